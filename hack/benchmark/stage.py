"""Where it is measured: a cluster with the chart on it, and a plugin as a process of its node."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dra_driver.settings import PluginSettings
from hack.benchmark.calls import Calls
from hack.benchmark.claims import Claims, namespace
from hack.benchmark.errors import BenchError
from hack.container_image.environment import TUNING
from hack.testbed.cluster import Cluster
from hack.testbed.kubelet_standin import process as standin
from tests.driver_process import ROOT
from tests.e2e.device_plugin import has_dra
from tests.e2e.driver import DRIVER, NAMESPACE, Driver
from tests.e2e.kube import PATHS, Kube, wait

_CHART = Path(__file__).parents[2] / "deploy/helm/dra-driver-gpu"
# As the chart leaves them: the intervals decide what an idle plugin costs.
_INTERVALS = ("look_interval", "reconcile_interval")
_FLAGS = {name: str(PluginSettings.model_fields[name].default) for name in _INTERVALS}
_SLICES = PATHS["ResourceSlice"]
# Starts the driver as a program of its own, with what the image sets. Tests fork theirs from a
# process that has imported everything: those need not import, and share its memory.
AS_IN_IMAGE = ("env", *TUNING)
_MEASURED = tuple(
    f"dra_driver.{name}"
    for name in ("__main__", "base.logs", "plugin.run", "agent.run", "sim.parts")
)

Document = dict[str, Any]
Progress = Callable[[str], None]


def write_bytecode(*modules: str) -> None:
    """Have the bytecode of *modules* and of what they import at hand, as the image has it: else the
    process that is measured compiles them."""
    command = [*AS_IN_IMAGE, sys.executable, "-c", f"import {', '.join(modules)}"]
    environment = {"PATH": os.environ["PATH"]}
    subprocess.run(command, check=True, timeout=120, env=environment, cwd=ROOT)


@dataclass(frozen=True, slots=True)
class Stage:
    """What the measuring works with."""

    cluster: Cluster
    kube: Kube
    driver: Driver
    claims: Claims
    progress: Progress

    @property
    def pid(self) -> int:
        """The plugin's."""
        return self.driver.processes[""].pid

    @property
    def socket(self) -> Path:
        return self.driver.plugin_dir / "dra.sock"

    def slices_query(self) -> dict[str, str]:
        return {"fieldSelector": f"spec.driver={DRIVER}"}

    def slices(self) -> list[Document]:
        """The driver's, as they are."""
        return list(self.kube.api.list(_SLICES, self.slices_query())["items"])

    def slices_version(self) -> str:
        """The resource version from which to watch for changes of them."""
        document = self.kube.api.list(_SLICES, self.slices_query())
        return str(document["metadata"]["resourceVersion"])

    def delete_slices(self) -> str:
        """Delete the driver's slices; the resource version from which to watch for new ones."""
        for resource_slice in self.slices():
            self.kube.api.delete(f"{_SLICES}/{resource_slice['metadata']['name']}")
        return self.slices_version()

    def launch(self, **flags: str) -> None:
        """Start the plugin; it may not be ready yet."""
        self.driver.start(ready=False, **(_FLAGS | flags))

    @contextmanager
    def plugin(self, **flags: str) -> Iterator[Calls]:
        """A plugin that is ready, and a connection to it."""
        self.launch(**flags)
        try:
            self.driver.wait_ready()
            with Calls(self.socket) as calls:
                yield calls
        finally:
            self.stop()

    def stop(self) -> None:
        self.driver.stop_all()

    def served(self, operation: str) -> tuple[float, float]:
        """What the plugin itself counted: seconds in all, and claims that were served well."""
        text = self.driver.ask("/metrics")[1]
        labels = f'{{operation="{operation}",outcome="ok"}}'
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if labels in line)
        name = "dra_driver_request_duration_seconds"
        return (
            float(samples.get(f"{name}_sum{labels}", 0)),
            float(samples.get(f"{name}_count{labels}", 0)),
        )


@contextmanager
def stage(version: str, progress: Progress) -> Iterator[Stage]:
    """Set it up; afterwards nothing of it is left, and a cluster that was down is down again."""
    cluster = Cluster(version)
    was_up = cluster.kubeconfig.exists()
    with ExitStack() as stack:
        if not was_up:
            stack.callback(cluster.down, progress)
        cluster.up(progress)
        if cluster.mode != "full":
            stack.callback(standin.stop, cluster)
            standin.start(cluster)
        kube = Kube(cluster.kubeconfig, cluster.kubectl)
        stack.callback(kube.api.close)
        _refuse_other_plugin(cluster)
        stack.enter_context(_chart(cluster, kube, progress))
        stack.enter_context(namespace(kube))
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dra-bench-"))
        driver = Driver(cluster, kube, Path(directory))
        driver.inside = AS_IN_IMAGE
        write_bytecode(*_MEASURED)
        new_stage = Stage(cluster, kube, driver, Claims(kube, cluster.node_name), progress)
        if has_dra(cluster):
            stack.callback(new_stage.delete_slices)
        stack.callback(driver.stop_all)
        yield new_stage


def _refuse_other_plugin(cluster: Cluster) -> None:
    socket = cluster.kubelet_dir / "plugins_registry" / f"{DRIVER}-reg.sock"
    if socket.exists():
        raise BenchError(f"another plugin serves this node ({socket}): end it first")


@contextmanager
def _chart(cluster: Cluster, kube: Kube, progress: Progress) -> Iterator[None]:
    """What the chart installs, less the DaemonSet. What was there before stays afterwards."""
    meta = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    documents = [meta, *_rendered(cluster, progress)]
    fresh = [each for each in documents if kube.find(*_address(each)) is None]
    try:
        for each in documents:
            kube.apply(each, NAMESPACE)
        wait("the chart's ServiceAccount", lambda: kube.all("ServiceAccount", NAMESPACE))
        yield
    finally:
        for each in reversed(fresh):
            kube.delete(*_address(each))
        if meta in fresh:
            kube.wait_gone("Namespace", NAMESPACE, seconds=120)


def _address(document: Document) -> tuple[str, str, str]:
    metadata = document["metadata"]
    return document["kind"], metadata["name"], metadata.get("namespace", NAMESPACE)


def _rendered(cluster: Cluster, progress: Progress) -> list[Document]:
    helm = str(cluster.program("helm", progress))
    command = [helm, "template", "dra-driver-gpu", str(_CHART), "--namespace", NAMESPACE]
    command += [
        "--no-hooks",
        "--kube-version",
        cluster.version,
    ]
    command += ["--api-versions", "resource.k8s.io/v1"] if has_dra(cluster) else []
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode != 0:
        raise BenchError(f"helm cannot render the chart: {answer.stderr.strip()}")
    return [each for each in yaml.safe_load_all(answer.stdout) if each and _is_wanted(each)]


def _is_wanted(document: Document) -> bool:
    return document["kind"] in PATHS and document["kind"] != "DaemonSet"
