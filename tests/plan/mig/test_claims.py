"""What a claim does to a GPU that can be cut: partitions come with it, and go with the last."""

from dataclasses import replace

import pytest

from dra_driver.base.errors import ClaimError, DeviceHeldByClaim, UnknownDevice
from dra_driver.k8s.claims import Claim
from dra_driver.model.gpus import GpuUuid, MigInstance, UnavailableGpu
from dra_driver.model.offer import AdminAccess, Device, Offer
from dra_driver.model.profiles import Rules
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import (
    CreateDeviceNodes,
    CreatePartition,
    RemoveMpsNamespace,
    RemovePartition,
    ServeMpsNamespace,
    SetComputeMode,
    SetMigMode,
)
from dra_driver.plan.memory.pod_limits import memory_limit_steps
from dra_driver.plan.mig.claims import (
    blocking_instances,
    partitions_created_for,
    partitions_left_behind,
    whole_gpus,
    with_created,
)
from dra_driver.plan.prepare.claim import plan_claim, undo_steps
from dra_driver.plan.prepare.gpu_settings import settings_to_read, with_previous_values
from tests.builders import POOL, SLICEABLE, allocation, claim, config, fraction, pod, ref
from tests.fakes.mig import (
    FOUR,
    GIB,
    ONE,
    SEVEN,
    THREE,
    instance,
    mig_gpu,
    mig_offer,
    partition,
    partition_device,
)

GPU = mig_gpu().uuid
FIRST, SECOND = "gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1"
WHOLE_SIDE, OTHER_SIDE = "gpu-0-mig-3g40gb-9-0", "gpu-0-mig-3g40gb-9-4"
FOUR_AT_0 = "gpu-0-mig-4g40gb-5-0"
MPS = config("MigDeviceConfig", sharing={"strategy": "MPS"})


def planned(*devices, name="claim", at=None, others=(), **fields):
    return plan_claim(claim(*devices, name=name, **fields), at or mig_offer(), others, POOL)


def prepared(*devices, name="other", others=(), at=None, **fields):
    """The record of a claim that was prepared: what it found, and what its partitions are."""
    plan = planned(*devices, name=name, others=others, at=at, **fields)
    previous = {step: False for step in settings_to_read(plan.steps, others)}
    plan = replace(plan, steps=with_previous_values(plan.steps, previous))
    return plan.settled(instances_of(plan)).record


def instances_of(plan):
    partitions = {g.device.uuid: g.device.partition for g in plan.grants if g.device.partition}
    return {
        uuid: MigInstance(
            part.key, 3, 0, GpuUuid(f"MIG-{part.key.profile_id}-{part.placement.start}")
        )
        for uuid, part in partitions.items()
    }


def test_a_partition_is_cut_after_mig_mode_is_on():
    steps = planned(FIRST).steps

    assert steps == (
        CreateDeviceNodes((0,)),
        SetMigMode(GPU, on=True),
        CreatePartition(GPU, partition(ONE, 0).key),
    )


def test_two_partitions_of_one_gpu_need_one_mode_and_two_cuts():
    steps = planned(FIRST, OTHER_SIDE).steps

    assert steps.count(SetMigMode(GPU, on=True)) == 1
    assert [step.key for step in steps if isinstance(step, CreatePartition)] == [
        partition(THREE, 4).key,
        partition(ONE, 0).key,
    ]


def test_on_a_board_that_needs_a_reset_the_mode_is_left_alone():
    ampere = mig_offer(mig_gpu(on=True, switches=False))

    steps = planned(FIRST, at=ampere).steps

    assert not any(isinstance(step, SetMigMode) for step in steps)
    assert any(isinstance(step, CreatePartition) for step in steps)


@pytest.mark.parametrize("allocated", [allocation("gpu-0"), fraction("20Gi", "gpu-0")])
def test_the_gpu_as_a_whole_and_a_share_of_it_find_the_mode_off(allocated):
    plan = plan_claim(Claim(ref(), (allocated,)), mig_offer(), (), POOL)

    assert SetMigMode(GPU, on=False) in plan.steps


def test_a_gpu_that_offers_no_partitions_keeps_its_mode():
    plain = Offer((Device(mig_gpu(), SLICEABLE),))

    assert planned("gpu-0", at=plain).steps == (CreateDeviceNodes((0,)),)


def test_an_instance_that_exists_is_neither_cut_nor_removed():
    there = partition_device(ONE, 0, instance=instance(ONE, 0))

    plan = planned(FIRST, at=Offer((there,)))

    assert plan.steps == (CreateDeviceNodes((0,)),)
    assert not plan.record.holdings[0].created_for_claims
    assert undo_steps(plan.record, ()) == ()


def test_the_record_says_which_partition_and_then_what_it_is():
    plan = planned(FIRST)

    (before,) = plan.record.holdings
    (after,) = plan.settled(instances_of(plan)).record.holdings

    assert (before.partition, before.created_for_claims, before.instance) == (
        partition(ONE, 0).key,
        True,
        None,
    )
    assert before.memory_of is None
    assert before.offered == ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
    assert after.memory_of == "MIG-19-0"


def test_the_last_claim_removes_its_partition_and_restores_the_mode():
    record = prepared(FIRST)

    assert undo_steps(record, ()) == (
        RemovePartition(GPU, partition(ONE, 0).key, instance(ONE, 0).uuid),
        SetMigMode(GPU, on=False),
    )


def test_a_claim_that_is_not_the_last_on_its_gpu_leaves_the_mode_on():
    first = prepared(FIRST, name="first")
    second = prepared(SECOND, name="second", others=(first,))

    mine = RemovePartition(GPU, partition(ONE, 0).key, instance(ONE, 0).uuid)
    assert undo_steps(first, (second,)) == (mine,)
    assert undo_steps(second, ())[-1] == SetMigMode(GPU, on=False)


def test_a_mode_that_was_on_before_the_first_claim_stays_on():
    plan = planned(FIRST)
    was_on = replace(plan, steps=with_previous_values(plan.steps, {SetMigMode(GPU, on=True): True}))

    assert undo_steps(was_on.record, ())[-1] == SetMigMode(GPU, on=True)


def share(name, device=WHOLE_SIDE, memory="10Gi", **capacity):
    return Claim(ref(name), (fraction(memory, device, **capacity),), pods=(pod(name),))


def test_claims_that_share_a_partition_remove_it_with_the_last():
    first = plan_claim(share("first"), mig_offer(), (), POOL).record
    second = plan_claim(share("second"), mig_offer(), (first,), POOL).record

    assert not any(isinstance(s, RemovePartition) for s in undo_steps(first, (second,)))
    assert RemovePartition(GPU, partition(THREE, 0).key) in undo_steps(second, ())


def test_shares_of_a_partition_add_up_to_its_memory():
    first = plan_claim(share("first", memory="30Gi"), mig_offer(), (), POOL).record

    with pytest.raises(DeviceHeldByClaim, match=r"20480Mi of memory, of which 10240Mi are free"):
        plan_claim(share("second", memory="20Gi"), mig_offer(), (first,), POOL)
    assert plan_claim(share("third", memory="10Gi"), mig_offer(), (first,), POOL).grants


def test_the_driver_limits_no_pod_on_a_partition():
    record = plan_claim(share("first"), mig_offer(), (), POOL).record

    assert record.limited
    assert memory_limit_steps(record, ()) == ()


def test_a_share_of_a_partition_is_refused_where_the_driver_has_to_limit_it():
    strict = Offer((partition_device(THREE, 0, rules=Rules(strict=True)),))

    with pytest.raises(ClaimError, match="does not limit parts of a MIG partition"):
        plan_claim(share("first"), strict, (), POOL)
    assert planned(WHOLE_SIDE, at=strict).grants


@pytest.mark.parametrize("held", ["gpu-0", WHOLE_SIDE, FOUR_AT_0, "gpu-0-mig-7g80gb-0-0"])
def test_a_partition_waits_for_whatever_overlaps_it(held):
    with pytest.raises(
        DeviceHeldByClaim, match=f"{FIRST} overlaps {held}, held by claim default/other"
    ):
        planned(FIRST, others=(prepared(held),))


def test_the_gpu_as_a_whole_waits_for_every_partition():
    with pytest.raises(
        DeviceHeldByClaim, match=f"gpu-0 overlaps {SECOND}, held by claim default/other"
    ):
        planned("gpu-0", others=(prepared(SECOND),))


def test_partitions_beside_each_other_do_not_wait():
    assert planned(FIRST, others=(prepared(SECOND), prepared(OTHER_SIDE, name="third"))).grants


def test_a_partition_is_held_as_a_whole_by_who_asked_for_no_share():
    with pytest.raises(DeviceHeldByClaim, match=f"{FIRST} is held by claim default/other"):
        planned(FIRST, others=(prepared(FIRST),))


@pytest.mark.parametrize("other", [FOUR_AT_0, "gpu-0", FIRST])
def test_a_claim_with_two_devices_that_overlap_is_refused(other):
    with pytest.raises(ClaimError, match="the same part of one GPU"):
        planned(WHOLE_SIDE, other)


def test_partitions_of_different_gpus_do_not_overlap():
    node = mig_offer(mig_gpu(0), mig_gpu(1))

    assert planned(WHOLE_SIDE, "gpu-1-mig-4g40gb-5-0", at=node).grants


def test_a_monitor_looks_on_beside_partitions():
    monitor = Device(mig_gpu(), AdminAccess())
    looking_on = Claim(ref(), (allocation("gpu-0-mon", admin=True),))

    plan = plan_claim(looking_on, Offer((monitor,)), (prepared(FIRST),), POOL)

    assert plan.steps == (CreateDeviceNodes((0,)),)


def test_under_mps_the_server_is_over_the_instance():
    plan = planned(WHOLE_SIDE, configs=(MPS,))

    (before,) = (step.namespace for step in plan.steps if isinstance(step, ServeMpsNamespace))
    (after,) = plan.settled(instances_of(plan)).record.namespaces

    assert before.gpus == (f"{GPU}/9/0",)
    assert after == replace(before, gpus=(GpuUuid("MIG-9-0"),))
    assert not any(isinstance(step, SetComputeMode) for step in plan.steps)


def test_the_server_ends_before_its_instance_goes():
    record = prepared(WHOLE_SIDE, configs=(MPS,))

    assert [type(step) for step in undo_steps(record, ())] == [
        RemoveMpsNamespace,
        RemovePartition,
        SetMigMode,
    ]


def test_cores_of_a_partition_are_reserved_under_mps():
    asked = share("first", memory="20Gi", cores="50")

    (grant,) = plan_claim(asked, mig_offer(), (), POOL).grants

    assert grant.namespace is not None
    assert (grant.namespace.percent, grant.namespace.memory_bytes) == (50, (20 * GIB,))


def test_two_partitions_under_mps_in_one_container_are_refused():
    both = Claim(ref(), (allocation(FIRST), allocation(SECOND)), (MPS,))

    with pytest.raises(ClaimError, match="a program under MPS computes on one partition"):
        plan_claim(both, mig_offer(), (), POOL)


def test_time_slicing_in_a_partition_is_accepted_and_changes_nothing():
    slicing = config("MigDeviceConfig", sharing={"strategy": "TimeSlicing"})

    assert planned(FIRST, configs=(slicing,)).steps == planned(FIRST).steps


def test_a_config_for_gpus_does_not_fit_a_partition():
    gpu_config = config("GpuConfig", "gpu", sharing={"strategy": "MPS"})

    with pytest.raises(ClaimError, match=f"{FIRST} is a MIG partition: write a MigDeviceConfig"):
        planned(FIRST, configs=(gpu_config,))


def test_only_what_no_claim_of_ours_cut_is_in_the_way():
    ours = prepared(SECOND)
    cut = CreatePartition(GPU, partition(FOUR, 0).key)
    foreign = partition(ONE, 2).key
    there = (partition(ONE, 1).key, foreign, partition(ONE, 6).key)

    assert blocking_instances(cut, there, (ours,)) == (foreign,)


def test_a_partition_that_a_claim_shares_already_is_no_new_cut():
    first = plan_claim(share("first"), mig_offer(), (), POOL).record
    second = plan_claim(share("second"), mig_offer(), (first,), POOL)

    assert [
        cut.new
        for cut in (*partitions_created_for([first]), *partitions_created_for([second.record]))
    ] == [True, False]
    assert tuple(partitions_created_for([second.record])) == tuple(partitions_created_for([first]))


def test_what_was_not_cut_is_not_removed_when_the_claim_is_given_back():
    record = planned(FIRST, SECOND).record
    first, second = partitions_created_for([record])

    begun = with_created(record, {second})

    assert [step for step in undo_steps(begun, ()) if isinstance(step, RemovePartition)] == [
        RemovePartition(second.gpu, second.key)
    ]
    assert [step for step in record.steps if step not in begun.steps] == [first]


def test_a_partition_that_is_not_offered_any_more_is_refused_with_what_there_is():
    node = Offer((partition_device(SEVEN, 0),), (UnavailableGpu("GPU", "reason"),))

    with pytest.raises(ClaimError, match="this node has: gpu-0-mig-7g80gb-0-0"):
        planned(FIRST, at=node)


def test_records_without_partitions_cut_nothing():
    assert tuple(partitions_created_for([ClaimRecord(ref(), ())])) == ()


@pytest.mark.parametrize("name", ["gpu-0", FIRST, FOUR_AT_0])
def test_who_is_in_the_place_of_what_was_allocated_is_named(name):
    there = partition_device(THREE, 0, instance=instance(THREE, 0))
    node = Offer(
        (there, partition_device(THREE, 4, instance=instance(THREE, 4)), partition_device(ONE, 3))
    )
    replacement = "gpu-0-mig-3g40gb-9-0, gpu-0-mig-3g40gb-9-4" if name == "gpu-0" else there.name

    with pytest.raises(UnknownDevice, match=f"'{name}', but {replacement} is in its place now"):
        planned(name, at=node)


@pytest.mark.parametrize("name", ["gpu-0-mig-9g90gb-77-0", "gpu-1", OTHER_SIDE])
def test_nobody_is_in_the_place_of_what_is_not_there_for_another_reason(name):
    node = Offer(
        (partition_device(THREE, 0, instance=instance(THREE, 0)), partition_device(ONE, 3))
    )

    with pytest.raises(UnknownDevice, match=f"'{name}', but this node has: gpu-0-mig-3g40gb-9-0"):
        planned(name, at=node)


def as_gpu(**fields):
    """A partition that serves claims for a GPU."""
    there = partition_device(THREE, 0, instance=instance(THREE, 0), as_gpu=True)
    return Offer((replace(there, **fields),))


@pytest.mark.parametrize("source", ["FromClass", "FromClaim"])
@pytest.mark.parametrize("requests", [(), ("gpu",)])
def test_who_asked_for_a_gpu_and_got_a_partition_may_have_written_of_a_gpu(source, requests):
    written = config("GpuConfig", *requests, source=source, sharing={"strategy": "MPS"})

    plan = planned(WHOLE_SIDE, at=as_gpu(), configs=(written,))

    assert [namespace.gpus for namespace in plan.record.namespaces] == [("MIG-9-0",)]


def test_the_interval_of_a_gpu_is_not_set_for_a_partition_of_it():
    written = config(
        "GpuConfig",
        "gpu",
        sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}},
    )

    plan = planned(WHOLE_SIDE, at=as_gpu(), configs=(written,))

    assert plan.steps == (CreateDeviceNodes((0,)),)


def test_other_partitions_are_not_configured_as_gpus():
    with pytest.raises(ClaimError, match="is a MIG partition: write a MigDeviceConfig"):
        planned(WHOLE_SIDE, at=as_gpu(as_gpu=False), configs=(config("GpuConfig", "gpu"),))


def test_an_instance_that_exists_is_known_from_the_beginning_to_be_under_mps():
    there = partition_device(THREE, 0, instance=instance(THREE, 0))

    record = planned(WHOLE_SIDE, at=Offer((there,)), configs=(MPS,)).record

    assert record.holdings[0].uuid == "MIG-9-0"
    assert record.namespaces[0].gpus == ("MIG-9-0",)


def test_a_limit_for_no_partition_of_the_claim_is_refused_with_the_names_of_those_that_are():
    limits = {"defaultPerDevicePinnedMemoryLimit": {"7": "2Gi"}}
    wrong = config("MigDeviceConfig", sharing={"strategy": "MPS", "mpsConfig": limits})

    with pytest.raises(ClaimError, match=rf"write an index: 0 \({FIRST}\)$"):
        planned(FIRST, configs=(wrong,))


def test_another_instance_in_the_place_of_a_partition_is_none_of_its_claim():
    mine = prepared(FIRST)
    (holding,) = mine.holdings
    other = replace(holding, instance=instance(ONE, 0, gi=9, name="new"))
    theirs = replace(prepared(FIRST, name="second"), holdings=(other,))
    begun = planned(FIRST, name="third").record

    def removed(record, *others):
        removals = (
            step for step in undo_steps(record, others) if isinstance(step, RemovePartition)
        )
        return [(removal.uuid, set(removal.unless)) for removal in removals]

    assert removed(mine, theirs) == [("MIG-19-0", set())]
    assert removed(mine, begun) == []
    assert removed(begun, planned(FIRST, name="fourth").record) == []
    assert removed(begun, mine) == [(None, {"MIG-19-0"})]
    assert removed(begun, mine, theirs) == [(None, {"MIG-19-0", "MIG-new"})]
    assert removed(begun) == [(None, set())]


@pytest.mark.parametrize("name", ["gpu-0", "gpu-0-1"])
def test_who_is_in_the_place_of_a_gpu_or_a_replica_of_it_is_named(name):
    node = Offer(
        (partition_device(THREE, 0, instance=instance(THREE, 0)), partition_device(ONE, 5))
    )

    with pytest.raises(UnknownDevice, match="gpu-0-mig-3g40gb-9-0 is in its place now, which was"):
        planned(name, at=node)


def test_a_record_says_what_was_cut_for_it():
    assert prepared(FIRST).created_partitions == {(GPU, partition(ONE, 0).key)}
    assert prepared("gpu-0").created_partitions == frozenset()


def test_what_was_cut_for_a_damaged_record_is_cut_and_held_by_nobody_else():
    (leftover,) = partitions_left_behind(prepared(FIRST))

    assert (leftover.holdings, tuple(partitions_created_for([leftover]))) == (
        (),
        tuple(partitions_created_for([prepared(FIRST)])),
    )
    assert planned(FIRST, others=(leftover,)).grants
    assert partitions_left_behind(None) == ()


def test_a_gpu_whose_mode_nobody_turns_off_has_to_be_looked_at():
    plain = Offer((Device(mig_gpu(), SLICEABLE),))
    modes = {True: planned("gpu-0"), False: planned("gpu-0", at=plain)}

    assert whole_gpus(modes[True].grants, modes[True].steps) == ()
    assert whole_gpus(modes[False].grants, modes[False].steps) == (mig_gpu(),)
    assert whole_gpus(planned(FIRST).grants, ()) == ()
