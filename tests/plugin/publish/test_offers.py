"""What is offered is put together anew only where something of it changed."""

import threading
from typing import Any, cast

import pytest

from dra_driver.base.errors import ApiServerError, Forbidden, Unreachable
from dra_driver.model.gpus import Inventory
from dra_driver.model.health import Fault, Faults, Problem
from dra_driver.model.offer import ApiFeatures, Replica, partition_name
from dra_driver.model.profiles import DEFAULT_PROFILE, Profile, SharingStrategy
from dra_driver.model.records import Holding
from dra_driver.plugin.publish.offers import ApiFeatureProbe, OfferBuilder
from tests.builders import gpu, inventory, ref
from tests.fakes.holds import FakeHolds
from tests.fakes.node import FakeNode
from tests.plan.mig.boards import dynamic, instance, mig, mig_gpu, partition


class World:
    def __init__(self, node: Any = None, profile=DEFAULT_PROFILE, mps=True):
        self.node = node or cast(Any, FakeNode(inventory(1)))
        self.profile = profile
        self.features = ApiFeatures()
        self.ledger = FakeHolds()
        self.faults: Faults = ()
        self.offers = OfferBuilder(
            self.node,
            lambda: self.profile,
            lambda: self.features,
            self.ledger,
            mps=mps,
            health=lambda _inventory: self.faults,
        )


H100 = "h100-80-sxm"
ONE = instance(mig(H100), "1g.10gb", 0)
EMPTY, PARTITIONED = mig_gpu(H100), mig_gpu(H100, on=True, instances=(ONE,))


class ChangingNode(FakeNode):
    """A node that has one GPU, and while its GPUs are read something happens."""

    def __init__(self, gpu, meanwhile=lambda: None):
        super().__init__(Inventory((gpu,)))
        self.meanwhile = meanwhile

    def refresh(self):
        self.meanwhile()
        return super().refresh()


def holds():
    """What a claim holds whose partition was created."""
    name = partition_name(EMPTY, partition(mig(H100), "1g.10gb", 0))
    holding = Holding(
        ref(),
        name,
        gpu=EMPTY.uuid,
        partition=ONE.key,
        created_for_claims=True,
        offered=("1g.10gb",),
    )
    return {name: (holding,)}


def holds_all():
    """What a claim holds for which a GPU was replicated before."""
    held = Holding(ref(), gpu(0).name, gpu=gpu(0).uuid, shape=Replica(0, 2, 1 << 30))
    return {held.gpu: (held,)}


def unmanaged(offer):
    """The partitions that somebody else created."""
    return [str(device.name) for device in offer.devices if device.instance is not None]


def partitioning(gpu):
    """A node whose GPU is partitioned for claims."""
    return World(ChangingNode(gpu), dynamic("1g.10gb"))


def names(offer):
    return [str(device.name) for device in offer.devices]


def test_as_long_as_nothing_changes_it_is_the_same_offer():
    world = World()

    assert world.offers.now() is world.offers.now() is world.offers.refresh()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda w: setattr(w, "profile", Profile("other")), id="profile"),
        pytest.param(
            lambda w: setattr(w, "features", ApiFeatures(device_taints=False)), id="api-server"
        ),
        pytest.param(lambda w: w.ledger.set(holds_all()), id="ledger"),
    ],
)
def test_any_part_that_changes_makes_another_offer(change):
    world = World()
    before = world.offers.now()

    change(world)

    assert world.offers.now() is not before


def test_a_claim_that_takes_a_gpu_as_it_is_offered_changes_nothing_once_that_was_put_together():
    world = World()
    device = world.offers.now().devices[0]
    held = Holding(ref(), device.name, gpu=device.gpu.uuid, shape=device.shape)
    offers = []
    for holdings in [{held.gpu: (held,)}, {}] * 2:
        world.ledger.set(holdings)
        offers.append(world.offers.now())

    assert offers[2:] == offers[:2]
    assert all(again is offer for again, offer in zip(offers[2:], offers[:2], strict=True))


def test_a_gpu_that_appears_is_offered_after_another_look():
    world = World()
    world.offers.now()
    world.node.now = Inventory((gpu(0), gpu(1)))

    assert names(world.offers.now()) == ["gpu-0", "gpu-0-mon"]
    assert names(world.offers.refresh()) == ["gpu-0", "gpu-1", "gpu-0-mon", "gpu-1-mon"]


@pytest.mark.parametrize("mps", [True, False])
def test_without_an_mps_agent_nothing_is_shared_by_mps(mps):
    devices = World(mps=mps).offers.now().devices

    by_mps = {SharingStrategy.MPS in device.rules.strategies for device in devices}

    assert by_mps == {mps}


def test_a_partition_of_a_claim_that_ends_while_we_look_is_nobody_elses():
    world = partitioning(PARTITIONED)
    world.ledger.set(holds())
    world.node.meanwhile = lambda: world.ledger.set({})

    offered = world.offers.refresh()

    assert unmanaged(offered) == []
    assert unmanaged(world.offers.now()) == []  # of the same look


def test_a_partition_of_a_claim_that_begins_while_we_look_is_nobody_elses():
    world = partitioning(PARTITIONED)
    world.node.meanwhile = lambda: world.ledger.set(holds())

    world.offers.refresh()
    world.ledger.set({})

    assert unmanaged(world.offers.now()) == []


def test_a_partition_that_is_there_after_its_claim_went_is_somebody_elses_at_the_next_look():
    world = partitioning(PARTITIONED)
    world.ledger.set(holds())
    world.offers.refresh()
    world.ledger.set({})

    assert unmanaged(world.offers.now()) == []
    assert unmanaged(world.offers.refresh()) == ["gpu-0-mig-1g10gb-19-0"]


def test_what_was_ours_counts_for_a_look_that_somebody_else_began():
    world = partitioning(EMPTY)
    world.ledger.set(holds())
    world.offers.refresh()
    world.ledger.set({})
    world.node.now = Inventory((PARTITIONED,))

    world.node.refresh()

    assert unmanaged(world.offers.now()) == []
    assert unmanaged(world.offers.refresh()) == ["gpu-0-mig-1g10gb-19-0"]


def test_a_partition_that_came_and_went_within_one_look_is_nobody_elses():
    world = partitioning(PARTITIONED)

    def come_and_go():
        world.ledger.set(holds())
        world.ledger.set({})

    world.node.meanwhile = come_and_go

    assert unmanaged(world.offers.refresh()) == []
    assert unmanaged(world.offers.now()) == []
    world.node.meanwhile = lambda: None
    assert unmanaged(world.offers.refresh()) == ["gpu-0-mig-1g10gb-19-0"]


def test_of_two_looks_at_once_the_later_one_counts():
    """The first one is slow: what it finds is not to stand for what the second one finds."""
    world = partitioning(EMPTY)
    begun, go_on, looks = threading.Event(), threading.Event(), []

    def slow():
        looks.append(world.node.now)
        if len(looks) == 1:
            begun.set()
            assert go_on.wait(10)

    world.node.meanwhile = slow
    first = threading.Thread(target=world.offers.refresh)
    first.start()
    assert begun.wait(10)
    second = threading.Thread(target=world.offers.refresh)
    second.start()
    second.join(0.05)
    assert len(looks) == 1
    assert world.offers.now(), "who does not look does not wait"
    world.node.now = Inventory((PARTITIONED,))

    go_on.set()
    first.join(10)
    second.join(10)

    assert unmanaged(world.offers.now()) == ["gpu-0-mig-1g10gb-19-0"]


def test_the_last_offer_is_that_of_the_newest_look_whichever_thread_is_done_last():
    world = World()
    begun, go_on = threading.Event(), threading.Event()

    def health(_inventory):
        if not begun.is_set():  # the first who asks waits long for an answer
            begun.set()
            assert go_on.wait(60)
        return ()

    world.offers = OfferBuilder(
        world.node,
        lambda: world.profile,
        lambda: world.features,
        world.ledger,
        health=health,
    )
    slow = threading.Thread(target=world.offers.now)
    slow.start()
    assert begun.wait(60)
    world.node.now = Inventory((gpu(0), gpu(1)))
    newest = world.offers.refresh()
    go_on.set()
    slow.join(60)

    assert not slow.is_alive()
    assert world.offers.last_offer is newest


def test_an_offer_with_partitions_is_the_same_as_long_as_nothing_changes():
    world = partitioning(PARTITIONED)
    world.ledger.set(holds())

    assert world.offers.now() is world.offers.refresh() is world.offers.now()


def probe_of(*answers):
    """A probe of an API server that answers so, one after the other."""
    remaining = list(answers)

    def ask():
        answer = remaining.pop(0)
        if isinstance(answer, ApiServerError):
            raise answer
        return answer

    return ApiFeatureProbe(ask)


def test_the_api_server_is_asked_again_from_time_to_time_and_by_nobody_who_wants_to_know():
    features = probe_of(ApiFeatures(), ApiFeatures(device_taints=False))

    assert features.probe() is None
    assert [features(), features()] == [ApiFeatures(), ApiFeatures()]
    assert features.probe() is None
    assert features() == ApiFeatures(device_taints=False)


def test_until_the_api_server_answered_once_nothing_can_be_offered_and_it_is_asked_soon():
    features = probe_of(Unreachable("no answer"), ApiFeatures(capacity=False))

    assert features.probe() == 1.0
    with pytest.raises(ApiServerError, match="keeps of a slice is not known: no answer"):
        features()
    assert features.probe() is None
    assert features() == ApiFeatures(capacity=False)


def test_an_api_server_that_refuses_for_long_is_asked_ever_more_seldom():
    features = probe_of(*[Forbidden("no rule")] * 8)

    assert [features.probe() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_the_first_answer_is_waited_for():
    features = probe_of(ApiFeatures())
    asking = threading.Timer(0.1, features.probe)
    asking.start()

    assert features() == ApiFeatures()
    asking.join()


def test_what_was_known_counts_while_the_api_server_is_away():
    features = probe_of(ApiFeatures(), Unreachable("no answer"), ApiFeatures(device_taints=False))
    answers = []
    for _ in range(3):
        assert features.probe() is None
        answers.append(features())

    assert answers == [ApiFeatures(), ApiFeatures(), ApiFeatures(device_taints=False)]


def test_an_offer_has_the_taints_of_what_is_wrong_and_stays_the_same_while_that_does():
    world = World()
    well = world.offers.now()
    world.faults = (Fault(gpu(0).uuid, Problem.XID, "79"),)

    sick = world.offers.now()

    assert [taint.key for taint in sick.devices[0].taints] == ["gpu.nvidia.com/xid"]
    assert world.offers.now() is sick
    world.faults = ()
    assert world.offers.now() == well
