"""The page about moving from NVIDIA's device plugin and back, typed as it stands, beside a stand-in
for that plugin."""

import json
import os
import re
import subprocess
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
import yaml

from hack.container_image.contents import PYTHON
from tests.deploy.chart import REPOSITORY as CHECKOUT
from tests.e2e import other_device_plugin
from tests.e2e.conftest import restarts_api_server
from tests.e2e.device_plugin import (
    CHANGE_SECONDS,
    GPU,
    asking,
    has_dra,
    needs_claims,
    wait_allocatable,
)
from tests.e2e.kube import wait
from tests.e2e.manifests import pod_of
from tests.e2e.release import CRD, IMAGE, PLUGIN, REPOSITORY

pytestmark = pytest.mark.timeout(600)

PAGE = (CHECKOUT / "docs/install.md").read_text()
THEIRS = "nvidia-device-plugin"
KUBELET_SECONDS = 10  # until the Node says nothing more of the plugin that has left
MOVE_SECONDS = 90  # for the pods of a node that is moved to be replaced
TRAIN = {"app": "train"}
BY_THEIRS, BY_OURS = "has GPU-", "has\nGPU 0: "  # what a pod prints
NVIDIA_FILE = """
version: v1
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}
"""


def commands(text):
    """What its console blocks have people type, block by block."""
    blocks = re.findall(r"^ *```console\n(.*?)^ *```", text, re.M | re.S)
    return [re.findall(r"^\$ ((?:.*\\\n)*.*)", textwrap.dedent(block), re.M) for block in blocks]


SECTION = PAGE.split("\n## From NVIDIA's device plugin, and back\n")[1].split("\n## ")[0]


TO_LABEL, INSTALL, MOVE, REMOVE, TAKE_BACK = commands(SECTION)


class Shell:
    """Types commands of the page as the administrator of the cluster, with the names of here."""

    def __init__(self, cluster, kube, directory, chart):
        programs = {cluster.kubectl.parent, Path(cluster.program("helm")).parent}
        self.node = cluster.node_name
        self._chart = chart
        self._environment = {
            "PATH": ":".join([*map(str, programs), os.environ["PATH"]]),
            "KUBECONFIG": str(kube.config),
            "HOME": str(directory),
            "GOGC": "off",
        }

    def type(self, command, *more):
        """What it says. AssertionError, with its words: it fails."""
        here = {
            "NVIDIA/nvidia-device-plugin": str(self._chart),
            "--version VERSION": "",
            "REGISTRY/dra-driver-gpu": REPOSITORY,
            "NODES": self.node,
            "NODE": self.node,
            "NVIDIA": THEIRS,
        }
        for name, value in here.items():
            command = command.replace(name, value)
        line = " ".join([command, *more])
        answer = subprocess.run(
            ["sh", "-c", line],
            cwd=CHECKOUT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert answer.returncode == 0, f"{line}\n{answer.stdout}{answer.stderr}"
        return answer.stdout

    def type_all(self, commands):
        for command in commands:
            self.type(command)


def stand_in(cluster, directory):
    """A chart with the values of NVIDIA's that the page names. Its plugin registers two devices."""
    program = f"""
import signal
{Path(other_device_plugin.__file__).read_text()}
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
with OtherDevicePlugin(Path("/device-plugins"), {GPU!r}, ["GPU-a", "GPU-b"]):
    signal.sigwait({{signal.SIGTERM}})
"""
    labels = {"name": THEIRS}
    sockets = {"name": "sockets", "hostPath": {"path": str(cluster.device_plugins_dir)}}
    container = {
        "name": "plugin",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": [f"/{PYTHON}", "-c", program],
        "volumeMounts": [{"name": "sockets", "mountPath": "/device-plugins"}],
        "securityContext": {"runAsUser": 0},
    }
    spec = {
        "hostNetwork": True,
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
        "volumes": [sockets],
    }
    daemon_set = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": THEIRS},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
    text = yaml.safe_dump(daemon_set)
    selector = "\n      nodeSelector: {{ .Values.nodeSelector | toJson }}"
    chart = directory / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text(f"{{apiVersion: v2, name: {THEIRS}, version: 0.20.0}}")
    (chart / "values.yaml").write_text("nodeSelector: {}")
    (chart / "templates/plugin.yaml").write_text(
        text.replace("      hostNetwork: true", f"      hostNetwork: true{selector}")
    )
    return chart


def train():
    """A Deployment whose pods have a GPU, by whichever plugin."""
    command = "echo has $OTHER_DEVICES; nvidia-smi -L; exec sleep 3600"
    spec = pod_of("train", [asking({GPU: 1}, command)], [])["spec"] | {"restartPolicy": "Always"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "train"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": TRAIN},
            "template": {"metadata": {"labels": TRAIN}, "spec": spec},
        },
    }


@pytest.fixture
def shell(cluster, kube, imported, chart, session_driver, tmp_path):
    """On a node with neither driver, but NVIDIA's device plugin by its chart."""
    if needs_claims(cluster):
        pytest.skip("pods get no GPUs by their number there")
    session_driver.stop_all()
    session_driver.agent.stop()
    chart.uninstall("--no-hooks")
    kube.delete("CustomResourceDefinition", CRD)  # helm keeps it, as an earlier test left it
    kube.wait_gone("CustomResourceDefinition", CRD)
    session_driver.forget_token()  # its account is gone
    shell = Shell(cluster, kube, tmp_path, stand_in(cluster, tmp_path))
    shell.type(
        "helm install NVIDIA NVIDIA/nvidia-device-plugin --namespace NVIDIA --create-namespace"
    )
    yield shell
    shell.type("kubectl delete deployment train --ignore-not-found")
    shell.type("kubectl uncordon NODE")
    kube.label_node(shell.node, **{"gpu-driver": None})
    for release, namespace in (("dra-driver-gpu", "dra-driver-gpu"), (THEIRS, THEIRS)):
        shell.type(
            f"helm uninstall {release} --namespace {namespace} --no-hooks --ignore-not-found"
        )
    chart.upgrade()
    session_driver.agent.start()
    session_driver.start()
    # The plugin of the chart had the device-plugin API here.
    wait("its slices", lambda: kube.published() == session_driver.usual, CHANGE_SECONDS)
    wait_allocatable(session_driver, session_driver.usual_allocatable)


def output(kube):
    """What the pods of the Deployment print that are there to stay; their names."""
    pods = kube.all("Pod", labelSelector="app=train")
    names = [
        pod["metadata"]["name"]
        for pod in pods
        if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
    return {name: kube.logs(name) for name in names}


def wait_output(kube, words):
    """The names of the pods once each prints *words*."""

    def is_printed():
        now = output(kube)
        return now and all(words in text for text in now.values()) and set(now)

    try:
        return wait(repr(words), is_printed, MOVE_SECONDS)
    except AssertionError as e:
        raise AssertionError(f"{e} from {output(kube)}\n{state(kube)}") from e


def state(kube):
    """What there is to see of a move that does not go on."""
    shown = "custom-columns=NODE:.metadata.name,HAS:.status.allocatable,SAYS:.status.conditions"
    pods = kube.kubectl("get", "pods", "--all-namespaces", "--output=wide")
    nodes = kube.kubectl("get", "nodes", f"--output={shown}")
    return f"{pods}\n{nodes}\n{kube.kubectl('get', 'events', '--sort-by=.lastTimestamp')[-3000:]}"


def install(shell, values, directory):
    """Step 2 of the page, with the *values* that this cluster needs, and a file of NVIDIA's."""
    values = {name: value for name, value in values.items() if name != "nodeSelector"}
    values["controller"] = {"replicas": 1, "httpPort": values["controller"]["httpPort"]}
    config = directory / "config.yaml"
    config.write_text(NVIDIA_FILE)
    (command,) = INSTALL
    file = written(directory / "values.yaml", values)
    shell.type(command, f"--values {file}", f"--set-file profiles.default={config}")


def move(shell, steps, by_number):
    """A node, as the page says; what it says to repeat is repeated. *by_number*: of the Node pods
    have GPUs after that."""
    for command in steps:
        if "get node" in command and by_number:
            time.sleep(KUBELET_SECONDS)
        wait(command, partial(is_done, shell, command, by_number), MOVE_SECONDS, pause=1)


def is_done(shell, command, by_number):
    try:
        answer = shell.type(command)
    except AssertionError as e:
        if "no matching resources found" not in str(e):
            raise
        return False
    if "get node" in command and by_number:
        return json.loads(answer).get(GPU, "0") != "0"
    return True


@restarts_api_server  # with the release go its rights, before its last pod has gone
@pytest.mark.refused("pods", "controllerrevisions.apps", "leases.coordination.k8s.io")
@pytest.mark.device_plugin
def test_a_node_is_moved_from_nvidias_device_plugin_and_back_as_the_page_says(
    cluster, kube, chart, session_driver, shell, tmp_path
):
    shell.type(f"kubectl apply --filename {written(tmp_path / 'train.yaml', train())}")
    (before,) = wait_output(kube, BY_THEIRS)

    shell.type_all(TO_LABEL)
    wait("it on the labelled node", lambda: plugin_pods(kube, THEIRS, f"name={THEIRS}") == 1)
    assert wait_output(kube, BY_THEIRS) == {before}

    install(shell, chart.usual(), tmp_path)
    assert plugin_pods(kube, "dra-driver-gpu", f"app.kubernetes.io/component={PLUGIN}") == 0

    move(shell, MOVE, by_number=not has_dra(cluster))
    wait_output(kube, BY_OURS)
    if not has_dra(cluster):
        wait_allocatable(session_driver, {GPU: 16})  # as the file says

    take_back = [c for c in TAKE_BACK if has_dra(cluster) or "resourceslices" not in c]
    move(shell, take_back, by_number=True)
    wait_output(kube, BY_THEIRS)

    move(shell, MOVE, by_number=not has_dra(cluster))
    names = wait_output(kube, BY_OURS)
    shell.type_all(REMOVE)
    shell.type("kubectl scale deployment train --replicas=3")
    wait("three of them", lambda: len(output(kube)) == 3, MOVE_SECONDS)
    assert names < wait_output(kube, BY_OURS)


def plugin_pods(kube, namespace, labels):
    return sum(
        pod["status"]["phase"] == "Running"
        for pod in kube.all("Pod", namespace, labelSelector=labels)
    )


def written(path, document):
    path.write_text(yaml.safe_dump(document))
    return str(path)
