"""Unmanaged instances stay, and those of claims are known as ours."""

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
from dra_driver.model.steps import CreatePartition, RemovePartition, SetMigMode
from dra_driver.plugin.claims.reconciler import ClaimReconciler
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.mig.lost_instances import LostInstances
from dra_driver.plugin.publish.offers import OfferBuilder
from tests.builders import POOL, SLICEABLE, allocation, claim, fraction, pod, ref
from tests.fakes.mig import FOUR, H100, ONE, THREE, mig_gpu, mig_offer, partition, partition_device
from tests.fakes.pods import FakePods, container, pod_spec
from tests.plan.mig.boards import dynamic
from tests.plugin.mig.world import (
    CLEAN,
    FIRST,
    GPU,
    KEY,
    MPS,
    SECOND,
    SECOND_KEY,
    FixedOffers,
    Killed,
    World,
)

THREE_KEY = partition(THREE, 0).key


def find_lost(world):
    """What the plugin does every few seconds."""
    nobody: Any = None
    claims = world.preparer.prepared_claims
    LostInstances(world.node, world.ledger.records, claims, nobody, Metrics()).look()


def replace_instance(world, key=KEY):
    """Somebody removes an instance, and some time later creates the same again: the driver gives it
    the same UUID."""
    world.node.mig.remove(GPU, key)
    find_lost(world)
    return world.node.mig.add(GPU, key)


class LiveWorld(World):
    """It offers what the node finds."""

    def open_offers(self):
        self.node.refresh = self.refresh
        self.offers = OfferBuilder(
            self.node, lambda: dynamic("1g.10gb", "3g.40gb"), ApiFeatures, self.ledger
        )

    def refresh(self):
        mig = self.node.mig
        instances = [mig.instances[key] for key in sorted(mig.instances) if key[0] == GPU]
        info = MigInfo(mig.modes[GPU], mig.modes[GPU], True, H100, tuple(instances))
        self.node.now = Inventory((replace(mig_gpu(), mig=info),))
        return type(self.node).refresh(self.node)


@pytest.fixture
def live_world(tmp_path):
    return LiveWorld(tmp_path)


def damage(world, name="claim"):
    """The record of a claim is not readable any more, and its partition still exists."""
    (path,) = (world.directory / "claims").rglob(f"uid-{name}.json")
    path.write_text(path.read_text()[:60])
    world.restart()


def test_an_unmanaged_instance_in_the_same_place_is_not_removed_with_the_claim(world):
    world.prepare(FIRST)
    unmanaged = replace_instance(world)

    world.unprepare()

    assert world.node.mig.instances == {(GPU, KEY): unmanaged}
    assert not world.ledger.records()


def test_nor_is_it_when_the_claim_is_prepared_again(world):
    world.prepare(FIRST)
    unmanaged = replace_instance(world)
    world.offers.next = Offer((partition_device(ONE, 0, instance=unmanaged),))

    world.preparer.prepare(ref())
    assert unmanaged.uuid in json.dumps(world.spec())
    world.unprepare()

    assert world.node.mig.instances == {(GPU, KEY): unmanaged}


@pytest.mark.point(84)
def test_killed_after_creating_the_next_start_knows_which_instances_are_ours(world):
    def die():
        raise Killed

    world.node.before_files = die
    with pytest.raises(Killed):
        world.prepare(FIRST)
    world.node.before_files = lambda: None
    world.node.mig.remove(GPU, KEY)
    unmanaged = world.node.mig.add(GPU, partition(FOUR, 0).key)

    world.restart()

    assert (world.partitions, world.ledger.records()) == ((unmanaged.key,), ())


@pytest.mark.parametrize("gpus", [(mig_gpu(),), (mig_gpu(), mig_gpu(1))])
def test_a_partition_that_was_not_created_yet_is_not_removed(world, gpus):
    """Something else fails before, on this GPU or on another, and somebody is quicker meanwhile."""
    world.use(*gpus)
    devices = [FIRST, "gpu-1-mig-1g10gb-19-0"][: len(gpus)]

    def fail(step):
        if isinstance(step, SetMigMode) and step.on and step.gpu == gpus[-1].uuid:
            world.node.mig.modes[GPU] = True
            world.node.mig.add(GPU, KEY)
            raise NodeError("in use by nv-hostengine")

    with world.before_steps(fail), pytest.raises(NodeError, match="nv-hostengine"):
        world.prepare(*devices)

    assert (world.partitions, world.ledger.records()) == ((KEY,), ())


def turns_mode_off(step):
    return step == SetMigMode(GPU, False)


def fail_to_share(world, name):
    """A claim is to have a share, but NVML does not answer any more once its partition exists."""
    find = world.node.instance

    def instance(gpu, key):
        if world.node.mig.on(GPU):
            raise TimedOut("looking for the instance took longer than 5 s")
        return find(gpu, key)

    world.node.instance = instance
    with pytest.raises(NodeError):
        world.share(name)
    world.node.instance = find


def test_a_partition_that_was_created_anew_for_a_claim_that_failed_goes(world):
    world.share("first")
    world.share("second")
    world.node.mig.instances.clear()
    fail_to_share(world, "third")

    world.unprepare("first", "second", "third")

    assert world.state == CLEAN


def test_so_does_one_beside_a_claim_that_was_half_given_back(world):
    world.share("first")
    late = TimedOut("turning MIG mode off took longer than 15 s")
    with world.failing(turns_mode_off, late), pytest.raises(NodeError):
        world.unprepare("first")
    fail_to_share(world, "second")

    world.unprepare("first", "second")

    assert world.state == CLEAN


def test_a_shared_partition_stays_where_a_claim_fails_that_was_to_share_it(world):
    world.share("first")
    fail_to_share(world, "second")

    world.unprepare("second")

    assert world.partitions == (THREE_KEY,)


def test_so_it_does_where_that_claim_fails_as_it_would_create_it(world):
    world.share("first")
    instances = dict(world.node.mig.instances)
    late = TimedOut("creating took longer than 15 s")
    with (
        world.failing(lambda step: isinstance(step, CreatePartition), late),
        pytest.raises(NodeError),
    ):
        world.share("second")
    world.unprepare("second")

    assert [step.unless for step in world.node.undone if isinstance(step, RemovePartition)] == [
        frozenset(instance.uuid for instance in instances.values())
    ]
    assert world.node.mig.instances == instances


def test_a_gpu_whose_mig_mode_stayed_on_is_off_for_good_after_a_claim_for_all_of_it(world):
    world.prepare(FIRST)
    error = NodeError("in use by nv-hostengine")
    with world.failing(turns_mode_off, error), contextlib.suppress(NodeError):
        world.unprepare()
    world.restart()
    world.node.mig.modes[GPU] = True

    world.prepare("gpu-0", name="whole")
    assert world.mode is False
    world.unprepare("whole")

    assert world.mode is False


def test_half_an_instance_goes_with_its_claim(world):
    """Somebody destroyed the compute instance only: nobody else knows what to do with the rest."""
    world.prepare(FIRST)
    find = world.node.instance

    def gone(gpu, key):
        raise MigInstanceNotFound("it has no compute instance")

    world.node.instance = gone
    find_lost(world)
    world.node.instance = find

    world.unprepare()

    assert world.partitions == ()


def test_a_claim_that_joins_does_not_get_an_unmanaged_instance(world):
    world.share("first")
    unmanaged = replace_instance(world, THREE_KEY)

    with pytest.raises(
        PlacementTaken, match="gpu-0 has an instance of profile 9 at 0 that was not created"
    ):
        world.share("second")
    world.unprepare("first")

    assert list(world.node.mig.instances.values()) == [unmanaged]


def test_claims_that_share_a_partition_which_is_created_anew_leave_nothing(world):
    world.share("first")
    world.share("second")
    world.node.mig.instances.clear()
    world.preparer.prepare(ref("first"))  # the second one's pods never had this one

    world.unprepare("first", "second")

    assert world.state == CLEAN


def test_a_claim_that_has_lost_one_of_its_partitions_keeps_the_other(world):
    world.prepare(FIRST, SECOND)
    world.node.mig.remove(GPU, KEY)
    before = dict(world.node.mig.instances)

    with pytest.raises(
        MigInstanceNotFound, match=rf"has lost {FIRST}: .* may still use {SECOND}, so"
    ):
        world.preparer.prepare(ref())

    assert (world.node.mig.instances, world.node.undone) == (before, [])
    world.unprepare()
    assert world.partitions == ()


def test_a_claim_that_computes_and_has_admin_access_too_keeps_its_partition(world):
    world.prepare(SECOND, name="holder")
    both = Claim(ref(), (allocation(FIRST), allocation(SECOND, request="look", admin=True)))
    answer = world.prepare_claim(both)
    world.unprepare("holder")
    before = dict(world.node.mig.instances)

    assert world.preparer.prepare(ref()) == answer
    assert world.node.mig.instances == before


MONITOR_ONLY = ["/dev/nvidia0", "/dev/nvidia-caps/mig-monitor"]


@pytest.mark.parametrize("device", [FIRST, "gpu-0"])
def test_admin_access_to_a_device_that_nobody_holds_creates_nothing(world, device):
    world.prepare_claim(Claim(ref(), (allocation(device, admin=True),)))

    assert world.device_nodes == MONITOR_ONLY
    assert world.partitions == ()


def test_admin_access_to_a_partition_is_to_the_instance_that_exists_now(world):
    world.prepare(FIRST, name="holder")
    world.prepare_claim(Claim(ref(), (allocation(FIRST, admin=True),)))
    instance = ["/dev/nvidia-caps/gpu0-mig-gi20", "/dev/nvidia-caps/gpu0-mig-gi20-ci0"]
    assert world.device_nodes == [MONITOR_ONLY[0], *instance, MONITOR_ONLY[1]]
    world.unprepare("holder")

    world.preparer.prepare(ref())

    assert world.device_nodes == MONITOR_ONLY


def test_admin_access_to_an_unmanaged_instance_that_is_gone_is_refused(world):
    instance = world.node.mig.add(GPU, KEY)
    world.offers = FixedOffers(partition_device(ONE, 0, instance=instance))
    world.restart()
    world.node.mig.instances.clear()

    with pytest.raises(MigInstanceNotFound):
        world.prepare_claim(Claim(ref(), (allocation(FIRST, admin=True),)))


@pytest.mark.parametrize("exists", [False, True])
def test_a_container_is_not_under_mps_in_a_partition_and_on_another_gpu(world, exists):
    gpus = (mig_gpu(), mig_gpu(1))
    world.pods = FakePods([pod_spec("pod", container("c", ("one", ""), ("two", "")))])
    world.use(*gpus)
    world.node.mig.modes[GPU] = exists
    first = partition_device(ONE, 0, instance=world.node.mig.add(GPU, KEY) if exists else None)
    devices = [first if device.name == FIRST else device for device in mig_offer(*gpus).devices]
    world.offers = FixedOffers(*devices)
    world.restart()
    world.prepare_claim(replace(claim("gpu-1", name="two"), pods=(pod("pod"),)))

    with pytest.raises(ClaimError, match="not under MPS"):
        world.prepare_claim(replace(claim(FIRST, name="one", configs=(MPS,)), pods=(pod("pod"),)))


def test_a_partition_that_came_and_went_within_one_look_is_not_unmanaged(live_world):
    world, looks = live_world, []

    def slow():
        looks.append("look")
        if len(looks) > 1:
            return world.refresh()
        world.prepare(FIRST)
        inventory = world.refresh()
        world.unprepare()
        return inventory

    world.offers.now()
    world.node.refresh = slow

    offer = world.offers.refresh()

    assert [device.name for device in offer.devices if device.instance] == []
    assert "gpu-0" in offer.by_name
    assert world.offers.now() == offer


class Claims:
    """The claims that the API server has."""

    def __init__(self, world):
        self._claims = world.api.claims

    def exists(self, claim_ref):
        return claim_ref in self._claims

    def is_deleted(self, claim_ref):
        return not self.exists(claim_ref)

    def find_by_uid(self, uid):
        return next((claim for claim in self._claims.values() if claim.ref.uid == uid), None)


def reconcile(world):
    def gpus():
        return world.node.inventory().gpus

    claims: Any = Claims(world)
    ClaimReconciler(world.ledger, claims, world.preparer, POOL, gpus).look()


def test_the_partition_of_an_unreadable_record_is_not_unmanaged(live_world):
    live_world.prepare(FIRST)
    before = live_world.offers.refresh()

    damage(live_world)
    after = live_world.offers.refresh()

    assert after.by_name[FIRST].instance is None
    assert [device.name for device in after.devices] == [device.name for device in before.devices]


def test_nobody_is_told_to_remove_what_may_be_of_an_unreadable_record(world):
    world.prepare(FIRST, name="first")
    (recorded,) = (world.directory / "claims").rglob("*.partitions")
    recorded.write_text("{")
    damage(world, "first")

    with pytest.raises(NodeError, match="may be held by the claim with UID uid-first"):
        world.prepare(FIRST, name="second")


def test_a_claim_with_an_unreadable_record_goes_on_with_its_partition(live_world):
    live_world.prepare(FIRST)
    instances = dict(live_world.node.mig.instances)

    damage(live_world)
    reconcile(live_world)

    assert live_world.node.mig.instances == instances
    (record,) = live_world.ledger.records()
    assert [holding.created_for_claims for holding in record.holdings] == [True]
    live_world.unprepare()
    assert live_world.state == CLEAN


def test_with_a_claim_that_is_gone_goes_the_partition_of_its_unreadable_record(world):
    world.prepare(FIRST)
    damage(world)
    world.api.claims.clear()

    reconcile(world)

    assert (world.state, world.ledger.set_aside()) == (CLEAN, ())
    assert not [path for path in (world.directory / "claims").rglob("*") if path.is_file()]


def test_a_shared_partition_stays_while_an_unreadable_record_may_hold_it(world):
    world.share("first")
    world.share("second")
    damage(world, "first")

    world.unprepare("second")

    assert (world.partitions, world.mode) == ((THREE_KEY,), True)


def test_a_whole_gpu_that_somebody_partitioned_since_the_last_look_says_so(world):
    world.add_unmanaged()

    with pytest.raises(UnknownDevice, match=f"'gpu-0', but {FIRST} is in its place now"):
        world.prepare("gpu-0")

    assert (world.node.done, world.ledger.records()) == ([], ())


@pytest.mark.parametrize("known", [True, False])
def test_a_whole_gpu_with_an_unmanaged_instance_is_refused_and_the_remedy_is_told(world, known):
    instance = world.add_unmanaged()
    gpu = mig_gpu()
    assert gpu.mig
    if known:
        gpu = replace(gpu, mig=replace(gpu.mig, instances=(instance,)))
    world.offers.last = world.offers.next = mig_offer(gpu)

    with pytest.raises(PlacementTaken) as refused:
        world.prepare("gpu-0")

    assert "gpu-0 has an instance of profile 19 at 0 that was not created" in str(refused.value)
    mig, gi = f"nvidia-smi mig -i {gpu.pci_bus_id}", instance.gi
    commands = {
        True: f"{mig} -dci -gi {gi} and {mig} -dgi -gi {gi}, or wait",
        False: "-dci -gi <its id in nvidia-smi mig -lgi> and nvidia-smi mig",
    }
    assert commands[known] in str(refused.value)
    assert (world.node.done, world.ledger.records()) == ([], ())


@pytest.mark.parametrize("allocated", [allocation("gpu-0"), fraction("20Gi", "gpu-0")])
def test_a_gpu_without_partitions_for_claims_is_refused_while_somebody_has_its_mode_on(
    world, allocated
):
    world.use(mig_gpu(), offers=FixedOffers(Device(mig_gpu(), SLICEABLE)))
    world.node.mig.modes[GPU] = True

    with pytest.raises(NodeError, match="MIG mode of gpu-0 is on now, so that nothing can"):
        world.prepare_claim(Claim(ref(), (allocated,)))
    assert not world.ledger.records()

    world.node.mig.modes[GPU] = False
    assert world.preparer.prepare(ref())


@pytest.mark.point(84)
@pytest.mark.parametrize("kind", [None, CreatePartition, RemovePartition, SetMigMode])
def test_a_claim_allocated_anew_leaves_the_partition_of_its_unreadable_record(world, kind):
    """Also killed at any step."""
    world.prepare(FIRST)
    damage(world)
    world.api.claims[ref()] = claim(SECOND)
    with (
        world.failing(lambda step: kind is not None and isinstance(step, kind), Killed),
        contextlib.suppress(Killed, DriverError),
    ):
        reconcile(world)
    if kind is not None:
        world.restart()
        world.preparer.prepare(ref())
    assert world.partitions == (SECOND_KEY,)

    world.unprepare()

    assert world.state == CLEAN
