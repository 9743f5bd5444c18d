"""The stage of the demonstration: what is set up, in which order, and how all of it goes again."""

import contextlib
import json
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from hack.demonstration.agent import Agent
from hack.demonstration.controller import Controller
from hack.demonstration.errors import DemoError
from hack.demonstration.kubectl import Kubectl, call
from hack.demonstration.manifests import documents, mebibytes, with_local_image, with_memory
from hack.demonstration.page import Findings, Partitions
from hack.demonstration.plugin import Plugin
from hack.testbed import packages
from hack.testbed.assets import DEFAULT_VERSION
from hack.testbed.cache import Progress
from hack.testbed.cluster import Cluster
from hack.testbed.errors import ClusterError
from hack.testbed.kubelet_standin import process as standin
from hack.testbed.waits import wait_for

Document = dict[str, Any]

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "deploy/helm/dra-driver-gpu"
RENDERED = REPOSITORY / "tests/data/golden/chart/default.yaml"  # for the usual Kubernetes, by helm
NAMESPACE = "dra-driver-gpu"
POD = "one-gpu"  # the example and its namespace are called the same
QUARTERS = "quarter-gpu"
SERVERS = "mps-two-servers"
PARTITIONS = ("mig-manifest", "mig-two-partitions")
EXAMPLES = (POD, QUARTERS, SERVERS, *PARTITIONS)
CONTROLLER = "dra-driver-gpu-controller"  # the service account
_WITH_PODS = ("DaemonSet", "Deployment")
FRACTIONS_FROM = 36  # of Kubernetes 1.x: what a GPU is divided by is kept there without more ado
POD_SECONDS = 60
GONE_SECONDS = 60


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Nobody else sets up or removes a demonstration of the cluster in *root* meanwhile."""
    # An abstract socket: it is no file that could be left, and goes with the process.
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0dra-demo:{root}")
        except OSError as e:
            raise DemoError("another hack/demo is at work: wait for it, or interrupt it") from e
        yield


@dataclass(frozen=True, slots=True)
class Before:
    """What ran before the demonstration, and is left running after it."""

    cluster: bool
    standin: bool
    missing: list[str]  # directories that only we shall have made


class Stage:
    """The demonstration on *cluster*; its files lie beside the cluster's, and go with them.

    *mps*: the node has an MPS agent. *profile*: of the node.
    """

    def __init__(self, cluster: Cluster, mps: bool = False, profile: str = "") -> None:
        self.cluster = cluster
        self.directory = cluster.layout.root / "demo"
        self.agent = Agent(cluster, self.directory)
        socket = str(self.agent.socket) if mps else ""
        self.plugin = Plugin(cluster, self.directory, socket, profile)
        self.controller = Controller(cluster, self.directory)
        self._before: Before | None = None
        self._record = self.directory / "before.json"
        self._chart = self.directory / "chart.yaml"
        self._examples = [self.directory / f"{name}.yaml" for name in EXAMPLES]

    @property
    def is_up(self) -> bool:
        """Whether one is here: being set up, kept, or left by one that was killed."""
        return self._before is not None or self._record.exists()

    def begin(self) -> bool:
        """Write down what is there, before anything is changed. Whether a cluster is up."""
        cluster = any(self.cluster.status().components.values())
        if cluster and self.plugin.is_served():
            raise DemoError(
                f"another plugin serves the cluster that is up here ({self.plugin.socket} "
                "answers): stop it, or `hack/cluster down` first"
            )
        ours = (self.cluster.kubelet_dir, self.cluster.cdi_dir, self.plugin.socket.parent)
        missing = [str(path) for path in ours if not path.exists()]
        had_standin = standin.standin(self.cluster).pid() is not None
        self._before = Before(cluster, had_standin, missing)
        self._remember(self._before)
        return cluster

    def _remember(self, before: Before) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._record.write_text(json.dumps(asdict(before)))

    def build(self, progress: Progress) -> None:
        """The programs, built where they are not in the cache yet."""
        packages.install(node=self.cluster.mode == "full", progress=progress)
        for program in ("kube-apiserver", *(() if self.is_usual else ("helm",))):
            self.cluster.program(program, progress)
        if self.cluster.mode == "full":
            self.cluster.program("containerd", progress)

    def bring_up(self, progress: Progress) -> None:
        """The cluster, with a node."""
        self.cluster.up(progress)
        if self._before:
            self._remember(self._before)  # again: an old cluster's directory may have been emptied
        if self.cluster.mode == "control-plane":
            standin.start(self.cluster)

    @property
    def is_usual(self) -> bool:
        """Whether helm, which takes long to build, has rendered the chart for this Kubernetes."""
        return self.cluster.version == DEFAULT_VERSION

    def _rendered(self) -> Iterator[Document]:
        if self.is_usual:
            return yaml.safe_load_all(RENDERED.read_text())
        helm = str(self.cluster.program("helm"))
        flags = [f"--namespace={NAMESPACE}", f"--kube-version={self.cluster.version}"]
        flags.append("--api-versions=resource.k8s.io/v1")
        return yaml.safe_load_all(call([helm, "template", "dra-driver-gpu", str(CHART), *flags]))

    def install(self) -> str:
        """What the chart installs, less its pods. The name of the plugin's service account."""
        objects = [o for o in self._rendered() if o and _is_installed(o)]
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        self._chart.write_text(yaml.safe_dump_all([namespace, *objects]))
        self._kubectl.apply(self._chart.read_text())
        accounts = (o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount")
        return next(str(name) for name in accounts if str(name).endswith("-kubelet-plugin"))

    def start_controller(self) -> None:
        """What rolls NodeProfiles out."""
        self.controller.start(self._kubectl, NAMESPACE, CONTROLLER)

    def start_plugin(self, account: str, sim: str) -> list[str]:
        """The plugin, with simulated GPUs. Their names."""
        self.plugin.start(self._kubectl, NAMESPACE, account, sim)
        names = [str(device["name"]) for device in self._devices()]
        if not names:
            raise DemoError(f"{sim} has no GPU to offer: `dra-driver devices --sim {sim}` says why")
        return names

    def run_pod(self) -> str:
        """The example's pod, until it has printed what it sees."""
        [log] = self._play(POD, [with_local_image(o) for o in documents(POD)]).values()
        return log

    def run_quarters(self) -> dict[str, str]:
        """Pods of three namespaces that share a GPU: what each has printed, by namespace and name.

        Nothing where GPUs are not divided, or the first pod has the only one.
        """
        gpus = [device for device in self._devices() if device.get("allowMultipleAllocations")]
        if self.minor < FRACTIONS_FROM or len(gpus) < 2:
            return {}
        smallest = min(mebibytes(gpu["capacity"]["memory"]["value"]) for gpu in gpus)
        objects = [with_local_image(o) for o in documents(QUARTERS)]
        return self._play(QUARTERS, [with_memory(o, smallest // 4) for o in objects])

    def run(self, *examples: str) -> dict[str, str]:
        """The pods of *examples*: what each has printed, by namespace and name."""
        played = (self._play(n, [with_local_image(o) for o in documents(n)]) for n in examples)
        return {pod: log for logs in played for pod, log in logs.items()}

    def _play(self, name: str, objects: list[Document]) -> dict[str, str]:
        """Run the pods of an example until all have printed; what, by namespace and name."""
        (self.directory / f"{name}.yaml").write_text(yaml.safe_dump_all(objects))
        spaces = [each for each in objects if each["kind"] == "Namespace"]
        self._kubectl.apply(yaml.safe_dump_all(spaces))
        for space in spaces:
            # A pod is refused until its namespace has the account that pods run as.
            account = ["serviceaccount/default", f"--namespace={space['metadata']['name']}"]
            self._kubectl.run("wait", "--for=create", *account, "--timeout=20s")
        self._kubectl.apply(yaml.safe_dump_all(o for o in objects if o["kind"] != "Namespace"))
        pods = [each["metadata"] for each in objects if each["kind"] == "Pod"]
        return {f"{m['namespace']}/{m['name']}": self._printed_by(m) for m in pods}

    def _printed_by(self, pod: Document) -> str:
        """What a pod prints once it runs."""
        name, space = pod["name"], f"--namespace={pod['namespace']}"
        log = self.cluster.log("kubelet" if self.cluster.mode == "full" else standin.NAME)

        def running() -> bool:
            return self._is_running(name, space)

        def printed() -> str:
            return self._kubectl.run("logs", name, space).rstrip()

        try:
            wait_for(f"pod {name} to run", running, timeout_seconds=POD_SECONDS)
            wait_for(f"pod {name} to print", lambda: bool(printed()), timeout_seconds=10)
        except (ClusterError, DemoError) as e:
            events = self._kubectl.run("events", space).rstrip()
            raise DemoError(f"{e}; its events:\n{events}\nSee also {log}") from e
        return printed()

    def look(self, sim: str, log: str, quarters: dict[str, str]) -> Findings:
        """Everything on the way from the node's GPU to the container."""
        (claim,) = self._kubectl.get("resourceclaims", f"--namespace={POD}")["items"]
        result = claim["status"]["allocation"]["devices"]["results"][0]
        slices = (s for s in self._slices() if _has(s, result["pool"], result["device"]))
        (claim_spec,) = self.cluster.cdi_dir.glob(f"*{claim['metadata']['uid']}*.json")
        (driver_spec,) = self.cluster.cdi_dir.glob("*-driver_*.json")
        return Findings(
            version=self.cluster.version,
            sim=sim,
            why=self.cluster.why,
            log=log,
            claim=claim,
            resource_slice=next(slices),
            claim_spec=(str(claim_spec), json.loads(claim_spec.read_text())),
            driver_spec=(str(driver_spec), json.loads(driver_spec.read_text())),
            quarters=quarters,
            claims_table=self.plugin.claims(sim),
        )

    def look_at_partitions(self, sim: str, logs: dict[str, str]) -> Partitions:
        """How the GPUs are divided for the pods, and what is left of that without them."""
        during = self.plugin.picture(sim)
        self._kubectl.delete([path for path in self._examples if path.exists()], GONE_SECONDS)
        after = self.plugin.picture(sim)
        return Partitions(self.cluster.version, self.cluster.why, logs, during, after)

    def end(self) -> bool:
        """Stop and remove all of it, from whatever state it is in. Whether the cluster stays."""
        before = self._before or Before(**json.loads(self._record.read_text()))
        if before.cluster:
            self._clear(before)
        else:
            self.plugin.stop()
            self.controller.process.stop()
            standin.stop(self.cluster)
            try:
                self.agent.end()
            finally:
                self.cluster.down()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._before = None
        return before.cluster

    def _clear(self, before: Before) -> None:
        """Everything of ours off a cluster that goes on; our processes end whatever it answers."""
        borrowed = before.standin or self.cluster.mode == "full"
        try:
            if examples := [path for path in self._examples if path.exists()]:
                if self.plugin.process.pid() is None:  # nobody could take the claims back
                    self._delete_pods_now(examples)
                self._kubectl.delete(examples, GONE_SECONDS)  # the plugin has to help
            self.plugin.stop()
            if self._chart.exists():
                node = f"spec.nodeName={self.cluster.node_name}"
                self._kubectl.run("delete", "resourceslices", f"--field-selector={node}")
                self._kubectl.delete([self._chart], GONE_SECONDS)
                if not borrowed:
                    self._kubectl.run(
                        "delete", "node", self.cluster.node_name, "--ignore-not-found"
                    )
        finally:
            self.plugin.stop()
            self.controller.process.stop()
            if not borrowed:
                standin.stop(self.cluster)
            self.agent.end()
        for directory in before.missing:
            shutil.rmtree(directory, ignore_errors=True)

    def _delete_pods_now(self, examples: list[Path]) -> None:
        force = ["--force", "--grace-period=0", "--ignore-not-found"]
        objects = [each for path in examples for each in yaml.safe_load_all(path.read_text())]
        for pod in (each["metadata"] for each in objects if each["kind"] == "Pod"):
            space = f"--namespace={pod['namespace']}"
            self._kubectl.run("delete", "pod", pod["name"], space, *force)

    @property
    def minor(self) -> int:
        """Of Kubernetes 1.x."""
        return int(self.cluster.version.split(".")[1])

    @property
    def _kubectl(self) -> Kubectl:
        cache = self.directory / "kubectl"
        return Kubectl(self.cluster.kubectl, self.cluster.kubeconfig, cache)

    def _slices(self) -> list[Document]:
        items: list[Document] = self._kubectl.get("resourceslices")["items"]
        ours = [each for each in items if each["spec"]["driver"] == "gpu.nvidia.com"]
        return sorted(ours, key=lambda each: str(each["metadata"]["name"]))

    def _devices(self) -> list[Document]:
        """What is published for pods that compute."""
        devices = [
            device for each in self._slices() for device in each["spec"].get("devices") or ()
        ]
        return [d for d in devices if d["attributes"]["type"]["string"] != "gpu-monitor"]

    def _is_running(self, pod: str, space: str) -> bool:
        status = self._kubectl.get("pod", pod, space).get("status", {})
        if status.get("phase") in ("Failed", "Succeeded"):
            raise DemoError(f"pod {pod} ended at once: {json.dumps(status)}")
        return bool(status.get("phase") == "Running")


def _has(resource_slice: Document, pool: str, device: str) -> bool:
    spec = resource_slice["spec"]
    names = [each["name"] for each in spec.get("devices") or ()]
    return bool(spec["pool"]["name"] == pool and device in names)


def _is_installed(document: Document) -> bool:
    """Of what the chart renders: the demonstration runs plugin and controller itself, and removes
    what it made without helm."""
    annotations = document["metadata"].get("annotations") or {}
    return document["kind"] not in _WITH_PODS and "helm.sh/hook" not in annotations
