"""Claims that were still used are given back as soon as their users ended, if they are deleted."""

import pytest

from dra_driver.base.errors import ClaimInUse, NodeError, Unreachable
from dra_driver.k8s.claims import ClaimRef, ClaimUid
from dra_driver.model.records import ClaimRecord
from dra_driver.plugin.claims.in_use import DeferredUnprepare
from tests.builders import ref

A, B = ref("a"), ref("b")


class World:
    """Claims, who uses them, and a clock that a test moves."""

    def __init__(self) -> None:
        self.records = {claim.uid: ClaimRecord(claim, ()) for claim in (A, B)}
        self.used: dict[ClaimUid, NodeError] = {
            claim.uid: ClaimInUse("process 7 still runs") for claim in (A, B)
        }
        self.deleted: set[ClaimRef] = set()
        self.down = False
        self.fails: NodeError | None = None
        self.looked: list[str] = []
        self.asked = self.woken = 0
        self.now = 100.0
        self.claims = DeferredUnprepare(
            self.take_back_if,
            self.refuse_while_used,
            self.is_deleted,
            self.records.get,
            lambda: self.now,
        )
        self.claims.look_soon = self.wake

    def wake(self):
        self.woken += 1

    def refuse_while_used(self, record):
        self.looked.append(record.claim.name)
        if record.claim.uid in self.used:
            raise self.used[record.claim.uid]

    def is_deleted(self, claim):
        self.asked += 1
        if self.down:
            raise Unreachable("no answer")
        return claim in self.deleted

    def take_back_if(self, claim, gone):
        assert gone()
        if self.fails:
            raise self.fails
        del self.records[claim.uid]
        return True

    def look(self, seconds=0.0):
        self.now += seconds
        return self.claims.look()


@pytest.fixture
def world():
    return World()


def test_nobody_is_looked_at_before_a_claim_was_refused(world):
    assert world.look() is None
    assert world.looked == []


def test_a_claim_that_was_refused_is_looked_at_until_its_users_ended_and_then_given_back(world):
    world.deleted.add(A)
    world.claims.refused(A)
    assert world.woken == 1
    assert world.look() == world.look() == 0.25
    assert world.asked == 0, "as long as somebody uses it nobody is asked"

    world.used.clear()

    assert world.look() is None
    assert [*world.records] == [B.uid]


def test_a_claim_that_exists_is_the_kubelets_to_give_back(world):
    world.used.clear()
    world.claims.refused(A)
    world.look(), world.look()
    assert world.asked == 1, "the API server is not asked at every look"

    world.deleted.add(A)
    world.look(2.0)

    assert [*world.records] == [B.uid]


def test_a_claim_that_goes_on_to_exist_is_left_alone_in_the_end(world):
    world.used.clear()
    world.claims.refused(A)
    for _ in range(29):
        assert world.look(2.0) == 0.25
    assert world.look(2.0) is None
    assert (world.asked, len(world.records)) == (30, 2)


def test_a_claim_that_the_kubelet_gave_back_meanwhile_needs_nothing(world):
    world.claims.refused(A)
    del world.records[A.uid]
    assert world.look() is None
    assert (world.looked, world.asked) == ([], 0)


@pytest.mark.parametrize("trouble", ["api", "users", "undo"])
def test_what_does_not_work_now_is_tried_again(world, trouble):
    world.deleted.add(A)
    world.used.clear()
    world.claims.refused(A)
    world.down = trouble == "api"
    world.fails = NodeError("in use") if trouble == "undo" else None
    if trouble == "users":
        world.used[A.uid] = NodeError("too many open files")
    assert world.look() == 0.25
    assert len(world.records) == 2

    world.down, world.fails, world.used = False, None, {}

    assert world.look(2.0) is None
    assert [*world.records] == [B.uid]


def test_of_many_claims_each_has_its_turn(world):
    many = [ref(f"many-{n:02}") for n in range(40)]
    for claim in many:
        world.records[claim.uid] = ClaimRecord(claim, ())
        world.used[claim.uid] = ClaimInUse("process 7 still runs")
        world.claims.refused(claim)

    world.look()
    assert len(world.looked) == 16
    world.look(), world.look()

    assert set(world.looked) == {claim.name for claim in many}
