"""What a claim does to a GPU with MIG: partitions are created for it, and removed with the last."""

from dataclasses import replace

import pytest

from dra_driver.base.errors import ClaimError, DeviceHeldByClaim, UnknownDevice
from dra_driver.k8s.claims import Claim
from dra_driver.model.gpus import GpuUuid, MigInstance, UnavailableGpu
from dra_driver.model.offer import AdminAccess, Device, Offer
from dra_driver.model.profiles import Rules
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import (
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
FOUR_AT_0, ALL_OF_IT = "gpu-0-mig-4g40gb-5-0", "gpu-0-mig-7g80gb-0-0"
MPS = config("MigDeviceConfig", sharing={"strategy": "MPS"})
SLICING = config("MigDeviceConfig", sharing={"strategy": "TimeSlicing"})
MODE_ON = SetMigMode(GPU, on=True)
CREATE_FIRST = CreatePartition(GPU, partition(ONE, 0).key)
REMOVE_FIRST = RemovePartition(GPU, CREATE_FIRST.key, instance(ONE, 0).uuid)


def existing(of=ONE, start=0, **fields):
    """A partition whose instance was not created for claims."""
    return partition_device(of, start, instance=instance(of, start), **fields)


PLAIN = Offer((Device(mig_gpu(), SLICEABLE),))
AMPERE = mig_offer(mig_gpu(on=True, switches=False))
AS_GPU = Offer((existing(THREE, as_gpu=True),))


def planned(*devices, name="claim", at=None, others=(), **fields):
    return plan_claim(claim(*devices, name=name, **fields), at or mig_offer(), others, POOL)


def share(name, device=WHOLE_SIDE, memory="10Gi", others=(), at=None, **capacity):
    """The plan of a claim for a part of a device."""
    shared = Claim(ref(name), (fraction(memory, device, **capacity),), pods=(pod(name),))
    return plan_claim(shared, at or mig_offer(), others, POOL)


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


def removals(record, *others):
    return [step for step in undo_steps(record, others) if isinstance(step, RemovePartition)]


# The steps of a claim.


@pytest.mark.parametrize(
    ("devices", "fields", "steps"),
    [
        pytest.param([FIRST], {}, [MODE_ON, CREATE_FIRST], id="MIG mode, then a partition"),
        pytest.param(
            [FIRST, OTHER_SIDE],
            {},
            [MODE_ON, CreatePartition(GPU, partition(THREE, 4).key), CREATE_FIRST],
            id="two partitions of one GPU, and one mode",
        ),
        pytest.param([FIRST], {"at": AMPERE}, [CREATE_FIRST], id="no mode that needs a reset"),
        pytest.param(
            ["gpu-0"],
            {"at": AMPERE},
            [],
            id="nor for the GPU as a whole, whose mode needs one",
        ),
        pytest.param(["gpu-0"], {"at": PLAIN}, [], id="a GPU that offers no partitions"),
        pytest.param([FIRST], {"at": Offer((existing(),))}, [], id="an instance that exists"),
        pytest.param(
            [FIRST],
            {"configs": (SLICING,)},
            [MODE_ON, CREATE_FIRST],
            id="time slicing in a partition changes nothing",
        ),
        pytest.param(
            [WHOLE_SIDE],
            {
                "at": AS_GPU,
                "configs": (
                    config(
                        "GpuConfig",
                        "gpu",
                        sharing={
                            "strategy": "TimeSlicing",
                            "timeSlicingConfig": {"interval": "Long"},
                        },
                    ),
                ),
            },
            [],
            id="nor does the interval of a GPU",
        ),
    ],
)
def test_what_is_done_for_a_claim(devices, fields, steps):
    assert list(planned(*devices, **fields).steps) == steps


@pytest.mark.parametrize("allocated", [allocation("gpu-0"), fraction("20Gi", "gpu-0")])
def test_mig_mode_is_turned_off_for_the_gpu_as_a_whole_and_for_a_share_of_it(allocated):
    plan = plan_claim(Claim(ref(), (allocated,)), mig_offer(), (), POOL)

    assert SetMigMode(GPU, on=False) in plan.steps


def test_admin_access_does_nothing_beside_partitions():
    admin = Claim(ref(), (allocation("gpu-0-mon", admin=True),))
    node = Offer((Device(mig_gpu(), AdminAccess()),))

    assert plan_claim(admin, node, (prepared(FIRST),), POOL).steps == ()


def test_the_record_says_which_partition_and_then_which_instance():
    plan = planned(FIRST)

    (before,) = plan.record.holdings
    record = plan.settled(instances_of(plan)).record
    (after,) = record.holdings

    key = partition(ONE, 0).key
    assert (before.partition, before.created_for_claims, before.instance) == (key, True, None)
    assert before.memory_of is None
    assert before.offered == ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
    assert after.memory_of == "MIG-19-0"
    assert record.created_partitions == {(GPU, key)}
    assert prepared("gpu-0").created_partitions == frozenset()


def test_a_partition_that_a_claim_shares_already_is_not_new():
    first = share("first").record
    second = share("second", others=(first,)).record

    (created,) = partitions_created_for([first])
    assert (created.new, list(partitions_created_for([second]))) == (
        True,
        [replace(created, new=False)],
    )
    assert tuple(partitions_created_for([ClaimRecord(ref(), ())])) == ()


# What is undone.


def test_the_last_claim_on_a_gpu_turns_its_mode_off_after_the_partition_is_removed():
    first = prepared(FIRST, name="first")
    second = prepared(SECOND, name="second", others=(first,))

    assert undo_steps(first, ()) == (REMOVE_FIRST, SetMigMode(GPU, on=False))
    assert undo_steps(first, (second,)) == (REMOVE_FIRST,)
    assert undo_steps(second, ())[-1] == SetMigMode(GPU, on=False)
    assert undo_steps(planned(FIRST, at=Offer((existing(),))).record, ()) == ()


def test_a_mode_that_was_on_before_the_first_claim_stays_on():
    plan = planned(FIRST)
    was_on = replace(plan, steps=with_previous_values(plan.steps, {MODE_ON: True}))

    assert undo_steps(was_on.record, ())[-1] == MODE_ON


def test_claims_that_share_a_partition_remove_it_with_the_last():
    first = share("first").record
    second = share("second", others=(first,)).record

    assert removals(first, second) == []
    assert removals(second) == [RemovePartition(GPU, partition(THREE, 0).key)]


def test_the_mps_server_ends_before_its_instance_goes():
    record = prepared(WHOLE_SIDE, configs=(MPS,))

    assert [type(step) for step in undo_steps(record, ())] == [
        RemoveMpsNamespace,
        RemovePartition,
        SetMigMode,
    ]


def test_a_partition_whose_creation_was_not_begun_is_not_removed():
    record = planned(FIRST, SECOND).record
    first, second = partitions_created_for([record])

    begun = with_created(record, {second})

    assert removals(begun) == [RemovePartition(second.gpu, second.key)]
    assert [step for step in record.steps if step not in begun.steps] == [first]


def test_another_instance_in_the_place_of_a_partition_is_none_of_its_claim():
    ours = prepared(FIRST)
    other = replace(ours.holdings[0], instance=instance(ONE, 0, gi=9, name="new"))
    theirs = replace(prepared(FIRST, name="second"), holdings=(other,))
    begun = planned(FIRST, name="third").record

    def removed(record, *others):
        return [(step.uuid, set(step.unless)) for step in removals(record, *others)]

    assert removed(ours, theirs) == [("MIG-19-0", set())]
    assert removed(ours, begun) == []
    assert removed(begun, planned(FIRST, name="fourth").record) == []
    assert removed(begun, ours) == [(None, {"MIG-19-0"})]
    assert removed(begun, ours, theirs) == [(None, {"MIG-19-0", "MIG-new"})]
    assert removed(begun) == [(None, set())]


def test_partitions_of_a_damaged_record_are_created_already_and_held_by_no_other_claim():
    record = prepared(FIRST)
    (left_behind,) = partitions_left_behind(record)

    assert left_behind.holdings == ()
    assert [*partitions_created_for([left_behind])] == [*partitions_created_for([record])]
    assert planned(FIRST, others=(left_behind,)).grants
    assert partitions_left_behind(None) == ()


# What others hold.


@pytest.mark.parametrize(
    ("device", "held", "problem"),
    [
        *(
            (FIRST, held, f"{FIRST} overlaps {held}, held by claim default/other")
            for held in ("gpu-0", WHOLE_SIDE, FOUR_AT_0, ALL_OF_IT)
        ),
        ("gpu-0", SECOND, f"gpu-0 overlaps {SECOND}, held by claim default/other"),
        (FIRST, FIRST, f"{FIRST} is held by claim default/other"),
    ],
)
def test_a_device_waits_for_whatever_overlaps_it(device, held, problem):
    with pytest.raises(DeviceHeldByClaim, match=problem):
        planned(device, others=(prepared(held),))


def test_partitions_beside_each_other_do_not_wait():
    assert planned(FIRST, others=(prepared(SECOND), prepared(OTHER_SIDE, name="third"))).grants
    two_gpus = mig_offer(mig_gpu(0), mig_gpu(1))
    assert planned(WHOLE_SIDE, "gpu-1-mig-4g40gb-5-0", at=two_gpus).grants


@pytest.mark.parametrize("other", [FOUR_AT_0, "gpu-0", FIRST])
def test_a_claim_with_two_devices_that_overlap_is_refused(other):
    with pytest.raises(ClaimError, match="the same part of one GPU"):
        planned(WHOLE_SIDE, other)


def test_shares_of_a_partition_add_up_to_its_memory_and_the_driver_limits_no_pod_there():
    first = share("first", memory="30Gi").record

    with pytest.raises(DeviceHeldByClaim, match=r"20480Mi of memory, of which 10240Mi are free"):
        share("second", memory="20Gi", others=(first,))
    assert share("third", memory="10Gi", others=(first,)).grants
    assert first.limited
    assert memory_limit_steps(first, ()) == ()


def test_a_share_of_a_partition_is_refused_where_the_driver_has_to_limit_it():
    strict = Offer((partition_device(THREE, 0, rules=Rules(strict=True)),))

    with pytest.raises(ClaimError, match="does not limit parts of a MIG partition"):
        share("first", at=strict)
    assert planned(WHOLE_SIDE, at=strict).grants


def test_only_an_instance_that_was_created_for_no_claim_is_in_the_way():
    unmanaged = partition(ONE, 2).key
    present = (partition(ONE, 1).key, unmanaged, partition(ONE, 6).key)
    create = CreatePartition(GPU, partition(FOUR, 0).key)

    two_gpus = mig_offer(mig_gpu(0), mig_gpu(1))
    elsewhere = planned("gpu-1-mig-1g10gb-19-2", name="elsewhere", at=two_gpus).record

    assert blocking_instances(create, present, (prepared(SECOND), elsewhere)) == (unmanaged,)


def test_a_gpu_whose_mode_is_not_turned_off_for_the_claim_may_be_in_mig_mode():
    switched, plain = planned("gpu-0"), planned("gpu-0", at=PLAIN)

    assert whole_gpus(switched.grants, switched.steps) == ()
    assert whole_gpus(plain.grants, plain.steps) == (mig_gpu(),)
    assert whole_gpus(planned(FIRST).grants, ()) == ()
    admin = Claim(ref(), (allocation("gpu-0", admin=True),))
    assert whole_gpus(plan_claim(admin, PLAIN, (), POOL).grants, ()) == ()


# Configurations.


def test_an_mps_server_is_for_the_instance():
    plan = planned(WHOLE_SIDE, configs=(MPS,))

    (before,) = (step.namespace for step in plan.steps if isinstance(step, ServeMpsNamespace))
    (after,) = plan.settled(instances_of(plan)).record.namespaces

    assert before.gpus == (f"{GPU}/9/0",)
    assert after == replace(before, gpus=(GpuUuid("MIG-9-0"),))
    assert not any(isinstance(step, SetComputeMode) for step in plan.steps)


def test_the_mps_server_of_an_instance_that_exists_is_for_it_from_the_beginning():
    record = planned(WHOLE_SIDE, at=Offer((existing(THREE),)), configs=(MPS,)).record

    assert record.holdings[0].uuid == "MIG-9-0"
    assert record.namespaces[0].gpus == ("MIG-9-0",)


def test_cores_of_a_partition_are_reserved_under_mps():
    (grant,) = share("first", memory="20Gi", cores="50").grants

    assert grant.namespace is not None
    assert (grant.namespace.percent, grant.namespace.memory_bytes) == (50, (20 * GIB,))


@pytest.mark.parametrize("source", ["FromClass", "FromClaim"])
@pytest.mark.parametrize("requests", [(), ("gpu",)])
def test_a_partition_that_serves_claims_for_a_gpu_may_be_configured_as_one(source, requests):
    written = config("GpuConfig", *requests, source=source, sharing={"strategy": "MPS"})

    plan = planned(WHOLE_SIDE, at=AS_GPU, configs=(written,))

    assert [namespace.gpus for namespace in plan.record.namespaces] == [("MIG-9-0",)]


LIMITS = {"defaultPerDevicePinnedMemoryLimit": {"7": "2Gi"}}


@pytest.mark.parametrize(
    ("node", "device", "written", "problem"),
    [
        pytest.param(
            None,
            FIRST,
            config("GpuConfig", "gpu", sharing={"strategy": "MPS"}),
            f"{FIRST} is a MIG partition: write a MigDeviceConfig",
            id="a GpuConfig",
        ),
        pytest.param(
            Offer((existing(THREE),)),
            WHOLE_SIDE,
            config("GpuConfig", "gpu"),
            "is a MIG partition: write a MigDeviceConfig",
            id="a GpuConfig, where partitions do not serve claims for GPUs",
        ),
        pytest.param(
            None,
            FIRST,
            config("MigDeviceConfig", sharing={"strategy": "MPS", "mpsConfig": LIMITS}),
            rf"write an index: 0 \({FIRST}\)$",
            id="a limit for no partition of the claim",
        ),
    ],
)
def test_a_config_that_does_not_fit_a_partition_is_refused(node, device, written, problem):
    with pytest.raises(ClaimError, match=problem):
        planned(device, at=node, configs=(written,))


def test_two_partitions_under_mps_in_one_container_are_refused():
    both = Claim(ref(), (allocation(FIRST), allocation(SECOND)), (MPS,))

    with pytest.raises(ClaimError, match="a program under MPS computes on one partition"):
        plan_claim(both, mig_offer(), (), POOL)


# Devices that are not offered.

HALF_THERE = (existing(THREE), partition_device(ONE, 3))
BOTH_HALVES = (existing(THREE), existing(THREE, 4), partition_device(ONE, 3))


@pytest.mark.parametrize(
    ("name", "devices", "problem"),
    [
        ("gpu-0", BOTH_HALVES, f"but {WHOLE_SIDE}, {OTHER_SIDE} is in its place now"),
        *(
            (name, BOTH_HALVES, f"but {WHOLE_SIDE} is in its place now, which was")
            for name in (FIRST, FOUR_AT_0)
        ),
        ("gpu-0-1", HALF_THERE, f"but {WHOLE_SIDE} is in its place now, which was"),
        *(
            (name, HALF_THERE, f"but this node has: {WHOLE_SIDE}")
            for name in ("gpu-0-mig-9g90gb-77-0", "gpu-1", OTHER_SIDE)
        ),
        (FIRST, (partition_device(SEVEN, 0),), f"but this node has: {ALL_OF_IT}"),
    ],
)
def test_a_device_that_is_not_offered_is_refused_with_what_is_in_its_place(name, devices, problem):
    node = Offer(devices, (UnavailableGpu("GPU", "reason"),))

    with pytest.raises(UnknownDevice, match=f"'{name}', {problem}"):
        planned(name, at=node)
