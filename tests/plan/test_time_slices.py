"""One interval on a GPU: two different ones clash, and nothing else does."""

import pytest

from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.steps import Interval, MakeDeviceNodes, SetTimeSlice
from dra_driver.plan.time_slices import clashing
from tests.fakes.values import ref

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")
SHORT, MEDIUM, LONG, DEFAULT = Interval.SHORT, Interval.MEDIUM, Interval.LONG, Interval.DEFAULT


def wanted(**intervals: Interval) -> dict[GpuUuid, SetTimeSlice]:
    return {
        GpuUuid(f"GPU-{gpu}"): SetTimeSlice(GpuUuid(f"GPU-{gpu}"), interval)
        for gpu, interval in intervals.items()
    }


def record(name: str, *steps: SetTimeSlice) -> Record:
    return Record(ref(name), (), (MakeDeviceNodes((0,)), *steps))


OTHERS = [
    record("second", SetTimeSlice(A, SHORT)),
    record("first", SetTimeSlice(A, SHORT), SetTimeSlice(B, LONG)),
]


@pytest.mark.parametrize("asked", [DEFAULT, MEDIUM, LONG])
def test_every_claim_with_another_interval_on_the_gpu_clashes(asked):
    assert [(claim.name, step) for claim, step in clashing(wanted(a=asked), OTHERS)] == [
        ("first", SetTimeSlice(A, SHORT)),
        ("second", SetTimeSlice(A, SHORT)),
    ]


def test_other_gpus_and_the_same_interval_are_no_clash():
    assert not [*clashing(wanted(a=SHORT), OTHERS)]
    assert not [*clashing(wanted(c=MEDIUM), OTHERS)]
    assert not [*clashing({}, OTHERS)]


def test_a_claim_without_an_interval_goes_with_any():
    assert not [*clashing(wanted(a=SHORT), [record("silent")])]
