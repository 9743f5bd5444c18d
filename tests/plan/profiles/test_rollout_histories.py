"""Rollouts in any order of events: leaders that are killed or paused at any write, nodes that come,
go and fail, and a spec that is changed and undone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.model.node_profiles import RolloutRules
from tests.plan.profiles.fleet import Fleet, Writer

RULES = RolloutRules(2, in_percent=False, max_failures=3, progress_deadline_seconds=100.0)
ACTIONS = (
    *("look", "write", "act") * 5,
    *("lead", "write_late", "undo", "specify", "join", "leave"),
    *("silence", "refuse", "be_ready", "pause", "wait"),
)


class History:
    """One order of events; what must never be is checked after each."""

    def __init__(self, rules):
        self.fleet = Fleet(rules=rules)
        self.paused: list[Writer] = []  # earlier leaders, each before one write
        self.fleet.settle()

    def happen(self, action, number):
        getattr(self, action)(number)
        assert len(self.fleet.in_progress()) <= self.fleet.limit()

    def name(self, number):
        return sorted(self.fleet.nodes)[number % len(self.fleet.nodes)]

    def write(self, number):
        self.fleet.write(self.fleet.leader, number)

    def write_late(self, number):
        if self.paused:
            self.fleet.write(self.paused.pop(number % len(self.paused)))

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
        target = fleet.profile.revision
        failed = [
            node
            for node in fleet.nodes.values()
            if node.given == target == node.report.revision and node.report.refusal
        ]
        decision = fleet.look()
        if len(failed) >= fleet.profile.rollout.max_failures or fleet.profile.rollout.paused:
            assert set(decision.status.updating) <= set(fleet.profile.status.updating)
            for change in decision.nodes:
                has_it = fleet.nodes[change.node].report.revision == target
                assert has_it or change.revision is None

    def lead(self, number):
        """Another process leads. The one before checked that it leads before its next write, and
        that write may come at any time."""
        old = self.fleet.leader
        if old.writes:
            old.writes = [old.writes[number % len(old.writes)]]
            self.paused.append(old)
        self.fleet.leader = Writer()

    def mend(self):
        fleet = self.fleet
        fleet.silent.clear()
        fleet.refusing.clear()
        fleet.change_rollout(paused=False)
        for name in fleet.nodes:
            fleet.change_node(name, ready=True)
            fleet.act(name)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), max_size=120))
def test_whatever_happens_few_nodes_are_in_progress_and_all_get_there(events):
    history = History(RULES)
    for action, number in events:
        history.happen(action, number)

    fleet = history.fleet
    history.mend()
    fleet.settle()

    target = fleet.profile.revision
    assert {target} == {node.given for node in fleet.nodes.values()}
    assert {target} == {node.report.revision for node in fleet.nodes.values()}
    assert (target, target) == (
        fleet.profile.status.current_revision,
        fleet.profile.status.update_revision,
    )
    assert fleet.profile.status.updating == ()
    fleet.seconds += 1000
    fleet.look()
    assert fleet.leader.writes == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), max_size=60))
def test_an_undo_ends_with_every_node_on_the_old_revision(events):
    history = History(RULES)
    old = history.fleet.profile.revision
    history.fleet.specify(2)
    for action, number in events:
        history.happen(action, number)

    history.fleet.specify(1)
    history.mend()
    history.fleet.settle()

    assert {old} == {node.report.revision for node in history.fleet.nodes.values()}
