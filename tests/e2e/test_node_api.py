"""A node goes from DRA to the device-plugin API and back, once no pod has a GPU by the old one."""

import pytest

from tests.e2e.conftest import PROFILE_LABELS
from tests.e2e.device_plugin import (
    CHANGE_SECONDS,
    GPU,
    PROFILE,
    devices,
    has_dra,
    needs_claims,
    pod,
    running,
    shown,
    wait_allocatable,
)
from tests.e2e.kube import wait

pytestmark = [pytest.mark.device_plugin, pytest.mark.usefixtures("containers")]


@pytest.fixture(autouse=True)
def needs_both(cluster):
    if not has_dra(cluster) or needs_claims(cluster):
        pytest.skip("on this Kubernetes pods get GPUs by their number by one API only")


@pytest.mark.point(159, 160)
def test_a_node_goes_to_the_device_plugin_api_once_no_pod_has_a_claim(
    cluster, kube, driver, profile
):
    kube.apply(pod("claims"))
    running(kube, "claims")
    assert has_claim(kube, "claims")

    profile("by-device-plugin", PROFILE)
    wait_condition(kube, cluster, "DRA", "DevicePlugin is to come", "pod default/claims")
    kube.apply(pod("claims-too"))
    running(kube, "claims-too")
    assert has_claim(kube, "claims-too"), "pods are served until the last one has ended"
    kube.delete("Pod", "claims")
    wait_condition(kube, cluster, "DRA", "waits for pod default/claims-too")
    kube.delete("Pod", "claims-too")
    wait_allocatable(driver, {GPU: 8}, CHANGE_SECONDS)
    wait_condition(kube, cluster, "DevicePlugin", "the profile says api: DevicePlugin")
    assert not kube.published()

    kube.apply(pod("plugged"))
    running(kube, "plugged")
    assert not has_claim(kube, "plugged")
    assert devices(cluster) == {"plugged": {"main": tuple(shown(kube, "plugged"))}}


@pytest.mark.point(159, 160)
def test_a_node_goes_back_to_claims_once_no_pod_has_a_device(cluster, kube, driver, profile):
    profile("by-device-plugin", PROFILE)
    wait_allocatable(driver, {GPU: 8}, CHANGE_SECONDS)
    kube.apply(pod("plugged"))
    running(kube, "plugged")

    kube.label_node(cluster.node_name, **dict.fromkeys(PROFILE_LABELS))
    wait_condition(kube, cluster, "DevicePlugin", "DRA is to come", "pod default/plugged")
    kube.apply(pod("plugged-too"))
    running(kube, "plugged-too")
    assert not has_claim(kube, "plugged-too"), "pods are served until the last one has ended"
    for name in ("plugged", "plugged-too"):
        kube.delete("Pod", name)
    wait("its slices", lambda: kube.published() == driver.usual, CHANGE_SECONDS)
    wait_condition(kube, cluster, "DRA", f"maps {GPU}")

    # The kubelet knows the resource for five more minutes, and is not to ask us for its devices.
    kube.apply(pod("claims"))
    running(kube, "claims", seconds=20)
    assert has_claim(kube, "claims")
    assert devices(cluster) == {}


def has_claim(kube, name):
    """Whether the scheduler has made a claim for what the pod asks for."""
    return "extendedResourceClaimStatus" in kube.get("Pod", name)["status"]


def wait_condition(kube, cluster, reason, *words):
    """Wait until the Node says by which API it gives GPUs out, and *words* of it."""

    def condition():
        conditions = kube.get("Node", cluster.node_name, "")["status"]["conditions"]
        return next(each for each in conditions if each["type"] == "GPUsAllocatedBy")

    def says_so():
        said = condition()
        return said["reason"] == reason and all(each in said["message"] for each in words)

    try:
        wait(f"{reason} and {words} in the condition", says_so, CHANGE_SECONDS)
    except AssertionError as e:
        raise AssertionError(f"{e}: it is {condition()}") from e
