"""What the controller costs, and how soon it acts, in a cluster of nodes that nobody runs."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from api.names import PROFILE_REVISION_ANNOTATION
from dra_driver.base.errors import ApiServerError
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient, ApiTimeouts
from dra_driver.model.node_profiles import NodeReport
from hack.benchmark.errors import BenchError
from hack.benchmark.figures import Measured, Results, percentile
from hack.benchmark.sizes import ControllerSizes
from hack.benchmark.stage import AS_IN_IMAGE, write_bytecode
from hack.benchmark.usage import cpu_seconds, rss_mib
from hack.crd import crd
from hack.testbed.components import Flags
from hack.testbed.control_plane import control_plane
from tests.e2e.fake_nodes import at_once
from tests.e2e.kube import PATHS, wait
from tests.e2e.profile_nodes import ProfileNodes, profile_nodes

_NAMESPACE = "dra-driver-gpu"
_PADDING = "x" * 9000  # a Node has some 10 KB, most of it names of images
_WAIT_SECONDS = 900.0
_SAMPLE_SECONDS = 30.0
_REPOSITORY = Path(__file__).parents[2]
# Nobody but the clients may hold up a request; and nodes without kubelets stay Ready.
_FLAGS: Flags = {
    "apiserver": (
        "--enable-priority-and-fairness=false",
        "--max-requests-inflight=0",
        "--max-mutating-requests-inflight=0",
        "--disable-admission-plugins=TaintNodesByCondition",
    ),
    "controller-manager": (
        "--kube-api-qps=10000",
        "--kube-api-burst=10000",
        "--controllers=*,-node-lifecycle-controller",
    ),
}

Document = dict[str, Any]
Progress = Callable[[str], None]


def measure(version: str, sizes: ControllerSizes, progress: Progress) -> Results:
    """Roll profiles out over all nodes; then the delays of single changes."""
    with control_plane(version, _FLAGS, progress) as plane, ExitStack() as stack:
        api = ApiClient(load_kubeconfig(plane.kubeconfig), ApiTimeouts(read=60.0, write=60.0))
        stack.callback(api.close)
        _prepare(api, sizes, progress)
        pools = _pools(sizes)
        progress(f"{sizes.nodes} nodes")
        nodes = stack.enter_context(profile_nodes(api, pools, _PADDING))
        wait("all nodes", lambda: len(nodes.nodes) == sizes.nodes, _WAIT_SECONDS, 1)
        begun = time.monotonic()
        process = stack.enter_context(_controller(plane.kubeconfig))
        cluster = _Cluster(api, nodes, tuple(pools))
        cluster.roll_out_all()
        rolled_out = time.monotonic() - begun
        progress(f"rolled out in {rolled_out:.0f} s; {sizes.samples} changes of each kind")
        status = [cluster.condition_to_status(n) for n in range(sizes.samples)]
        spec = [cluster.spec_to_node(n) for n in range(sizes.samples)]
        if process.poll() is not None:
            raise BenchError(f"the controller ended with {process.returncode}")
        memory, seconds = rss_mib(process.pid), cpu_seconds(process.pid)
    slowest = max(percentile(each, 0.95) for each in (status, spec))
    both = (
        f"from a node's condition to the status {_range(status)}, from a spec to the first node "
        f"{_range(spec)}"
    )
    return {
        "controller_rss_mb": Measured(
            memory["all"] * 2**20 / 1e6,
            f"at most {memory['peak'] * 2**20 / 1e6:.0f}; {seconds:.0f} s of processor time in all",
            1,
        ),
        "controller_lag_p95_ms": Measured(slowest * 1000, both, len(status) + len(spec)),
        "controller_nodes": Measured(
            float(sizes.nodes),
            f"{sizes.profiles} profiles, {sizes.claims} claims; all rolled out in "
            f"{rolled_out:.0f} s",
            1,
        ),
    }


class _Cluster:
    """The profiles, one for each pool of nodes."""

    def __init__(self, api: ApiClient, nodes: ProfileNodes, pools: Sequence[str]) -> None:
        self._api = api
        self._nodes = nodes
        self._pools = pools

    def roll_out_all(self) -> None:
        """Every node has the first revision of its profile."""
        for pool in self._pools:
            spec = {"gpus": [{"replicas": 2}], "nodeSelector": {"pool": pool}}
            document = {"metadata": {"name": pool}, "spec": spec}
            head = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "NodeProfile"}
            self._api.create(PATHS["NodeProfile"], head | document)

        def are_complete() -> bool:
            profiles = self._api.list(PATHS["NodeProfile"], {})["items"]
            return all(
                (each.get("status") or {}).get("currentRevision")
                and each["status"]["updated"] == each["status"]["nodes"] > 0
                for each in profiles
            )

        wait("all rollouts", are_complete, _WAIT_SECONDS, 1)

    def condition_to_status(self, sample: int) -> float:
        """Seconds until a GPU that a node reports as pending is counted, or is no more."""
        pool = self._pools[sample % len(self._pools)]
        profile = self._profile(pool)
        number = 1 - profile["status"]["pending"]
        report = NodeReport(pool, profile["status"]["currentRevision"], pending=number)
        query = {"resourceVersion": profile["metadata"]["resourceVersion"]}
        begun = time.perf_counter()
        self._nodes.report(f"{pool}-0000", report)
        for document in self._changes(PATHS["NodeProfile"], query):
            is_its = document["metadata"]["name"] == pool
            if is_its and document["status"]["pending"] == number:
                return time.perf_counter() - begun
        raise BenchError(f"the status of {pool} did not follow within {_SAMPLE_SECONDS:g} s")

    def spec_to_node(self, sample: int) -> float:
        """Seconds until the first node is given what the profile says now. Its rollout is paused
        then, and the others are not disturbed."""
        pool = self._pools[sample % len(self._pools)]
        path = f"{PATHS['NodeProfile']}/{pool}"
        since = self._api.get(PATHS["Node"], {"limit": "1"})["metadata"]["resourceVersion"]
        before = self._profile(pool)["status"]["updateRevision"]
        query = {"resourceVersion": since, "labelSelector": f"pool={pool}"}
        rollout = {"maxUnavailable": 1, "paused": False}
        begun = time.perf_counter()
        self._api.patch(path, {"spec": {"gpus": [{"replicas": 3 + sample}], "rollout": rollout}})
        for document in self._changes(PATHS["Node"], query):
            given = document["metadata"]["annotations"].get(PROFILE_REVISION_ANNOTATION)
            if given != before:
                seconds = time.perf_counter() - begun
                self._api.patch(path, {"spec": {"rollout": {"paused": True}}})
                return seconds
        raise BenchError(f"no node of {pool} was given the change in {_SAMPLE_SECONDS:g} s")

    def _profile(self, name: str) -> Document:
        return self._api.get(f"{PATHS['NodeProfile']}/{name}")

    def _changes(self, path: str, query: Mapping[str, str]) -> Iterator[Document]:
        """Objects that change, until nobody wants more or nothing comes in time."""
        watch = self._api.watch(path, query, int(_SAMPLE_SECONDS))
        try:
            for event in watch:
                if event["type"] != "BOOKMARK":
                    yield event["object"]
        finally:
            watch.close()


@contextmanager
def _controller(kubeconfig: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One replica, which leads."""
    write_bytecode("dra_driver.__main__", "dra_driver.base.logs", "dra_driver.controller.run")
    flags = {"kubeconfig": kubeconfig, "revision-namespace": _NAMESPACE, "log-level": "warning"}
    process = subprocess.Popen(
        [*AS_IN_IMAGE, sys.executable, "-m", "dra_driver", "controller"]
        + [f"--{name}={value}" for name, value in flags.items()],
        env={"PATH": os.environ["PATH"]},
        cwd=_REPOSITORY,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def _prepare(api: ApiClient, sizes: ControllerSizes, progress: Progress) -> None:
    """What a release brings, and claims that the controller must not care about."""
    api.create(PATHS["Namespace"], {"metadata": {"name": _NAMESPACE}})
    definition = yaml.safe_load(re.sub(r"{{.*?}}", "", crd(), flags=re.DOTALL))
    api.create(PATHS["CustomResourceDefinition"], definition)
    wait("the resource", lambda: _is_served(api), 30)
    progress(f"{sizes.claims} claims")
    path = PATHS["ResourceClaim"].format(namespace=_NAMESPACE)
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}
    spec = {"devices": {"requests": [request]}}
    at_once(
        lambda n: api.create(path, {"metadata": {"name": f"claim-{n}"}, "spec": spec}),
        range(sizes.claims),
    )


def _is_served(api: ApiClient) -> bool:
    try:
        api.get(PATHS["NodeProfile"], {"limit": "1"})
    except ApiServerError:
        return False
    return True


def _pools(sizes: ControllerSizes) -> dict[str, int]:
    """As many nodes for each profile."""
    return {f"pool-{n:02}": sizes.nodes // sizes.profiles for n in range(sizes.profiles)}


def _range(seconds: Sequence[float]) -> str:
    return (
        f"p50 {percentile(seconds, 0.5) * 1000:.0f}, p95 {percentile(seconds, 0.95) * 1000:.0f} ms"
    )
