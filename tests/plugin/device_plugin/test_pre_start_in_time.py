"""How long PreStartContainer may take: after 30 s the kubelet gives it up, and nobody reads why."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from dra_driver.base.deadlines import request_deadline, seconds_within_request
from dra_driver.base.errors import NodeError, TimedOut, Unreachable
from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.model.profiles import SharingStrategy
from dra_driver.plugin.device_plugin.allocations import Allocations
from dra_driver.plugin.device_plugin.pods import NodePods
from tests.fakes.allocations import GPU, AllocationWorld, in_threads, listed, replica, whole


def test_every_wait_ends_before_the_kubelet_gives_up(tmp_path):
    world = AllocationWorld(tmp_path, replicas=4, default_strategy=SharingStrategy.MPS)
    world.node.protocol, world.pre_start_seconds = 2, 3.0
    waits: list[float] = []

    @contextlib.contextmanager
    def lease(seconds):
        waits.append(seconds)
        yield

    def agent_does_not_answer(step):
        waits.append(seconds_within_request(20.0))
        raise TimedOut("waited for the MPS agent")

    world.start(lease=lease, mps_dir="/run/mps")
    world.admit("train", replica(0))
    world.preparer.take_back_if(world.recorded(replica(0)).claim, lambda: True)  # it is lost
    waits.clear()
    world.node.before_step = agent_does_not_answer

    with pytest.raises(TimedOut, match="waited for the MPS agent"):
        world.allocations.pre_start(GPU, [replica(0)])

    assert len(waits) > 3
    assert max(waits) <= 3.0


def test_a_call_of_the_kubelet_has_five_seconds_less_than_it_waits(tmp_path):
    world = AllocationWorld(tmp_path, replicas=4)
    world.admit("train", replica(0))
    world.start()
    left: list[float] = []
    world.before_pods = lambda: left.append(seconds_within_request(math.inf, undoing=True))

    Allocations(world.dependencies).pre_start(GPU, [replica(0)])

    assert len(left) == 1
    assert left[0] <= 25


@contextlib.contextmanager
def while_others(act: Callable[[Callable[[], bool]], object]) -> Iterator[None]:
    """Another thread is at *act*, in the middle of it, which is where *act* calls what it gets."""
    begun, over = threading.Event(), threading.Event()

    def stay() -> bool:
        begun.set()
        return over.wait(60)

    with in_threads(partial(act, stay)):
        assert begun.wait(60)
        try:
            yield
        finally:
            over.set()


@contextlib.contextmanager
def asking_for_pods(world):
    def ask(stay):
        world.before_pods = stay
        world.reconciler.look()

    with while_others(ask):
        yield


@contextlib.contextmanager
def working_on_the_claim(world):
    def work(stay):
        with world.preparer.prepared_claims.alone_with(world.uid(replica(0))):
            stay()

    with while_others(work):
        yield


@contextlib.contextmanager
def working_on_the_gpu(world):
    def work(stay):
        def act(record):
            stay()
            return record

        world.preparer.prepared_claims.while_prepared(world.uid(replica(1)), act)

    with while_others(work):
        yield


@contextlib.contextmanager
def using_the_device(world):
    world.users.alive[world.uid(replica(0))] = {Pod("old", PodUid("uid-old"))}
    yield


@pytest.mark.parametrize(
    ("others_are", "why"),
    [
        (asking_for_pods, "finding its pod took more than 1 s"),
        (working_on_the_claim, "is still being worked on"),
        (working_on_the_gpu, "did not finish in"),
        (using_the_device, "pod old still uses it"),
    ],
)
def test_whatever_is_waited_for_the_call_ends_in_time_and_says_what_it_is(
    tmp_path, others_are, why
):
    world = AllocationWorld(tmp_path, replicas=4)
    world.admit("train", replica(0))
    world.admit("neighbour", replica(1))
    world.pre_start_seconds = 1.0
    world.start()

    with others_are(world):
        begun = time.monotonic()
        with pytest.raises(NodeError, match=why):
            world.allocations.pre_start(GPU, [replica(0)])
        took = time.monotonic() - begun

    assert took < 4  # any wait by itself is for five seconds or more


def test_what_one_wait_took_the_next_one_has_less(tmp_path):
    world = AllocationWorld(tmp_path, replicas=4)
    world.pre_start_seconds = 2.0
    too_long: list[float] = []
    taken_back = [world.uid(replica(0))]

    @contextlib.contextmanager
    def slow_lease(seconds):
        if (left := begun + world.pre_start_seconds - time.monotonic()) < seconds - 0.1:
            too_long.append(seconds - left)
        time.sleep(0.2)
        if taken_back:  # by another process, before this one has the lease
            world.ledger.forget(taken_back.pop())
        yield

    world.admit("train", replica(0))
    world.start(lease=slow_lease)

    begun = time.monotonic()
    world.allocations.pre_start(GPU, [replica(0)])

    assert (too_long, taken_back) == ([], [])


@pytest.mark.parametrize(
    ("api_down", "why"),
    [(False, ""), (True, ": the API server does not tell of pod uid-train")],
    ids=["it answers late", "it does not answer"],
)
def test_a_call_that_has_no_time_left_says_what_took_it(tmp_path, api_down, why):
    world = AllocationWorld(tmp_path, replicas=4)
    world.admit("train", replica(0))
    world.pre_start_seconds = 0.2
    world.start()
    world.before_pods = lambda: time.sleep(0.3)
    world.api_down = api_down

    with pytest.raises(TimedOut) as refused:
        world.allocations.pre_start(GPU, [replica(0)])

    took = f"{GPU} {replica(0)}: finding its pod took more than 0.2 s"
    assert str(refused.value) == took + why


def test_a_call_that_searched_for_most_of_its_time_says_why_when_it_ends_later(tmp_path):
    world = AllocationWorld(tmp_path, replicas=4)
    world.admit("train", replica(0))
    world.pre_start_seconds = 0.6
    world.start()
    world.before_pods, world.api_down = lambda: time.sleep(0.3), True

    with (
        working_on_the_claim(world),
        pytest.raises(TimedOut, match=r"still being worked on.*: the API server does not tell of"),
    ):
        world.allocations.pre_start(GPU, [replica(0)])


def test_a_call_that_has_no_time_left_says_so_where_the_kubelet_names_no_pod(tmp_path):
    world = AllocationWorld(tmp_path, replicas=4)
    world.allocate(replica(0))
    world.pre_start_seconds = 0.2
    world.start()
    world.listed, world.checkpoint_error = [listed("other", whole(1))], NodeError("no checkpoint")
    world.before_pods = lambda: time.sleep(0.3)
    world.api_down = True

    with pytest.raises(TimedOut, match=r"finding its pod took .*: the API server does not answer"):
        world.allocations.pre_start(GPU, [replica(0)])


def test_nobody_waits_longer_for_anothers_question_than_the_call_has(tmp_path):
    asked, over = threading.Event(), threading.Event()

    def hang():
        asked.set()
        over.wait(60)
        return ()

    pods = NodePods(hang)
    with in_threads(pods.now):
        assert asked.wait(60)
        begun = time.monotonic()
        with request_deadline(0.1):
            assert pods.with_these({PodUid("uid-train")}) == {}
            with pytest.raises(Unreachable, match="an earlier question for the pods"):
                pods.now()
        assert time.monotonic() - begun < 10
        over.set()
