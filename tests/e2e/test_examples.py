"""Every example under deploy/examples is applied as it is, and does what its header says."""

import contextlib
import os
from pathlib import Path

import pytest
import yaml

from dra_driver.sim.node_spec import read_node
from tests.deploy.examples import Events, Example, Log, Uses, examples, uuids, wrong
from tests.e2e.kube import wait
from tests.e2e.manifests import GLIBC

PATIENCE_SECONDS = 15  # a pod that is Running may need a moment until its log is complete


def with_local_image(document):
    """The same object with an image that this node has; nothing else is changed."""
    spec = document.get("spec", {})
    pod = spec.get("template", {}).get("spec", spec)
    for container in (*pod.get("containers", ()), *pod.get("initContainers", ())):
        container |= {"image": GLIBC, "imagePullPolicy": "Never"}
    return document


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_the_example_does_what_it_says(kube, driver, simulated, profile, example: Example):
    minor = int(driver.cluster.version.split(".")[1])
    if minor < example.minor:
        pytest.skip(f"needs Kubernetes 1.{example.minor}")
    if example.uses and driver.cluster.mode != "full":
        pytest.skip(f"needs containers, to tell whose processes are whose: {driver.cluster.why}")
    if example.simulated:
        simulated(example.simulated)
    follow(kube, driver, profile, example)
    with unchanged(driver.node_file):
        try:
            play(kube, driver, example)
        finally:
            remove(kube, example)


def follow(kube, driver, profile, example):
    """The profile of the example holds, and its GPUs are partitioned as that says."""
    if example.layouts:
        (driver.profiles / "layouts.yaml").write_text(example.layouts.read_text())
    if example.profile:
        profile(example.name, example.profile.read_text())
    if example.bundled:
        profile(example.bundled)
    if example.layouts:
        wait("the layout", lambda: driver.layout_state() == "success", 30)


def play(kube, driver, example):
    for document in example.objects():
        kube.apply(with_local_image(document))
        if document["kind"] == "Pod":
            wait_decided(kube, document["metadata"])
    for use in example.uses:
        tell_simulation(kube, driver, use)
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


def tell_simulation(kube, driver, use: Uses):
    """That the main process of a pod uses so much of the GPU which the pod has."""
    kube.wait_pod(use.pod, "Running", namespace=use.namespace, seconds=100)

    def its_gpus():
        return uuids(kube.logs(use.pod, None, use.namespace))

    (uuid,) = wait("its GPU in the log", its_gpus, PATIENCE_SECONDS)
    uuids_of_node = [gpu.uuid for gpu in read_node(driver.node_file).gpus]
    status = kube.get("Pod", use.pod, use.namespace)["status"]["containerStatuses"][0]
    pid = main_process(status["containerID"].rpartition("/")[2])
    node = yaml.safe_load(driver.node_file.read_text())
    processes = node["gpus"][uuids_of_node.index(uuid)].setdefault("processes", [])
    processes.append({"pid": pid, "memory_bytes": use.memory_bytes})
    replace(driver.node_file, yaml.safe_dump(node))


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
