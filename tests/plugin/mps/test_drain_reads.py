"""However many pods have MPS clients, little is asked of the API server, and none is forgotten."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.base.threads import BackgroundTasks
from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.k8s.pods import PodSpec
from dra_driver.model.mps import MpsNamespaceName
from dra_driver.plan.mps.drain import LONGEST_MARGIN_SECONDS
from dra_driver.plugin.mps.drain import READS_A_SECOND, READS_AT_ONCE, MpsDrain, PodMpsClients
from tests.builders import ref
from tests.fakes.mps_agent import FakeMpsAgent

LOOP = 5.0  # seconds between two looks, unless one is due sooner


class Node:
    """Pods with these grace periods, each with a client."""

    def __init__(self, *graces):
        self.now = 1000.0
        self.graces = {f"p{number}": grace for number, grace in enumerate(graces)}
        self.reads = []  # (when, pod)
        self.late = []
        tasks = BackgroundTasks(self.clock, lambda work: work())
        me: Any = self
        agent: Any = FakeMpsAgent()
        self.drain = MpsDrain(me, agent, tasks, me, self.clock)
        self.next_in = 0.0

    def clock(self):
        return self.now

    def read(self, namespace, name):
        return self.read_cached(namespace, name)

    def read_cached(self, namespace, name):
        self.reads.append((self.now, name))
        grace = self.graces[name]
        return PodSpec(namespace, name, PodUid(f"uid-{name}"), (), grace_seconds=grace)

    def mps_drained(self, clients):
        raise AssertionError("nobody is deleted")

    def mps_unread_pods(self, pods):
        self.late.append(pods)

    def go_on(self, seconds):
        until = self.now + seconds
        while self.now + self.next_in <= until:
            self.now += self.next_in
            self.next_in = min(LOOP, self.drain.look(self.clients_of_pods()) or LOOP)

    def clients_of_pods(self):
        return [
            PodMpsClients(
                ref(name), Pod(name, PodUid(f"uid-{name}")), MpsNamespaceName("c"), frozenset([1])
            )
            for name in self.graces
        ]

    def gaps(self, after=0.0):
        """The longest time between two looks at each pod, once the first were over."""
        gaps = {}
        for name in self.graces:
            times = [at for at, read in self.reads if read == name and at >= 1000.0 + after]
            ends = (*times, self.now)
            gaps[name] = max(
                (later - at for at, later in pairwise(ends)), default=self.now - 1000.0
            )
        return gaps


GRACES = st.lists(st.sampled_from([0.0, 1.0, 5.0, 15.0, 30.0, 60.0, 600.0]), max_size=60)
few = settings(max_examples=10, deadline=None)


@few
@given(GRACES, st.lists(st.integers(1, 40), max_size=4))
def test_no_node_reads_more_than_its_share_in_any_time(graces, pauses):
    node = Node(*graces)
    for number, pause in enumerate(pauses):
        node.go_on(pause)
        node.graces[f"later-{number}"] = 30.0  # and pods come
    node.go_on(60)

    least = 0.0  # reads before it less what came in that time, for every beginning of a window
    for before, (at, _) in enumerate(node.reads):
        come = READS_A_SECOND * (at - 1000.0)
        least = min(least, before - come)
        assert before + 1 - come - least <= READS_AT_ONCE + 1e-6


@few
@given(GRACES)
def test_every_pod_has_its_turn(graces):
    node = Node(*graces)
    node.go_on(300)

    all_of_them = len(graces) / READS_A_SECOND
    for name, gap in node.gaps().items():
        assert gap <= max(node.graces[name], 20.0) + all_of_them + LOOP


@few
@given(st.lists(st.sampled_from([12.0, 30.0, 45.0, 60.0, 120.0, 600.0]), min_size=1, max_size=80))
def test_where_the_pods_need_half_of_what_there_is_each_is_noticed_before_its_margin(graces):
    while sum(1 / (grace - LONGEST_MARGIN_SECONDS) for grace in graces) > READS_A_SECOND / 2:
        graces.pop()
    node = Node(*graces)
    node.go_on(300)

    for name, gap in node.gaps(after=60).items():
        assert gap <= node.graces[name] - LONGEST_MARGIN_SECONDS
    assert set(node.late) <= {0}


@pytest.mark.parametrize(("pods", "grace"), [(1, 6.0), (10, 15.0), (30, 30.0), (70, 60.0)])
def test_pods_that_are_alike_are_noticed_as_long_as_their_grace_is_longer_than_a_turn(pods, grace):
    node = Node(*[grace] * pods)
    node.go_on(300)

    assert max(node.gaps(after=100).values()) <= grace - LONGEST_MARGIN_SECONDS


def test_pods_with_hopelessly_short_graces_do_not_harm_one_with_a_long_one():
    node = Node(*[1.0] * 99, 120.0)
    node.go_on(600)

    assert node.gaps()["p99"] <= 117.0


def test_a_pod_alone_is_looked_at_three_times_in_its_grace_period():
    node = Node(30.0)
    node.go_on(100)

    assert [at - 1000 for at, _ in node.reads] == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]


@pytest.mark.parametrize("remaining", [5, 0])
def test_that_pods_cannot_be_looked_at_in_time_is_said_once_and_when_it_is_over(caplog, remaining):
    caplog.set_level("INFO")
    node = Node(*[15.0] * 60)
    node.go_on(300)
    assert [(record.pods, record.reads_a_second) for record in caplog.records] == [
        (60, READS_A_SECOND)
    ]
    assert max(node.late) > 0

    for number in range(60 - remaining):
        del node.graces[f"p{number}"]
    node.go_on(60)
    assert caplog.messages[1:] == ["pods with MPS clients are looked at in time again"]
    assert node.late[-1] == 0
