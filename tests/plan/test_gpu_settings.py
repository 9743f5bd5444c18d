"""Interval and modes of a GPU: what was found comes back when the last claim goes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.gpus import GpuUuid
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import (
    ComputeMode,
    GpuSetting,
    SetComputeMode,
    SetMemoryLimits,
    SetMigMode,
    Step,
    TimeSliceInterval,
)
from dra_driver.model.steps import SetTimeSlice as Slice
from dra_driver.plan.prepare.gpu_settings import (
    restore_steps,
    settings_to_read,
    with_inherited_values,
    with_previous_values,
)
from tests.builders import ref

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")
SHORT, MEDIUM, LONG = TimeSliceInterval.SHORT, TimeSliceInterval.MEDIUM, TimeSliceInterval.LONG
ALONE, NOBODY, ANYONE = ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED, ComputeMode.DEFAULT
LIMIT = SetMemoryLimits(A, ())


def mode(gpu, value=ALONE, before=None):
    return SetComputeMode(gpu, value, before)


def record(name: str, *steps: GpuSetting) -> ClaimRecord:
    return ClaimRecord(ref(name), (), (LIMIT, *steps))


def test_a_setting_that_nobody_has_changed_yet_is_looked_up_first():
    others = [record("silent")]
    steps = with_inherited_values((LIMIT, Slice(A, SHORT), mode(A), Slice(B, LONG)), others)

    assert steps == (LIMIT, Slice(A, SHORT), mode(A), Slice(B, LONG))
    assert settings_to_read(steps, others) == (Slice(A, SHORT), mode(A), Slice(B, LONG))
    previous = {Slice(A, SHORT): MEDIUM, mode(A): NOBODY, Slice(B, LONG): None}
    assert with_previous_values(steps, previous) == (
        LIMIT,
        Slice(A, SHORT, MEDIUM),
        mode(A, ALONE, NOBODY),
        Slice(B, LONG, None),
    )


def test_what_a_gpu_does_not_say_stays_unsaid():
    assert with_previous_values((mode(A),), {mode(A): None}) == (mode(A),)


def test_a_later_claim_takes_over_what_the_first_one_found():
    others = [record("first", Slice(A, SHORT, MEDIUM), mode(B, ALONE, NOBODY))]

    steps = with_inherited_values((Slice(A, SHORT), mode(A), Slice(B, SHORT), mode(B)), others)

    assert steps == (Slice(A, SHORT, MEDIUM), mode(A), Slice(B, SHORT), mode(B, ALONE, NOBODY))
    assert settings_to_read(steps, others) == (mode(A), Slice(B, SHORT)), "of each kind by itself"


def test_a_gpu_that_did_not_say_is_not_asked_while_it_is_set():
    others = [record("first", Slice(A, SHORT, None))]

    steps = with_inherited_values((Slice(A, SHORT),), others)

    assert steps == (Slice(A, SHORT),)
    assert settings_to_read(steps, others) == ()


@pytest.mark.parametrize("settings", [(), (Slice(A, SHORT, MEDIUM),), (mode(A, ALONE, ANYONE),)])
def test_a_claim_that_changes_nothing_takes_nothing_over_and_brings_nothing_back(settings):
    others = [record("first", *settings)]

    assert with_inherited_values((LIMIT,), others) == (LIMIT,)
    assert restore_steps(record("silent"), others) == ()


def test_what_was_found_comes_back_newest_first_and_only_where_nobody_needs_the_setting():
    mine = record("mine", Slice(A, SHORT, MEDIUM), Slice(B, LONG, SHORT), mode(A, ALONE, NOBODY))

    assert restore_steps(mine, []) == (mode(A, NOBODY), Slice(B, SHORT), Slice(A, MEDIUM))
    other = record("other", Slice(B, LONG, SHORT), mode(A, ALONE, NOBODY))
    assert restore_steps(mine, [other]) == (Slice(A, MEDIUM),)


def test_mig_mode_is_off_again_where_the_gpu_did_not_say():
    assert restore_steps(record("mine", SetMigMode(A, True)), []) == (SetMigMode(A, False),)
    assert restore_steps(record("mine", SetMigMode(A, True, True)), []) == (SetMigMode(A, True),)


def test_a_claim_that_had_mig_mode_turned_off_leaves_it_off():
    assert restore_steps(record("mine", SetMigMode(A, False, True)), []) == (SetMigMode(A, False),)


def test_a_gpu_that_did_not_say_gets_back_what_its_driver_sets_up():
    mine = record("mine", Slice(A, SHORT, None), mode(B, ALONE, None))

    assert restore_steps(mine, []) == (mode(B, ANYONE), Slice(A, TimeSliceInterval.DEFAULT))


class Killed(Exception):
    """The process ended between two effects."""


Values = dict[tuple[type[GpuSetting], GpuUuid], int]


def value(step: GpuSetting) -> int:
    match step:
        case Slice():
            return step.interval
        case SetComputeMode():
            return step.mode
        case SetMigMode():
            return step.on


def settings(steps: Iterable[Step]) -> Iterator[GpuSetting]:
    return (step for step in steps if isinstance(step, GpuSetting))


@dataclass
class World:
    """Two GPUs and a ledger; ``kill`` effects from now the process dies."""

    gpus: Values
    says: bool = True
    ledger: dict[str, ClaimRecord] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    kill: int = -1
    whole: set[GpuUuid] = field(default_factory=set)  # claims wanted their MIG mode off

    def others(self, name: str) -> list[ClaimRecord]:
        return [record for other, record in sorted(self.ledger.items()) if other != name]

    def effect(self) -> None:
        if self.kill == 0:
            raise Killed
        self.kill -= 1

    def carry_out(self, step: GpuSetting) -> None:
        self.effect()
        self.gpus[type(step), step.gpu] = value(step)

    def prepare(self, name: str, asked: tuple[GpuSetting, ...]) -> None:
        set_by_others = {
            (type(step), step.gpu): value(step)
            for other in self.others(name)
            for step in settings(other.steps)
        }
        clash = any(
            value(step) != set_by_others.get((type(step), step.gpu), value(step)) for step in asked
        )
        if name in self.ledger or clash:
            return
        steps = with_inherited_values(asked, self.others(name))
        look_up = settings_to_read(steps, self.others(name))
        previous = {
            step: self.gpus[type(step), step.gpu] if self.says else None for step in look_up
        }
        self.effect()
        self.ledger[name] = replace(
            ClaimRecord(ref(name), ()), steps=with_previous_values(steps, previous)
        )
        self.whole |= {step.gpu for step in steps if isinstance(step, SetMigMode) and not step.on}
        for step in settings(steps):
            self.carry_out(step)
        self.effect()
        self.complete.add(name)

    def unprepare(self, name: str) -> None:
        if name not in self.ledger:
            return
        self.complete.discard(name)
        for step in restore_steps(self.ledger[name], self.others(name)):
            self.carry_out(step)
        self.effect()
        del self.ledger[name]

    def recover(self) -> None:
        """What the next process does: prepared or not, nothing in between."""
        self.kill = -1
        for name in sorted(self.ledger.keys() - self.complete):
            self.unprepare(name)

    def settings(self) -> Iterator[GpuSetting]:
        for name in self.complete:
            yield from settings(self.ledger[name].steps)


NAMES = ("one", "two", "three")
KINDS = {
    Slice: st.sampled_from(TimeSliceInterval),
    SetComputeMode: st.sampled_from(ComputeMode),
    SetMigMode: st.booleans(),
}
KEYS = [(kind, gpu) for gpu in (A, B) for kind in KINDS]
GPUS = st.fixed_dictionaries({(kind, gpu): KINDS[kind] for kind, gpu in KEYS})


@st.composite
def asked(draw):
    keys = draw(st.sets(st.sampled_from(KEYS), max_size=3))
    return tuple(kind(gpu, draw(KINDS[kind])) for kind, gpu in KEYS if (kind, gpu) in keys)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.none() | asked(),  # None: it is given back
        st.integers(-1, 6),  # after how many effects the process is killed
    ),
    max_size=12,
)


@given(GPUS, st.booleans(), ACTIONS, st.permutations(NAMES))
def test_after_any_claims_in_any_order_killed_anywhere_everything_is_as_it_was(
    first, says, todo, last
):
    """But for a MIG mode that a claim wanted off: no claim turns it on by going."""
    if not says:
        first = dict.fromkeys(KEYS, 0)  # all that can be known of a GPU that does not say
    world = World(dict(first), says)
    for name, requested, kill in todo:
        world.kill = kill
        try:
            if requested is None:
                world.unprepare(name)
            else:
                world.prepare(name, requested)
            world.kill = -1
        except Killed:
            world.recover()
        for step in world.settings():
            assert world.gpus[type(step), step.gpu] == value(step), "a prepared claim has it"
    for name in last:
        world.unprepare(name)
    assert world.gpus == first | {(SetMigMode, gpu): False for gpu in world.whole}
