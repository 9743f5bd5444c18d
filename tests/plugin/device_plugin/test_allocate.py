"""Allocate: what the kubelet gives to a container is there before the answer, within a second."""

import threading
import time
from functools import partial

import pytest

from dra_driver.base.errors import (
    ClaimError,
    DeviceHeldByClaim,
    MpsAgentUnreachable,
    NodeError,
    TimedOut,
)
from dra_driver.kubeletplugin.device_plugin.resources import HostDevice
from dra_driver.model.health import Fault, Problem
from dra_driver.model.mps import mps_server_name
from dra_driver.model.offer import DEVICE_PLUGIN_FEATURES
from dra_driver.model.profiles import SharingStrategy
from dra_driver.plugin.publish.offers import OfferBuilder
from tests.builders import claim, gpu_uuid
from tests.fakes.allocations import DRAINING, GPU, OFF, AllocationWorld, in_threads, replica, whole

DRIVER_ID = "k8s.gpu.nvidia.com/driver=files"


@pytest.fixture
def world(tmp_path):
    return AllocationWorld(tmp_path)


@pytest.mark.point(143)
def test_each_device_is_answered_by_a_name_that_the_runtime_finds_and_the_driver_last(world):
    answer = world.allocate(whole(1), whole(0))

    own = [f"k8s.gpu.nvidia.com/claim={world.uid(whole(0), whole(1))}-{n}" for n in (0, 1)]
    assert answer.cdi_names == (*own, DRIVER_ID)
    assert (answer.env, answer.mounts, answer.devices) == ((), (), ())
    assert world.cdi_names == set(answer.cdi_names)
    assert world.record(whole(0), whole(1)).completed


@pytest.mark.point(136, 143, 146)
def test_a_kubelet_that_takes_no_names_gets_the_same_file_by_file(world):
    world.takes_names = False

    answer = world.allocate(whole(1))

    assert answer.cdi_names == ()
    assert HostDevice("/dev/nvidia1", "/dev/nvidia1", "rw") in answer.devices
    assert ("GPU_DEVICE_1_UUID", str(whole(1))) in answer.env
    assert not [name for name, _ in answer.env if name.endswith("_CLAIM")]
    documents = [m for m in answer.mounts if str(world.uid(whole(1))) in m.host_path]
    assert [m.read_only for m in documents] == [True]
    libraries = [m for m in answer.mounts if m.container_path.endswith("/libcuda.so.1")]
    assert {m.host_path for m in libraries} == {"/usr/lib64/libcuda.so.580.95.05"}


@pytest.mark.point(137, 142)
@pytest.mark.parametrize("takes_names", [True, False])
@pytest.mark.parametrize("between", ["nothing", "a restart", "a reboot"])
def test_the_same_devices_in_any_order_give_the_same_answer(world, takes_names, between):
    world.takes_names = takes_names
    first = world.allocate(whole(0), whole(1))
    if between == "a restart":
        world.start()
    elif between == "a reboot":
        world.reboot()

    assert world.allocate(whole(1), whole(0)) == first
    assert len(world.ledger.records()) == 1


@pytest.mark.point(138)
def test_an_unknown_device_is_refused_and_leaves_nothing(world):
    with pytest.raises(ClaimError, match=r"this node does not offer device GPU-.*7"):
        world.allocate(whole(7))

    assert world.nothing_left
    assert world.observed == [("allocate", "refused")]


def test_what_a_claim_holds_is_refused_in_time(world):
    world.allocate_seconds = 0.9
    world.start()
    world.preparer.prepare(world.api.put(claim("gpu-0")))
    begun = time.monotonic()

    with pytest.raises(DeviceHeldByClaim, match="gpu-0 is held by claim default/claim"):
        world.allocate(whole(0))

    assert time.monotonic() - begun < 20
    assert world.record(whole(0)) is None


def test_a_device_that_is_handed_out_again_before_its_last_user_has_ended_is_answered(world):
    world.admit("first", whole(0), whole(1))
    world.run("first", whole(0), whole(1))

    assert world.allocate(whole(0))
    assert world.allocate(whole(0), whole(1))


@pytest.mark.parametrize("choice", [OFF, DRAINING])
def test_a_node_that_gives_nothing_out_by_this_api_answers_for_what_it_gave_before(world, choice):
    answer = world.admit("first", whole(0))
    world.choice.set(choice)

    assert world.allocate(whole(0)) == answer
    with pytest.raises(NodeError, match="by DRA: a class maps it"):
        world.allocate(whole(1))
    assert [record.gpus for record in world.ledger.records()] == [{whole(0)}]


@pytest.mark.point(141)
def test_a_hundred_at_once_agree(tmp_path):
    world = AllocationWorld(tmp_path, gpus=2, replicas=50)
    answers = {}

    def allocate(place, minor):
        answers[place, minor] = world.allocate(replica(place, minor))

    acts = [
        lambda place=place, minor=minor: allocate(place, minor)
        for place in range(50)
        for minor in range(2)
    ]
    with in_threads(*acts):
        pass

    assert len({answer.cdi_names[0] for answer in answers.values()}) == 100
    assert all(record.completed for record in world.ledger.records())
    assert {name for a in answers.values() for name in a.cdi_names} == world.cdi_names


def test_two_containers_of_one_pod_have_what_they_were_given_each(tmp_path):
    world = AllocationWorld(tmp_path, replicas=4)

    first = world.admit("pod", replica(0))
    second = world.admit("pod", replica(1), container="other")

    assert first.cdi_names[0] != second.cdi_names[0]
    assert len(world.ledger.records()) == 2


def hang_in(world, where, until):
    """Have *where* wait for the event *until*."""
    if where == "the device files":
        world.node.before_nodes = lambda minors: until.wait(60)
    elif where == "the driver's files":
        world.node.before_files = lambda: until.wait(60)
    elif where == "an agent that is away":
        world.node.agent = False
    else:
        world.node.before_step = lambda step: until.wait(60)


HANGING = ["the device files", "the driver's files", "the MPS agent"]


def by_mps(directory):
    return AllocationWorld(directory, replicas=4, default_strategy=SharingStrategy.MPS)


@pytest.mark.point(136)
@pytest.mark.parametrize("where", HANGING)
def test_whatever_hangs_the_kubelet_gets_a_clear_error_in_time(tmp_path, where):
    world = by_mps(tmp_path)
    world.takes_names, world.allocate_seconds = False, 0.3
    world.start()
    over = threading.Event()
    hang_in(world, where, over)
    begun = time.monotonic()

    with pytest.raises(TimedOut, match=r"nvidia.com/gpu GPU-.*::0: preparing this took more than"):
        world.allocate(replica(0))

    assert time.monotonic() - begun < 20
    over.set()


def test_where_names_do_nothing_a_server_may_take_a_second_to_start(tmp_path):
    world = by_mps(tmp_path)
    world.takes_names = False
    world.allocate_seconds = 0.9
    world.start()
    world.node.before_nodes = lambda minors: time.sleep(1.2)

    assert world.allocate(replica(0)).devices


@pytest.mark.point(136)
@pytest.mark.parametrize("where", [*HANGING, "an agent that is away", "another process"])
def test_where_names_do_what_takes_longer_is_prepared_before_the_container_starts(tmp_path, where):
    world = by_mps(tmp_path)
    expected = world.allocate(replica(0))
    world.preparer.take_back_if(world.recorded(replica(0)).claim, lambda: True)
    world.allocate_seconds = 0.3
    over = threading.Event()
    if where == "another process":
        world.start(lease=taken)
    else:
        world.start()
        hang_in(world, where, over)

    assert world.admit("train", replica(0)) == expected

    over.set()
    world.node.agent = True
    world.start()
    assert world.reconciler.look() is None
    world.run("train", replica(0))
    assert set(expected.cdi_names) <= world.cdi_names
    assert world.pods_of(replica(0)) == ["train"]


def test_what_was_answered_ahead_is_prepared_soon(tmp_path):
    world = by_mps(tmp_path)
    world.node.agent = False
    world.admit("train", replica(0))
    world.node.agent = True

    assert world.reconciler.look() == 1.0

    assert world.recorded(replica(0)).completed


class SlowOffers:
    """Somebody who reads the GPUs does not come back."""

    def __init__(self, last_offer, until):
        self.last_offer = last_offer
        self._until = until

    def now(self):
        self._until.wait(60)
        return self.last_offer

    refresh = now


@pytest.mark.parametrize(
    ("ids", "rules", "problem"),
    [
        pytest.param([replica(0, 1)], {}, "gpu-1 .* has the taint gpu.nvidia.com/xid", id="sick"),
        pytest.param([replica(0), replica(1)], {"one_share": True}, "2 replicas were", id="two"),
    ],
)
def test_what_would_be_refused_is_not_answered_ahead_either(tmp_path, ids, rules, problem):
    world = AllocationWorld(tmp_path, replicas=4, **rules)
    world.allocate_seconds = 0.2
    faults = (Fault(gpu_uuid(1), Problem.XID, "79"),)
    offers = OfferBuilder(
        world.node,
        lambda: world.profile,
        lambda: DEVICE_PLUGIN_FEATURES,
        world.ledger,
        health=lambda _: faults,
    )
    over = threading.Event()
    world.start(offers=SlowOffers(offers.now(), over))

    with pytest.raises(ClaimError, match=problem):
        world.allocate(*ids)

    over.set()


def test_a_device_that_was_not_offered_last_is_not_said_to_be_unknown_without_a_look(tmp_path):
    """Another process of ours may have listed it."""
    world = AllocationWorld(tmp_path, replicas=4)
    world.allocate_seconds = 0.2
    over = threading.Event()
    world.start(offers=SlowOffers(world.offers.now(), over))

    with pytest.raises(TimedOut, match="preparing this took more than"):
        world.allocate(replica(0, minor=2))

    over.set()


@pytest.mark.parametrize("choice", [OFF, DRAINING], ids=["off", "draining"])
def test_a_node_that_gives_nothing_more_out_does_not_do_so_ahead_either(tmp_path, choice):
    world = AllocationWorld(tmp_path, gpus=20)
    given = world.allocate(whole(0))
    world.allocate_seconds = 0.2
    world.start()
    over = threading.Event()
    world.node.before_nodes = lambda minors: over.wait(60)
    with in_threads(*(partial(world.allocate, whole(number)) for number in range(1, 17))):
        pass  # no thread is left that could look at anything
    world.choice.set(choice)

    with pytest.raises(NodeError, match="by DRA: a class maps it"):
        world.allocate(whole(17))
    assert world.allocate(whole(0)) == given

    over.set()


def test_nothing_is_answered_ahead_before_anything_was_offered(tmp_path):
    world = AllocationWorld(tmp_path, replicas=4)
    world.allocate_seconds = 0.2
    over = threading.Event()
    world.start(offers=SlowOffers(None, over))

    with pytest.raises(TimedOut, match="preparing this took more than"):
        world.allocate(replica(0))

    over.set()


def test_what_is_prepared_too_late_is_taken_back_since_no_pod_has_it(world):
    world.takes_names, world.allocate_seconds = False, 0.1
    world.start()
    over, began = threading.Event(), threading.Event()

    def hang(minors):
        began.set()
        over.wait(60)

    world.node.before_nodes = hang
    with pytest.raises(TimedOut):
        world.allocate(whole(0))
    assert began.wait(60)
    over.set()
    while not (world.record(whole(0)) and world.record(whole(0)).completed):
        time.sleep(0.01)

    world.reconciler.look()
    assert world.record(whole(0))
    world.now += 60
    world.reconciler.look()

    assert world.nothing_left


def test_an_mps_agent_that_is_away_is_an_error_that_leaves_nothing(tmp_path):
    world = by_mps(tmp_path)
    world.takes_names = world.node.agent = False

    with pytest.raises(MpsAgentUnreachable):
        world.allocate(replica(0))

    assert world.nothing_left
    assert world.observed == [("allocate", "failed")]


@pytest.mark.parametrize("agent", ["away", "slow"])
def test_a_server_of_protocol_2_may_start_after_the_answer_by_files(tmp_path, agent):
    world = by_mps(tmp_path)
    world.takes_names, world.node.protocol = False, 2
    server = f"/run/mps/{mps_server_name([gpu_uuid()])}"
    world.node.pipe_directory = f"{server}/pipe"
    world.start(mps_dir="/run/mps")

    def slow(step):
        raise TimedOut("no answer of the MPS agent in 0.5 s")

    world.node.agent = agent == "slow"
    world.node.before_step = slow if agent == "slow" else world.node.before_step
    answer = world.admit("train", replica(0))
    assert dict(answer.env)["CUDA_MPS_PIPE_DIRECTORY"] == f"{server}/pipe"
    assert {f"{server}/pipe", f"{server}/shm"} < {mount.host_path for mount in answer.mounts}
    with pytest.raises(NodeError):
        world.allocations.pre_start(GPU, [replica(0)])

    world.node.agent, world.node.before_step = True, lambda step: None
    world.run("train", replica(0))

    assert world.node.namespaces
    assert world.allocate(replica(0)) == answer
    world.node.namespaces.clear()
    world.node.pipe_directory = "/run/mps/elsewhere"
    with pytest.raises(NodeError, match=r"in another directory than .* answered; delete the pod"):
        world.allocations.pre_start(GPU, [replica(0)])


def test_replicas_under_mps_are_served_by_one_server_for_everybody(tmp_path):
    world = AllocationWorld(tmp_path, replicas=4, default_strategy=SharingStrategy.MPS)
    world.takes_names = False

    answer = world.allocate(replica(2))

    (namespace,) = world.node.namespaces.values()
    assert (namespace.tenant, namespace.percent) == ("", 25)
    env = dict(answer.env)
    assert env["CUDA_MPS_PIPE_DIRECTORY"] in {mount.container_path for mount in answer.mounts}
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"


def taken(seconds):
    assert seconds < 4
    raise TimedOut("another process did not let go")


def test_another_process_that_keeps_the_lease_is_an_error_in_time(world):
    world.takes_names, world.allocate_seconds = False, 0.9
    world.start(lease=taken)

    with pytest.raises(TimedOut, match="did not let go"):
        world.allocate(whole(0))


class NoOffers:
    def now(self):
        raise NodeError("NVML is away")


def test_the_preferred_devices_are_any_where_it_is_not_known_what_is_offered(world):
    world.start(offers=NoOffers())

    preferred = world.allocations.preferred(GPU, [whole(0), whole(1)], [whole(1)], 1)

    assert preferred == (whole(1),)


def test_preferred_are_devices_that_nobody_is_recorded_to_have_as_long_as_there_are_any(world):
    world.allocate(whole(0))

    def preferred(size, *must_include):
        return world.allocations.preferred(GPU, [whole(0), whole(1)], must_include, size)

    assert preferred(1) == (whole(1),)
    assert preferred(1, whole(0)) == (whole(0),)
    assert set(preferred(2)) == {whole(0), whole(1)}
