"""Claims for partitions, from request to CDI file and back, and any crash in between."""

import json
from dataclasses import replace

import pytest

from dra_driver.base.errors import ClaimError, NodeError, PlacementTaken, UnknownDevice
from dra_driver.k8s.claims import Claim
from dra_driver.model.offer import AdminAccess, Device
from dra_driver.model.steps import CreatePartition, RemovePartition, SetMigMode
from dra_driver.node.state.ledger import Ledger
from tests.builders import allocation, ref
from tests.fakes.mig import FOUR, ONE, THREE, mig_gpu, name_of, partition, partition_device
from tests.plugin.mig.world import (
    CLEAN,
    FIRST,
    GPU,
    KEY,
    MPS,
    SECOND,
    SECOND_KEY,
    SIDE,
    UUID,
    FixedOffers,
    Killed,
)

THREE_KEY = partition(THREE, 0).key


def test_a_prepared_claim_has_its_instance_and_nothing_of_others(world):
    world.add_unmanaged(start=6)

    (device,) = world.prepare(FIRST)

    assert device.cdi_ids[0] == f"k8s.gpu.nvidia.com/claim=uid-claim-{FIRST}"
    assert world.device_nodes == [
        "/dev/nvidia0",
        "/dev/nvidia-caps/gpu0-mig-gi20",
        "/dev/nvidia-caps/gpu0-mig-gi20-ci0",
    ]
    assert f"GPU_DEVICE_0_MIG_1G10GB_19_0_UUID={UUID}" in world.edits["env"]
    texts = [path.read_text() for path in (world.directory / "plugin").rglob("*.json")]
    assert [UUID in text for text in texts] == [True], "the workload can read its UUID"


def test_two_partitions_of_one_gpu_are_told_apart_in_one_container(world):
    world.prepare(FIRST, SECOND)

    env = [line for device in world.spec()["devices"] for line in device["containerEdits"]["env"]]
    assert sorted(line for line in env if "_UUID=" in line) == [
        f"GPU_DEVICE_0_MIG_1G10GB_19_0_UUID={UUID}",
        f"GPU_DEVICE_0_MIG_1G10GB_19_1_UUID={name_of(GPU, SECOND_KEY)}",
    ]


def test_a_monitor_may_look_at_instances_and_keeps_nobody_from_the_gpu(world):
    world.use(mig_gpu(), offers=FixedOffers(Device(mig_gpu(), AdminAccess())))

    world.prepare_claim(Claim(ref(), (allocation("gpu-0-mon", admin=True),)))

    assert world.device_nodes == ["/dev/nvidia0", "/dev/nvidia-caps/mig-monitor"]
    assert world.preparer.prepared_claims.while_free(mig_gpu(), lambda: None)


@pytest.mark.point(84)
def test_the_instance_goes_with_the_claim_and_the_mode_with_the_last_one(world):
    world.prepare(FIRST, name="first")
    world.prepare(SECOND, name="second")

    world.unprepare("first")
    assert (world.partitions, world.mode) == ((SECOND_KEY,), True)
    world.unprepare("second")
    assert world.state == CLEAN


def test_a_whole_gpu_after_its_partitions_finds_the_mode_off(world):
    world.prepare(FIRST)
    world.unprepare()
    world.node.mig.modes[GPU] = True  # somebody left it on

    world.prepare("gpu-0", name="whole")

    assert world.mode is False


def test_a_share_under_mps_is_served_on_the_instance(world):
    world.share("claim", MPS)

    (namespace,) = world.node.namespaces.values()
    assert namespace.gpus == (name_of(GPU, THREE_KEY),)
    assert world.ledger.records()[0].namespaces == (namespace,)
    world.unprepare()
    assert (world.node.namespaces, world.state) == ({}, CLEAN)


def test_an_unmanaged_instance_in_the_same_place_is_used_and_left_there(world):
    unmanaged = world.add_unmanaged()

    world.prepare(FIRST)
    assert unmanaged.uuid in json.dumps(world.spec())
    world.unprepare()

    assert world.node.mig.instances == {(GPU, KEY): unmanaged}
    assert world.mode is True


def test_an_unmanaged_instance_in_the_way_is_a_clear_refusal(world):
    unmanaged = world.add_unmanaged(FOUR)

    with pytest.raises(UnknownDevice, match=f"{FIRST!r}, but gpu-0-mig-4g40gb-5-0 is in"):
        world.prepare(FIRST)

    assert world.state == ((unmanaged.key,), True, ())


def test_an_instance_that_somebody_creates_at_the_last_moment_is_refused_and_stays(world):
    with (
        world.before_steps(world.overtake),
        pytest.raises(PlacementTaken, match="by somebody else meanwhile"),
    ):
        world.prepare(FIRST, SECOND)

    assert (world.partitions, world.ledger.records(), world.spec()) == ((KEY,), (), None)
    world.node.mig.instances.clear()
    world.prepare(FIRST)  # now it is free
    world.unprepare()
    assert world.partitions == ()


@pytest.mark.point(84)
def test_killed_after_that_the_next_start_does_not_remove_it(world):
    def overtake(step):
        world.overtake(step)
        if step == SetMigMode(GPU, False):  # while the change is undone
            raise Killed

    with world.before_steps(overtake), pytest.raises(Killed):
        world.prepare(FIRST)

    world.restart()

    assert (world.partitions, world.ledger.records()) == ((KEY,), ())


def test_an_error_in_the_middle_leaves_nothing(world):
    second = CreatePartition(GPU, SECOND_KEY)
    error = NodeError("NVML says Insufficient Resources")

    with (
        world.failing(lambda step: step == second, error),
        pytest.raises(NodeError, match="Insufficient Resources"),
    ):
        world.prepare(FIRST, SECOND)

    assert (world.state, world.spec()) == (CLEAN, None)


def test_an_unmanaged_instance_that_vanished_before_it_is_used_is_said(world):
    instance = world.node.mig.add(GPU, KEY)
    world.offers = FixedOffers(partition_device(ONE, 0, instance=instance))
    world.restart()
    world.node.mig.instances.clear()

    with pytest.raises(NodeError, match="there is no instance"):
        world.prepare(FIRST)

    assert not world.ledger.records()


def test_an_instance_of_a_claim_that_vanished_is_created_again(world):
    world.prepare(FIRST)
    world.node.mig.instances.clear()

    world.preparer.prepare(ref())

    assert UUID in json.dumps(world.spec())
    assert world.partitions == (KEY,)


def test_a_gpu_that_does_not_answer_changes_nothing_of_a_prepared_claim(world):
    world.prepare(FIRST)
    before = world.spec()

    def silent(gpu, key):
        raise NodeError("the GPU does not answer")

    world.node.instance = silent

    assert world.preparer.prepare(ref())
    assert world.spec() == before


@pytest.mark.point(84)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [SetMigMode, CreatePartition])
@pytest.mark.parametrize("then", ["prepare", "unprepare", "nothing"])
def test_killed_at_any_step_the_next_start_leaves_nothing_half_done(world, kind, late, then):
    def die(step):
        if isinstance(step, kind):
            if late:  # after the effect, before anybody knows of it
                world.node._do(step)
            raise Killed

    with world.before_steps(die), pytest.raises(Killed):
        world.prepare(SIDE, configs=(MPS,))

    world.restart()

    assert (world.state, world.node.namespaces) == (CLEAN, {})
    if then == "prepare":
        assert world.preparer.prepare(ref())
        assert world.partitions == (THREE_KEY,)
    if then == "unprepare":
        world.unprepare()
        assert world.spec() is None


@pytest.mark.parametrize("kind", [RemovePartition, SetMigMode])
def test_killed_while_a_claim_is_given_back_the_next_start_goes_on(world, kind):
    world.prepare(FIRST)
    with world.failing(lambda step: isinstance(step, kind), Killed), pytest.raises(Killed):
        world.unprepare()
    world.restart()

    assert world.state == CLEAN


def test_a_restart_leaves_prepared_partitions_alone(world):
    world.prepare(FIRST)

    world.restart()

    (record,) = world.ledger.records()
    assert (world.partitions, record.completed) == ((KEY,), True)
    assert [holding.instance for holding in record.holdings] == [world.node.mig.find(GPU, KEY)]


def test_an_unmanaged_instance_survives_every_claim(world):
    unmanaged = world.add_unmanaged(start=6)
    world.offers.next = world.offers.last

    for name in ("first", "second"):
        world.prepare(FIRST, name=name)
        world.unprepare(name)
        world.restart()

    assert world.node.mig.instances == {(GPU, unmanaged.key): unmanaged}
    assert world.mode is True


def test_while_a_gpu_is_free_something_else_can_be_done_to_it(world):
    done = []
    prepared_claims = world.preparer.prepared_claims

    assert prepared_claims.while_free(mig_gpu(), lambda: done.append("free"))
    world.prepare(FIRST)
    assert not prepared_claims.while_free(mig_gpu(), lambda: done.append("held"))
    assert prepared_claims.while_free(mig_gpu(1), lambda: done.append("another"))

    assert done == ["free", "another"]


def test_a_record_that_cannot_be_read_keeps_its_gpu_from_being_changed(world):
    world.prepare(FIRST)
    (file,) = (world.directory / "claims").rglob("*.json")
    file.write_text(file.read_text().replace('"version":1', '"version":'))
    world.restart()

    assert not world.preparer.prepared_claims.while_free(mig_gpu(), lambda: None)


def test_a_claim_for_an_unknown_config_touches_no_gpu(world):
    wrong = replace(MPS, parameters={**MPS.parameters, "sharing": {"strategy": "Vgpu"}})

    with pytest.raises(ClaimError):
        world.prepare(FIRST, configs=(wrong,))

    assert world.state == CLEAN


class LedgerOnAFullDisk(Ledger):
    """Takes no instance of a claim that is not completed."""

    def write(self, record):
        if any(holding.instance for holding in record.holdings) and not record.completed:
            raise NodeError("no space left on the disk")
        super().write(record)


def test_a_partition_whose_instance_cannot_be_recorded_is_removed_by_its_uuid(world):
    world.ledger_type = LedgerOnAFullDisk
    world.restart()

    with pytest.raises(NodeError, match="no space left"):
        world.prepare(FIRST)

    removed = [step.uuid for step in world.node.undone if isinstance(step, RemovePartition)]
    assert removed == [UUID]
    assert world.ledger.records() == ()
