"""Every example under deploy/examples is applied as it is, and does what its header says: with the
chart installed from the image, on a simulated node."""

import contextlib
import os
from pathlib import Path

import pytest
import yaml

from api.names import GPUS_CONFIGURED
from dra_driver.sim.node_spec import node_file, read_node
from tests.deploy.examples import Events, Example, Log, Uses, examples, uuids, wrong
from tests.e2e.kube import wait
from tests.e2e.manifests import GLIBC
from tests.e2e.release import PLUGIN

PROFILE = "gpu.nvidia.com/profile"  # the node's label
IN_FORCE = "profile in force"  # in the plugin's log
PATIENCE_SECONDS = 15  # a pod that is Running may need a moment until its log is complete


def with_local_image(document):
    """The same object with an image that this node has; nothing else is changed."""
    spec = document.get("spec", {})
    pod = spec.get("template", {}).get("spec", spec)
    for container in (*pod.get("containers", ()), *pod.get("initContainers", ())):
        container |= {"image": GLIBC, "imagePullPolicy": "Never"}
    return document


def by_node(example):
    """One after the other on the same simulated node, the last one what divides its GPUs."""
    return example.simulated, bool(example.layouts), example.name


EXAMPLES = sorted(examples(), key=by_node)
PROFILES = {example.name: example.profile for example in EXAMPLES if example.profile}
LAYOUTS = {f"{example.name}-layouts": example.layouts for example in EXAMPLES if example.layouts}
VALUES = {"profiles": {name: file.read_text() for name, file in (PROFILES | LAYOUTS).items()}}


@pytest.fixture
def node(kube, installed, session_driver):
    """The node, where nothing is left of an example afterwards."""
    yield installed
    wait("its claims to be given back", lambda: not session_driver.claims(), 70)
    assert not session_driver.specs()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_example_does_what_it_says(kube, node, example: Example):
    minor = int(node.cluster.version.split(".")[1])
    if minor < example.minor:
        pytest.skip(f"needs Kubernetes 1.{example.minor}")
    serve(kube, node, example.simulated or "h100x8")
    follow(kube, node, example)
    with unchanged(node.node_file), node_profile(kube, node, example):
        try:
            play(kube, node, example)
        finally:
            remove(kube, example)


def serve(kube, node, name):
    """The release serves that simulated node."""
    text = node_file(name).read_text()
    if node.node_file.read_text() != text:
        before = kube.published()
        replace(node.node_file, text)
        wait("other devices", lambda: (now := kube.published()) and now != before, 30)


def follow(kube, node, example):
    """The profile of the example holds, and its GPUs are partitioned as that says."""
    profile = example.name if example.profile else example.bundled or None
    labels = kube.api.get(f"/api/v1/nodes/{node.cluster.node_name}")["metadata"]["labels"]
    if labels.get(PROFILE) != profile:
        before = node.log(PLUGIN).count(IN_FORCE)
        kube.label_node(node.cluster.node_name, **{PROFILE: profile})
        wait(IN_FORCE, lambda: node.log(PLUGIN).count(IN_FORCE) > before, 15, 0.5)
    if example.layouts:
        wait("the layout", lambda: layout_state(kube, node) == "success", 30)


def layout_state(kube, node):
    labels = kube.api.get(f"/api/v1/nodes/{node.cluster.node_name}")["metadata"]["labels"]
    return labels.get("nvidia.com/mig.config.state")


@contextlib.contextmanager
def node_profile(kube, node, example):
    """The NodeProfile of the example, if it has one, was rolled out; in the end it is gone."""
    if not example.node_profile:
        yield
        return
    document = yaml.safe_load(example.node_profile.read_text())
    name, labels = document["metadata"]["name"], document["spec"]["nodeSelector"]
    kube.label_node(node.cluster.node_name, **labels)
    kube.apply(document)
    kube.kubectl("wait", f"nodeprofile/{name}", "--for=condition=Complete", "--timeout=40s")
    try:
        yield
    finally:
        kube.delete("NodeProfile", name)
        kube.label_node(node.cluster.node_name, **dict.fromkeys(labels))
        wait("the node to leave the profile", lambda: "of the files" in report(kube, node), 30)


def report(kube, node):
    """What the plugin says of the profile in force."""
    conditions = kube.api.get(f"/api/v1/nodes/{node.cluster.node_name}")["status"]["conditions"]
    return next((c["message"] for c in conditions if c["type"] == GPUS_CONFIGURED), "")


def play(kube, node, example):
    for document in example.objects():
        kube.apply(with_local_image(document))
        if document["kind"] == "Pod":
            wait_decided(kube, document["metadata"])
    for use in example.uses:
        tell_simulation(kube, node, use)
    for expected in example.expectations:
        kube.wait_pod(expected.pod, expected.phase, namespace=expected.namespace, seconds=100)
        for check in expected.checks:
            holds(kube, check)


def wait_decided(kube, pod):
    """The scheduler has said where *pod* runs, or why nowhere.

    For a moment it counts a share that it is giving away twice, and would put the next pod on
    another GPU, though there is room.
    """

    def conditions():
        status = kube.get("Pod", pod["name"], pod.get("namespace", "default"))["status"]
        return {condition["type"] for condition in status.get("conditions", ())}

    wait(f"the scheduler to decide on pod {pod['name']}", lambda: "PodScheduled" in conditions())


def remove(kube, example):
    objects = example.objects()
    for namespace in (o["metadata"]["name"] for o in objects if o["kind"] == "Namespace"):
        for owner in ("StatefulSet", "Deployment"):  # or its pods come back
            for owned in kube.all(owner, namespace):
                kube.delete(owner, owned["metadata"]["name"], namespace)
        for pod in kube.all("Pod", namespace):
            kube.delete("Pod", pod["metadata"]["name"], namespace)
        wait_empty(kube, namespace)
        kube.delete("Namespace", namespace)  # it goes by itself, in its own time


@contextlib.contextmanager
def unchanged(file):
    """*file* has its text again in the end."""
    text = file.read_text()
    try:
        yield
    finally:
        replace(file, text)


def replace(file, text):
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)


def tell_simulation(kube, release, use: Uses):
    """That the main process of a pod uses so much of the GPU which the pod has."""
    kube.wait_pod(use.pod, "Running", namespace=use.namespace, seconds=100)

    def its_gpus():
        return uuids(kube.logs(use.pod, None, use.namespace))

    (uuid,) = wait("its GPU in the log", its_gpus, PATIENCE_SECONDS)
    uuids_of_node = [gpu.uuid for gpu in read_node(release.node_file).gpus]
    status = kube.get("Pod", use.pod, use.namespace)["status"]["containerStatuses"][0]
    pid = main_process(status["containerID"].rpartition("/")[2])
    node = yaml.safe_load(release.node_file.read_text())
    processes = node["gpus"][uuids_of_node.index(uuid)].setdefault("processes", [])
    processes.append({"pid": pid, "memory_bytes": use.memory_bytes})
    replace(release.node_file, yaml.safe_dump(node))


def main_process(container: str) -> int:
    """The oldest process of a container, as the host counts."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        with contextlib.suppress(OSError):
            if container in path.read_text():
                pids.append(int(path.parent.name))
    return min(pids)


def wait_empty(kube, namespace):
    wait(f"the pods of {namespace} to go", lambda: not kube.all("Pod", namespace))


def holds(kube, check):
    def read(source: Log | Events) -> str:
        if isinstance(source, Events):
            return "\n".join(kube.events(source.pod, source.namespace))
        return kube.logs(source.pod, source.container, source.namespace)

    try:
        wait("the log", lambda: wrong(check, read) is None, PATIENCE_SECONDS, 0.5)
    except AssertionError:
        assert wrong(check, read) is None, wrong(check, read)
