"""One shape inside, whatever version of resource.k8s.io the API server speaks."""

import pytest

from dra_driver.base.errors import Refused
from dra_driver.k8s.resource_versions import (
    choose_version,
    convert_claim_to_v1,
    convert_slice_from_v1,
    convert_slice_to_v1,
)

DEVICE = {
    "name": "gpu-0",
    "attributes": {"type": {"string": "gpu"}},
    "capacity": {"memory": {"value": "80Gi"}},
    "taints": [{"key": "k", "effect": "NoSchedule"}],
}
SLICE = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceSlice",
    "metadata": {"name": "s", "unknown": 1},
    "spec": {"driver": "d", "devices": [DEVICE], "unknown": 2},
}


@pytest.mark.parametrize(
    ("served", "chosen"),
    [
        (["v1", "v1beta2", "v1beta1"], "v1"),
        (["v1beta1", "v1"], "v1"),
        (["v1beta1", "v1beta2", "v1alpha3"], "v1beta2"),
        (["v1alpha3", "v1beta1"], "v1beta1"),
        (["v2", "v1"], "v1"),
    ],
)
def test_the_newest_version_that_both_know_is_chosen(served, chosen):
    assert choose_version(served) == chosen


@pytest.mark.parametrize(("served", "description"), [([], "nothing"), (["v1alpha3"], "v1alpha3")])
def test_an_api_server_without_any_is_told_what_to_turn_on(served, description):
    with pytest.raises(Refused, match=f"it serves {description}.*--runtime-config=resource"):
        choose_version(served)


def test_a_device_of_v1beta1_has_everything_but_its_name_below_basic():
    old = convert_slice_from_v1("v1beta1", SLICE)

    assert old["apiVersion"] == "resource.k8s.io/v1beta1"
    assert old["spec"]["devices"] == [
        {"name": "gpu-0", "basic": {k: v for k, v in DEVICE.items() if k != "name"}}
    ]


def test_a_device_without_anything_still_has_a_basic():
    old = convert_slice_from_v1("v1beta1", {"spec": {"devices": [{"name": "bare"}]}})

    assert old["spec"]["devices"] == [{"name": "bare", "basic": {}}]


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_a_slice_comes_back_as_it_went(version):
    assert convert_slice_to_v1(convert_slice_from_v1(version, SLICE)) == SLICE
    assert convert_slice_from_v1(version, SLICE)["metadata"] == {"name": "s", "unknown": 1}


def test_a_slice_of_counters_has_no_devices_in_any_version():
    counters = {"spec": {"sharedCounters": [{"name": "c", "counters": {"m": {"value": "1"}}}]}}

    assert convert_slice_from_v1("v1beta1", counters)["spec"] == counters["spec"]


def test_a_request_of_v1beta1_is_one_for_exactly_that():
    old = {
        "apiVersion": "resource.k8s.io/v1beta1",
        "spec": {
            "devices": {
                "requests": [
                    {"name": "a", "deviceClassName": "gpu", "count": 2, "adminAccess": True},
                    {"name": "b", "firstAvailable": [{"name": "big", "deviceClassName": "gpu"}]},
                ],
                "config": [{"opaque": {}}],
            }
        },
        "status": {"allocation": {"devices": {"results": [{"request": "a"}]}}},
    }

    claim = convert_claim_to_v1(old)

    assert claim["apiVersion"] == "resource.k8s.io/v1"
    assert claim["spec"]["devices"] == {
        "requests": [
            {
                "name": "a",
                "exactly": {"deviceClassName": "gpu", "count": 2, "adminAccess": True},
            },
            {"name": "b", "firstAvailable": [{"name": "big", "deviceClassName": "gpu"}]},
        ],
        "config": [{"opaque": {}}],
    }
    assert claim["status"] == old["status"]


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(
            {"requests": [{"name": "a", "exactly": {"deviceClassName": "gpu"}}]}, id="a request"
        ),
        pytest.param({"requests": None}, id="none, as the API server writes that"),
    ],
)
def test_a_claim_of_v1_stays_as_it_is(devices):
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "spec": {"devices": devices},
    }

    assert convert_claim_to_v1(claim) == claim
