"""Plugin, kubelet and others break while pods have GPUs by the device-plugin API."""

import contextlib
import os
import signal
import uuid

import pytest

from hack.testbed.leftovers import kill_containers
from tests.e2e.conftest import NEW, OLD
from tests.e2e.device_plugin import (
    GPU,
    SHARED,
    by_device_plugin,
    devices,
    doctor,
    pod,
    restarts,
    running,
    shown,
    wait_allocatable,
)
from tests.e2e.kube import wait
from tests.e2e.other_device_plugin import OtherDevicePlugin
from tests.e2e.processes import main_process

pytestmark = [pytest.mark.device_plugin, pytest.mark.usefixtures("containers")]


@pytest.fixture(scope="module", autouse=True)
def node(session_driver):
    """Gives its eight GPUs out by the device-plugin API."""
    with by_device_plugin(session_driver):
        yield


@pytest.mark.core
@pytest.mark.point(151)
def test_while_the_plugin_is_replaced_pods_run_on_and_its_gpus_are_soon_back(kube, driver):
    driver.stop()
    driver.start(OLD)
    kube.apply(pod("stays", 2))
    running(kube, "stays")

    driver.start(NEW)
    wait_allocatable(driver, {GPU: 8})
    driver.stop(OLD)
    wait_allocatable(driver, {GPU: 8})
    kube.apply(pod("after", 6))
    running(kube, "after")
    assert not shown(kube, "stays") & shown(kube, "after")
    assert restarts(kube, "stays") == 0
    driver.stop(NEW)
    driver.start()


@pytest.mark.core
@pytest.mark.point(150)
def test_a_container_that_ends_while_the_plugin_is_away_starts_again_once_it_is_back(kube, driver):
    kube.apply(pod("again", 2, restartPolicy="Always"))
    running(kube, "again")
    gpus = shown(kube, "again")
    driver.kill()
    os.kill(main_process(kube, "again"), signal.SIGKILL)
    wait("the kubelet to miss the plugin", lambda: waiting(kube, "again"), 40)

    driver.start()

    wait("its container to run", lambda: is_running(kube, "again"), 60)
    assert shown(kube, "again") == gpus


def waiting(kube, name):
    """Why the only container of a pod does not run."""
    (status,) = kube.get("Pod", name)["status"]["containerStatuses"]
    return status["state"].get("waiting", {}).get("message", "")


def is_running(kube, name):
    (status,) = kube.get("Pod", name)["status"]["containerStatuses"]
    return "running" in status["state"]


@pytest.mark.core
@pytest.mark.point(155)
def test_when_the_kubelet_has_lost_its_checkpoint_no_gpu_is_used_twice_and_pods_are_told(
    cluster, kube, driver
):
    kube.apply(pod("holds", 4))
    running(kube, "holds")
    cluster.stop("kubelet")
    (cluster.device_plugins_dir / "kubelet_internal_checkpoint").write_text("{")
    cluster.start("kubelet")
    wait_allocatable(driver, {GPU: 8})

    kube.apply(pod("comes", 4))
    with contextlib.suppress(AssertionError):
        running(kube, "comes", seconds=10)
        assert not shown(kube, "comes") & shown(kube, "holds")
    wait("its owner to be told", lambda: "GPUForgotten" in str(kube.events("holds")), 30)
    assert "the kubelet has lost which devices these have: default/holds" in doctor(driver)
    kube.delete("Pod", "holds")
    running(kube, "comes")


@pytest.mark.point(149)
def test_by_the_answer_that_the_kubelet_kept_a_container_starts_after_all_records_are_lost(
    cluster, kube, driver, other_boot
):
    """As after a reboot: what the answer names is made anew."""
    kube.apply(pod("outlives", 2, restartPolicy="Always"))
    running(kube, "outlives")
    gpus = shown(kube, "outlives")
    driver.stop()
    other_boot()
    cluster.restart("kubelet")
    driver.start()
    wait_allocatable(driver, {GPU: 8})

    os.kill(main_process(kube, "outlives"), signal.SIGKILL)

    wait("its container to run", lambda: restarts(kube, "outlives") == 1, 60)
    running(kube, "outlives")
    assert shown(kube, "outlives") == gpus
    assert devices(cluster)["outlives"] == {"main": tuple(sorted(gpus))}
    kube.apply(pod("beside", 6))
    running(kube, "beside")
    assert not shown(kube, "beside") & gpus


def test_after_a_reboot_the_kubelet_fails_pods_until_the_plugin_is_there_and_others_get_their_gpus(
    cluster, kube, driver, other_boot
):
    kube.apply(pod("before", 8, restartPolicy="Always"))
    running(kube, "before")
    cluster.stop("kubelet")
    driver.stop()
    kill_containers(cluster.layout.containerd_socket)
    cluster.restart("containerd")  # else it still says for a moment that they run
    other_boot()

    cluster.start("kubelet")
    kube.wait_pod("before", "Failed")
    driver.start()

    assert kube.get("Pod", "before")["status"]["reason"] == "UnexpectedAdmissionError"
    kube.apply(pod("after", 8))
    running(kube, "after")
    assert len(shown(kube, "after")) == 8


@pytest.fixture
def other_boot(cluster, driver, tmp_path):
    """Plugins that are started from now on see another boot of the node, and no CDI file."""
    boot_id = tmp_path / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    bind = f"mount --bind {boot_id} /proc/sys/kernel/random/boot_id"

    def begin():
        for file in cluster.cdi_dir.iterdir():
            file.unlink()
        driver.inside = ("unshare", "--mount", "sh", "-c", f'{bind} && exec "$0" "$@"')

    yield begin
    driver.inside = ()
    driver.stop()
    driver.start()


@pytest.mark.point(156)
def test_a_pod_with_a_node_name_that_came_before_the_plugin_is_told_why_it_has_no_gpu(
    cluster, kube, driver
):
    """A kubelet that knows of no such resource starts it without."""
    driver.stop()
    cluster.stop("kubelet")
    (cluster.device_plugins_dir / "kubelet_internal_checkpoint").unlink()
    cluster.start("kubelet")
    kube.apply(pod("early", nodeName=cluster.node_name))
    running(kube, "early")
    assert "GPU-" not in kube.logs("early")

    driver.start()

    wait("the reason", lambda: "create it once" in str(kube.events("early")), 20)
    assert "these ask for GPUs and run without: default/early" in doctor(driver)
    kube.delete("Pod", "early")
    kube.wait_gone("Pod", "early")
    kube.apply(pod("early", nodeName=cluster.node_name))
    running(kube, "early")
    assert len(shown(kube, "early")) == 1


@pytest.mark.point(159)
def test_another_device_plugin_is_named_and_nothing_is_offered_beside_it(cluster, kube, driver):
    driver.stop()
    with OtherDevicePlugin(cluster.device_plugins_dir, GPU, ["GPU-a", "GPU-b"]):
        wait_allocatable(driver, {GPU: 2})
        driver.start(ready=False)
        wait("it to be named", lambda: "nvidia-gpu.sock" in driver.ask("/readyz")[1], 20)
        kube.apply(pod("of-other", command="echo has $OTHER_DEVICES; sleep 600"))
        running(kube, "of-other")
        wait("its device", lambda: kube.logs("of-other").startswith("has GPU-"))
        assert driver.allocatable() == {GPU: 2}
        kube.delete("Pod", "of-other")
        kube.wait_gone("Pod", "of-other")
    wait_allocatable(driver, {GPU: 8}, 60)  # it could have been gone for a moment


def test_beside_a_plugin_with_another_resource_ours_is_offered_no_more_and_no_pod_fails(
    cluster, kube, driver
):
    kube.apply(pod("ours", 2))
    running(kube, "ours")
    theirs = ["GPU-a::0", "GPU-a::1"]
    socket = "nvidia-gpu.shared.sock"
    with OtherDevicePlugin(cluster.device_plugins_dir, SHARED, theirs, socket):
        # Those of our pod, once the other one has had the time to register all that it has.
        wait_allocatable(driver, {GPU: 2, SHARED: 2}, 45)
        kube.apply(pod("next", 6))
        wait("too few to be told", lambda: f"Insufficient {GPU}" in str(kube.events("next")), 20)

    running(kube, "next")
    assert not shown(kube, "next") & shown(kube, "ours")
    assert restarts(kube, "ours") == 0


def test_a_plugin_that_registers_our_resource_later_is_named_and_ours_serves_again_when_it_is_gone(
    cluster, kube, driver
):
    """The kubelet lets the newest have it, and does not come back to the other by itself."""
    kube.apply(pod("ours", 2))
    running(kube, "ours")
    theirs = [f"vendor-{n}" for n in range(4)]
    with OtherDevicePlugin(cluster.device_plugins_dir, GPU, theirs, "vendor.sock"):
        wait("it to be named", lambda: "the device vendor-" in driver.ask("/readyz")[1], 20)
        assert "the device vendor-" in doctor(driver)
        wait_allocatable(driver, {GPU: 4})
        kube.apply(pod("of-other", 2, command="echo has $OTHER_DEVICES; sleep 600"))
        running(kube, "of-other")
        wait("its device", lambda: kube.logs("of-other").startswith("has vendor-"))

    # Which GPU that pod has nobody knows.
    wait("its pod to be named", lambda: "pod default/of-other" in driver.ask("/readyz")[1], 60)
    assert "pods have GPUs by it" in doctor(driver)
    kube.delete("Pod", "of-other")
    kube.wait_gone("Pod", "of-other")
    wait_allocatable(driver, {GPU: 8}, 75)
    kube.apply(pod("next", 6))
    running(kube, "next")
    assert not shown(kube, "next") & shown(kube, "ours")
    assert restarts(kube, "ours") == 0
