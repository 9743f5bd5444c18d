"""One real Kubernetes for all end-to-end tests, with the chart on it and a plugin on its node."""

import contextlib
import fcntl
import os
import pickle
import tempfile
from functools import partial
from pathlib import Path

import pytest
import yaml

from dra_driver.sim.node_spec import node_file as described
from hack.container_image.build import build
from hack.testbed.cluster import Cluster
from hack.testbed.kubelet_standin import process as standin
from tests.e2e.device_plugin import RESOURCE_NAME, has_dra, needs_claims, wait_allocatable
from tests.e2e.driver import LIMITING, NAMESPACE, Driver
from tests.e2e.kube import NAMESPACES, Kube, wait
from tests.e2e.release import CRD, IMAGE, RUNS, Release

PROFILE_LABELS = ("gpu.nvidia.com/profile", "nvidia.com/device-plugin.config")
LAYOUT_LABELS = ("nvidia.com/mig.config", "nvidia.com/mig.config.state")

# An API server that starts refuses everybody, for as long as it has not read the roles.
restarts_api_server = pytest.mark.refused(
    "/apis/resource.k8s.io",
    "deviceclasses.resource.k8s.io",
    "events",
    "nodeprofiles.resource.nvidia.com",
    "nodes",
    "nodes/status",
    "resourceclaims.resource.k8s.io",
    "resourceslices.resource.k8s.io",
    "selfsubjectaccessreviews.authorization.k8s.io",
)

DRA_SOCKETS = ["plugins/gpu.nvidia.com/dra.sock", "plugins_registry/gpu.nvidia.com-reg.sock"]

# The UIDs of the plugin's pods in a rolling update.
OLD = "00000000-0000-4000-8000-00000000000a"
NEW = "00000000-0000-4000-8000-00000000000b"


def pytest_collection_modifyitems(items):
    directory = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(directory):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(600))  # longer than what it waits for


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
    """What an administrator installs. Its DaemonSets have no pods but where a module has them run:
    other tests start the plugin as a process, to be able to kill it."""
    with tempfile.TemporaryDirectory(prefix="dra-e2e-") as directory:
        node_file = Path(directory) / "node.yaml"
        node_file.write_text(described("h100x8").read_text())
        release = Release(cluster, kube, Path(directory), node_file)
        kube.label_node(cluster.node_name, **{RUNS: None})  # a session that was killed had it
        release.upgrade()
        yield release
        release.uninstall("--no-hooks")
        # What helm keeps: a release of the next session's tests would leave it to this one.
        kube.delete("CustomResourceDefinition", CRD)


@pytest.fixture(scope="session")
def image(tmp_path_factory):
    """What hack/image builds; once for all workers of a run."""
    own = tmp_path_factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "image"
    directory.mkdir(exist_ok=True)
    record = directory / "built.pickle"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.exists():
            record.write_bytes(pickle.dumps(build(IMAGE, directory, print)))
        return pickle.loads(record.read_bytes())


@pytest.fixture(scope="session")
def imported(cluster, image):
    """The image, where the node has it."""
    if cluster.mode != "full":
        pytest.skip(f"needs containers: {cluster.why}")
    cluster.import_images(image.archive)
    return image


@pytest.fixture(scope="module")
def installed(request, imported, chart, session_driver):
    """The release with its pods on the node, where the processes of other tests rest meanwhile. A
    module may have VALUES that differ from the usual ones."""
    session_driver.stop_all()
    session_driver.agent.stop()
    chart.serve(described("h100x8").read_text())
    chart.upgrade(**getattr(request.module, "VALUES", {}))
    try:
        chart.start()
        yield chart
        chart.kube.clean_up()
    finally:
        chart.kube.label_node(
            chart.cluster.node_name, **dict.fromkeys((*PROFILE_LABELS, *LAYOUT_LABELS))
        )
        chart.stop()
        session_driver.agent.start()
        session_driver.start()


@pytest.fixture(scope="session")
def namespaces(kube):
    """What tests use beside "default"; pods and claims that they leave there are removed too."""
    for name, labels in NAMESPACES.items():
        wait(f"an earlier namespace {name} to go", partial(is_not_going, kube, name))
        metadata = {"name": name, "labels": labels}
        kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    for name in NAMESPACES:
        wait("its service account", partial(kube.all, "ServiceAccount", name))
    yield tuple(NAMESPACES)
    for name in NAMESPACES:
        kube.delete("Namespace", name)  # it goes by itself, in its own time


def is_not_going(kube, namespace):
    document = kube.find("Namespace", namespace)
    return document is None or "deletionTimestamp" not in document["metadata"]


@pytest.fixture(scope="session")
def session_driver(cluster, kube, chart, namespaces):
    with tempfile.TemporaryDirectory(prefix="dra-e2e-") as directory:
        driver = Driver(cluster, kube, Path(directory), **flags(cluster, Path(directory)))
        try:
            driver.agent.start()
            driver.start()
            if has_dra(cluster):
                driver.usual = wait("its slices", kube.published)
            else:
                driver.usual_allocatable = wait("its GPUs", driver.allocatable)
            yield driver
        finally:
            driver.stop_all()
            driver.agent.close()
            kube.label_node(cluster.node_name, **dict.fromkeys((*PROFILE_LABELS, *LAYOUT_LABELS)))


def flags(cluster, directory):
    """Profiles of both kinds, none to begin with; a quick guard; the runtime as it is here."""
    profiles = directory / "profiles"
    profiles.mkdir()
    runtime = cluster.layout.containerd_state
    usual = {
        "profiles": str(profiles),
        "revision-namespace": NAMESPACE,
        "guard-interval": "0.5",
        "runtime-dir": str(runtime),
    }
    # Else the device-plugin API would be chosen there, for pods that ask for GPUs by number.
    return usual | (RESOURCE_NAME if needs_claims(cluster) else {})


@pytest.fixture
def driver(session_driver, request):
    """A plugin that serves eight simulated H100s; and after the test nothing is left of it."""
    driver = session_driver
    if "" not in driver.processes or driver.processes[""].poll() is not None:
        driver.processes.pop("", None)
        driver.start()
    driver.wait_ready()
    driver.agent.ensure()
    yield driver
    driver.agent.ensure()
    if "" not in driver.processes:
        driver.start()
    driver.wait_ready()
    driver.kube.clean_up()
    assert_nothing_left(driver)


@pytest.fixture
def limiting(driver, kube):
    """The plugin on a node with two GPUs whose driver limits memory by cgroup itself."""
    driver.stop()
    driver.start(sim=LIMITING)
    wait("its two GPUs", lambda: len(kube.devices()) == 2)
    yield driver
    kube.clean_up()
    wait("ledger records to go", lambda: not driver.claims(), 70)
    driver.stop()
    driver.start()


@pytest.fixture
def updating(driver):
    """A plugin with sockets of its own pod UID (OLD), as a DaemonSet with maxSurge has."""
    driver.stop()
    driver.start(OLD)
    yield driver
    driver.stop_all()
    driver.start()


@pytest.fixture
def simulated(driver, kube):
    """Has plugin and agent serve another simulated node: ``simulated("a100-40x1")``, or one that is
    described. After the test they serve the usual one."""
    usual = driver.node_file.read_text()

    def serve(node):
        text = yaml.safe_dump(node) if isinstance(node, dict) else described(node).read_text()
        driver.serve(text)
        wait("other devices", lambda: (now := kube.published()) and now != driver.usual, 30)

    yield serve
    if driver.node_file.read_text() == usual:
        return
    kube.clean_up()
    wait("ledger records to go", lambda: not driver.claims(), 70)
    wait(f"servers to go: {driver.agent.remains()}", lambda: not driver.agent.remains(), 20)
    driver.serve(usual)


@pytest.fixture
def profile(driver, kube):
    """Has the node follow a profile: ``profile(name, text)``; without a text, a bundled one. After
    the test it follows none."""
    directory = driver.profiles
    node = driver.cluster.node_name

    def follow(name, text=None, label=PROFILE_LABELS[0], message="profile in force"):
        if text is not None:
            (directory.parent / "new").write_text(text)
            (directory.parent / "new").rename(directory / f"{name}.yaml")
        before = driver.log.count(message)
        kube.label_node(node, **{**dict.fromkeys(PROFILE_LABELS), label: name})
        wait(message, lambda: driver.log.count(message) > before, 15)

    yield follow
    kube.label_node(node, **dict.fromkeys(PROFILE_LABELS))
    for file in directory.iterdir():
        file.unlink()


def assert_nothing_left(driver):
    """No file of a claim, no ledger record, no interval, no memory limit, no MPS server, no socket
    but those of the running plugin."""
    wait(f"CDI files to go: {driver.specs()}", lambda: not driver.specs(), 70)
    wait(f"ledger records to go: {driver.claims()}", lambda: not driver.claims(), 70)
    kube = driver.kube
    with contextlib.suppress(AssertionError):
        # A GPU that was late once, on a busy machine, has its taint for a minute.
        wait("devices to be as usual", lambda: kube.published() == driver.usual, 80)
    assert kube.published() == driver.usual
    wait_allocatable(driver, driver.usual_allocatable)
    assert not driver.metadata()
    wait(f"memory limits to go: {driver.limits()}", lambda: not driver.limits(), 30)
    assert not driver.instances()
    wait(f"MPS servers to go: {driver.agent.remains()}", lambda: not driver.agent.remains(), 20)
    assert set(driver.intervals()) <= {"Default"}
    files = list((driver.plugin_dir / "instances").glob("[0-9]*"))
    assert len(files) == 1, f"files of dead processes: {files}"
    serves_dra = not driver.usual_allocatable
    assert driver.sockets() == (DRA_SOCKETS if serves_dra else [])
