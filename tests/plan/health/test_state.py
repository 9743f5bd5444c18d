"""How what is known of the health of GPUs changes with what is seen."""

from dra_driver.model.health import Effect, Fault, GpuEvent, HealthReading, HealthState, Problem
from dra_driver.plan.health import state
from dra_driver.plan.health.taints import device_taints
from tests.builders import gpu, gpu_uuid, offer

GPUS = (gpu(0), gpu(1))
NOTHING = HealthState()


def xid(number: int, minor: int = 0, gi: int | None = None, count: int = 1) -> GpuEvent:
    return GpuEvent(gpu_uuid(minor), Problem.XID, str(number), gi, count)


def after(*events: GpuEvent, known: HealthState = NOTHING, now: float = 100) -> HealthState:
    return state.after_events(known, events, GPUS, {}, now)


def look(known: HealthState, now: float, minor: int = 0, **values) -> HealthState:
    return state.after_reading(known, HealthReading(gpu_uuid(minor), **values), {}, now)


def test_a_fatal_xid_taints_its_gpu_alone():
    known = after(xid(79))
    first, second = (device_taints(device, known.faults) for device in offer(2).devices)
    [taint] = first
    assert (taint.key, taint.effect, taint.value) == (
        "gpu.nvidia.com/xid",
        Effect.NO_SCHEDULE,
        "79",
    )
    assert (taint.since, second) == (100, ())


def test_an_xid_of_an_application_leaves_no_fault():
    assert after(xid(31)).faults == ()


def test_a_reset_ends_a_fatal_xid_after_a_while():
    known = look(after(xid(79)), 105, energy_mj=1000)
    known = look(known, 110, energy_mj=7)
    assert state.settled(known, {}, 169).faults
    assert state.settled(known, {}, 170).faults == ()


def test_a_counter_that_grows_ends_nothing():
    known = look(look(after(xid(79)), 105, energy_mj=1000), 110, energy_mj=1001)
    assert state.settled(known, {}, 1e9).faults == known.faults


def test_a_condition_that_comes_back_keeps_since_when():
    known = look(HealthState(), 100, remap_failed=True)
    known = look(look(known, 110, remap_failed=False), 120, remap_failed=True)
    assert known.faults == (Fault(gpu_uuid(), Problem.REMAP_FAILED, since=100, count=2),)
