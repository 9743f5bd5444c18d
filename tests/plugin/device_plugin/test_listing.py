"""One process at a time lists the devices, and as long as it is to."""

import threading
from dataclasses import replace

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.base.threads import UNTIL_WOKEN
from dra_driver.k8s.node_labels import NodeStatus
from dra_driver.kubeletplugin.device_plugin.resources import ResourceName
from dra_driver.kubeletplugin.serve.rolling_update import PluginLease
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_api import ApiChoice
from dra_driver.plugin.device_plugin.listing import DeviceListing
from tests.fakes.allocations import DRAINING, OFF, ON, AllocationWorld, replica
from tests.waiting import eventually

BESIDE_ANOTHER = replace(DRAINING, other_plugin="nvidia-gpu.sock is there")


class FakeServer:
    """Remembers what it was told to list, and who lists now."""

    listing: list["FakeServer"] = []  # noqa: RUF012 - of all processes

    def __init__(self) -> None:
        self.offered: dict[str, dict[str, bool]] = {}  # by resource and id, whether it is healthy
        self.resources = ()
        self.ended: frozenset[str] | None = None  # resources of an earlier process
        self.kubelet_knows = True
        self.frozen = False

    def offer(self, resources):
        if self not in FakeServer.listing:
            FakeServer.listing.append(self)
        assert FakeServer.listing == [self], "registrations overlap"
        self.resources = tuple(resources)
        self.offered = {
            resource.name: {device.id: device.healthy for device in resource.devices}
            for resource in resources
        }

    def freeze(self, frozen):
        self.frozen = frozen

    def end(self, leftovers):
        self.ended = frozenset(leftovers)
        self.offered = {}

    @property
    def has_ended(self):
        return self.kubelet_knows

    def withdraw(self):
        if self in FakeServer.listing:
            FakeServer.listing.remove(self)
        self.offered = {}


class Process:
    """A process of the plugin on the node of *world*."""

    def __init__(self, world, directory, name, newest, turn_seconds=60.0):
        self.server = FakeServer()
        self.not_taken: set[ResourceName] = set()  # by another device plugin
        lease = PluginLease(directory, name, lambda: None)
        self.listing = DeviceListing(
            self.server,
            lease,
            world.allocations._parts.offers,
            world.ledger,
            world.choice,
            ResourceNames(),
            lambda: newest() is self,
            world.reconciler,
            lambda: world.node_status,
            lambda offered: self.not_taken & set(offered),
            turn_seconds,
        )

    @property
    def gpus(self):
        return self.server.offered.get("nvidia.com/gpu", {})


@pytest.fixture
def world(tmp_path):
    FakeServer.listing = []
    world = AllocationWorld(tmp_path, gpus=1, replicas=2)
    world.reconciler.look()
    return world


@pytest.fixture
def process(world, tmp_path):
    process = Process(world, tmp_path, "first", lambda: process)
    yield process
    process.listing.stop()


def list_beside_another(world, process):
    """One of our pods has a device, and another device plugin comes."""
    world.admit("train", replica(1))
    process.listing.step()
    world.choice.set(BESIDE_ANOTHER)
    process.listing.step()


def test_what_is_offered_is_listed_once_it_is_known_what_containers_have(world, process):
    world.reconciler.ready = False
    process.listing.step()
    assert (process.gpus, process.listing.listed) == ({}, False)

    world.reconciler.ready = True
    process.listing.step()

    assert process.gpus == {replica(0): True, replica(1): True}
    assert process.listing.listed


def test_what_is_listed_is_found_once_for_an_offer_and_what_is_held_of_it(world, process):
    process.listing.step()
    (first,) = process.server.resources
    process.listing.step()
    assert process.server.resources[0] is first

    world.admit("train", replica(1))
    process.listing.step()
    (second,) = process.server.resources
    assert second is not first
    process.listing.step()
    assert process.server.resources[0] is second


def test_a_node_that_gives_nothing_more_out_keeps_what_is_held_and_lists_the_rest_as_unhealthy(
    world, process
):
    world.admit("train", replica(1))
    world.choice.set(DRAINING)

    process.listing.step()

    assert process.gpus == {replica(0): False, replica(1): True}


def test_beside_another_device_plugin_only_what_our_pods_have_is_listed(world, process):
    world.choice.set(BESIDE_ANOTHER)
    process.listing.step()
    assert process.server.offered == {}

    world.choice.set(ON)
    world.admit("train", replica(1))
    world.choice.set(BESIDE_ANOTHER)
    process.listing.step()

    assert process.gpus == {replica(0): False, replica(1): True}


def test_beside_a_device_plugin_that_comes_later_the_list_stays_and_is_begun_anew_once_that_is_gone(
    world, process
):
    """To end it would have the kubelet close its connection with the other one."""
    process.listing.step()
    world.choice.set(BESIDE_ANOTHER)
    process.listing.step()
    assert process.gpus == {replica(0): True, replica(1): True}
    assert process.server.frozen, "the kubelet would take a new list for that of the other one"

    world.choice.set(ON)
    assert process.listing.step() == pytest.approx(0.1)
    assert FakeServer.listing == [], "the kubelet dials only who registers"
    looks = []
    process.listing.look_soon = lambda: looks.append(1)
    process.listing.step()
    assert FakeServer.listing == [], "what the other one gave out is not known yet"
    assert looks == [1]
    world.reconciler.look()
    process.listing.step()
    assert process.gpus == {replica(0): True, replica(1): True}
    assert not process.server.frozen


def test_once_another_device_plugin_is_gone_what_our_pods_have_is_listed_while_its_pods_go_on(
    world, process
):
    """Where nobody registers the resource, no container of our pods starts again."""
    list_beside_another(world, process)
    world.choice.set(replace(BESIDE_ANOTHER, other_plugin_is_gone=True))
    process.listing.step()
    assert FakeServer.listing == [], "the kubelet dials only who registers"
    world.reconciler.look()
    process.listing.step()

    assert process.gpus == {replica(0): False, replica(1): True}
    assert not process.server.frozen


def test_what_is_recorded_is_listed_where_it_stays_unknown_what_the_other_one_gave_out(
    world, process
):
    list_beside_another(world, process)
    world.choice.set(ON)
    for _ in range(35):
        process.listing.step()

    assert process.gpus == {replica(0): False, replica(1): True}
    world.reconciler.look()
    process.listing.step()
    assert process.gpus == {replica(0): True, replica(1): True}


def test_where_the_kubelet_goes_on_asking_us_beside_another_device_plugin_nothing_more_is_offered(
    world, process
):
    """The other one has not taken the resource: each pod that came for it would fail."""
    list_beside_another(world, process)
    world.node_status = NodeStatus(allocatable={"nvidia.com/gpu.shared": "4"})  # theirs
    world.allocations.refused = process.listing.refused
    with pytest.raises(NodeError, match=r"nvidia-gpu\.sock"):
        world.allocate(replica(0))
    process.listing.step()
    assert process.server.offered == {"nvidia.com/gpu": {replica(0): False, replica(1): True}}
    assert process.server.frozen

    world.choice.set(ON)
    process.listing.step()
    world.reconciler.look()
    process.listing.step()
    assert process.gpus == {replica(0): True, replica(1): True}


def test_what_is_refused_of_one_resource_says_nothing_of_another_that_the_other_plugin_has(
    world, process
):
    process.listing.step()
    world.choice.set(BESIDE_ANOTHER)
    process.listing.step()
    process.listing.refused(ResourceName("nvidia.com/gpu.shared"))
    process.listing.step()
    assert process.gpus == {replica(0): True, replica(1): True}

    process.listing.refused(ResourceName("nvidia.com/gpu"))
    process.listing.step()
    assert process.gpus == {replica(0): False, replica(1): False}


def test_of_a_resource_that_another_device_plugin_has_not_taken_nothing_more_is_offered(
    world, process
):
    list_beside_another(world, process)
    process.not_taken = {ResourceName("nvidia.com/gpu")}
    process.listing.step()
    assert process.gpus == {replica(0): False, replica(1): True}

    process.not_taken = set()
    process.listing.step()
    assert process.gpus == {replica(0): False, replica(1): True}, "it may have it now"


def test_a_node_of_another_api_lists_nothing_and_waits_to_be_woken(world, process):
    process.listing.step()
    process.server.kubelet_knows = False
    world.choice.set(OFF)

    assert process.listing.step() == pytest.approx(0.1)
    assert process.gpus == {}
    assert FakeServer.listing == [process.server], "nobody else lists before the kubelet knows"
    process.server.kubelet_knows = True
    assert process.listing.step() == UNTIL_WOKEN
    assert FakeServer.listing == []
    world.choice.set(ON)
    process.listing.step()
    assert process.gpus == {replica(0): True, replica(1): True}


KILLED = NodeStatus(
    allocatable={"nvidia.com/gpu": "0", "nvidia.com/gpu.shared": "0", "x/nic": "0", "cpu": "2"},
    capacity={"nvidia.com/gpu": "2", "nvidia.com/gpu.shared": "0", "x/nic": "1", "cpu": "2"},
)


def test_the_kubelet_forgets_what_a_process_listed_that_was_killed_before_the_node_went_to_dra(
    world, process
):
    world.node_status = None
    world.choice.set(OFF)
    assert process.listing.step() is None
    assert process.server.ended is None, "it is not known yet what the kubelet remembers"

    world.node_status = KILLED
    assert process.listing.step() == UNTIL_WOKEN

    assert process.server.ended == {"nvidia.com/gpu"}
    process.server.ended = None
    assert process.listing.step() == UNTIL_WOKEN
    assert process.server.ended is None, "once"


def test_the_kubelet_forgets_nothing_of_another_device_plugin(world, process):
    world.node_status = KILLED
    world.choice.set(replace(OFF, other_plugin="nvidia-gpu.sock is there"))
    assert process.listing.step() == UNTIL_WOKEN

    world.node_status = replace(KILLED, allocatable=KILLED.capacity)
    world.choice.set(OFF)
    assert process.listing.step() is None
    assert process.server.ended is None

    world.node_status = KILLED
    process.listing.step()
    assert process.server.ended == {"nvidia.com/gpu"}


def test_nothing_is_ended_before_the_api_is_known(world, process):
    world.node_status = KILLED
    world.choice.set(ApiChoice())

    assert process.listing.step() == UNTIL_WOKEN
    assert process.server.ended is None


def test_only_the_newest_process_has_the_kubelet_forget(world, tmp_path):
    newest = None
    older = Process(world, tmp_path, "older", lambda: newest)
    world.node_status = KILLED
    world.choice.set(OFF)

    assert older.listing.step() == pytest.approx(1.0)
    assert older.server.ended is None


@pytest.mark.parametrize("known_by", ["our record", "the kubelet"])
def test_what_a_container_has_never_leaves_the_list(world, process, known_by):
    world.admit("train", replica(1))
    world.reconciler.look()
    if known_by == "the kubelet":
        world.preparer.take_back_if(world.recorded(replica(1)).claim, lambda: True)
    else:
        world.reconciler.held = frozenset()
    world.node.now = type(world.node.now)()
    world.node.refresh()

    process.listing.step()

    assert process.gpus == {replica(1): False}


def test_an_older_process_lists_until_the_newer_one_is_there_to_do_it(world, tmp_path):
    newest = None
    older = Process(world, tmp_path, "older", lambda: newest)
    newest = older
    older.listing.step()
    newer = Process(world, tmp_path, "newer", lambda: newest)
    newest = newer  # it has begun to start
    assert older.listing.step()
    assert FakeServer.listing == [older.server]

    taking_over = threading.Thread(target=newer.listing.step)
    taking_over.start()
    eventually(lambda: older.listing.step() and not older.gpus, "the older process lets go")
    taking_over.join(60)

    assert FakeServer.listing == [newer.server]
    assert newer.gpus == {replica(0): True, replica(1): True}
    older.listing.step()
    assert FakeServer.listing == [newer.server]
    newest = older  # the newer one has ended
    newer.listing.stop()
    older.listing.step()
    assert older.gpus == {replica(0): True, replica(1): True}
    older.listing.stop()


def test_a_newer_process_waits_for_an_older_one_that_does_not_let_go(world, tmp_path):
    newest = None
    older = Process(world, tmp_path, "older", lambda: newest)
    newest = older
    older.listing.step()
    newest = newer = Process(world, tmp_path, "newer", lambda: newest, turn_seconds=0.1)

    assert newer.listing.step() == pytest.approx(0.1)

    assert FakeServer.listing == [older.server]
    older.listing.stop()


def test_what_the_node_has_left_of_an_earlier_list_is_listed_as_empty(world, process):
    world.node_status = NodeStatus(
        allocatable={"nvidia.com/mig-1g.5gb": "2", "nvidia.com/gpu": "2", "x/nic": "4"}
    )
    process.listing.step()
    assert process.server.offered["nvidia.com/mig-1g.5gb"] == {}
    assert process.gpus == {replica(0): True, replica(1): True}

    world.node_status = NodeStatus(allocatable={"nvidia.com/mig-1g.5gb": "0"})
    process.listing.step()

    assert process.server.offered.keys() == {"nvidia.com/gpu"}
