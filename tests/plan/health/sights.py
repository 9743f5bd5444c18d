"""What can be seen of GPUs, as hypothesis makes it up: events, looks, scans, and what is asked."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from dra_driver.model.gpus import GpuUuid, Inventory, MigInfo
from dra_driver.model.health import (
    DEFAULT_HEALTH_RULES,
    GpuEvent,
    HealthReading,
    HealthState,
    Problem,
)
from dra_driver.plan.health import state
from tests.builders import gpu, gpu_uuid
from tests.fakes.mig import H100, ONE, TWO, instance

MINORS = (0, 1, 2)
_MIG = MigInfo(True, True, True, H100, (instance(ONE, 0, 7), instance(TWO, 2, 9)))
GPUS = (gpu(0), gpu(1, mig=_MIG), gpu(2))
RULES = {gpu_uuid(2): DEFAULT_HEALTH_RULES}

Sight = Callable[[HealthState, float], HealthState]
"""What becomes of what is known at a time, in seconds since the epoch."""


def xid(number: int, minor: int = 0, gi: int | None = None, count: int = 1) -> GpuEvent:
    return GpuEvent(gpu_uuid(minor), Problem.XID, str(number), gi, count)


def saw(*events: GpuEvent, rules: state.RulesByGpu = RULES) -> Sight:
    return lambda known, now: state.after_events(known, events, GPUS, rules, now)


def looked(minor: int = 0, rules: state.RulesByGpu = RULES, **values) -> Sight:
    reading = HealthReading(gpu_uuid(minor), **values)
    return lambda known, now: state.after_reading(known, reading, rules, now)


def scanned(*minors: int, lost: tuple[int, ...] = (), stale: tuple[int, ...] = ()) -> Sight:
    inventory = Inventory(
        tuple(GPUS[minor] for minor in minors),
        stale=frozenset(gpu_uuid(minor) for minor in stale),
        lost=tuple((gpu_uuid(minor), "it does not answer") for minor in lost),
    )
    return lambda known, now: state.after_scan(known, inventory, now)


def released(*minors: int) -> Sight:
    return lambda known, now: state.after_release(known, uuids(minors), None, now)


def unmonitored(*minors: int) -> Sight:
    return lambda known, now: state.after_registration(known, uuids(minors), now)


def cleared(minor: int | None = None) -> Sight:
    return lambda known, _: state.cleared(known, None if minor is None else gpu_uuid(minor))


def settled(known: HealthState, now: float) -> HealthState:
    return state.settled(known, RULES, now)


def uuids(minors: tuple[int, ...]) -> frozenset[GpuUuid]:
    return frozenset(gpu_uuid(minor) for minor in minors)


def events(minor: int) -> st.SearchStrategy[GpuEvent]:
    """Of one GPU."""
    problems = st.sampled_from(
        [
            *((Problem.XID, str(number)) for number in (31, 48, 63, 79, 94, 95, 119, 9999)),
            (Problem.UNCORRECTABLE_ECC, ""),
            (Problem.CORRECTABLE_ECC, ""),
            (Problem.RECOVERY_ACTION, "NODE_REBOOT"),
            (Problem.LOST, ""),
        ]
    )
    return st.builds(
        lambda problem, gi, count: GpuEvent(gpu_uuid(minor), problem[0], problem[1], gi, count),
        problems,
        st.sampled_from([None, 7, 9, 8]),
        st.integers(1, 1000),
    )


def readings(minor: int) -> st.SearchStrategy[HealthReading]:
    """Of one GPU."""
    flag, counter = st.none() | st.booleans(), st.none() | st.integers(0, 50)
    return st.builds(
        HealthReading,
        st.just(gpu_uuid(minor)),
        remap_pending=flag,
        remap_failed=flag,
        recovery_action=st.sampled_from([None, "NONE", "GPU_RESET", "RECOVER_IMEX_DOMAIN", "31"]),
        thermal_slowdown=flag,
        power_brake=flag,
        nvlinks=st.none() | st.integers(0, 18),
        fabric=st.sampled_from([None, "", "route unhealthy: access timeout", "x" * 80]),
        pcie_replays=counter,
        energy_mj=counter,
        uncorrectable_ecc=counter,
        correctable_ecc=counter,
    )


def sights(minor: int) -> st.SearchStrategy[Sight]:
    """Something that is seen of one GPU, and concerns no other."""
    return st.one_of(
        st.lists(events(minor), max_size=4).map(lambda several: saw(*several)),
        readings(minor).map(
            lambda reading: lambda known, now: state.after_reading(known, reading, RULES, now)
        ),
        st.sampled_from(
            [
                scanned(minor),
                scanned(minor, lost=(minor,)),
                scanned(minor, stale=(minor,)),
                cleared(minor),
            ]
        ),
    )


SIGHTS = st.one_of(
    *(sights(minor) for minor in MINORS),
    st.lists(st.sampled_from(MINORS), unique=True).map(lambda minors: released(*minors)),
    st.lists(st.sampled_from(MINORS), unique=True).map(lambda minors: unmonitored(*minors)),
    st.sampled_from([settled, cleared()]),
)
HISTORIES = st.lists(st.tuples(st.integers(0, 90), SIGHTS), max_size=12)
"""What is seen one after the other, and how many seconds after what was before it."""


def known_after(
    history: list[tuple[int, Sight]], known: HealthState | None = None, now: float = 1000
) -> tuple[HealthState, float]:
    """What is known in the end, and when that is."""
    known = known or HealthState()
    for seconds, sight in history:
        now += seconds
        known = sight(known, now)
    return known, now


def without_counts(known: HealthState) -> HealthState:
    return replace(known, faults=tuple(replace(fault, count=0) for fault in known.faults))
