"""The chart as a release of the real helm: its DaemonSets run the image that hack/image builds."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from hack.testbed.cluster import Cluster
from tests.e2e.driver import NAMESPACE
from tests.e2e.kube import Document, Kube, wait

CHART = Path(__file__).parents[2] / "deploy/helm/dra-driver-gpu"
NAME = "dra-driver-gpu"
REPOSITORY, TAG = "dra.test/dra-driver-gpu", "e2e"
IMAGE = f"{REPOSITORY}:{TAG}"
CRD = "nodeprofiles.resource.nvidia.com"  # which an uninstall leaves
RUNS = "dra.test/installed"  # the label of the node, while the DaemonSets have pods there
PLUGIN, AGENT, CONTROLLER = "kubelet-plugin", "mps-agent", "controller"
HTTP_PORT, MPS_HTTP_PORT, CONTROLLER_HTTP_PORT = 18080, 18081, 18082
REPLICAS = 2  # of the controller
HELM_SECONDS = 120
POD_SECONDS = 90


class Release:
    """One release on *cluster*. *directory* is for helm's files; *node_file* describes the
    simulated node, and may be changed while it is served."""

    def __init__(self, cluster: Cluster, kube: Kube, directory: Path, node_file: Path) -> None:
        self.cluster = cluster
        self.kube = kube
        self.directory = directory
        self.node_file = node_file
        self.helm_program = cluster.program("helm")

    @property
    def mps_dir(self) -> Path:
        """The chart's own."""
        return Path(yaml.safe_load((CHART / "values.yaml").read_text())["mps"]["dir"])

    def usual(self) -> dict[str, Any]:
        """The values of every upgrade: where this cluster has what, and an image that is here."""
        server = yaml.safe_load(self.kube.config.read_text())["clusters"][0]["cluster"]["server"]
        return {
            "image": {"repository": REPOSITORY, "tag": TAG, "pullPolicy": "Never"},
            "sim": f"/host{self.node_file}",
            "kubeletDir": str(self.cluster.kubelet_dir),
            "cdiDir": str(self.cluster.cdi_dir),
            "runtimeDir": str(self.cluster.layout.containerd_state),
            "nodeSelector": {RUNS: "yes"},
            # The API server is on the node's loopback.
            "hostNetwork": True,
            "httpPort": HTTP_PORT,
            "mps": {"httpPort": MPS_HTTP_PORT},
            "controller": {
                "replicas": REPLICAS,
                "httpPort": CONTROLLER_HTTP_PORT,
                "nodeSelector": {RUNS: "yes"},
            },
            "env": [
                {"name": "KUBERNETES_SERVICE_HOST", "value": urlsplit(server).hostname},
                {"name": "KUBERNETES_SERVICE_PORT", "value": str(urlsplit(server).port)},
                # Tests are in a hurry.
                {"name": "LOOK_INTERVAL", "value": "0.5"},
                {"name": "RECONCILE_INTERVAL", "value": "2"},
                {"name": "GUARD_INTERVAL", "value": "0.5"},
            ],
        }

    def helm(self, *arguments: str | Path) -> str:
        """What helm prints. AssertionError, with its words: it refuses."""
        answer = self.try_helm(*arguments)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def try_helm(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """The same, whatever comes of it."""
        return subprocess.run(
            [self.helm_program, *arguments, "--namespace", NAMESPACE],
            env={"KUBECONFIG": str(self.kube.config), "HOME": str(self.directory), "GOGC": "off"},
            capture_output=True,
            text=True,
            timeout=HELM_SECONDS,
            check=False,
        )

    def upgrade(self, **changes: Any) -> None:
        """Install it, or change it: to the usual values, but for *changes*, which are merged."""
        values = self.directory / "values.json"
        values.write_text(json.dumps(_merged(self.usual(), changes)))
        # What another session left here, by whatever means, becomes this release's.
        adopt = ("--create-namespace", "--take-ownership", "--force-conflicts")
        self.helm("upgrade", "--install", NAME, CHART, "--values", values, *adopt)

    def uninstall(self, *flags: str) -> None:
        self.helm("uninstall", NAME, *flags)

    def keep(self) -> None:
        """After an uninstall that was refused, which leaves it where nothing can be upgraded."""
        refused = json.loads(self.helm("history", NAME, "--output", "json"))[-1]
        self.helm("rollback", NAME, str(refused["revision"]))

    def start(self) -> None:
        """Have all pods run on the node, and wait until they are ready."""
        self.kube.label_node(self.cluster.node_name, **{RUNS: "yes"})
        self._scale(REPLICAS)
        self.wait_ready()

    def stop(self) -> None:
        """Take their pods off the node. What they serve goes on."""
        self.kube.label_node(self.cluster.node_name, **{RUNS: None})
        self._scale(0)
        wait("the pods of the release to go", lambda: not self.pods(), POD_SECONDS)

    def _scale(self, replicas: int) -> None:
        """The controller's pods stay where they are, whatever becomes of the node's labels."""
        path = f"{self.kube.path('Deployment', NAMESPACE)}/{NAME}-{CONTROLLER}"
        self.kube.api.patch(path, {"spec": {"replicas": replicas}})

    def serve(self, node: str) -> None:
        """Something happens to the simulated node: it is what *node* describes now."""
        fresh = self.node_file.with_suffix(".new")
        fresh.write_text(node)
        fresh.rename(self.node_file)

    def wait_ready(self, *components: str) -> None:
        """Until each of *components* (default: all) has its pods, of the DaemonSet or Deployment as
        it is now, and these are ready."""
        for component in components or (PLUGIN, AGENT, CONTROLLER):
            try:
                wait(f"{component} to be ready", lambda c=component: self._ready(c), POD_SECONDS)  # type: ignore[misc]
            except AssertionError as e:
                raise AssertionError(f"{e}\n{self.explain(component)}") from e

    def _ready(self, component: str) -> bool:
        if component == CONTROLLER:
            return self._is_controller_ready()
        daemon_set = self.kube.get("DaemonSet", f"{NAME}-{component}", NAMESPACE)
        status, generation = daemon_set["status"], daemon_set["metadata"]["generation"]
        return bool(
            status.get("observedGeneration") == generation
            and status.get("desiredNumberScheduled") == 1
            and status.get("updatedNumberScheduled") == status.get("numberReady") == 1
            and len(self.pods(component)) == 1
        )

    def _is_controller_ready(self) -> bool:
        deployment = self.kube.get("Deployment", f"{NAME}-{CONTROLLER}", NAMESPACE)
        status, generation = deployment["status"], deployment["metadata"]["generation"]
        return bool(
            status.get("observedGeneration") == generation
            and status.get("updatedReplicas") == status.get("readyReplicas") == REPLICAS
            and len(self.pods(CONTROLLER)) == REPLICAS
        )

    def pods(self, component: str = "") -> list[Document]:
        """Those of the release, or of one component, that are there."""
        components = component or f"{PLUGIN},{AGENT},{CONTROLLER}"
        labels = f"app.kubernetes.io/component in ({components})"
        return self.kube.all("Pod", NAMESPACE, labelSelector=labels)

    def restart(self, component: str) -> None:
        """Delete its pod, and wait until the next one is ready."""
        [before] = self.pods(component)
        name, uid = before["metadata"]["name"], before["metadata"]["uid"]
        self.kube.delete("Pod", name, NAMESPACE)

        def replaced() -> bool:
            return all(pod["metadata"]["uid"] != uid for pod in self.pods(component))

        wait(f"the pod {name} to go", replaced, POD_SECONDS)
        self.wait_ready(component)

    def inside(self, component: str, *command: str) -> subprocess.CompletedProcess[str]:
        """What a command says in the pod of a DaemonSet, as `kubectl exec` runs it."""
        kubectl = (self.cluster.kubectl, "--kubeconfig", self.kube.config)
        place = ("exec", f"daemonset/{NAME}-{component}", "--namespace", NAMESPACE, "--")
        return subprocess.run(
            [*kubectl, *place, *command], capture_output=True, text=True, timeout=60, check=False
        )

    def log(self, component: str) -> str:
        """What the pods of a DaemonSet have written, the oldest first."""
        pods = sorted(self.pods(component), key=lambda pod: pod["metadata"]["creationTimestamp"])
        names = [pod["metadata"]["name"] for pod in pods]
        return "".join(self.kube.logs(name, namespace=NAMESPACE) for name in names)

    def explain(self, component: str) -> str:
        """Why its pods are not ready."""
        names = [pod["metadata"]["name"] for pod in self.pods(component)]
        pods = [self.kube.explain(name, NAMESPACE) for name in names]
        try:
            return f"{pods}\n{self.log(component)[-3000:]}"
        except subprocess.CalledProcessError as e:  # it has not started
            return f"{pods}\n{e.stderr}"


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """*values* with *changes*, which count where both have the same, and not both a group."""
    merged = dict(values)
    for name, change in changes.items():
        both = isinstance(change, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], change) if both else change
    return merged
