"""Giving a claim back: what only it needed goes, what others need stays."""

from dataclasses import replace

from dra_driver.kubeletplugin.claims import Claim
from dra_driver.model.profiles import Strategy
from dra_driver.model.steps import (
    ComputeMode,
    EndMps,
    Interval,
    LimitMemory,
    PodLimit,
    ServeMps,
    SetComputeMode,
    SetTimeSlice,
)
from dra_driver.plan.gpu_settings import to_look_up, with_found
from dra_driver.plan.prepare import plan_claim
from dra_driver.plan.undo import undoing
from tests.fakes.pods import NOBODY
from tests.fakes.values import MIB, POOL, allocation, config, fraction, gpu, offer, pod, ref

GIB = 1024 * MIB
SHORT = config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}})


def prepared(name, memory="20Gi"):
    asked = Claim(ref(name), (fraction(memory),), (SHORT,), (pod(),))
    return plan_claim(asked, offer(fractions_set_interval=True), (), POOL).record


def test_the_last_claim_takes_limit_and_interval_with_it():
    steps = undoing(prepared("a"), ())

    assert steps == (
        LimitMemory(gpu(0).uuid, (PodLimit(pod().uid, None),)),
        SetTimeSlice(gpu(0).uuid, Interval.DEFAULT),
    )


def test_what_another_claim_needs_stays():
    steps = undoing(prepared("a"), (prepared("b", "10Gi"),))

    assert steps == (LimitMemory(gpu(0).uuid, (PodLimit(pod().uid, 10 * GIB),)),)


def test_a_whole_gpu_leaves_nothing_to_undo():
    whole = plan_claim(Claim(ref(), (allocation(),)), offer(), (), POOL).record

    assert undoing(whole, ()) == ()


MPS = config(sharing={"strategy": "MPS"})


def by_mps(name, *allocations, others=(), **rules):
    """Its record, on GPUs that were in compute mode PROHIBITED before anybody came."""
    asked = Claim(ref(name), allocations or (fraction(),), (MPS,), (pod(),))
    record = plan_claim(asked, offer(**rules), others, POOL, NOBODY).record
    found = {mode: ComputeMode.PROHIBITED for mode in to_look_up(record.steps, others)}
    return replace(record, steps=with_found(record.steps, found))


def space_of(record):
    (step,) = (step for step in record.steps if isinstance(step, ServeMps))
    return step.space.name


def test_a_space_is_ended_before_anything_else_is_undone():
    record = by_mps("a", strategies=(Strategy.MPS,))

    assert undoing(record, ()) == (
        EndMps(space_of(record)),
        LimitMemory(gpu(0).uuid, (PodLimit(pod().uid, None),)),
        SetComputeMode(gpu(0).uuid, ComputeMode.PROHIBITED),
    )


def test_the_last_of_several_claims_brings_the_compute_mode_back():
    first = by_mps("a", strategies=(Strategy.MPS,))
    second = by_mps("b", others=(first,), strategies=(Strategy.MPS,))

    assert not [s for s in undoing(first, (second,)) if isinstance(s, SetComputeMode)]
    assert SetComputeMode(gpu(0).uuid, ComputeMode.PROHIBITED) in undoing(second, ())


def test_every_space_of_a_claim_is_ended():
    record = by_mps("a", fraction("1Gi", request="a"), fraction("1Gi", request="b"))
    spaces = [step.space.name for step in record.steps if isinstance(step, ServeMps)]

    ended = [step.space for step in undoing(record, ()) if isinstance(step, EndMps)]

    assert len(spaces) == 2
    assert ended == spaces
