"""A record is completed when it has an answer, even an empty one."""

from dataclasses import replace

from dra_driver.model.gpus import DeviceName, GpuUuid, MigInstance, PartitionKey, placeholder_uuid
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimMemoryLimit, ClaimRecord, Holding
from tests.builders import ref


def test_a_record_without_an_answer_was_only_begun() -> None:
    assert not ClaimRecord(ref(), ()).completed


def test_a_record_with_an_answer_is_completed() -> None:
    assert ClaimRecord(ref(), (), prepared=(), spec="").completed


def test_the_gpus_of_a_claim_are_known_by_their_uuids() -> None:
    holding = Holding(ref(), DeviceName("gpu-0-mon"), GpuUuid("GPU-a"))

    assert ClaimRecord(ref(), (holding,)).gpus == {"GPU-a"}


def test_a_claim_is_limited_where_any_of_what_it_holds_is() -> None:
    whole = Holding(ref(), DeviceName("gpu-0"), GpuUuid("GPU-a"))
    limit = ClaimMemoryLimit(1, GuardRules(GuardPolicy.WARN))
    part = replace(whole, limit=limit)

    assert ClaimRecord(ref(), (whole, part)).limited
    assert not ClaimRecord(ref(), (whole,)).limited


def test_a_part_of_a_gpu_is_computed_on_by_the_gpus_uuid() -> None:
    holding = Holding(ref(), DeviceName("gpu-0-2"), gpu=GpuUuid("GPU-a"))

    assert (holding.uuid, holding.memory_of, holding.unit) == ("GPU-a", "GPU-a", "gpu-0")


def test_a_partition_has_a_word_for_its_instance_until_it_is_cut() -> None:
    key, gpu = PartitionKey(19, 3, 1, 1), GpuUuid("GPU-a")
    name = DeviceName("gpu-0-mig-1g5gb-19-3")
    before = Holding(ref(), name, gpu=gpu, partition=key)
    after = replace(before, instance=MigInstance(key, 9, 0, GpuUuid("MIG-a")))

    assert (before.uuid, before.memory_of, before.unit) == (placeholder_uuid(gpu, key), None, name)
    assert (after.uuid, after.memory_of, after.unit) == ("MIG-a", "MIG-a", name)
