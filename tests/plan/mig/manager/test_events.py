"""Of layouts and boards the node is told what is new, once, and in words."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mig_layouts import LayoutOutcome, LayoutState, MigState
from dra_driver.plan.mig.manager.state import MigEvent, failure_event, mig_events

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")
NAMES = {A: "gpu-0", B: "gpu-1"}


def told(before, after):
    return list(mig_events(before, after, NAMES))


def outcomes(**by_gpu):
    return MigState(outcomes={A if key == "a" else B: outcome for key, outcome in by_gpu.items()})


def failed(reason="no room", layout="all"):
    return LayoutOutcome(layout, LayoutState.FAILED, reason)


DONE, WAITS = (
    LayoutOutcome("all", LayoutState.SUCCESS),
    LayoutOutcome("all", LayoutState.PENDING, "a claim holds it"),
)


def test_a_gpu_that_could_not_be_cut_is_named_with_its_layout_and_the_reason():
    (event,) = told(MigState(), outcomes(a=failed()))

    assert event.reason == "MIGLayoutFailed"
    assert event.message == "gpu-0 is not partitioned as layout 'all' says: no room"
    assert not event.is_good


def test_gpus_that_fail_are_told_of_one_by_one():
    assert len({event.about for event in told(MigState(), outcomes(a=failed(), b=failed()))}) == 2


def test_other_words_for_the_same_failure_are_about_the_same_thing():
    first, second = outcomes(a=failed("held by 1")), outcomes(a=failed("held by 2"))
    (event,), (two,) = told(MigState(), first), told(first, second)

    assert (event.reason, event.about) == (two.reason, two.about)
    assert two.message.endswith("held by 2")


def test_another_layout_that_fails_is_another_thing():
    first, second = outcomes(a=failed()), outcomes(a=failed(layout="other"))
    (event,), (two,) = told(MigState(), first), told(first, second)

    assert event.about != two.about


def test_gpus_that_were_cut_are_told_of_together_by_layout():
    other = LayoutOutcome("other", LayoutState.SUCCESS)

    assert [event.message for event in told(outcomes(a=WAITS), outcomes(a=DONE, b=DONE))] == [
        "partitioned as layout 'all' says: gpu-0, gpu-1"
    ]
    assert [event.message for event in told(MigState(), outcomes(a=DONE, b=other))] == [
        "partitioned as layout 'all' says: gpu-0",
        "partitioned as layout 'other' says: gpu-1",
    ]
    assert all(event.is_good for event in told(MigState(), outcomes(a=DONE, b=other)))


def test_a_gpu_that_is_cut_as_before_is_not_told_of_again_though_a_note_is_new():
    noted = replace(DONE, reason="no partitions of it are created for claims")

    assert told(outcomes(a=DONE), outcomes(a=noted, b=WAITS)) == []


def test_what_waits_is_told_by_the_state_alone():
    assert told(MigState(), outcomes(a=WAITS)) == []


def test_a_layout_that_is_not_known_is_told_as_it_is_logged():
    problem = "there is no layout 'x'"

    assert told(MigState(), MigState(problem=problem)) == [
        failure_event(f"the layout of this node cannot be used: {problem}")
    ]


@pytest.mark.parametrize(
    "why", ["MIG mode of gpu-0 is not turned on yet: processes use it: dcgm (7)"]
)
def test_a_board_without_the_mode_that_its_profile_wants_is_told_as_it_is_logged(why):
    assert told(MigState(), MigState(mode_problems={A: why})) == [MigEvent("MIGModeNotSet", A, why)]


books = st.builds(
    MigState,
    outcomes=st.dictionaries(
        st.sampled_from([A, B]),
        st.builds(
            LayoutOutcome,
            st.sampled_from("xy"),
            st.sampled_from(LayoutState),
            st.sampled_from("12"),
        ),
    ),
    mode_problems=st.dictionaries(st.sampled_from([A, B]), st.sampled_from(["why", "why not"])),
    problem=st.sampled_from(["", "p", "q"]),
)


@given(books)
def test_what_did_not_change_is_never_told_again(book):
    assert told(book, book) == []


@given(books, books)
def test_every_failure_that_is_new_is_told_exactly_once(before, after):
    bad = [event for event in told(before, after) if not event.is_good]
    fresh = [
        gpu
        for gpu, outcome in after.outcomes.items()
        if outcome.state is LayoutState.FAILED and outcome != before.outcomes.get(gpu)
    ]
    boards = [
        gpu for gpu, why in after.mode_problems.items() if why != before.mode_problems.get(gpu)
    ]
    problem = bool(after.problem) and after.problem != before.problem

    assert len(bad) == len(fresh) + len(boards) + problem
    assert len({(event.reason, event.about) for event in bad}) == len(bad)
