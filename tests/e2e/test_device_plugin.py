"""Pods that ask for GPUs by name and number, where the device-plugin API gives them out."""

import json
import signal

import pytest

from hack.testbed.assets import minor
from tests.deploy.examples import uuids
from tests.e2e.device_plugin import (
    GPU,
    SHOW,
    asking,
    by_device_plugin,
    devices,
    pod,
    restarts,
    running,
    shown,
    wait_allocatable,
)
from tests.e2e.kube import wait
from tests.e2e.manifests import pod_of

FIRST_WITH_SIDECARS = 29
ONCE_AGAIN = f"[ -e /mark/begun ] && {{ {SHOW}; }}; nvidia-smi -L; touch /mark/begun; exit 1"

pytestmark = [pytest.mark.core, pytest.mark.device_plugin, pytest.mark.usefixtures("containers")]


@pytest.fixture(scope="module", autouse=True)
def node(session_driver):
    """Gives its eight GPUs out by the device-plugin API."""
    with by_device_plugin(session_driver):
        yield


@pytest.mark.point(147, 158)
def test_a_pod_gets_as_many_gpus_as_it_asks_for_and_the_kubelet_says_which(cluster, kube, driver):
    kube.apply(pod("one"))
    kube.apply(pod("two", 2))
    running(kube, "one", "two")

    gpus = {name: shown(kube, name) for name in ("one", "two")}
    assert [len(each) for each in gpus.values()] == [1, 2]
    assert not gpus["one"] & gpus["two"]
    assert {name: {"main": tuple(sorted(each))} for name, each in gpus.items()} == devices(cluster)
    wait_allocatable(driver, {GPU: 8})

    kube.apply(pod("most", 6))
    wait("too few to be told", lambda: f"Insufficient {GPU}" in str(kube.events("most")), 20)
    kube.delete("Pod", "two")
    running(kube, "most")
    assert gpus["two"] < shown(kube, "most")


@pytest.mark.point(153)
def test_an_init_container_and_the_container_after_it_have_one_gpu(kube, driver):
    first, second = (
        asking({GPU: 1}, "nvidia-smi -L", "first"),
        asking({GPU: 1}, "nvidia-smi -L", "second"),
    )
    kube.apply(pod_of("turns", [asking({GPU: 1})], [], initContainers=[first, second]))
    running(kube, "turns")

    gpus = {shown(kube, "turns", name) for name in ("first", "second", "main")}
    assert len(gpus) == 1
    assert len(*gpus) == 1


@pytest.mark.point(154)
def test_a_sidecar_keeps_its_gpu_to_itself(cluster, kube, driver):
    if minor(cluster.version) < FIRST_WITH_SIDECARS:
        pytest.skip(f"sidecars came with Kubernetes 1.{FIRST_WITH_SIDECARS}")
    sidecar = asking({GPU: 1}, name="sidecar") | {"restartPolicy": "Always"}
    kube.apply(pod_of("company", [asking({GPU: 1})], [], initContainers=[sidecar]))
    running(kube, "company")

    assert not shown(kube, "company", "main") & shown(kube, "company", "sidecar")


def test_a_container_that_is_started_again_has_the_gpu_that_it_had(kube, driver):
    again = asking({GPU: 1}, ONCE_AGAIN) | {
        "volumeMounts": [{"name": "mark", "mountPath": "/mark"}]
    }
    mark = {"name": "mark", "emptyDir": {}}
    kube.apply(pod_of("again", [again], [], restartPolicy="OnFailure", volumes=[mark]))
    restarted = lambda: restarts(kube, "again") == 1  # noqa: E731
    wait("its container to be started again", restarted, 40)
    running(kube, "again")

    log = kube.kubectl("logs", "again", "--previous")
    before = uuids(log)
    assert len(before) == 1, f"{log}\n{kube.explain('again')}"
    assert shown(kube, "again") == before


def test_a_static_pod_gets_its_gpu(cluster, kube, driver):
    manifest = cluster.static_pods_dir / "static.json"
    manifest.write_text(json.dumps(pod("static")))
    try:
        mirror = f"static-{cluster.node_name}"
        running(kube, mirror)
        gpus = shown(kube, mirror)
        assert devices(cluster) == {mirror: {"main": tuple(gpus)}}
    finally:
        manifest.unlink()
    kube.wait_gone("Pod", mirror)


def test_a_pod_with_a_node_name_gets_its_gpu_without_a_scheduler(cluster, kube, driver):
    kube.apply(pod("placed", 2, nodeName=cluster.node_name))
    running(kube, "placed")

    assert len(shown(kube, "placed")) == 2


@pytest.mark.point(148)
def test_after_restarts_of_the_kubelet_pods_run_on_and_others_get_other_gpus(cluster, kube, driver):
    kube.apply(pod("before", 2))
    running(kube, "before")
    gpus = shown(kube, "before")

    for how in (signal.SIGTERM, signal.SIGKILL):
        cluster.restart("kubelet", how)
        wait_allocatable(driver, {GPU: 8})
    kube.apply(pod("after", 6))
    running(kube, "after")
    assert not gpus & shown(kube, "after")
    assert restarts(kube, "before") == 0
    assert devices(cluster)["before"] == {"main": tuple(sorted(gpus))}
