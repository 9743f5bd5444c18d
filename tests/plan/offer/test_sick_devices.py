"""What is wrong with a GPU is in the taints of its devices, or they are not offered."""

from dataclasses import replace

import pytest

from dra_driver.base.errors import DeviceUnhealthy, UnknownDevice
from dra_driver.k8s.claims import Toleration
from dra_driver.model.gpus import Inventory
from dra_driver.model.health import Effect, Fault, HealthRules, Problem
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import (
    DEFAULT_PROFILE,
    GpuSelector,
    MigRules,
    Profile,
    ProfileEntry,
    Rules,
)
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.slice_documents import published_devices
from dra_driver.plan.prepare.claim import plan_claim
from tests.builders import POOL, allocation, claim, gpu_uuid, inventory
from tests.fakes.mig import ONE, mig_gpu, partition

XID = Fault(gpu_uuid(), Problem.XID, "79", since=1000000000.25)
LOST = Fault(gpu_uuid(), Problem.LOST, since=5.0)


def offer(*faults, node=None, profile=DEFAULT_PROFILE, **features):
    return build_offer(
        node or inventory(2), profile, ApiFeatures(**features), {}, faults=tuple(faults)
    )


def taints(offer):
    """By device, but for what keeps pods from monitors."""
    return {
        device["name"]: device["taints"]
        for device in published_devices(offer)
        if "taints" in device and not device["name"].endswith("-mon")
    }


def test_the_devices_of_a_sick_gpu_are_tainted_since_it_is_sick_and_no_others():
    since = {"timeAdded": "2001-09-09T01:46:40Z", "effect": "NoSchedule"}

    assert taints(offer(XID)) == {"gpu-0": [{"key": "gpu.nvidia.com/xid", "value": "79", **since}]}
    assert offer(XID).by_name["gpu-1"] == offer().by_name["gpu-1"]


def test_an_older_api_server_is_sent_no_more_taints_than_it_takes():
    """Kubernetes 1.33 and 1.34 refuse a slice with more than four taints of a device."""
    problems = (
        *(Problem.UNCORRECTABLE_ECC, Problem.LOST, Problem.RECOVERY_ACTION),
        *(Problem.REMAP_FAILED, Problem.XID, Problem.RELEASED),
    )
    faults = [Fault(gpu_uuid(), problem, "1", since=n) for n, problem in enumerate(problems, 1)]
    effects = HealthRules(((Problem.REMAP_FAILED, Effect.NO_EXECUTE),))
    evict = Profile("p", (ProfileEntry(GpuSelector(), Rules(health=effects), "spec.gpus[0]"),))

    def keys(**features):
        sick = offer(*faults, profile=evict, **features)
        return [taint["key"].removeprefix("gpu.nvidia.com/") for taint in taints(sick)["gpu-0"]]

    assert keys() == sorted(problems)
    assert keys(counters=False) == [
        *("gpu-lost", "released", "row-remap-failed", "uncorrectable-ecc")
    ]


def test_a_taint_without_a_value_has_none():
    (taint,) = taints(offer(LOST))["gpu-0"]

    assert "value" not in taint


def test_who_looks_at_a_sick_gpu_is_kept_from_it_by_nothing_new():
    monitors = [
        [device for device in published_devices(each) if device["name"] == "gpu-0-mon"]
        for each in (offer(), offer(XID))
    ]

    assert monitors[0] == monitors[1] != []


def test_a_profile_says_what_follows():
    health = HealthRules(effects=((Problem.XID, Effect.NO_EXECUTE),))
    entry = ProfileEntry(GpuSelector(), Rules(health=health), "spec.gpus[0]")

    (taint,) = taints(offer(XID, profile=Profile("strict", (entry,))))["gpu-0"]

    assert taint["effect"] == "NoExecute"


def test_every_replica_of_a_sick_gpu_is_tainted():
    """Without counted capacity each replica is a device."""
    profile = Profile("shared", (ProfileEntry(GpuSelector(), Rules(replicas=2), "spec.gpus[0]"),))

    tainted = taints(offer(XID, profile=profile, capacity=False))

    assert tainted.keys() == {"gpu-0-0", "gpu-0-1"}


def test_where_taints_are_not_kept_the_devices_are_withdrawn_with_the_reason():
    withdrawn = offer(XID, device_taints=False)

    assert [device.name for device in withdrawn.devices if device.name == "gpu-0"] == []
    assert "gpu-1" in withdrawn.by_name
    (unavailable,) = withdrawn.unavailable
    assert gpu_uuid() in unavailable.what
    assert "Xid 79" in unavailable.reason


def test_a_sick_partition_leaves_the_others_of_its_gpu_alone():
    node = Inventory((mig_gpu(0),))
    profile = Profile(
        "mig",
        (ProfileEntry(GpuSelector(), Rules(mig=MigRules(True, ("1g.10gb",))), "spec.gpus[0]"),),
    )
    first = partition(ONE, 0).key
    tainted = taints(offer(replace(XID, partition=first), node=node, profile=profile))

    assert tainted.keys() == {"gpu-0", "gpu-0-mig-1g10gb-19-0"}  # the whole has part of it


def test_where_taints_are_not_kept_a_sick_partition_is_withdrawn_alone():
    node = Inventory((mig_gpu(0),))
    rules = Rules(mig=MigRules(True, ("1g.10gb",)))
    profile = Profile("mig", (ProfileEntry(GpuSelector(), rules, "spec.gpus[0]"),))
    sick = replace(XID, partition=partition(ONE, 0).key)

    withdrawn = offer(sick, node=node, profile=profile, device_taints=False)

    assert "gpu-0-mig-1g10gb-19-0" not in withdrawn.by_name
    assert "gpu-0-mig-1g10gb-19-1" in withdrawn.by_name
    assert "gpu-0-mig-1g10gb-19-0" in {each.what for each in withdrawn.unavailable}


def prepared(*faults, **fields):
    """What the claim for gpu-0 gets."""
    features = {"device_taints": fields.pop("device_taints", True)}
    of_claim = replace(claim("gpu-0"), allocations=(allocation("gpu-0", **fields),))
    return plan_claim(of_claim, offer(*faults, **features), (), POOL)


def test_a_claim_for_a_sick_device_is_refused_with_the_reason():
    with pytest.raises(DeviceUnhealthy, match=r"gpu-0 has the taint gpu\.nvidia\.com/xid: Xid 79"):
        prepared(XID)


@pytest.mark.parametrize(
    "toleration",
    [
        Toleration(operator="Exists"),
        Toleration("gpu.nvidia.com/xid", "Exists"),
        Toleration("gpu.nvidia.com/xid", "Equal", "79", "NoSchedule"),
    ],
)
def test_a_claim_that_tolerates_it_is_served(toleration):
    assert prepared(XID, tolerations=(toleration,)).holdings


def test_a_claim_that_tolerates_something_else_is_refused():
    with pytest.raises(DeviceUnhealthy):
        prepared(XID, LOST, tolerations=(Toleration("gpu.nvidia.com/xid", "Exists"),))


def test_a_claim_for_a_device_that_was_withdrawn_is_told_the_reason():
    with pytest.raises(UnknownDevice, match="Xid 79"):
        prepared(XID, device_taints=False)
