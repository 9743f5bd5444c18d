"""Events say what is new of layouts and MIG modes, once."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mig_layouts import LayoutOutcome, LayoutState, MigState
from dra_driver.plan.mig.manager.state import MigEvent, failure_event, mig_events

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")
NOTHING = MigState()
DONE, WAITS = (
    LayoutOutcome("all", LayoutState.SUCCESS),
    LayoutOutcome("all", LayoutState.PENDING, "a claim holds it"),
)
MODE_OFF = "MIG mode of gpu-0 is not turned on yet: processes use it: dcgm (7)"


def events(before, after):
    return list(mig_events(before, after, {A: "gpu-0", B: "gpu-1"}))


def outcomes(**by_gpu):
    return MigState(outcomes={A if key == "a" else B: outcome for key, outcome in by_gpu.items()})


def failed(reason="no room", layout="all"):
    return LayoutOutcome(layout, LayoutState.FAILED, reason)


def failure(gpu, name, reason="no room"):
    message = f"{name} is not partitioned as layout 'all' says: {reason}"
    return MigEvent("MIGLayoutFailed", f"{gpu} all", message)


def applied(layout, gpus):
    message = f"partitioned as layout {layout!r} says: {gpus}"
    return MigEvent("MIGLayoutApplied", message, message)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(
            NOTHING,
            outcomes(a=failed(), b=failed()),
            [failure(A, "gpu-0"), failure(B, "gpu-1")],
            id="GPUs that fail, one by one",
        ),
        pytest.param(
            outcomes(a=failed("held by 1")),
            outcomes(a=failed("held by 2")),
            [failure(A, "gpu-0", "held by 2")],
            id="another reason for the same failure",
        ),
        pytest.param(
            outcomes(a=failed()),
            outcomes(a=failed(layout="other")),
            [
                MigEvent(
                    "MIGLayoutFailed",
                    f"{A} other",
                    "gpu-0 is not partitioned as layout 'other' says: no room",
                )
            ],
            id="another layout that fails is another thing",
        ),
        pytest.param(
            outcomes(a=WAITS),
            outcomes(a=DONE, b=DONE),
            [applied("all", "gpu-0, gpu-1")],
            id="all GPUs of a layout together",
        ),
        pytest.param(
            NOTHING,
            outcomes(a=DONE, b=LayoutOutcome("other", LayoutState.SUCCESS)),
            [applied("all", "gpu-0"), applied("other", "gpu-1")],
            id="each layout for itself",
        ),
        pytest.param(
            outcomes(a=DONE),
            outcomes(a=replace(DONE, reason="no partitions are created for claims"), b=WAITS),
            [],
            id="neither a new reason for a success, nor what waits",
        ),
        pytest.param(
            NOTHING,
            MigState(problem="there is no layout 'x'"),
            [failure_event("the layout of this node cannot be used: there is no layout 'x'")],
            id="a layout that is not known",
        ),
        pytest.param(
            NOTHING,
            MigState(mode_problems={A: MODE_OFF}),
            [MigEvent("MIGModeNotSet", A, MODE_OFF)],
            id="a board without the mode that its profile wants",
        ),
        pytest.param(
            MigState(mode_problems={A: MODE_OFF}),
            MigState(mode_problems={A: MODE_OFF}),
            [],
            id="not again while it stays so",
        ),
    ],
)
def test_what_is_new_makes_an_event(before, after, expected):
    assert events(before, after) == expected
    assert [event.is_good for event in expected] == ["Applied" in e.reason for e in expected]


states = st.builds(
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


@given(states, states)
def test_every_failure_that_is_new_is_reported_exactly_once(before, after):
    bad = [event for event in events(before, after) if not event.is_good]
    new_failures = [
        gpu
        for gpu, outcome in after.outcomes.items()
        if outcome.state is LayoutState.FAILED and outcome != before.outcomes.get(gpu)
    ]
    new_problems = after.mode_problems.items() - before.mode_problems.items()
    problem = bool(after.problem) and after.problem != before.problem

    assert len(bad) == len(new_failures) + len(new_problems) + problem
    assert len({(event.reason, event.about) for event in bad}) == len(bad)
    assert events(after, after) == []
