"""How far layouts are, as people read it."""

from dra_driver.cli.findings import Level
from dra_driver.cli.mig_status import layout_findings, layout_lines
from dra_driver.model.mig_layouts import LayoutOutcome, LayoutState, MigState
from tests.cli.mig import a100

GPUS = tuple(a100(minor) for minor in range(4))
FREE, SAME, BUSY, WRONG = GPUS

STATE = MigState(
    outcomes={
        FREE.uuid: LayoutOutcome("all-1g.5gb", LayoutState.SUCCESS),
        SAME.uuid: LayoutOutcome("all-1g.5gb", LayoutState.SUCCESS),
        BUSY.uuid: LayoutOutcome("all-1g.5gb", LayoutState.PENDING, "claim team-a/a holds it"),
        WRONG.uuid: LayoutOutcome("odd", LayoutState.FAILED, "it has no profile 1g.99gb"),
    },
    mode_problems={FREE.uuid: "MIG mode could not be restored"},
)


def test_gpus_that_are_equally_far_are_one_line():
    assert list(layout_lines(STATE, GPUS)) == [
        "layout all-1g.5gb on gpu-0, gpu-1: success",
        "layout all-1g.5gb on gpu-2: pending: claim team-a/a holds it",
        "layout odd on gpu-3: failed: it has no profile 1g.99gb",
        "gpu-0: MIG mode could not be restored",
    ]


def test_a_layout_that_there_is_not_is_told_without_any_gpu():
    state = MigState(problem="there is no layout 'x'")

    assert list(layout_lines(state, GPUS)) == ["layout: there is no layout 'x'"]
    (finding,) = layout_findings(state, GPUS)
    assert finding.level is Level.FAIL
    assert "nvidia.com/mig.config" in finding.remedy


def test_doctor_fails_where_a_layout_failed_and_warns_where_it_waits():
    findings = list(layout_findings(STATE, GPUS))

    assert [finding.level for finding in findings] == [Level.OK, Level.WARN, Level.FAIL, Level.WARN]
    assert all(finding.remedy for finding in findings[1:3])


def test_gpus_that_are_gone_are_not_told_of():
    assert list(layout_lines(STATE, ())) == list(layout_findings(STATE, ())) == []
    assert list(layout_findings(MigState(), GPUS)) == []
