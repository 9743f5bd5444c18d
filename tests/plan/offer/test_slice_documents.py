"""What the scheduler sees of a GPU, in the words of NVIDIA's driver."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.k8s import quantity
from dra_driver.kubeletplugin.slices.reconcile import split_into_slices
from dra_driver.model.gpus import Inventory, Topology, Version
from dra_driver.model.offer import (
    AdminAccess,
    ApiFeatures,
    Device,
    Exclusive,
    Fractional,
    Offer,
    Replica,
)
from dra_driver.model.profiles import GpuSelector, Profile, ProfileEntry, Rules, SharingStrategy
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.slice_documents import published_devices
from tests.builders import MIB, SLICEABLE, gpu
from tests.fakes.pool_rules import validate_pool
from tests.fakes.slice_rules import refuse_slice
from tests.plan.profile_rules import any_rules


def whole(**fields):
    """The document of an exclusive GPU."""
    (device,) = published_devices(Offer((Device(gpu(0, **fields)),)))
    return device


def test_a_whole_gpu_is_published_with_all_its_names():
    topology = Topology("pci0000:15", "0000:16:00.0", 0, "nvswitch", 7)

    device = whole(topology=topology, addressing_mode="HMM")

    assert device == {
        "name": "gpu-0",
        "attributes": {
            "addressingMode": {"string": "HMM"},
            "architecture": {"string": "Hopper"},
            "brand": {"string": "Nvidia"},
            "cudaComputeCapability": {"version": "9.0.0"},
            "cudaDriverVersion": {"version": "13.0.0"},
            "driverVersion": {"version": "580.95.5"},
            "mps": {"bool": True},
            "nvlinkClique": {"string": "nvswitch"},
            "nvlinkPeers": {"int": 7},
            "pcieSwitch": {"string": "0000:16:00.0"},
            "productName": {"string": "NVIDIA H100 80GB HBM3"},
            "resource.kubernetes.io/numaNode": {"int": 0},
            "resource.kubernetes.io/pciBusID": {"string": "0000:18:00.0"},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:15"},
            "timeSlicing": {"bool": True},
            "type": {"string": "gpu"},
            "uuid": {"string": "GPU-00000000-0000-0000-0000-000000000000"},
        },
        "capacity": {"memory": {"value": "81559Mi"}},
    }


def test_what_is_unknown_is_left_out():
    device = whole(topology=Topology(), memory_bytes=None)

    assert device["capacity"] == {}
    assert "resource.kubernetes.io/numaNode" not in device["attributes"]
    assert "addressingMode" not in device["attributes"]


def test_memory_is_a_canonical_quantity():
    sizes = {80 * 1024**3: "80Gi", 81559 * 1024**2: "81559Mi", 1024**4: "1Ti", 1000: "1000"}
    for size, text in sizes.items():
        assert whole(memory_bytes=size)["capacity"]["memory"]["value"] == text


@pytest.mark.point(75)
@given(st.text(min_size=1, max_size=100))
def test_a_long_name_is_cut_to_64_bytes_without_breaking_a_character(name):
    device = whole(product_name=name)

    shown = device["attributes"]["productName"]["string"]
    assert len(shown.encode()) <= 64
    assert name.startswith(shown)


@pytest.mark.point(82)
def test_a_sliceable_gpu_is_whole_for_a_claim_that_names_nothing():
    (device,) = published_devices(Offer((Device(gpu(0), SLICEABLE),)))

    assert device["allowMultipleAllocations"] is True
    assert device["attributes"]["type"] == {"string": "gpu"}
    assert device["capacity"] == {
        "cores": {
            "value": "100",
            "requestPolicy": {
                "default": "0",
                "validRange": {"min": "0", "max": "100", "step": "1"},
            },
        },
        "memory": {
            "value": "81559Mi",
            "requestPolicy": {
                "default": "81559Mi",
                "validRange": {"min": "1Gi", "max": "81559Mi", "step": "1Mi"},
            },
        },
        "shares": {
            "value": "48",
            "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "48", "step": "1"}},
        },
    }


def test_a_gpu_for_one_share_only_has_a_policy_that_the_api_server_takes():
    shape = Fractional(SLICEABLE.memory_default, 1024 * MIB, MIB, shares=1, cores=False)

    (device,) = published_devices(Offer((Device(gpu(0), shape),)))

    assert device["capacity"]["shares"]["requestPolicy"] == {"default": "1", "validValues": ["1"]}
    assert "cores" not in device["capacity"]


def test_replicas_share_everything_but_name_and_memory():
    shapes = (Replica(place, 2, 40 * 1024 * MIB, renamed=True) for place in range(2))

    first, second = published_devices(Offer(tuple(Device(gpu(0), shape) for shape in shapes)))

    assert (first["name"], second["name"]) == ("gpu-0-0", "gpu-0-1")
    assert first["attributes"] == second["attributes"]
    assert first["attributes"]["type"] == {"string": "gpu-shared"}
    assert first["capacity"] == {"memory": {"value": "40Gi"}}


def test_replicas_that_share_by_mps_reserve_their_part_of_the_cores():
    shape = replace(SLICEABLE, shares=3, replicas=3, cores_default=33)

    sliceable, replica = published_devices(
        Offer((Device(gpu(0), shape), Device(gpu(1), Replica(0, 3, None, cores=33))))
    )

    assert sliceable["capacity"]["cores"] == {
        "value": "100",
        "requestPolicy": {"default": "33", "validRange": {"min": "0", "max": "100", "step": "1"}},
    }
    assert replica["capacity"] == {"cores": {"value": "33"}}


@pytest.mark.parametrize(
    ("strategies", "time_slicing", "mps"),
    [
        pytest.param((SharingStrategy.TIME_SLICING, SharingStrategy.MPS), True, True, id="both"),
        pytest.param((SharingStrategy.TIME_SLICING,), True, False, id="turns"),
        pytest.param((SharingStrategy.MPS,), False, True, id="mps"),
        pytest.param((), False, False, id="none"),
    ],
)
def test_every_device_says_by_which_strategies_it_can_be_shared(strategies, time_slicing, mps):
    rules = Rules(strategies=strategies)
    shapes = (SLICEABLE, Exclusive(), Replica(0, 2, None), AdminAccess())

    devices = published_devices(Offer(tuple(Device(gpu(0), shape, rules) for shape in shapes)))

    published = {
        (d["attributes"]["timeSlicing"]["bool"], d["attributes"]["mps"]["bool"]) for d in devices
    }
    assert published == {(time_slicing, mps)}


def test_a_monitor_can_be_selected_by_all_that_its_gpu_can_and_is_tainted():
    whole, monitor = published_devices(
        Offer((Device(gpu(0), SLICEABLE), Device(gpu(0), AdminAccess())))
    )

    assert monitor["name"] == "gpu-0-mon"
    assert monitor["attributes"].keys() == whole["attributes"].keys()
    assert monitor["capacity"].keys() == whole["capacity"].keys()
    assert monitor["attributes"]["type"] == {"string": "gpu-monitor"}
    assert "allowMultipleAllocations" not in monitor
    assert monitor["taints"] == [{"key": "gpu.nvidia.com/monitor", "effect": "NoSchedule"}]


@given(
    memory=st.none() | st.integers(1, 200 * 1024**3),
    capability=st.sampled_from([Version(6, 1), Version(9, 0)]),
    features=st.builds(ApiFeatures),
    rules=any_rules(),
    mps=st.booleans(),
)
def test_whatever_a_profile_says_the_api_server_takes_the_slice(
    memory, capability, features, rules, mps
):
    everywhere = Profile("p", (ProfileEntry(GpuSelector(), rules, "spec.gpus[0]"),))
    node = Inventory((gpu(0, memory_bytes=memory, compute_capability=capability), gpu(1)))

    devices = published_devices(build_offer(node, everywhere, features, {}, mps))

    pool = split_into_slices("node-1", devices)
    assert not list(validate_pool(pool))
    for part in pool.slices:
        place = {"name": "node-1", "resourceSliceCount": len(pool.slices), "generation": 1}
        spec = {"driver": "gpu.nvidia.com", "nodeName": "node-1", "pool": place}
        assert refuse_slice({**spec, "devices": list(part.devices)}, None) == ""
    for capacity in (device["capacity"].get("memory") for device in devices):
        if capacity and "requestPolicy" in capacity:
            least = capacity["requestPolicy"]["validRange"]["min"]
            assert quantity.parse(least) >= MIB  # or a claim for nothing lies beside a whole one
