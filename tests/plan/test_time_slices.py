"""One interval on a GPU: shared, refused, and brought back when the last claim goes."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import DeviceHeld
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.steps import Interval, MakeDeviceNodes, SetTimeSlice
from dra_driver.plan.time_slices import (
    time_slice_clashes,
    time_slice_steps,
    to_look_up,
    undo_time_slice_steps,
    with_found,
)
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


def test_an_interval_that_nobody_has_set_yet_is_looked_up_first():
    steps = time_slice_steps(wanted(b=LONG, a=SHORT), [record("silent")])
    assert to_look_up((MakeDeviceNodes((0,)), *steps), [record("silent")]) == (A, B)
    assert with_found((MakeDeviceNodes((0,)), *steps), {A: MEDIUM, B: None}) == (
        MakeDeviceNodes((0,)),
        SetTimeSlice(A, SHORT, MEDIUM),
        SetTimeSlice(B, LONG, None),
    )


def test_a_later_claim_takes_over_what_the_first_one_found():
    others = [record("first", SetTimeSlice(A, SHORT, MEDIUM))]
    steps = time_slice_steps(wanted(a=SHORT, b=SHORT), others)
    assert steps == (SetTimeSlice(A, SHORT, MEDIUM), SetTimeSlice(B, SHORT))
    assert to_look_up(steps, others) == (B,)


def test_a_gpu_that_did_not_say_is_not_asked_while_it_is_set():
    others = [record("first", SetTimeSlice(A, SHORT, None))]
    assert to_look_up(time_slice_steps(wanted(a=SHORT), others), others) == ()


def test_a_claim_without_an_interval_goes_with_any():
    others = [record("first", SetTimeSlice(A, SHORT, DEFAULT))]
    assert time_slice_steps({}, others) == ()
    assert undo_time_slice_steps(record("silent"), others) == ()


@pytest.mark.parametrize("asked", [DEFAULT, MEDIUM, LONG])
def test_two_different_intervals_on_one_gpu_are_refused_and_both_are_named(asked):
    others = [
        record("second", SetTimeSlice(A, SHORT)),
        record("first", SetTimeSlice(A, SHORT), SetTimeSlice(B, LONG)),
    ]
    with pytest.raises(DeviceHeld) as refused:
        time_slice_steps(wanted(a=asked), others)
    assert str(refused.value) == "; ".join(
        f"the time-slice interval of GPU-a is Short, set by claim default/{name} (UID uid-{name}), "
        f"and cannot be {asked} too: write the same interval, or none, which fits any, or wait "
        "until that claim is gone"
        for name in ("first", "second")
    )


def test_other_gpus_and_the_same_interval_are_no_clash():
    others = [record("first", SetTimeSlice(A, SHORT), SetTimeSlice(B, LONG))]
    assert time_slice_clashes(wanted(a=SHORT), others) == ()
    assert time_slice_clashes(wanted(c=MEDIUM), others) == ()


def test_what_was_found_comes_back_newest_first_and_only_where_nobody_needs_the_interval():
    mine = record("mine", SetTimeSlice(A, SHORT, MEDIUM), SetTimeSlice(B, LONG, SHORT))
    assert undo_time_slice_steps(mine, []) == (SetTimeSlice(B, SHORT), SetTimeSlice(A, MEDIUM))
    other = record("other", SetTimeSlice(B, LONG, SHORT))
    assert undo_time_slice_steps(mine, [other]) == (SetTimeSlice(A, MEDIUM),)


def test_a_gpu_that_did_not_say_gets_the_drivers_own_interval_back():
    mine = record("mine", SetTimeSlice(A, SHORT, None))
    assert undo_time_slice_steps(mine, []) == (SetTimeSlice(A, DEFAULT),)


class Killed(Exception):
    """The process ended between two effects."""


@dataclass
class World:
    """Two GPUs and a ledger; ``kill`` effects from now the process dies."""

    gpus: dict[GpuUuid, Interval]
    says: bool = True
    ledger: dict[str, Record] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    kill: int = -1

    def others(self, name: str) -> list[Record]:
        return [record for other, record in sorted(self.ledger.items()) if other != name]

    def effect(self) -> None:
        if self.kill == 0:
            raise Killed
        self.kill -= 1

    def carry_out(self, step: SetTimeSlice) -> None:
        self.effect()
        self.gpus[step.gpu] = step.interval

    def prepare(self, name: str, intervals: dict[GpuUuid, Interval]) -> None:
        if name in self.ledger:
            return
        asked = {gpu: SetTimeSlice(gpu, interval) for gpu, interval in intervals.items()}
        try:
            steps = time_slice_steps(asked, self.others(name))
        except DeviceHeld:
            return
        look_up = to_look_up(steps, self.others(name))
        found = {gpu: self.gpus[gpu] if self.says else None for gpu in look_up}
        self.effect()
        self.ledger[name] = replace(Record(ref(name), ()), steps=with_found(steps, found))
        for step in steps:
            self.carry_out(step)
        self.effect()
        self.complete.add(name)

    def unprepare(self, name: str) -> None:
        if name not in self.ledger:
            return
        self.complete.discard(name)
        for step in undo_time_slice_steps(self.ledger[name], self.others(name)):
            self.carry_out(step)
        self.effect()
        del self.ledger[name]

    def recover(self) -> None:
        """What the next process does: prepared or not, nothing in between."""
        self.kill = -1
        for name in sorted(self.ledger.keys() - self.complete):
            self.unprepare(name)

    def settings(self) -> Iterator[tuple[GpuUuid, Interval]]:
        for name in self.complete:
            for step in self.ledger[name].steps:
                assert isinstance(step, SetTimeSlice)
                yield step.gpu, step.interval


NAMES = ("one", "two", "three")
some_intervals = st.dictionaries(st.sampled_from([A, B]), st.sampled_from(Interval), max_size=2)
actions = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.none() | some_intervals,  # None: it is given back
        st.integers(-1, 5),  # after how many effects the process is killed
    ),
    max_size=12,
)


@given(
    st.fixed_dictionaries({A: st.sampled_from(Interval), B: st.sampled_from(Interval)}),
    st.booleans(),
    actions,
    st.permutations(NAMES),
)
def test_after_any_claims_in_any_order_killed_anywhere_everything_is_as_it_was(
    first, says, todo, last
):
    if not says:
        first = {A: DEFAULT, B: DEFAULT}  # all that can be known of a GPU that does not say
    world = World(dict(first), says)
    for name, intervals, kill in todo:
        world.kill = kill
        try:
            if intervals is None:
                world.unprepare(name)
            else:
                world.prepare(name, intervals)
            world.kill = -1
        except Killed:
            world.recover()
        for gpu, interval in world.settings():
            assert world.gpus[gpu] == interval, "a prepared claim has its interval"
    for name in last:
        world.unprepare(name)
    assert world.gpus == first
