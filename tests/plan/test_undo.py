"""Giving a claim back: what only it needed goes, what others need stays."""

from dra_driver.kubeletplugin.claims import Claim
from dra_driver.model.steps import Interval, LimitMemory, PodLimit, SetTimeSlice
from dra_driver.plan.prepare import plan_claim
from dra_driver.plan.undo import undoing
from tests.fakes.values import MIB, POOL, allocation, config, fraction, gpu, offer, pod, ref

GIB = 1024 * MIB
SHORT = config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}})


def prepared(name, memory="20Gi"):
    asked = Claim(ref(name), (fraction(memory),), (SHORT,), (pod(),))
    return plan_claim(asked, offer(), (), POOL).record


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
