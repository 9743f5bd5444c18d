"""Rollouts in any order of events.

Leaders are killed or paused at any write, nodes come, go and fail, the spec is changed and undone.
"""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.model.node_profiles import ProfileStatus, RolloutRules
from tests.plan.profiles.fleet import Fleet, Writer, revision

RULES = RolloutRules(1, in_percent=False, max_failures=2, progress_deadline_seconds=100.0)
ACTIONS = (
    *("look", "write", "act", "reconcile") * 3,
    *("lead", "write_late", "undo", "specify") * 2,
    *("join", "leave", "silence", "refuse", "be_ready", "pause", "wait", "recreate"),
)


class History:
    """One order of events; what must never be is checked after each."""

    def __init__(self, rules):
        self.fleet = Fleet(nodes=5, rules=rules)
        self.paused: list[Writer] = []  # earlier leaders
        self.fleet.settle()

    def happen(self, action, number):
        getattr(self, action)(number)
        assert len(self.fleet.in_progress()) <= self.fleet.limit()

    def name(self, number):
        return sorted(self.fleet.nodes)[number % len(self.fleet.nodes)]

    def reconcile(self, number):
        self.look(number)
        while self.fleet.leader.writes:
            self.write(number)

    def write(self, number):
        self.fleet.write(self.fleet.leader, number)

    def write_late(self, number):
        if self.paused:
            self.fleet.write(self.paused[number % len(self.paused)], number)

    def act(self, number):
        self.fleet.act(self.name(number))

    def undo(self, _number):
        self.fleet.specify(1)

    def specify(self, number):
        self.fleet.specify(1 + number % 3)

    def pause(self, number):
        self.fleet.change_rollout(paused=number % 2 == 0)

    def wait(self, number):
        self.fleet.seconds += 60 * (number % 3)

    def recreate(self, _number):
        """The profile is deleted and applied again, and with its status goes what was named there
        and what had failed. Where that matters is not looked at here."""
        if len(self.fleet.in_progress()) == len(self.fleet.without_report()):
            self.paused.clear()
            self.fleet.leader = Writer()
            self.fleet.change_profile(status=ProfileStatus())

    def join(self, _number):
        self.fleet.join()

    def leave(self, number):
        if len(self.fleet.nodes) > 1:
            del self.fleet.nodes[self.name(number)]

    def silence(self, number):
        self.fleet.silent ^= {self.name(number)}

    def refuse(self, number):
        self.fleet.refusing ^= {self.name(number)}

    def be_ready(self, number):
        self.fleet.change_node(self.name(number), ready=number % 2 == 0)

    def look(self, _number):
        fleet = self.fleet
        before = fleet.profile
        has_it = {
            node.name for node in fleet.nodes.values() if node.report.revision == before.revision
        }
        failed = [
            name
            for name in has_it
            if fleet.nodes[name].report.refusal and fleet.nodes[name].given == before.revision
        ]
        decision = fleet.look()
        given = {change.node for change in decision.nodes if change.revision is not None}
        named = set(decision.status.updating) - set(before.status.updating)
        assert all(fleet.nodes[name].ready for name in named | (given - has_it))
        if before.rollout.paused or len(failed) >= before.rollout.max_failures:
            assert not named
            assert given <= has_it

    def lead(self, _number):
        """Another process leads. The one before has checked that it leads for everything that it
        decided, and may write any of that at any time."""
        self.fleet.look()
        self.paused.append(self.fleet.leader)
        self.fleet.leader = Writer()

    def mend(self):
        fleet = self.fleet
        fleet.silent.clear()
        fleet.refusing.clear()
        fleet.change_rollout(paused=False)
        for name in fleet.nodes:
            fleet.change_node(name, ready=True)
            fleet.act(name)


def history(seed, length):
    """Events drawn evenly: hypothesis itself prefers short and simple ones, in which little
    happens."""
    draw = Random(seed)
    history = History(RULES)
    for _ in range(length):
        history.happen(draw.choice(ACTIONS), draw.randrange(12))
    return history


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 200))
def test_whatever_happens_few_nodes_are_in_progress_and_all_get_there(seed, length):
    events = history(seed, length)
    fleet = events.fleet

    events.mend()
    fleet.settle()

    target = fleet.profile.revision
    assert {target} == {node.given for node in fleet.nodes.values()}
    assert {target} == {node.report.revision for node in fleet.nodes.values()}
    status = fleet.profile.status
    assert (target, target) == (status.current_revision, status.update_revision)
    assert status.updating == ()
    fleet.seconds += 1000
    fleet.look()
    assert fleet.leader.writes == []


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 100))
def test_an_undo_ends_with_every_node_on_the_old_revision(seed, length):
    events = history(seed, length)
    fleet = events.fleet

    fleet.specify(1)
    events.mend()
    fleet.settle()

    assert {revision(1)} == {node.report.revision for node in fleet.nodes.values()}
