"""What is recorded of a claim, and which device that is of."""

from dataclasses import replace

import pytest

from dra_driver.model.gpus import DeviceName, GpuUuid, MigInstance, PartitionKey, placeholder_uuid
from dra_driver.model.offer import Device, Replica
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimMemoryLimit, ClaimRecord, Holding, holdings_by_gpu
from tests.builders import gpu, gpu_uuid, holding, record, ref
from tests.fakes.mig import ONE, partition, partition_device


def test_a_record_is_completed_once_it_has_an_answer() -> None:
    assert not ClaimRecord(ref(), ()).completed
    assert ClaimRecord(ref(), (), prepared=(), spec="").completed


def test_the_gpus_of_a_claim_are_known_by_their_uuids() -> None:
    assert record("a", "gpu-1-mon", "gpu-0").gpus == {gpu_uuid(0), gpu_uuid(1)}


def test_a_claim_is_limited_where_any_of_what_it_holds_is() -> None:
    part = holding(limit=ClaimMemoryLimit(1, GuardRules(GuardPolicy.WARN)))

    assert record("claim", holding(), part).limited
    assert not record().limited


@pytest.mark.parametrize(
    ("held", "offered", "expected"),
    [
        (holding(), Device(gpu(7, uuid=gpu_uuid())), True),
        (holding(), Device(gpu(0, uuid=gpu_uuid(1))), False),
        (holding(shape=Replica(1, 4, None)), Device(gpu(), Replica(1, 2, None)), True),
        (holding(shape=Replica(1, 4, None)), Device(gpu(), Replica(0, 4, None)), False),
        (
            holding(partition=partition(ONE, 2).key),
            partition_device(ONE, 2),
            True,
        ),
        (
            holding(partition=partition(ONE, 3).key),
            partition_device(ONE, 2),
            False,
        ),
        (holding(), partition_device(ONE, 2), False),
    ],
    ids=["renamed", "another GPU", "a replica", "another", "a partition", "another", "the whole"],
)
def test_what_is_held_is_known_by_uuid_partition_and_place(held, offered, expected) -> None:
    assert held.is_of(offered) is expected


def test_a_part_of_a_gpu_is_computed_on_by_the_gpus_uuid() -> None:
    holding = Holding(ref(), DeviceName("gpu-0-2"), gpu=GpuUuid("GPU-a"))

    assert (holding.uuid, holding.memory_of, holding.unit) == ("GPU-a", "GPU-a", "gpu-0")


def test_a_partition_has_a_word_for_its_instance_until_it_is_created() -> None:
    key, gpu = PartitionKey(19, 3, 1, 1), GpuUuid("GPU-a")
    name = DeviceName("gpu-0-mig-1g5gb-19-3")
    before = Holding(ref(), name, gpu=gpu, partition=key)
    after = replace(before, instance=MigInstance(key, 9, 0, GpuUuid("MIG-a")))

    assert (before.uuid, before.memory_of, before.unit) == (placeholder_uuid(gpu, key), None, name)
    assert (after.uuid, after.memory_of, after.unit) == ("MIG-a", "MIG-a", name)


def test_a_replica_of_a_partition_is_a_part_of_that() -> None:
    name = DeviceName("gpu-0-mig-1g5gb-19-3-1")
    key = PartitionKey(19, 3, 1, 1)
    replica = holding(device=name, partition=key, shape=Replica(1, 4, None))

    assert (replica.unit, replica.gpu_name) == ("gpu-0-mig-1g5gb-19-3", "gpu-0")


def test_what_is_held_of_each_gpu_is_in_the_order_of_claims() -> None:
    first, second = record("a"), record("b", "gpu-1", "gpu-0")

    assert holdings_by_gpu([second, first]) == {
        gpu_uuid(0): (first.holdings[0], second.holdings[1]),
        gpu_uuid(1): (second.holdings[0],),
    }
