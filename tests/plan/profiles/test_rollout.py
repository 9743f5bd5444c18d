"""What the controller writes next, from what the cluster looks like."""

from dataclasses import replace
from typing import Any

import pytest

from dra_driver.model.node_profiles import (
    ConditionType,
    GivenSince,
    NodeChange,
    NodeFailure,
    NodeReport,
    ProfileStatus,
    ProgressReason,
    RevisionChange,
    RolloutRules,
)
from dra_driver.plan.profiles.rollout import (
    Moment,
    Surroundings,
    decide_rollout,
    decide_without_profile,
    revisions_in_use,
)
from tests.plan.profiles.fleet import Fleet, kept, node, profile, report, revision

REVISIONS = (kept(1, number=1), kept(2, number=2))
AT_ONCE = RolloutRules(2, in_percent=False, max_failures=2)


def changing(*updating, rules=AT_ONCE, **fields: Any):
    """A profile of which revision 1 is rolled out everywhere, and revision 2 is under way."""
    status = ProfileStatus(1, revision(1), revision(2), updating=updating)
    return profile(2, rollout=rules, status=replace(status, **fields))


def decide(profile, *nodes, seconds=0.0, since=None, **around: Any):
    surroundings = Surroundings(nodes, **{"revisions": REVISIONS, **around})
    return decide_rollout(profile, surroundings, Moment(seconds, "later", since or {}))


def progress(decision):
    return decision.status.condition(ConditionType.PROGRESSING)


def old(*numbers, **fields: Any):
    """Nodes that have revision 1."""
    return [node(number, given=1, reports=1, **fields) for number in numbers]


def done(*numbers):
    return [node(number, given=2, reports=2) for number in numbers]


def test_nodes_are_named_in_the_status_before_they_are_given_anything():
    decision = decide(profile(1), *[node(number) for number in range(50)], revisions=())

    assert decision.status.updating == tuple(f"node-{number:04}" for number in range(5))
    assert decision.nodes == ()
    assert decision.revision == RevisionChange(replace(kept(1), resource_version=""), exists=False)


def test_nodes_that_are_named_are_given_the_revision_as_they_were_seen():
    decision = decide(changing("node-0001", "node-0002"), *old(1, 2, 3))

    assert decision.nodes == (
        NodeChange("node-0001", "uid-1", "1", revision(2)),
        NodeChange("node-0002", "uid-2", "1", revision(2)),
    )
    assert decision.status.updating == ("node-0001", "node-0002")


def test_nothing_is_given_before_the_revision_is_kept():
    assert decide(changing("node-0001"), *old(1), revisions=REVISIONS[:1]).nodes == ()


def test_a_revision_of_a_deleted_profile_of_the_same_name_is_not_the_profiles():
    former = tuple(replace(each, owner_uid="former") for each in REVISIONS)

    decision = decide(changing("node-0001"), *old(1), revisions=former)

    assert (decision.nodes, decision.old_revisions) == ((), ())
    assert decision.revision is not None
    assert not decision.revision.exists


def test_a_revision_that_nobody_owns_is_taken_over_where_the_spec_needs_it():
    orphans = tuple(replace(each, owner_uid="") for each in REVISIONS)

    decision = decide(changing("node-0001"), *old(1), revisions=orphans)

    assert decision.revision == RevisionChange(REVISIONS[1], exists=True)
    assert decision.old_revisions == ()


def test_names_for_another_revision_are_written_first():
    decision = decide(changing("node-0001", update_revision=revision(3)), *old(1, 2))

    assert decision.nodes == ()
    assert decision.status.update_revision == revision(2)
    assert decision.status.updating == ("node-0001", "node-0002")


def test_a_node_that_reported_makes_place_for_the_next():
    decision = decide(changing("node-0001", "node-0002"), *done(1), *old(2, 3, 4))

    assert decision.status.updating == ("node-0002", "node-0003")


def test_nodes_that_are_gone_make_place():
    decision = decide(changing("node-0001", "node-0002"), *old(3, 4, 5))

    assert decision.status.updating == ("node-0003", "node-0004")


def test_a_given_node_counts_whoever_gave_it():
    given = node(1, given=2, reports=1)

    assert decide(changing(), given, *old(2, 3)).status.updating == ("node-0002",)


def test_nodes_that_took_the_revision_by_themselves_are_stamped_without_a_slot():
    joined = [node(number, reports=2) for number in range(500)]

    decision = decide(changing("node-0600", rules=replace(AT_ONCE, max_unavailable=1)), *joined)

    assert len(decision.nodes) == 250
    assert {change.revision for change in decision.nodes} == {revision(2)}
    assert (decision.status.updated, decision.status.current_revision) == (500, revision(2))


def test_a_node_that_is_not_ready_is_given_nothing_and_counted():
    nodes = [*old(1, ready=False), *old(2, ready=False), *done(3)]

    decision = decide(changing("node-0001"), *nodes)

    assert (decision.nodes, decision.status.updating) == ((), ())
    assert progress(decision).reason == ProgressReason.WAITING_FOR_NODES
    assert progress(decision).message == (
        f"revision {revision(2)} is in force on 1 of 3 nodes; 2 not ready"
    )


def test_a_node_that_is_not_ready_counts_while_it_may_take_another_revision():
    away = node(1, given=3, reports=1, ready=False)
    since = {away.name: GivenSince(revision(3), 0.0)}

    early = decide(changing(away.name), away, *old(2, 3), seconds=599.0, since=since)
    late = decide(changing(away.name), away, *old(2, 3), seconds=600.0, since=since)

    assert early.status.updating == ("node-0001", "node-0002")
    assert late.status.updating == ("node-0002", "node-0003")
    assert early.again_in == 1.0


def test_a_node_that_may_take_another_revision_of_the_profile_counts_and_is_named_first():
    """The profile was deleted and applied again, or the node was another profile's for a while."""
    moving, too = node(8, given=3, reports=1), node(9, given=3, reports=1)

    decision = decide(changing("node-0001"), *old(1, 2), moving, too)

    assert decision.status.updating == ("node-0001", "node-0008")


def test_a_node_that_was_given_a_revision_of_another_profile_does_not_count():
    other = replace(node(3, reports=1), given="other-5d8fbz7k2x")

    assert decide(changing(), *old(1, 2), other).status.updating == ("node-0001", "node-0002")


def test_a_node_that_reports_the_revision_and_was_given_another_one_counts_until_it_is_stamped():
    undone = node(3, given=3, reports=2)

    decision = decide(changing(), *old(1, 2), undone)

    assert [change.node for change in decision.nodes] == ["node-0003"]
    assert decision.status.updating == ("node-0001",)


def test_a_node_that_refuses_the_revision_has_failed():
    refusing = replace(node(1, given=2), report=report(2, refusal="x" * 1000))

    decision = decide(changing("node-0001"), refusing, *old(2))

    assert decision.status.failures == (NodeFailure("node-0001", "x" * 256),)
    assert (decision.status.failed, decision.status.updating) == (1, ("node-0002",))


def test_a_node_that_refuses_what_it_took_by_itself_is_given_nothing():
    refusing = replace(node(1), report=report(2, refusal="it does not fit"))

    decision = decide(changing(), refusing)

    assert (decision.nodes, decision.status.failed) == ((), 1)
    assert progress(decision).reason == ProgressReason.WAITING_FOR_NODES


def test_a_node_that_does_not_report_in_time_has_failed():
    given = node(1, given=2, reports=1)
    first = decide(changing("node-0001"), given, seconds=100.0)
    again = decide(changing("node-0001"), given, seconds=699.0, since=first.given_since)
    late = decide(changing("node-0001"), given, seconds=700.0, since=first.given_since)

    assert (first.again_in, again.again_in, late.again_in) == (600.0, 1.0, None)
    assert again.status.failures == ()
    assert late.status.failures == (NodeFailure("node-0001", "did not report within 600 s"),)
    assert late.status.updating == ()


def test_a_node_whose_annotation_cannot_be_written_is_said_and_keeps_its_place():
    """A process that was paused may write it yet."""
    first = decide(changing("node-0001"), *old(1), seconds=100.0)
    late = decide(changing("node-0001"), *old(1), seconds=700.0, since=first.given_since)

    failure = NodeFailure("node-0001", "its annotation could not be written within 600 s")
    assert first.status.failures == ()
    assert (late.status.failures, late.status.failed) == ((failure,), 1)
    assert "; 1 failed" in progress(late).message and "in progress" not in progress(late).message
    assert late.status.updating == ("node-0001",)
    assert [change.node for change in late.nodes] == ["node-0001"]


def test_a_node_whose_annotation_is_written_late_has_all_its_time():
    failure = NodeFailure("node-0001", "its annotation could not be written within 600 s")

    decision = decide(
        changing("node-0001", failures=(failure,)), node(1, given=2, reports=1), seconds=700.0
    )

    assert (decision.status.failures, decision.again_in) == ((), 600.0)


@pytest.mark.parametrize("refusals", [0, 2], ids=["paused", "stopped at the failures of others"])
def test_no_time_passes_while_nothing_is_given(refusals):
    rules = replace(AT_ONCE, paused=not refusals)
    refusing = [
        replace(node(number, given=2), report=report(2, refusal="it does not fit"))
        for number in range(2, 2 + refusals)
    ]
    since = {"node-0001": GivenSince(revision(1), 0.0)}

    stopped = decide(
        changing("node-0001", rules=rules), *old(1), *refusing, seconds=700.0, since=since
    )

    assert stopped.status.failed == refusals
    assert "node-0001" not in stopped.given_since


def test_a_node_that_cannot_be_taken_back_holds_an_undo_up_for_its_deadline_only():
    undone = replace(changing("node-0001"), revision=revision(1), rules=kept(1).rules)
    first = decide(undone, *old(1, 2), seconds=100.0)
    late = decide(undone, *old(1, 2), seconds=700.0, since=first.given_since)

    assert [(change.node, change.revision) for change in first.nodes] == [("node-0001", None)]
    assert (first.status.update_revision, first.again_in) == (revision(2), 600.0)
    assert late.status.update_revision == revision(1)


def test_the_time_begins_again_with_another_revision():
    since = {"node-0001": GivenSince(revision(1), 0.0)}

    decision = decide(changing(), node(1, given=2, reports=1), seconds=700.0, since=since)

    assert (decision.status.failed, decision.again_in) == (0, 600.0)


def test_the_next_leader_knows_which_nodes_have_failed():
    failure = NodeFailure("node-0001", "did not report within 600 s")
    status = changing(failures=(failure,))

    assert decide(status, node(1, given=2, reports=1)).status.failures == (failure,)
    assert decide(status, *done(1)).status.failures == ()
    other = replace(status, status=replace(status.status, update_revision=revision(3)))
    assert decide(other, node(1, given=2, reports=1)).status.failures == ()


def test_at_most_ten_failures_are_named_and_all_are_counted():
    rules = replace(AT_ONCE, max_failures=100)
    refusing = [
        replace(node(number, given=2), report=report(2, refusal="no")) for number in range(12)
    ]

    status = decide(changing(rules=rules), *reversed(refusing)).status

    assert [failure.node for failure in status.failures] == [each.name for each in refusing[:10]]
    assert status.failed == 12


def test_at_maxfailures_nothing_more_is_given():
    refusing = [replace(node(number, given=2), report=report(2, refusal="no")) for number in (1, 2)]

    decision = decide(changing("node-0001", "node-0003"), *refusing, *old(3, 4))

    assert decision.nodes == ()
    assert decision.status.updating == ("node-0003",)
    assert (progress(decision).status, progress(decision).reason) == (False, "TooManyFailures")
    assert progress(decision).message == (
        f"revision {revision(2)} is in force on 0 of 4 nodes; 1 in progress; 2 failed; 1 waiting; "
        "the rollout stopped at 2 (maxFailures)"
    )


def test_a_paused_rollout_gives_nothing_and_takes_what_nodes_took():
    paused = changing("node-0001", rules=replace(AT_ONCE, paused=True))

    decision = decide(paused, *old(1, 2), node(3, reports=2))

    assert [change.node for change in decision.nodes] == ["node-0003"]
    assert decision.status.updating == ("node-0001",)
    assert (progress(decision).status, progress(decision).reason) == (False, "Paused")


def test_where_every_node_has_the_revision_it_is_the_current_one():
    pending = replace(node(2, given=2), report=report(2, pending=3))

    decision = decide(changing("node-0001"), *done(1), pending)

    status = decision.status
    assert (status.current_revision, status.updating, status.pending) == (revision(2), (), 3)
    assert progress(decision).reason == ProgressReason.COMPLETE
    complete = status.condition(ConditionType.COMPLETE)
    assert complete is not None
    assert (complete.status, complete.last_transition) == (True, "later")


def test_a_profile_that_holds_nowhere_says_so():
    decision = decide(changing())

    assert (progress(decision).status, progress(decision).reason) == (False, "NoNodes")
    assert decision.status.current_revision == revision(2)


def test_the_time_of_a_condition_is_kept_while_its_status_is():
    first = decide(changing(), *old(1)).status
    earlier = tuple(replace(each, last_transition="earlier") for each in first.conditions)

    second = decide(changing(conditions=earlier), *done(1)).status

    times = [condition.last_transition for condition in second.conditions]
    assert times == ["later", "earlier"]  # Complete became true, Progressing still is


def test_an_unreadable_profile_writes_nothing_but_why():
    unreadable = replace(changing("node-0001"), problem="spec.x: unknown field", generation=2)

    decision = decide(unreadable, *old(1))

    assert (decision.nodes, decision.revision, decision.old_revisions) == ((), None, ())
    assert decision.status.updating == ("node-0001",)
    assert decision.status.observed_generation == 2
    assert progress(decision).message == "nodes keep what they have: spec.x: unknown field"


def test_a_tie_and_a_slow_scheduler_are_conditions():
    decision = decide(changing(), ties=frozenset(["b", "a"]), slows_scheduler="takes 3 s")

    tied = decision.status.condition(ConditionType.TIED)
    slow = decision.status.condition(ConditionType.SLOWS_SCHEDULER)
    assert tied is not None
    assert slow is not None
    assert tied.message.endswith(": a, b, inference; the oldest holds there")
    assert (slow.status, slow.message) == (True, "takes 3 s")


def test_a_node_that_need_not_change_any_more_is_written_before_its_name_goes():
    """A leader that was paused may still give it what is undone by now."""
    undone = changing("node-0001", update_revision=revision(3))

    decision = decide(undone, *done(1), *old(2))

    assert decision.nodes == (NodeChange("node-0001", "uid-1", "1", None),)
    assert decision.status == undone.status


def test_old_revisions_go_but_none_that_is_used():
    revisions = tuple(kept(number, number=number) for number in range(1, 7))
    nodes = [node(1, given=3, reports=3)]
    using = Surroundings(nodes, revisions, revisions_in_use(nodes))
    limited = replace(profile(6), revision_history_limit=1)
    limited = replace(limited, status=ProfileStatus(1, revision(1), revision(6)), rollout=AT_ONCE)

    decision = decide_rollout(limited, using, Moment(0.0, "now"))

    assert [each.number for each in decision.old_revisions] == [2, 4]


def test_revisions_in_use_are_those_given_and_reported():
    nodes = [node(1, given=1, reports=2), node(2), node(3, given=""), replace(node(4), report=None)]

    assert revisions_in_use(nodes) - {""} == {revision(1), revision(2)}


def test_nothing_is_written_twice():
    fleet = Fleet(nodes=3)
    fleet.settle()
    fleet.seconds += 10_000

    decision = fleet.look()

    assert fleet.leader.writes == []
    assert (decision.given_since, decision.again_in) == ({}, None)


@pytest.mark.parametrize("nodes", [1, 10, 50])
def test_a_rollout_reaches_all_nodes_a_few_at_a_time(nodes):
    fleet = Fleet(nodes, RolloutRules())
    fleet.settle()
    fleet.specify(2)

    rounds = fleet.settle()

    assert fleet.profile.status.updated == nodes
    assert rounds >= nodes // fleet.limit()


def without_profile(*nodes, seconds=0.0, since=None):
    decision = decide_without_profile(nodes, Moment(seconds, "now", since or {}))
    return [change.node for change in decision.nodes], decision


def test_nodes_without_a_profile_are_told_so_a_few_at_a_time():
    names, decision = without_profile(*old(*range(25)), node(30), node(31, given=""))

    assert names == ["node-0000", "node-0001", "node-0002"]
    assert {change.revision for change in decision.nodes} == {""}


def test_a_node_that_was_told_counts_until_it_follows_the_files():
    told = node(1, given="", reports=1)

    assert without_profile(told, *old(2, 3))[0] == []
    assert without_profile(replace(told, report=None), *old(2, 3))[0] == ["node-0002"]


def test_a_node_that_was_told_counts_no_longer_than_its_deadline():
    told = node(1, given="", reports=1)
    _, first = without_profile(told, *old(2))

    names, late = without_profile(told, *old(2), seconds=600.0, since=first.given_since)

    assert (names, first.again_in, late.again_in) == (["node-0002"], 600.0, None)


def test_a_node_that_took_a_profile_by_itself_is_told_too():
    assert without_profile(node(1, reports=1))[0] == ["node-0001"]


def test_nodes_that_follow_the_files_are_left_alone():
    files = replace(node(1, given=""), report=NodeReport("default", of_files=True))

    assert without_profile(files, node(2))[0] == []


def test_in_the_end_every_node_without_a_profile_follows_the_files():
    nodes = {each.name: each for each in old(*range(50))}
    while names := without_profile(*nodes.values())[0]:
        assert len(names) <= 5
        for name in names:
            files = NodeReport("default", of_files=True)
            nodes[name] = replace(nodes[name], given="", report=files)

    assert {each.given for each in nodes.values()} == {""}
