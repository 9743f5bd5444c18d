"""The turns of the processes on a GPU: which interval holds, and when the earlier one comes back.

A GPU has one interval. A claim that names none has no opinion; claims that name the same share it;
two different ones clash. What was found before the first of them is written into the record of
each, and comes back with the last: so it does not matter in which order they go, or what happens in
between.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from dra_driver.errors import DeviceHeld
from dra_driver.kubeletplugin.claims import ClaimRef
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.steps import Interval, SetTimeSlice, Step


def time_slice_steps(
    wanted: Mapping[GpuUuid, SetTimeSlice], others: Iterable[Record]
) -> tuple[SetTimeSlice, ...]:
    """The steps for what a claim *wanted*; what *others* found before them is taken over.

    The interval is set even where it should hold already: a claim that is just being given back may
    have restored it. DeviceHeld: another interval holds on one of the GPUs.
    """
    others = tuple(others)
    if clashes := time_slice_clashes(wanted, others):
        raise DeviceHeld("; ".join(clashes))
    set_by_others = _set_by(others)
    return tuple(
        replace(step, before=set_by_others[gpu].before) if gpu in set_by_others else step
        for gpu, step in sorted(wanted.items())
    )


def time_slice_clashes(
    wanted: Mapping[GpuUuid, SetTimeSlice], others: Iterable[Record]
) -> tuple[str, ...]:
    """Each different interval that another claim set on one of the GPUs, and what to do."""
    return tuple(
        f"the time-slice interval of {step.gpu} is {step.interval}, set by claim {claim} "
        f"(UID {claim.uid}), and cannot be {wanted[step.gpu].interval} too: write the same "
        "interval, or none, which fits any, or wait until that claim is gone"
        for claim, step in clashing(wanted, others)
    )


def clashing(
    wanted: Mapping[GpuUuid, SetTimeSlice], others: Iterable[Record]
) -> Iterator[tuple[ClaimRef, SetTimeSlice]]:
    """What other claims set that differs from what is *wanted* of the same GPU, by claim."""
    return (
        (record.claim, step)
        for record in sorted(others, key=lambda record: record.claim)
        for step in _settings(record)
        if step.gpu in wanted and step.interval != wanted[step.gpu].interval
    )


def to_look_up(steps: Iterable[Step], others: Iterable[Record]) -> tuple[GpuUuid, ...]:
    """The GPUs whose interval has to be looked up before *steps* are recorded.

    Where other claims have set one, what the GPU says now is theirs and not what was there before.
    """
    set_by_others = _set_by(others)
    return tuple(
        step.gpu
        for step in steps
        if isinstance(step, SetTimeSlice) and step.gpu not in set_by_others
    )


def with_found(steps: Iterable[Step], found: Mapping[GpuUuid, Interval | None]) -> tuple[Step, ...]:
    """*steps*, told what was *found* on the GPUs that had to be looked up."""
    return tuple(
        replace(step, before=found[step.gpu])
        if isinstance(step, SetTimeSlice) and step.gpu in found
        else step
        for step in steps
    )


def undo_time_slice_steps(record: Record, others: Iterable[Record]) -> tuple[SetTimeSlice, ...]:
    """What brings back the intervals that were there before *record*'s claim, newest first.

    Nothing, as long as one of *others* has set an interval on the same GPU.
    """
    needed = _set_by(others)
    return tuple(
        SetTimeSlice(step.gpu, _before(step))
        for step in reversed(tuple(_settings(record)))
        if step.gpu not in needed
    )


def _before(step: SetTimeSlice) -> Interval:
    """A GPU that does not say is taken to have been as the driver sets it up."""
    return Interval.DEFAULT if step.before is None else step.before


def _set_by(records: Iterable[Record]) -> dict[GpuUuid, SetTimeSlice]:
    return {step.gpu: step for record in records for step in _settings(record)}


def _settings(record: Record) -> Iterator[SetTimeSlice]:
    return (step for step in record.steps if isinstance(step, SetTimeSlice))
