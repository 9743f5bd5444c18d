"""Settings of a GPU that claims change: what was found comes back with the last that needs them.

What a GPU had before the first claim is written into the record of each. So it does not matter in
which order they go, or what happens in between.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import assert_never

from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.steps import (
    ComputeMode,
    Interval,
    SetComputeMode,
    SetMigMode,
    SetTimeSlice,
    Setting,
    Step,
)

_Key = tuple[type[Setting], GpuUuid]


def taken_over(steps: Iterable[Step], others: Iterable[Record]) -> tuple[Step, ...]:
    """*steps*, told what *others* found before them, where they have the same kind of setting.

    A setting is made even where it should hold already: a claim that is just being given back may
    have restored it.
    """
    found = _set_by(others)

    def told(step: Step) -> Step:
        match step:
            case SetTimeSlice() | SetComputeMode() | SetMigMode() if _key(step) in found:
                return _with_before(step, found[_key(step)].before)
            case _:
                return step

    return tuple(map(told, steps))


def to_look_up(steps: Iterable[Step], others: Iterable[Record]) -> tuple[Setting, ...]:
    """The settings whose present value has to be looked up before *steps* are recorded.

    Where other claims have set one, what the GPU says now is theirs and not what was there before.
    """
    found = _set_by(others)
    return tuple(step for step in _settings(steps) if _key(step) not in found)


def with_found(steps: Iterable[Step], found: Mapping[Setting, int | None]) -> tuple[Step, ...]:
    """*steps*, told what was *found* of those that had to be looked up."""
    return tuple(
        _with_before(step, found[step]) if isinstance(step, Setting) and step in found else step
        for step in steps
    )


def undo_settings(record: Record, others: Iterable[Record]) -> tuple[Setting, ...]:
    """What brings back what was there before *record*'s claim, newest first.

    Nothing, as long as one of *others* has the same kind of setting on the same GPU.
    """
    needed = _set_by(others)
    steps = reversed(tuple(_settings(record.steps)))
    return tuple(_back(step) for step in steps if _key(step) not in needed)


def _back(step: Setting) -> Setting:
    """A GPU that does not say is taken to have been as the driver sets it up."""
    match step:
        case SetTimeSlice(gpu=gpu, before=before):
            return SetTimeSlice(gpu, Interval.DEFAULT if before is None else before)
        case SetComputeMode(gpu=gpu, before=before):
            return SetComputeMode(gpu, ComputeMode.DEFAULT if before is None else before)
        case SetMigMode(gpu=gpu, on=on, before=before):
            # Found on, and turned off for a GPU as a whole: the next partition turns it on.
            return SetMigMode(gpu, on and bool(before))
        case _:
            assert_never(step)


def _with_before(step: Setting, before: int | None) -> Setting:
    match step:
        case SetTimeSlice():
            return replace(step, before=None if before is None else Interval(before))
        case SetComputeMode():
            return replace(step, before=None if before is None else ComputeMode(before))
        case SetMigMode():
            return replace(step, before=None if before is None else bool(before))
        case _:
            assert_never(step)


def _set_by(records: Iterable[Record]) -> dict[_Key, Setting]:
    return {_key(step): step for record in records for step in _settings(record.steps)}


def _key(step: Setting) -> _Key:
    return type(step), step.gpu


def _settings(steps: Iterable[Step]) -> Iterator[Setting]:
    return (step for step in steps if isinstance(step, Setting))
