"""What the scheduler sees of partitions, in the words of NVIDIA's driver."""

from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.kubeletplugin.slices.reconcile import (
    MAX_COUNTER_SETS,
    SliceOwner,
    plan_writes,
    split_into_slices,
)
from dra_driver.model.gpus import GpuUuid, Inventory, Topology
from dra_driver.model.offer import AdminAccess, ApiFeatures, Device, Offer
from dra_driver.model.profiles import MigRules
from dra_driver.plan.mig.dynamic import after_switch
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.slice_documents import published_counters, published_devices
from dra_driver.sim.node_spec import bundled_nodes, node_file
from tests.builders import MIB, SLICEABLE
from tests.fakes.pool_rules import validate_pool
from tests.fakes.simulated import Node
from tests.fakes.slice_rules import refuse_slice
from tests.plan.mig.boards import boards, dynamic, instance, mig, mig_gpu, partition, profile
from tests.plan.profile_rules import any_rules

EVERYWHERE = Topology("pci0000:15", "0000:16:00.0", 0, "nvswitch", 7)


def document(board="a100-40", name="3g.20gb", start=4, topology=EVERYWHERE, **fields):
    """Of one partition."""
    gpu = replace(mig_gpu(board), topology=topology)
    device = Device(gpu, partition=partition(mig(board), name, start), **fields)
    (published,) = published_devices(Offer((device,)))
    return published


def test_a_partition_that_is_created_for_claims_has_the_names_of_nvidias_driver():
    device = document(takes=(("block-4-4", 4),))

    assert device == {
        "name": "gpu-0-mig-3g20gb-9-4",
        "attributes": {
            "architecture": {"string": "Ampere"},
            "brand": {"string": "Nvidia"},
            "cudaComputeCapability": {"version": "8.0.0"},
            "cudaDriverVersion": {"version": "13.0.0"},
            "driverVersion": {"version": "580.95.5"},
            "mps": {"bool": True},
            "parentUUID": {"string": "GPU-00000000-0000-0000-0000-000000000000"},
            "pcieSwitch": {"string": "0000:16:00.0"},
            "productName": {"string": "NVIDIA a100-40"},
            "profile": {"string": "3g.20gb"},
            "resource.kubernetes.io/numaNode": {"int": 0},
            "resource.kubernetes.io/pciBusID": {"string": "0000:18:00.0"},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:15"},
            "timeSlicing": {"bool": True},
            "type": {"string": "mig"},
        },
        "capacity": {
            "copyEngines": {"value": "3"},
            "decoders": {"value": "2"},
            "encoders": {"value": "0"},
            "jpegEngines": {"value": "0"},
            "memory": {"value": "19968Mi"},
            "multiprocessors": {"value": "42"},
            "ofaEngines": {"value": "0"},
        },
        "consumesCounters": [
            {"counterSet": "gpu-0-counter-set", "counters": {"block-4-4": {"value": "4"}}}
        ],
    }


def test_an_instance_that_exists_also_says_who_it_is_and_where():
    device = document(instance=instance(mig(), "3g.20gb", 4))

    assert device["attributes"]["uuid"] == {"string": "MIG-9-4"}
    assert {name for name in device["capacity"] if name.startswith("memorySlice")} == {
        f"memorySlice{unit}" for unit in (4, 5, 6, 7)
    }
    assert device["capacity"]["memorySlice4"] == {"value": "1"}
    assert "consumesCounters" not in device


def test_of_a_shared_partition_a_claim_takes_nothing_that_it_does_not_name():
    shape = replace(SLICEABLE, memory_default=19968 * MIB)

    device = document(shape=shape, instance=instance(mig(), "3g.20gb", 4))

    assert device["allowMultipleAllocations"] is True
    assert device["capacity"]["memory"]["requestPolicy"]["default"] == "19968Mi"
    assert device["capacity"]["cores"]["value"] == "100"
    for name in ("multiprocessors", "copyEngines", "ofaEngines", "memorySlice4"):
        policy = device["capacity"][name]["requestPolicy"]
        assert policy["default"] == "0"
        assert policy.get("validRange", {}).get("min") == "0" or policy["validValues"] == ["0"]


def test_a_partition_that_serves_claims_for_a_gpu_says_so_and_has_no_peers():
    device = document(as_gpu=True)

    assert device["attributes"]["asGpu"] == {"bool": True}
    assert device["attributes"]["nvlinkPeers"] == {"int": 0}
    assert "nvlinkClique" not in device["attributes"]


@pytest.mark.parametrize(
    ("board", "name", "gone", "slices"),
    [
        pytest.param("a100-40", "3g.20gb", set(), 4, id="nothing has to go"),
        pytest.param("rtx-pro-6000-96", "2g.48gb", {"pcieSwitch"}, 6, id="one makes room"),
        pytest.param("a100-40", "7g.40gb", set(), 0, id="nothing goes in vain"),
    ],
)
def test_of_too_many_names_those_that_matter_least_go_where_that_makes_room(
    board, name, gone, slices
):
    device = document(
        board,
        name,
        start=0,
        shape=SLICEABLE,
        instance=instance(mig(board), name, 0),
        as_gpu=True,
    )

    names = {*device["attributes"], *device["capacity"]}
    assert len(names) <= 32
    assert {"pcieSwitch", "nvlinkPeers"} - names == gone
    assert sum(name.startswith("memorySlice") for name in names) == slices
    assert {"asGpu", "ofaEngines", "shares", "parentUUID", "timeSlicing"} <= names


def test_counters_are_published_by_gpu():
    offered = build_offer(
        Inventory((mig_gpu("h100-80-sxm"),)), dynamic("1g.10gb"), ApiFeatures(), {}
    )

    assert published_counters(offered) == (
        {"name": "gpu-0-counter-set", "counters": {"block-0-8": {"value": "8"}}},
    )


def test_a_monitor_of_a_gpu_with_partitions_takes_of_no_counter():
    offered = build_offer(Inventory((mig_gpu("h100-80-sxm"),)), dynamic(), ApiFeatures(), {})

    monitor = published_devices(offered)[-1]
    assert monitor["attributes"]["type"] == {"string": "gpu-monitor"}
    assert "consumesCounters" not in monitor
    assert monitor["capacity"]["memory"] == {"value": "81559Mi"}


def refused(pool):
    """What the API server would say of its slices."""
    place = {"name": "node-1", "resourceSliceCount": len(pool.slices), "generation": 1}
    for part in pool.slices:
        spec = {"driver": "gpu.nvidia.com", "nodeName": "node-1", "pool": place}
        if part.devices:
            spec["devices"] = list(part.devices)
        if part.shared_counters:
            spec["sharedCounters"] = list(part.shared_counters)
        yield refuse_slice(spec, None)


def pool_of(offered):
    return split_into_slices("node-1", published_devices(offered), published_counters(offered))


@pytest.mark.exhaustive
@pytest.mark.parametrize("profiles", [(), ("*",)])
@pytest.mark.parametrize("board", ["a100-40", "h100-80-sxm", "rtx-pro-6000-96"])
def test_the_api_server_takes_sixteen_gpus_with_partitions(board, profiles):
    gpus = tuple(
        replace(
            mig_gpu(board, minor, on=True),
            uuid=GpuUuid(f"GPU-{minor}"),
            topology=EVERYWHERE,
        )
        for minor in range(16)
    )

    pool = pool_of(build_offer(Inventory(gpus), dynamic(*profiles), ApiFeatures(), {}))

    assert validate_pool(pool, "gpu.nvidia.com") == ()
    assert set(refused(pool)) == {""}
    sets = [part for part in pool.slices if part.shared_counters]
    assert [len(part.shared_counters) for part in sets] == [MAX_COUNTER_SETS] * 2
    assert pool.slices[: len(sets)] == tuple(sets)  # the scheduler wants all of them anyway


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "node_profile", [dynamic(), dynamic("*"), profile()], ids=["mig", "all", "none"]
)
@pytest.mark.parametrize("name", bundled_nodes())
def test_the_api_server_takes_the_slices_of_every_bundled_node(name, node_profile, tmp_path):
    node = Node(tmp_path, yaml.safe_load(node_file(name).read_text()))
    switched = after_switch(node.gpus().scan(), node_profile, ApiFeatures(), {})

    pool = pool_of(build_offer(switched, node_profile, ApiFeatures(), {}))

    assert validate_pool(pool, "gpu.nvidia.com") == ()
    assert set(refused(pool)) <= {""}


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [1, 5, 16])
def test_an_unmanaged_instance_on_one_gpu_is_one_update_of_one_slice(number):
    """More of them would leave the pool incomplete until the last is written."""
    gpus = [
        replace(mig_gpu("a100-40", minor, on=True), uuid=GpuUuid(f"GPU-{minor}"))
        for minor in range(number)
    ]
    before = pool_of(build_offer(Inventory(tuple(gpus)), dynamic(), ApiFeatures(), {}))
    owner = SliceOwner("gpu.nvidia.com", "node-1", "uid")
    published = [
        {
            **created,
            "metadata": {**created["metadata"], "name": created["metadata"]["generateName"] + "x"},
        }
        for created in plan_writes(before, (), owner).create
    ]
    for which in {0, number // 2, number - 1}:
        mig_info = gpus[which].mig
        for part in mig_info.profiles if number == 1 else mig_info.profiles[:1]:
            existing = instance(mig_info, part.name, part.placements[-1].start)
            changed = replace(gpus[which], mig=replace(mig_info, instances=(existing,)))
            node = [*gpus[:which], changed, *gpus[which + 1 :]]

            after = pool_of(build_offer(Inventory(tuple(node)), dynamic(), ApiFeatures(), {}))

            writes = plan_writes(after, published, owner)
            assert (len(writes.delete), len(writes.update), len(writes.create)) == (0, 1, 0)
            assert validate_pool(after, "gpu.nvidia.com") == ()


@given(
    rules=any_rules(),
    board=st.sampled_from(sorted(boards())),
    patterns=st.lists(st.sampled_from(["1g*", "2g*", "*+me", "*", "9g"]), max_size=2),
    features=st.builds(
        ApiFeatures, capacity=st.booleans(), device_taints=st.booleans(), counters=st.booleans()
    ),
    created=st.booleans(),
    single=st.booleans(),
    number=st.integers(1, 60),
    taken=st.booleans(),
)
def test_whatever_a_profile_says_of_partitions_the_api_server_takes_the_slices(
    rules, board, patterns, features, created, single, number, taken
):
    first = boards()[board][0].name
    of_mig = MigRules(created, tuple(patterns), single=single, replicas=((first, number),))
    instances = (instance(mig(board), first, 0),) if taken else ()
    node = Inventory((mig_gpu(board, on=True, instances=instances), mig_gpu(board, 1, on=False)))
    everything = profile(
        **{field: getattr(rules, field) for field in rules.__dataclass_fields__ if field != "mig"},
        mig=of_mig,
    )

    offered = build_offer(node, everything, features, {})

    pool = pool_of(offered)
    assert validate_pool(pool, "gpu.nvidia.com") == ()
    assert set(refused(pool)) <= {""}
    assert features.counters or not offered.counter_sets
    assert all(
        isinstance(device.shape, AdminAccess) or device.rules.mig == of_mig
        for device in offered.devices
    )
