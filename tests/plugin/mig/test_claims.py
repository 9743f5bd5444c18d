"""Claims for partitions, from request to CDI file and back, and any crash in between."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest

from dra_driver.base.errors import ClaimError, NodeError, PlacementTaken, UnknownDevice
from dra_driver.k8s.claims import Claim
from dra_driver.model.gpus import Inventory
from dra_driver.model.offer import AdminAccess, Device, Offer
from dra_driver.model.steps import CreatePartition, RemovePartition, SetMigMode
from dra_driver.node.state.claim_files import CdiSpecFiles, ClaimFiles, MetadataFiles
from dra_driver.node.state.ledger import Ledger
from tests.builders import allocation, claim, config, fraction, ref
from tests.fakes.mig import (
    FOUR,
    ONE,
    THREE,
    mig_gpu,
    mig_offer,
    name_of,
    partition,
    partition_device,
)
from tests.fakes.node import FakeNode
from tests.fakes.pods import NO_PODS
from tests.fakes.preparers import preparer_of

GPU = mig_gpu().uuid
FIRST, SECOND = "gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1"
UUID = name_of(GPU, partition(ONE, 0).key)  # of the first
SIDE = "gpu-0-mig-3g40gb-9-0"
MPS = config("MigDeviceConfig", sharing={"strategy": "MPS"})


class Killed(BaseException):
    """kill -9: nothing that would clean up runs, because nobody catches it."""


class Api:
    """The claims that the API server has."""

    def __init__(self):
        self.claims = {}

    def read(self, claim):
        return self.claims[claim]


class FixedOffers:
    """What the last look offers, and call the next one will."""

    def __init__(self, offer):
        self.last = self.next = offer

    def now(self):
        return self.last

    def refresh(self):
        self.last = self.next
        return self.last


class World:
    """A node with its disk. ``restart`` is what a new process finds after a crash."""

    def __init__(self, directory):
        self.directory = directory
        self.api = Api()
        self.node: Any = FakeNode(Inventory((mig_gpu(),)))
        self.offers = FixedOffers(mig_offer())
        self.pods = NO_PODS
        self.restart()

    def restart(self):
        self.ledger = Ledger(self.directory / "claims", "boot")
        specs = CdiSpecFiles(self.directory / "cdi", "k8s.gpu.nvidia.com")
        files = ClaimFiles(specs, MetadataFiles(self.directory / "plugin"))
        self.preparer = preparer_of(
            self.node, self.offers, self.api, self.ledger, files, pods=self.pods
        )
        self.preparer.recover()

    def prepare(self, *devices, name="claim", **fields):
        return self.prepare_claim(claim(*devices, name=name, **fields))

    def prepare_claim(self, claim):
        self.api.claims[claim.ref] = claim
        return self.preparer.prepare(claim.ref)

    def spec(self, name="claim"):
        path = self.directory / "cdi" / f"k8s.gpu.nvidia.com-claim_uid-{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    @contextlib.contextmanager
    def failing(self, is_failing, error):
        """Meanwhile a step of which *is_failing* is true raises *error* before it is done."""

        def fail(step):
            if is_failing(step):
                raise error

        self.node.before_step = fail
        try:
            yield
        finally:
            self.node.before_step = lambda step: None

    @property
    def cut(self):
        return self.node.mig.on(GPU)

    @property
    def mode(self):
        return self.node.mig.modes[GPU]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_a_prepared_claim_has_its_instance_and_nothing_of_others(world):
    world.node.mig.modes[GPU] = True
    world.node.mig.add(GPU, partition(ONE, 6).key)

    (device,) = world.prepare(FIRST)

    (edits,) = [entry["containerEdits"] for entry in world.spec()["devices"]]
    assert device.cdi_ids == (f"k8s.gpu.nvidia.com/claim=uid-claim-{FIRST}",)
    assert [node["path"] for node in edits["deviceNodes"]] == [
        "/dev/nvidia0",
        "/dev/nvidia-caps/gpu0-mig-gi20",
        "/dev/nvidia-caps/gpu0-mig-gi20-ci0",
    ]
    assert f"GPU_DEVICE_0_MIG_1G10GB_19_0_UUID={UUID}" in edits["env"]


def test_two_partitions_of_one_gpu_are_told_apart_in_one_container(world):
    world.prepare(FIRST, SECOND)

    env = [line for device in world.spec()["devices"] for line in device["containerEdits"]["env"]]
    uuids = [line for line in env if "_UUID=" in line]
    assert sorted(uuids) == [
        f"GPU_DEVICE_0_MIG_1G10GB_19_0_UUID={UUID}",
        f"GPU_DEVICE_0_MIG_1G10GB_19_1_UUID={name_of(GPU, partition(ONE, 1).key)}",
    ]


def test_the_workload_can_read_the_uuid_of_its_instance(world):
    world.prepare(FIRST)

    texts = [path.read_text() for path in (world.directory / "plugin").rglob("*.json")]
    assert [UUID in text for text in texts] == [True]


def test_a_monitor_may_look_at_instances_and_at_nothing_else_of_them(world):
    world.offers = FixedOffers(Offer((Device(mig_gpu(), AdminAccess()),)))
    world.restart()

    world.prepare_claim(Claim(ref(), (allocation("gpu-0-mon", admin=True),)))

    (edits,) = [device["containerEdits"] for device in world.spec()["devices"]]
    assert [node["path"] for node in edits["deviceNodes"]] == [
        "/dev/nvidia0",
        "/dev/nvidia-caps/mig-monitor",
    ]


@pytest.mark.point(84)
def test_the_instance_goes_with_the_claim_and_the_mode_with_the_last_one(world):
    world.prepare(FIRST, name="first")
    world.prepare(SECOND, name="second")

    world.preparer.unprepare(ref("first"))
    assert (world.cut, world.mode) == ((partition(ONE, 1).key,), True)
    world.preparer.unprepare(ref("second"))
    assert (world.cut, world.mode) == ((), False)


def test_a_whole_gpu_after_its_partitions_finds_the_mode_off(world):
    world.prepare(FIRST)
    world.preparer.unprepare(ref())
    world.node.mig.modes[GPU] = True  # somebody left it on

    world.prepare("gpu-0", name="whole")

    assert world.mode is False


def test_a_share_under_mps_is_served_on_the_instance(world):
    claim = Claim(ref(), (fraction("10Gi", SIDE),), (MPS,))

    world.prepare_claim(claim)

    (namespace,) = world.node.namespaces.values()
    assert namespace.gpus == (name_of(GPU, partition(THREE, 0).key),)
    assert world.ledger.records()[0].namespaces == (namespace,)
    world.preparer.unprepare(ref())
    assert (world.node.namespaces, world.cut) == ({}, ())


def test_an_instance_of_somebody_else_in_the_same_place_is_used_and_left_there(world):
    world.node.mig.modes[GPU] = True
    foreign = world.node.mig.add(GPU, partition(ONE, 0).key)
    world.offers.next = Offer((partition_device(ONE, 0, instance=foreign),))

    world.prepare(FIRST)
    assert foreign.uuid in json.dumps(world.spec())
    world.preparer.unprepare(ref())

    assert world.node.mig.instances == {(GPU, foreign.key): foreign}
    assert world.mode is True


def test_an_instance_of_somebody_else_in_the_way_is_a_clear_refusal(world):
    world.node.mig.modes[GPU] = True
    foreign = world.node.mig.add(GPU, partition(FOUR, 0).key)
    world.offers.next = Offer((partition_device(FOUR, 0, instance=foreign),))

    with pytest.raises(UnknownDevice, match=f"{FIRST!r}, but gpu-0-mig-4g40gb-5-0 is in"):
        world.prepare(FIRST)

    assert world.cut == (foreign.key,)
    assert not world.ledger.records()


def test_what_somebody_else_cuts_at_the_last_moment_is_refused_and_stays(world):
    key = partition(ONE, 0).key

    def overtake(step):
        if step == CreatePartition(GPU, key):
            world.node.mig.add(GPU, key)

    world.node.before_step = overtake

    with pytest.raises(PlacementTaken, match="was cut by somebody else meanwhile"):
        world.prepare(FIRST, SECOND)

    assert world.cut == (key,)
    assert not world.ledger.records()
    assert world.spec() is None


@pytest.mark.point(84)
def test_killed_after_that_the_next_start_does_not_remove_it(world):
    key = partition(ONE, 0).key

    def overtake(step):
        if step == CreatePartition(GPU, key):
            world.node.mig.add(GPU, key)
        if step == SetMigMode(GPU, False):  # while it is taken back
            raise Killed

    world.node.before_step = overtake
    with pytest.raises(Killed):
        world.prepare(FIRST)
    world.node.before_step = lambda step: None

    world.restart()

    assert (world.cut, world.ledger.records()) == ((key,), ())


def test_what_was_refused_once_can_be_cut_when_it_is_free(world):
    key = partition(ONE, 0).key
    world.node.before_step = lambda step: (
        world.node.mig.add(GPU, key) if step == CreatePartition(GPU, key) else None
    )
    with pytest.raises(PlacementTaken):
        world.prepare(FIRST)
    world.node.before_step = lambda step: None
    world.node.mig.instances.clear()

    world.prepare(FIRST)
    world.preparer.unprepare(ref())

    assert world.cut == ()


def test_an_error_in_the_middle_leaves_nothing(world):
    second_cut = CreatePartition(GPU, partition(ONE, 1).key)
    error = NodeError("NVML says Insufficient Resources")

    with (
        world.failing(lambda step: step == second_cut, error),
        pytest.raises(NodeError, match="Insufficient Resources"),
    ):
        world.prepare(FIRST, SECOND)

    assert (world.cut, world.mode) == ((), False)
    assert not world.ledger.records()
    assert world.spec() is None


def test_an_instance_that_vanished_before_it_is_used_is_said(world):
    there = world.node.mig.add(GPU, partition(ONE, 0).key)
    world.offers.last = world.offers.next = Offer((partition_device(ONE, 0, instance=there),))
    world.node.mig.instances.clear()

    with pytest.raises(NodeError, match="there is no instance"):
        world.prepare(FIRST)

    assert not world.ledger.records()


def test_an_instance_that_vanished_behind_our_back_is_cut_again(world):
    world.prepare(FIRST)
    world.node.mig.instances.clear()

    world.preparer.prepare(ref())

    assert UUID in json.dumps(world.spec())
    assert world.cut == (partition(ONE, 0).key,)


def test_what_cannot_be_asked_about_a_prepared_instance_changes_nothing(world):
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

    world.node.before_step = die
    with pytest.raises(Killed):
        world.prepare(SIDE, configs=(MPS,))
    world.node.before_step = lambda step: None

    world.restart()

    assert (world.cut, world.mode, world.node.namespaces) == ((), False, {})
    assert not world.ledger.records()
    if then == "prepare":
        assert world.preparer.prepare(ref())
        assert world.cut == (partition(THREE, 0).key,)
    if then == "unprepare":
        world.preparer.unprepare(ref())
        assert world.spec() is None


@pytest.mark.parametrize("kind", [RemovePartition, SetMigMode])
def test_killed_while_it_is_given_back_the_next_start_goes_on(world, kind):
    world.prepare(FIRST)
    with world.failing(lambda step: isinstance(step, kind), Killed), pytest.raises(Killed):
        world.preparer.unprepare(ref())
    world.restart()

    assert (world.cut, world.mode) == ((), False)
    assert not world.ledger.records()


def test_a_restart_leaves_prepared_partitions_alone(world):
    world.prepare(FIRST)

    world.restart()

    assert world.cut == (partition(ONE, 0).key,)
    assert world.ledger.records()[0].completed
    (holding,) = world.ledger.records()[0].holdings
    assert holding.instance == world.node.mig.find(GPU, partition(ONE, 0).key)


def test_a_foreign_instance_survives_every_claim(world):
    world.node.mig.modes[GPU] = True
    foreign = world.node.mig.add(GPU, partition(ONE, 6).key)

    for name in ("first", "second"):
        world.prepare(FIRST, name=name)
        world.preparer.unprepare(ref(name))
        world.restart()

    assert world.node.mig.instances == {(GPU, foreign.key): foreign}
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
    (record,) = (world.directory / "claims").rglob("*.json")
    record.write_text(record.read_text().replace('"version":1', '"version":'))
    world.restart()

    assert not world.preparer.prepared_claims.while_free(mig_gpu(), lambda: None)


def test_who_looks_on_keeps_nobody_from_a_gpu(world):
    world.offers = FixedOffers(Offer((Device(mig_gpu(), AdminAccess()),)))
    world.restart()
    world.prepare_claim(Claim(ref(), (allocation("gpu-0-mon", admin=True),)))

    assert world.preparer.prepared_claims.while_free(mig_gpu(), lambda: None)


def test_a_claim_for_an_unknown_config_touches_no_gpu(world):
    wrong = replace(MPS, parameters={**MPS.parameters, "sharing": {"strategy": "Vgpu"}})

    with pytest.raises(ClaimError):
        world.prepare(FIRST, configs=(wrong,))

    assert (world.cut, world.mode) == ((), False)
