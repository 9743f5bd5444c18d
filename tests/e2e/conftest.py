"""One real Kubernetes for all end-to-end tests, with the chart on it and a plugin on its node."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml

from hack.testbed.cluster import Cluster
from hack.testbed.kubelet_standin import process as standin
from tests.e2e.driver import NAMESPACE, Driver
from tests.e2e.kube import Kube, wait

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "deploy/helm/dra-driver-gpu"
RUN_AS_PROCESS = ("DaemonSet",)  # tests start the plugin themselves, to be able to kill it


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def cluster():
    cluster = Cluster(os.environ.get("KUBERNETES_VERSION", "1.36.3"))
    cluster.up(progress=print)
    if cluster.mode == "full":
        yield cluster
        return
    standin.start(cluster)
    yield cluster
    standin.stop(cluster)


@pytest.fixture
def containers(cluster):
    """For a test of what only a container hides, or only its kubelet remembers: else it skips."""
    if cluster.mode != "full":
        pytest.skip(f"needs containers and the kubelet itself: {cluster.why}")


@pytest.fixture(scope="session")
def kube(cluster):
    return Kube(cluster.kubeconfig, cluster.kubectl)


@pytest.fixture(scope="session")
def chart(cluster, kube):
    """What an administrator installs, less the DaemonSet; rendered by the real helm."""
    rendered = subprocess.run(
        [
            cluster.program("helm"),
            "template",
            "dra-driver-gpu",
            CHART,
            "--namespace",
            NAMESPACE,
            "--kube-version",
            cluster.version,
            "--api-versions",
            "resource.k8s.io/v1",
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    objects = [o for o in yaml.safe_load_all(rendered) if o and o["kind"] not in RUN_AS_PROCESS]
    for document in objects:
        kube.apply(document, NAMESPACE)
    return objects


@pytest.fixture(scope="session")
def session_driver(cluster, kube, chart):
    with tempfile.TemporaryDirectory(prefix="dra-e2e-") as directory:
        driver = Driver(cluster, kube, Path(directory))
        try:
            driver.start()
            yield driver
        finally:
            driver.stop_all()


@pytest.fixture
def driver(session_driver, request):
    """A plugin that serves eight simulated H100s; and after the test nothing is left of it."""
    driver = session_driver
    if "" not in driver.processes or driver.processes[""].poll() is not None:
        driver.processes.pop("", None)
        driver.start()
    driver.wait_ready()
    yield driver
    if "" not in driver.processes:
        driver.start()
    driver.wait_ready()
    clean_up(driver.kube)
    assert_nothing_left(driver)


def clean_up(kube):
    """Delete what a test left in the namespace default, as its user would."""
    for kind in ("Deployment", "Job", "Pod", "ResourceClaim", "ResourceClaimTemplate"):
        for found in kube.all(kind):
            kube.delete(kind, found["metadata"]["name"])
    wait("every pod to go", lambda: not kube.all("Pod"), 90)
    wait("every claim to go", lambda: not kube.all("ResourceClaim"), 90)


def assert_nothing_left(driver):
    """No CDI file, no ledger record, no socket but the two of the running plugin."""
    wait(f"CDI files to go: {driver.specs()}", lambda: not driver.specs(), 70)
    wait(f"ledger records to go: {driver.claims()}", lambda: not driver.claims(), 70)
    notes = list((driver.plugin_dir / "instances").glob("[0-9]*"))
    assert len(notes) == 1, f"notes of dead processes: {notes}"
    assert driver.sockets() == [
        "plugins/gpu.nvidia.com/dra.sock",
        "plugins_registry/gpu.nvidia.com-reg.sock",
    ]
