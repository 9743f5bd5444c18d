"""Giving a claim back: what only it needed goes, what others need stays."""

from dataclasses import replace

from dra_driver.k8s.claims import Claim
from dra_driver.model.profiles import SharingStrategy
from dra_driver.model.steps import (
    ComputeMode,
    PodMemoryLimit,
    RemoveMpsNamespace,
    ServeMpsNamespace,
    SetComputeMode,
    SetMemoryLimits,
    SetTimeSlice,
    TimeSliceInterval,
)
from dra_driver.plan.prepare.claim import plan_claim, undo_steps
from dra_driver.plan.prepare.gpu_settings import settings_to_read, with_previous_values
from tests.builders import MIB, POOL, allocation, config, fraction, gpu, offer, pod, ref
from tests.fakes.pods import NOBODY

GIB = 1024 * MIB
SHORT = config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}})


def prepared(name, memory="20Gi"):
    asked = Claim(ref(name), (fraction(memory),), (SHORT,), (pod(),))
    return plan_claim(asked, offer(fractions_set_interval=True), (), POOL).record


def test_the_last_claim_takes_limit_and_interval_with_it():
    steps = undo_steps(prepared("a"), ())

    assert steps == (
        SetMemoryLimits(gpu(0).uuid, (PodMemoryLimit(pod().uid, None),)),
        SetTimeSlice(gpu(0).uuid, TimeSliceInterval.DEFAULT),
    )


def test_what_another_claim_needs_stays():
    steps = undo_steps(prepared("a"), (prepared("b", "10Gi"),))

    assert steps == (SetMemoryLimits(gpu(0).uuid, (PodMemoryLimit(pod().uid, 10 * GIB),)),)


def test_a_whole_gpu_leaves_nothing_to_undo():
    whole = plan_claim(Claim(ref(), (allocation(),)), offer(), (), POOL).record

    assert undo_steps(whole, ()) == ()


MPS = config(sharing={"strategy": "MPS"})


def by_mps(name, *allocations, others=(), **rules):
    """Its record, on GPUs that were in compute mode PROHIBITED before anybody came."""
    asked = Claim(ref(name), allocations or (fraction(),), (MPS,), (pod(),))
    record = plan_claim(asked, offer(**rules), others, POOL, NOBODY).record
    previous = {mode: ComputeMode.PROHIBITED for mode in settings_to_read(record.steps, others)}
    return replace(record, steps=with_previous_values(record.steps, previous))


def namespace_of(record):
    (step,) = (step for step in record.steps if isinstance(step, ServeMpsNamespace))
    return step.namespace.name


def test_a_namespace_is_ended_before_anything_else_is_undone():
    record = by_mps("a", strategies=(SharingStrategy.MPS,))

    assert undo_steps(record, ()) == (
        RemoveMpsNamespace(namespace_of(record)),
        SetMemoryLimits(gpu(0).uuid, (PodMemoryLimit(pod().uid, None),)),
        SetComputeMode(gpu(0).uuid, ComputeMode.PROHIBITED),
    )


def test_every_namespace_of_a_claim_is_ended():
    record = by_mps("a", fraction("1Gi", request="a"), fraction("1Gi", request="b"))
    namespaces = [
        step.namespace.name for step in record.steps if isinstance(step, ServeMpsNamespace)
    ]

    ended = [
        step.namespace for step in undo_steps(record, ()) if isinstance(step, RemoveMpsNamespace)
    ]

    assert len(namespaces) == 2
    assert ended == namespaces
