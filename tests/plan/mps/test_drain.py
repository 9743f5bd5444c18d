"""When pods are looked at, and when the clients of those that end are ended: values alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.k8s.pods import PodDeletion
from dra_driver.plan.mps.drain import (
    LONGEST_MARGIN_SECONDS,
    PodRead,
    ReadBudget,
    most_urgent,
    never_read,
    terminating_pod,
)

SECONDS = st.floats(-100, 1000).map(lambda seconds: round(seconds, 3))
LEFT = st.floats(0, 1000).map(lambda seconds: round(seconds, 3))


def deleted(ends_at, seconds_left=None, grace=1000.0):
    return PodDeletion(ends_at, grace, seconds_left)


def ended(deletion, *looks):
    """As ``terminating_pod``, of a pod that is deleted."""
    terminating = terminating_pod(deletion, *looks)
    assert terminating is not None
    return terminating


def test_a_pod_that_is_not_deleted_does_not_end():
    assert terminating_pod(None, 0.0) is None


@given(seconds_left=LEFT, now=SECONDS)
def test_a_program_has_at_least_half_of_what_was_left_and_all_but_the_margin(seconds_left, now):
    terminating = ended(deleted(5.0, seconds_left), now)

    assert terminating.ends_at == now + seconds_left
    assert terminating.ends_at - LONGEST_MARGIN_SECONDS <= terminating.due_at <= terminating.ends_at
    assert terminating.due_at - now >= seconds_left / 2 - 1e-9
    if seconds_left >= 2 * LONGEST_MARGIN_SECONDS:
        assert terminating.margin == LONGEST_MARGIN_SECONDS


@given(ends_at=SECONDS, now=SECONDS, seconds_left=LEFT)
def test_which_time_of_day_a_deletion_says_changes_nothing(ends_at, now, seconds_left):
    terminating = ended(deleted(ends_at, seconds_left), now)

    assert terminating.due_at == ended(deleted(0.0, seconds_left), now).due_at


def test_nobody_has_more_than_the_grace_period_from_when_the_deletion_was_seen():
    assert ended(deleted(0.0, 900.0, grace=30.0), 100.0).ends_at == 130.0


@pytest.mark.parametrize(("undeleted_at", "due_at"), [(95.0, 122.0), (100.0, 127.0)])
def test_where_nobody_says_how_much_is_left_it_began_after_the_last_look(undeleted_at, due_at):
    assert ended(deleted(0.0, grace=30.0), 100.0, undeleted_at).due_at == due_at


def test_where_nothing_is_known_of_a_pod_in_deletion_its_clients_are_ended_at_once():
    assert ended(deleted(0.0, grace=30.0), 100.0).due_at == 100.0


def test_a_grace_period_that_may_be_over_leaves_no_margin():
    terminating = ended(deleted(0.0, grace=30.0), 100.0, 20.0)

    assert (terminating.ends_at, terminating.due_at) == (50.0, 50.0)


@given(ends_at=SECONDS, looks=st.lists(st.tuples(SECONDS, LEFT), min_size=1))
def test_later_looks_at_the_same_deletion_change_nothing(ends_at, looks):
    terminating = first = ended(deleted(ends_at, looks[0][1]), looks[0][0])
    for now, seconds_left in looks:
        terminating = ended(deleted(ends_at, seconds_left), now, now, terminating)

    assert terminating == first


def test_an_end_that_comes_nearer_is_another_one():
    first = ended(deleted(100.0, 90.0), 0.0)

    hurried = deleted(12.0, 2.0)
    assert terminating_pod(hurried, 10.0, 9.0, first) == terminating_pod(hurried, 10.0, 9.0)


def test_what_was_read_before_a_deletion_takes_nothing_back():
    first = ended(deleted(50.0, 30.0), 0.0)

    assert terminating_pod(None, 1.0, 0.0, first) == first
    assert ended(deleted(600.0, 500.0), 1.0, 0.0, first) == first


# How often pods are looked at


@pytest.mark.parametrize(
    ("grace", "interval"), [(0, 2), (1, 2), (6, 2), (30, 10), (45, 15), (60, 20), (3600, 20)]
)
def test_a_pod_is_looked_at_several_times_in_its_grace_period(grace, interval):
    glance = PodRead(100.0, grace)

    assert glance.interval == interval
    assert not glance.is_due(99.9 + interval)
    assert glance.is_due(100.0 + interval)


def test_a_look_is_late_when_a_pod_can_have_ended_since_the_last():
    glance = PodRead(0.0, 30)
    assert not glance.is_late(30.0)
    assert glance.is_late(30.1)
    assert not never_read(0.0).is_late(99.0)  # nobody says how long it has
    assert not PodRead(0.0, 0).is_late(2.0)  # it is not asked to be quicker than that


def test_first_is_whose_patience_is_used_up_most():
    glances = {
        "short": PodRead(80.0, 30),  # 20 of 27 seconds
        "long": PodRead(0.0, 600),  # 100 of 597
        "new": never_read(100.0),
        "seen": PodRead(95.0, 30),
    }

    assert most_urgent(glances, 100.0, 2.0) == ("new", "short", "long")


def test_whose_grace_period_is_hopelessly_short_does_not_take_the_turns_of_others():
    short = {f"short-{number}": PodRead(40.0, 1) for number in range(99)}
    glances = short | {"long": PodRead(0.0, 57)}

    assert most_urgent(glances, 50.0, 2.0)[0] == "long"


@given(st.lists(st.floats(0, 5), max_size=50), st.floats(0.1, 5), st.integers(1, 10))
def test_no_more_is_read_than_there_was_at_once_and_came_since(pauses, a_second, at_once):
    budget, now, reads = ReadBudget(a_second, at_once, at_once, 0.0), 0.0, 0
    for pause in pauses:
        now += pause
        while (less := budget.after_read(now)) is not None:
            budget, reads = less, reads + 1
        assert reads <= at_once + a_second * now + 1e-6


def test_a_clock_that_is_behind_gives_nothing():
    budget = ReadBudget(1.0, 5.0, 1.0, 10.0).after_read(9.0)

    assert budget == ReadBudget(1.0, 5.0, 0.0, 10.0)
    assert budget.after_read(10.0) is None
    assert budget.after_read(11.0) == ReadBudget(1.0, 5.0, 0.0, 11.0)
