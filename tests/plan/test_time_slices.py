"""One interval on a GPU: two different ones clash, and nothing else does."""

import pytest

from dra_driver.model.gpus import GpuUuid
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import CreateDeviceNodes, SetTimeSlice, TimeSliceInterval
from dra_driver.plan.prepare.claim import clashing_intervals
from tests.builders import ref

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")
SHORT, MEDIUM, LONG, DEFAULT = (
    TimeSliceInterval.SHORT,
    TimeSliceInterval.MEDIUM,
    TimeSliceInterval.LONG,
    TimeSliceInterval.DEFAULT,
)


def requested_steps(**intervals: TimeSliceInterval) -> dict[GpuUuid, SetTimeSlice]:
    return {
        GpuUuid(f"GPU-{gpu}"): SetTimeSlice(GpuUuid(f"GPU-{gpu}"), interval)
        for gpu, interval in intervals.items()
    }


def record(name: str, *steps: SetTimeSlice) -> ClaimRecord:
    return ClaimRecord(ref(name), (), (CreateDeviceNodes((0,)), *steps))


OTHERS = [
    record("second", SetTimeSlice(A, SHORT)),
    record("first", SetTimeSlice(A, SHORT), SetTimeSlice(B, LONG)),
]


@pytest.mark.parametrize("asked", [DEFAULT, MEDIUM, LONG])
def test_every_claim_with_another_interval_on_the_gpu_clashes(asked):
    assert [
        (claim.name, step) for claim, step in clashing_intervals(requested_steps(a=asked), OTHERS)
    ] == [
        ("first", SetTimeSlice(A, SHORT)),
        ("second", SetTimeSlice(A, SHORT)),
    ]


def test_other_gpus_and_the_same_interval_are_no_clash():
    assert not [*clashing_intervals(requested_steps(a=SHORT), OTHERS)]
    assert not [*clashing_intervals(requested_steps(c=MEDIUM), OTHERS)]
    assert not [*clashing_intervals({}, OTHERS)]


def test_a_claim_without_an_interval_goes_with_any():
    assert not [*clashing_intervals(requested_steps(a=SHORT), [record("silent")])]
