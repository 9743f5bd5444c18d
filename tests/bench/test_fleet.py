"""The fleet: what its nodes publish, in our shape, in NVIDIA's, and as plain devices."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import names
from hack.benchmark.bursts import parts
from hack.benchmark.fleet import PARTITIONS
from hack.benchmark.fleet_nodes import GPUS, FleetNode, nodes
from hack.benchmark.fleet_nvidia import nvidia_partitioned
from hack.benchmark.fleet_shapes import ours, ours_partitioned, plain
from tests.fakes.pool_rules import validate_pool

NODE = FleetNode("fleet-000")
PARTITIONED = FleetNode("fleet-000", partitioned=True)
MIXES = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 9), min_size=1)


def exclusive(device):
    return not device.get("allowMultipleAllocations") and "taints" not in device


def named(pool):
    return {device["name"]: device for device in pool.devices}


def profile(device):
    return device["attributes"].get("profile", {}).get("string")


def taken(device):
    (consumed,) = device["consumesCounters"]
    return {name: counter["value"] for name, counter in consumed["counters"].items()}


def test_a_plain_device_is_a_gpu_of_ours_that_one_claim_takes_as_a_whole():
    shared, alone = named(ours(NODE)), named(plain(NODE))

    assert len(alone) == GPUS
    assert all(exclusive(device) for device in alone.values())
    assert not any(exclusive(shared[name]) for name in alone)
    for name, device in alone.items():
        assert device["attributes"] == shared[name]["attributes"]
        value = shared[name]["capacity"][names.MEMORY]["value"]
        assert device["capacity"] == {names.MEMORY: {"value": value}}


@pytest.mark.parametrize("shape", [ours, ours_partitioned, nvidia_partitioned, plain])
@pytest.mark.parametrize("node", [NODE, PARTITIONED])
def test_the_api_server_takes_every_shape(shape, node):
    assert validate_pool(shape(node), names.DRIVER) == ()


@pytest.mark.parametrize("shape", [ours_partitioned, nvidia_partitioned])
def test_partitions_are_offered_by_nodes_that_are_partitioned_and_by_no_other(shape):
    profiles = {profile for profile in PARTITIONS if profile != "gpu"}

    assert profiles <= {profile(device) for device in shape(PARTITIONED).devices}
    assert {profile(device) for device in shape(NODE).devices} == {None}
    assert not any("consumesCounters" in device for device in shape(NODE).devices)


def test_other_nodes_of_a_fleet_with_partitions_publish_as_without():
    assert ours_partitioned(NODE) == ours(NODE) == ours(PARTITIONED)


def test_nvidias_driver_publishes_every_placement_in_a_slice_for_each_gpu():
    counters, *slices = nvidia_partitioned(PARTITIONED).slices

    assert len(counters.shared_counters) == len(slices) == GPUS
    assert {len(each.devices) for each in slices} == {26}
    assert {len(each["counters"]) for each in counters.shared_counters} == {15}


def test_in_nvidias_shape_a_whole_gpu_leaves_nothing_for_a_partition():
    pool = nvidia_partitioned(PARTITIONED)
    everything = {
        each["name"]: {name: counter["value"] for name, counter in each["counters"].items()}
        for each in pool.slices[0].shared_counters
    }

    assert taken(named(pool)["gpu-3"]) == everything["gpu-3-counter-set"]


def test_in_nvidias_shape_two_partitions_share_a_unit_of_memory_where_they_overlap():
    consumption = {
        (profile(device), *sorted(name for name in taken(device) if "-slice-" in name))
        for device in nvidia_partitioned(PARTITIONED).slices[1].devices
    }
    first_half = tuple(f"memory-slice-{unit}" for unit in range(4))

    assert ("3g.40gb", *first_half) in consumption
    assert ("1g.10gb", "memory-slice-3") in consumption
    assert ("1g.10gb", "memory-slice-7") not in consumption


def test_ours_has_fewer_devices_and_fewer_counters():
    ours, theirs = ours_partitioned(PARTITIONED), nvidia_partitioned(PARTITIONED)
    most = [
        max(len(taken(device)) for device in pool.devices if "consumesCounters" in device)
        for pool in (ours, theirs)
    ]

    assert len(ours.devices) < len(theirs.devices)
    assert len(ours.slices) < len(theirs.slices)
    assert most[0] < most[1]


def test_no_two_gpus_of_the_fleet_are_the_same():
    gpus = [gpu for node in nodes(2, 1) for gpu in node.gpus]

    assert len({gpu.uuid for gpu in gpus}) == 2 * GPUS
    assert len({gpu.pci_bus_id for gpu in gpus}) == GPUS


@given(st.integers(1, 60), st.data())
def test_as_many_nodes_as_wanted_are_partitioned_and_they_are_spread(count, data):
    partitioned = data.draw(st.integers(1, count))

    places = [index for index, node in enumerate(nodes(count, partitioned)) if node.partitioned]

    assert len(places) == partitioned
    gaps = {after - before for before, after in itertools.pairwise(places)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(MIXES, st.integers(1, 400))
def test_a_burst_is_of_as_many_pods_as_wanted_each_kind_by_its_share(mix, count):
    pods = parts(mix, count)

    assert sum(pods.values()) == count
    assert set(pods) <= set(mix)
    for kind, share in mix.items():
        assert abs(pods.get(kind, 0) - count * share / sum(mix.values())) < 1
