"""Whose an instance is: what somebody else made stays, and call is ours is known as ours."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest

from dra_driver.base.errors import (
    ClaimError,
    DriverError,
    MigInstanceNotFound,
    NodeError,
    PlacementTaken,
    TimedOut,
    UnknownDevice,
)
from dra_driver.k8s.claims import Claim
from dra_driver.model.gpus import Inventory, MigInfo
from dra_driver.model.offer import ApiFeatures, Device, Offer
from dra_driver.model.steps import CreateDeviceNodes, CreatePartition, RemovePartition, SetMigMode
from dra_driver.plugin.claims.reconciler import ClaimReconciler
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.mig.lost_instances import LostInstances
from dra_driver.plugin.publish.offers import OfferBuilder
from tests.builders import POOL, SLICEABLE, allocation, claim, fraction, pod, ref
from tests.fakes.mig import FOUR, H100, ONE, THREE, mig_gpu, mig_offer, partition, partition_device
from tests.fakes.pods import FakePods, container, pod_spec
from tests.plan.mig.boards import dynamic
from tests.plugin.mig.test_claims import FIRST, GPU, MPS, SECOND, SIDE, FixedOffers, Killed, World

KEY = partition(ONE, 0).key


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def look(world):
    """What the plugin does every few seconds."""
    nobody: Any = None
    observer = Metrics()
    prepared_claims = world.preparer.prepared_claims
    LostInstances(world.node, world.ledger.records, prepared_claims, nobody, observer).look()


def replace_instance(world, key=KEY):
    """Somebody removes what is there, and some time later makes the same again: the driver gives it
    the same UUID."""
    world.node.mig.remove(GPU, key)
    look(world)
    return world.node.mig.add(GPU, key)


def live(world):
    """Have the node offer what it finds, as it does."""
    world.offers = OfferBuilder(
        world.node, lambda: dynamic("1g.10gb", "3g.40gb"), lambda: ApiFeatures(), world.ledger
    )
    refresh = world.node.refresh

    def look():
        mig = world.node.mig
        mine = tuple(
            instance for (uuid, _), instance in sorted(mig.instances.items()) if uuid == GPU
        )
        info = MigInfo(mig.modes[GPU], mig.modes[GPU], True, H100, mine)
        world.node.now = Inventory((replace(mig_gpu(), mig=info),))
        return refresh()

    world.node.refresh = look
    world.restart()
    world.offers = OfferBuilder(
        world.node, lambda: dynamic("1g.10gb", "3g.40gb"), lambda: ApiFeatures(), world.ledger
    )
    return world


def damage(world, name="claim"):
    """The record of a claim is not readable any more, and call was cut for it still is there."""
    (path,) = (world.directory / "claims").rglob(f"uid-{name}.json")
    path.write_text(path.read_text()[:60])
    offers = world.offers
    world.restart()
    if isinstance(offers, OfferBuilder):
        live(world)


def test_another_instance_in_the_same_place_is_not_removed_with_the_claim(world):
    world.prepare(FIRST)
    foreign = replace_instance(world)

    world.preparer.unprepare(ref())

    assert world.node.mig.instances == {(GPU, KEY): foreign}
    assert not world.ledger.records()


def test_nor_is_it_when_the_claim_is_prepared_again(world):
    world.prepare(FIRST)
    foreign = replace_instance(world)
    world.offers.next = Offer((partition_device(ONE, 0, instance=foreign),))

    world.preparer.prepare(ref())
    assert foreign.uuid in json.dumps(world.spec())
    world.preparer.unprepare(ref())

    assert world.node.mig.instances == {(GPU, KEY): foreign}


@pytest.mark.point(84)
def test_killed_after_cutting_the_next_start_knows_which_instances_are_ours(world):
    def die():
        raise Killed

    world.node.before_files = die
    with pytest.raises(Killed):
        world.prepare(FIRST)
    world.node.before_files = lambda: None
    world.node.mig.remove(GPU, KEY)
    foreign = world.node.mig.add(GPU, partition(FOUR, 0).key)

    world.restart()

    assert world.cut == (foreign.key,)
    assert not world.ledger.records()


def test_a_cut_that_was_not_tried_is_not_taken_back(world):
    """Something else fails before, and somebody is quicker meanwhile."""
    world.node.mig.modes[GPU] = True

    def fail(step):
        if isinstance(step, CreateDeviceNodes):
            world.node.mig.add(GPU, KEY)
            raise NodeError("/dev/nvidia0 cannot be made")

    world.node.before_step = fail
    with pytest.raises(NodeError, match="cannot be made"):
        world.prepare(FIRST)

    assert world.cut == (KEY,)
    assert not world.ledger.records()


def test_what_a_claim_was_to_have_of_one_gpu_stays_where_another_fails(world):
    gpus = (mig_gpu(), mig_gpu(1))
    world.node = type(world.node)(Inventory(gpus))
    world.offers = FixedOffers(mig_offer(*gpus))
    world.restart()

    def fail(step):
        if isinstance(step, SetMigMode) and step.on and step.gpu == gpus[1].uuid:
            world.node.mig.modes[GPU] = True
            world.node.mig.add(GPU, KEY)
            raise NodeError("in use by nv-hostengine")

    world.node.before_step = fail
    with pytest.raises(NodeError, match="nv-hostengine"):
        world.prepare(FIRST, "gpu-1-mig-1g10gb-19-0")

    assert world.cut == (KEY,)


def silent_once_cut(world):
    """NVML does not answer any more once something is cut; what answers as before is returned."""
    find = world.node.instance

    def instance(gpu, key):
        if world.node.mig.on(GPU):
            raise TimedOut("looking for the instance took longer than 5 s")
        return find(gpu, key)

    world.node.instance = instance
    return find


def turns_mode_off(step):
    return step == SetMigMode(GPU, False)


def share_of_side(world, name):
    world.prepare_claim(Claim(ref(name), (fraction("10Gi", SIDE),)))


def test_a_partition_that_was_cut_anew_for_a_claim_that_failed_goes(world):
    share_of_side(world, "first")
    share_of_side(world, "second")
    world.node.mig.instances.clear()
    answers = silent_once_cut(world)
    with pytest.raises(NodeError):
        share_of_side(world, "third")
    world.node.instance = answers

    for name in ("first", "second", "third"):
        world.preparer.unprepare(ref(name))

    assert (world.cut, world.mode, world.ledger.records()) == ((), False, ())


def test_so_does_one_beside_a_claim_that_was_half_given_back(world):
    share_of_side(world, "first")
    late = TimedOut("turning MIG mode off took longer than 15 s")
    with world.failing(turns_mode_off, late), pytest.raises(NodeError):
        world.preparer.unprepare(ref("first"))
    answers = silent_once_cut(world)
    with pytest.raises(NodeError):
        share_of_side(world, "second")
    world.node.instance = answers

    for name in ("first", "second"):
        world.preparer.unprepare(ref(name))

    assert (world.cut, world.mode, world.ledger.records()) == ((), False, ())


def test_what_another_claim_has_stays_where_one_fails_that_was_to_share_it(world):
    share_of_side(world, "first")
    answers = silent_once_cut(world)
    with pytest.raises(NodeError):
        share_of_side(world, "second")
    world.node.instance = answers

    world.preparer.unprepare(ref("second"))

    assert world.cut == (partition(THREE, 0).key,)


def test_so_it_does_where_that_one_fails_as_it_would_cut(world):
    share_of_side(world, "first")
    instances = dict(world.node.mig.instances)
    late = TimedOut("cutting took longer than 15 s")
    with (
        world.failing(lambda step: isinstance(step, CreatePartition), late),
        pytest.raises(NodeError),
    ):
        share_of_side(world, "second")
    world.preparer.unprepare(ref("second"))

    assert [step.unless for step in world.node.undone if isinstance(step, RemovePartition)] == [
        frozenset(instance.uuid for instance in instances.values())
    ]
    assert world.node.mig.instances == instances


def test_a_gpu_whose_mig_mode_stayed_on_is_off_for_good_after_a_claim_for_all_of_it(world):
    world.prepare(FIRST)
    error = NodeError("in use by nv-hostengine")
    with world.failing(turns_mode_off, error), contextlib.suppress(NodeError):
        world.preparer.unprepare(ref())
    world.restart()
    world.node.mig.modes[GPU] = True

    world.prepare("gpu-0", name="whole")
    assert world.mode is False
    world.preparer.unprepare(ref("whole"))

    assert world.mode is False


def test_a_half_of_an_instance_that_is_left_goes_with_its_claim(world):
    """Somebody destroyed the compute instance only: nobody else knows what to do with the rest."""
    world.prepare(FIRST)
    find = world.node.instance

    def gone(gpu, key):
        raise MigInstanceNotFound("it has no compute instance")

    world.node.instance = gone
    look(world)
    world.node.instance = find

    world.preparer.unprepare(ref())

    assert world.cut == ()


def test_a_claim_that_joins_does_not_get_somebody_elses_instance(world):
    share_of_side(world, "first")
    foreign = replace_instance(world, partition(THREE, 0).key)

    with pytest.raises(
        PlacementTaken, match="gpu-0 has an instance of profile 9 at 0 that was not created"
    ):
        share_of_side(world, "second")
    world.preparer.unprepare(ref("first"))

    assert list(world.node.mig.instances.values()) == [foreign]


def test_claims_that_share_a_partition_which_is_cut_anew_leave_nothing(world):
    share_of_side(world, "first")
    share_of_side(world, "second")
    world.node.mig.instances.clear()
    world.preparer.prepare(ref("first"))  # the second one's pods never had this one

    world.preparer.unprepare(ref("first"))
    world.preparer.unprepare(ref("second"))

    assert (world.cut, world.mode) == ((), False)


def test_a_claim_that_has_lost_one_of_its_partitions_keeps_the_other(world):
    world.prepare(FIRST, SECOND)
    world.node.mig.remove(GPU, KEY)
    before = dict(world.node.mig.instances)

    with pytest.raises(
        MigInstanceNotFound, match=rf"has lost {FIRST}: .* may still use {SECOND}, so"
    ):
        world.preparer.prepare(ref())

    assert world.node.mig.instances == before
    assert world.node.undone == []
    world.preparer.unprepare(ref())
    assert world.cut == ()


def test_who_computes_and_looks_on_as_well_keeps_what_it_has(world):
    world.prepare(SECOND, name="holder")
    both = Claim(ref(), (allocation(FIRST), allocation(SECOND, request="look", admin=True)))
    answer = world.prepare_claim(both)
    world.preparer.unprepare(ref("holder"))
    before = dict(world.node.mig.instances)

    assert world.preparer.prepare(ref()) == answer
    assert world.node.mig.instances == before


def paths(world):
    (edits,) = [device["containerEdits"] for device in world.spec()["devices"]]
    return [node["path"] for node in edits["deviceNodes"]]


@pytest.mark.parametrize("device", [FIRST, "gpu-0"])
def test_who_looks_on_at_what_nobody_has_may_look_at_instances(world, device):
    world.prepare_claim(Claim(ref(), (allocation(device, admin=True),)))

    assert paths(world) == ["/dev/nvidia0", "/dev/nvidia-caps/mig-monitor"]
    assert world.cut == ()


def test_who_looks_on_at_a_partition_is_given_what_is_there_now(world):
    world.prepare(FIRST, name="holder")
    world.prepare_claim(Claim(ref(), (allocation(FIRST, admin=True),)))
    assert paths(world) == [
        "/dev/nvidia0",
        "/dev/nvidia-caps/gpu0-mig-gi20",
        "/dev/nvidia-caps/gpu0-mig-gi20-ci0",
        "/dev/nvidia-caps/mig-monitor",
    ]
    world.preparer.unprepare(ref("holder"))

    world.preparer.prepare(ref())

    assert paths(world) == ["/dev/nvidia0", "/dev/nvidia-caps/mig-monitor"]


def test_an_instance_that_exists_and_is_gone_is_not_to_be_looked_at(world):
    there = world.node.mig.add(GPU, KEY)
    world.offers.last = world.offers.next = Offer((partition_device(ONE, 0, instance=there),))
    world.node.mig.instances.clear()

    with pytest.raises(MigInstanceNotFound):
        world.prepare_claim(Claim(ref(), (allocation(FIRST, admin=True),)))


@pytest.mark.parametrize("exists", [False, True])
def test_a_container_is_not_under_mps_in_a_partition_and_on_another_gpu(world, exists):
    spec = pod_spec("pod", container("c", ("one", ""), ("two", "")))
    gpus = (mig_gpu(), mig_gpu(1))
    world.node = type(world.node)(Inventory(gpus))
    world.node.mig.modes[GPU] = exists
    there = world.node.mig.add(GPU, KEY) if exists else None
    offer = mig_offer(*gpus)
    first = partition_device(ONE, 0, instance=there)
    devices = [first if device.name == FIRST else device for device in offer.devices]
    world.offers = FixedOffers(Offer(tuple(devices)))
    world.pods = FakePods([spec])
    world.restart()
    world.prepare_claim(replace(claim("gpu-1", name="two"), pods=(pod("pod"),)))

    with pytest.raises(ClaimError, match="not under MPS"):
        world.prepare_claim(replace(claim(FIRST, name="one", configs=(MPS,)), pods=(pod("pod"),)))


def test_a_partition_that_came_and_went_within_one_look_is_nobody_elses(world):
    live(world)
    look = world.node.refresh
    short = True

    def slow():
        nonlocal short
        if short:
            short = False
            world.prepare(FIRST)
            seen_offer = look()
            world.preparer.unprepare(ref())
            return seen_offer
        return look()

    world.offers.now()
    world.node.refresh = slow

    offer = world.offers.refresh()

    assert [device.name for device in offer.devices if device.instance] == []
    assert "gpu-0" in offer.by_name
    assert world.offers.now() == offer


class Claims:
    """What the API server knows."""

    def __init__(self, world):
        self._claims = world.api.claims

    def exists(self, claim_ref):
        return claim_ref in self._claims

    def is_deleted(self, claim_ref):
        return not self.exists(claim_ref)

    def find_by_uid(self, uid):
        return next((claim for claim in self._claims.values() if claim.ref.uid == uid), None)


def reconciler(world):
    claims: Any = Claims(world)
    return ClaimReconciler(
        world.ledger, claims, world.preparer, POOL, lambda: world.node.inventory().gpus
    )


def test_the_partition_of_an_unreadable_record_is_nobody_elses(world):
    live(world)
    world.prepare(FIRST)
    before = world.offers.refresh()

    damage(world)
    after = world.offers.refresh()

    assert after.by_name[FIRST].instance is None
    assert [device.name for device in after.devices] == [device.name for device in before.devices]


def test_a_claim_with_an_unreadable_record_goes_on_with_its_partition(world):
    live(world)
    world.prepare(FIRST)
    instances = dict(world.node.mig.instances)

    damage(world)
    reconciler(world).look()

    assert world.node.mig.instances == instances
    assert [
        holding.created_for_claims
        for record in world.ledger.records()
        for holding in record.holdings
    ] == [True]
    world.preparer.unprepare(ref())
    assert (world.cut, world.mode) == ((), False)


def test_with_a_claim_that_is_gone_goes_the_partition_of_its_unreadable_record(world):
    world.prepare(FIRST)
    damage(world)
    world.api.claims.clear()

    reconciler(world).look()

    assert (world.cut, world.mode) == ((), False)
    assert world.ledger.set_aside() == ()
    assert not [path for path in (world.directory / "claims").rglob("*") if path.is_file()]


def test_a_claim_that_was_allocated_anew_leaves_the_partition_of_its_unreadable_record(world):
    world.prepare(FIRST)
    damage(world)
    world.api.claims[ref()] = claim(SECOND)

    reconciler(world).look()

    assert world.cut == (partition(ONE, 1).key,)
    world.preparer.unprepare(ref())
    assert (world.cut, world.mode) == ((), False)


def test_who_shares_a_partition_with_an_unreadable_record_does_not_remove_it(world):
    share_of_side(world, "first")
    share_of_side(world, "second")
    damage(world, "first")

    world.preparer.unprepare(ref("second"))

    assert world.cut == (partition(THREE, 0).key,)
    assert world.mode is True


def test_a_whole_gpu_that_somebody_cut_since_the_last_look_says_so(world):
    world.node.mig.modes[GPU] = True
    foreign = world.node.mig.add(GPU, KEY)
    world.offers.next = Offer((partition_device(ONE, 0, instance=foreign),))

    with pytest.raises(UnknownDevice, match=f"'gpu-0', but {FIRST} is in its place now"):
        world.prepare("gpu-0")

    assert (world.node.done, world.ledger.records()) == ([], ())


def test_a_whole_gpu_that_stays_cut_is_not_prepared(world):
    world.node.mig.modes[GPU] = True
    world.node.mig.add(GPU, KEY)

    with pytest.raises(
        PlacementTaken, match="gpu-0 has an instance of profile 19 at 0 that was not created"
    ):
        world.prepare("gpu-0")

    assert (world.node.done, world.ledger.records()) == ([], ())


@pytest.mark.parametrize("allocated", [allocation("gpu-0"), fraction("20Gi", "gpu-0")])
def test_a_gpu_that_is_not_cut_for_claims_is_refused_while_somebody_has_its_mode_on(
    world, allocated
):
    world.offers = FixedOffers(Offer((Device(mig_gpu(), SLICEABLE),)))
    world.restart()
    world.node.mig.modes[GPU] = True

    with pytest.raises(NodeError, match="MIG mode of gpu-0 is on now, so that nothing can"):
        world.prepare_claim(Claim(ref(), (allocated,)))
    assert not world.ledger.records()

    world.node.mig.modes[GPU] = False
    assert world.preparer.prepare(ref())


def test_a_gpu_that_does_not_say_its_mode_is_prepared(world):
    world.offers = FixedOffers(Offer((Device(mig_gpu(), SLICEABLE),)))
    world.restart()

    def silent(setting):
        raise NodeError("the GPU does not answer")

    world.node.current_setting = silent

    assert world.prepare("gpu-0")


@pytest.mark.point(84)
@pytest.mark.parametrize("kind", [CreatePartition, RemovePartition, SetMigMode])
def test_killed_at_any_step_with_an_unreadable_record_the_next_start_goes_on(world, kind):
    world.prepare(FIRST)
    damage(world)
    world.api.claims[ref()] = claim(SECOND)
    with (
        world.failing(lambda step: isinstance(step, kind), Killed),
        contextlib.suppress(Killed, DriverError),
    ):
        reconciler(world).look()
    world.restart()
    world.preparer.prepare(ref())
    assert world.cut == (partition(ONE, 1).key,)

    world.preparer.unprepare(ref())

    assert (world.cut, world.mode) == ((), False)
