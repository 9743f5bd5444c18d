"""Who is told what holds a claim that cannot be given back; the kubelet tells nobody."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dra_driver.base.errors import ApiServerError, ClaimInUse, DriverUnusable, NodeError
from dra_driver.k8s.claims import ClaimRef, ClaimUid, PreparedDevice
from dra_driver.k8s.events import Event, NodeRef, PodRef
from dra_driver.plugin.claims.stuck_claims import StuckClaims
from tests.builders import pod, record, ref

A, B = ref("a"), ref("b")
WEB, DB = pod("web"), pod("db")
HELD = "GPU-0, removing profile 14 at 0: in use, held by sleep (27191); end what uses it"
RUNS = "pod default/web: process 7 still runs; the claim waits for its end"
NODE = NodeRef("node-a", "uid-node-a")
DEVICE = PreparedDevice(("gpu",), "node-a", "gpu-0", ("vendor/class=x",))


class World:
    """A node on which claims are recorded until they could be given back."""

    def __init__(self) -> None:
        self.records = {
            A.uid: record(A, pods=(WEB, DB)),
            B.uid: record(B, pods=(WEB,)),
        }
        self.fails: dict[ClaimUid, Exception] = {}
        self.events: list[Event] = []
        self.in_use: list[ClaimRef] = []
        preparer: Any = self
        self.claims = StuckClaims(
            preparer, self.records.get, self, lambda: NODE, self.in_use.append
        )

    def prepare(self, claim: ClaimRef) -> tuple[PreparedDevice, ...]:
        if claim.uid in self.fails:
            raise self.fails[claim.uid]
        return (DEVICE,)

    def unprepare(self, claim: ClaimRef) -> None:
        if claim.uid in self.fails:
            raise self.fails[claim.uid]
        self.records.pop(claim.uid, None)

    def take_back_if(self, claim: ClaimRef, gone: Callable[[], bool]) -> bool:
        if gone():
            self.unprepare(claim)
        return gone()

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def stuck(self, claim: ClaimRef, why: str = HELD) -> list[str]:
        """Its pods that are told when it cannot be given back."""
        self.fails[claim.uid] = NodeError(why)
        before = len(self.events)
        with pytest.raises(NodeError) as raised:
            self.claims.unprepare(claim)
        assert str(raised.value) == why
        return [event.regarding.name for event in self.events[before:]]

    def given_back(self, claim: ClaimRef) -> None:
        del self.fails[claim.uid]
        self.claims.unprepare(claim)


@pytest.fixture
def world() -> World:
    return World()


def test_every_pod_of_the_claim_is_told_what_holds_it(world):
    assert world.stuck(A) == ["web", "db"]

    message = f"claim {A} cannot be given back yet: {HELD}"
    assert world.events == [
        Event(PodRef(A.namespace, pod.name, pod.uid), "ClaimNotGivenBack", str(A), message)
        for pod in (WEB, DB)
    ]
    assert all(event.is_warning for event in world.events)


def test_a_pod_is_told_once_for_each_change_of_the_words(world):
    other = HELD.replace("sleep (27191)", "dcgm (7)")

    reported = [bool(world.stuck(A, why)) for why in (HELD, HELD, other, other, HELD)]

    assert reported == [True, False, True, False, True]


def test_each_claim_is_told_of_for_itself(world):
    assert world.stuck(A) == ["web", "db"]
    assert world.stuck(B) == ["web"]
    assert world.stuck(A) == world.stuck(B) == []


def test_a_driver_that_broke_keeps_no_pod_from_ending_and_the_claim_stays_recorded(world):
    world.fails[A.uid] = DriverUnusable("no complete NVIDIA driver")

    world.claims.unprepare(A)

    assert world.events == []
    assert A.uid in world.records
    with pytest.raises(DriverUnusable):  # the reconciler, which comes again, is told
        world.claims.take_back_if(A, lambda: True)


def test_a_claim_that_was_given_back_is_forgotten(world):
    world.stuck(A)
    world.given_back(A)

    world.records[A.uid] = record(A, pods=(DB,))

    assert world.stuck(A) == ["db"]


def test_a_claim_that_was_given_back_without_the_kubelet_is_forgotten_too(world):
    world.stuck(A)
    del world.records[A.uid]
    world.stuck(B)

    world.records[A.uid] = record(A, pods=(WEB,))

    assert world.stuck(A) == ["web"]


def test_of_a_claim_without_a_record_nobody_is_told(world):
    del world.records[A.uid]
    assert world.stuck(A) == []


def test_a_claim_whose_pods_are_not_known_is_told_of_to_nobody(world):
    world.records[A.uid] = replace(world.records[A.uid], pods=())
    assert world.stuck(A) == []


def test_claims_are_prepared_as_ever_and_of_what_fails_there_the_kubelet_tells(world):
    assert world.claims.prepare(A) == (DEVICE,)
    world.fails[A.uid] = NodeError(HELD)
    with pytest.raises(NodeError):
        world.claims.prepare(A)
    assert world.events == []


def test_our_own_mistakes_are_no_news_for_pods(world):
    world.fails[A.uid] = ZeroDivisionError("oops")
    with pytest.raises(ZeroDivisionError):
        world.claims.unprepare(A)
    assert world.events == []


def test_of_a_claim_that_a_process_still_uses_the_node_is_told_too_since_the_pod_may_be_gone(world):
    world.fails[A.uid] = ClaimInUse(RUNS)
    for _ in range(2):
        with pytest.raises(ClaimInUse):
            world.claims.unprepare(A)

    message = f"claim {A} cannot be given back yet: {RUNS}"
    assert [event.regarding.name for event in world.events] == ["web", "db", "node-a"]
    assert world.events[-1] == Event(NODE, "ClaimNotGivenBack", str(A), message)
    assert world.in_use == [A, A], "its end is waited for"


def test_what_else_holds_a_claim_is_no_news_for_the_node(world):
    world.stuck(A)
    assert world.in_use == []


def test_a_claim_that_the_reconciler_cannot_take_back_is_told_of_in_the_same_way(world):
    world.fails[A.uid] = ClaimInUse(RUNS)
    with pytest.raises(ClaimInUse):
        world.claims.take_back_if(A, lambda: True)

    assert [event.regarding.name for event in world.events] == ["web", "db", "node-a"]
    assert world.in_use == [A]
    world.fails.clear()
    assert world.claims.take_back_if(A, lambda: True)


def test_an_api_server_that_does_not_tell_whether_a_claim_is_gone_is_no_news(world):
    world.fails[A.uid] = ApiServerError("no answer")
    with pytest.raises(ApiServerError):
        world.claims.take_back_if(A, lambda: True)
    assert world.events == []
