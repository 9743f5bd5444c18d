"""Every example under deploy/examples is applied as it is, and does what its header says."""

import pytest

from tests.deploy.examples import Example, Log, examples, wrong
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
def test_the_example_does_what_it_says(kube, driver, example: Example):
    minor = int(driver.cluster.version.split(".")[1])
    if minor < example.minor:
        pytest.skip(f"needs Kubernetes 1.{example.minor}")
    objects = [with_local_image(document) for document in example.objects()]
    namespaces = [o["metadata"]["name"] for o in objects if o["kind"] == "Namespace"]
    try:
        for document in objects:
            kube.apply(document)
        for expected in example.expectations:
            kube.wait_pod(expected.pod, expected.phase, namespace=expected.namespace, seconds=100)
            for check in expected.checks:
                holds(kube, check)
    finally:
        for namespace in namespaces:
            for pod in kube.all("Pod", namespace):
                kube.delete("Pod", pod["metadata"]["name"], namespace)
            wait_empty(kube, namespace)
            kube.delete("Namespace", namespace)  # it goes by itself, in its own time


def wait_empty(kube, namespace):
    wait(f"the pods of {namespace} to go", lambda: not kube.all("Pod", namespace))


def holds(kube, check):
    def read(log: Log) -> str:
        return kube.logs(log.pod, log.container, log.namespace)

    try:
        wait("the log", lambda: wrong(check, read) is None, PATIENCE_SECONDS, 0.5)
    except AssertionError:
        assert wrong(check, read) is None, wrong(check, read)
