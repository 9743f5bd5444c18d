"""What is known of the health of GPUs, and how it changes with what is seen.

Each function takes what is known and what was seen, and answers what is known then. None changes
anything of a GPU that it was not told of. Times are in seconds since the epoch. Rules of GPUs that
have none are the default.

A fault is over once it was well for ``recovery_seconds`` without a break (``settled``). After a
reboot nothing of all this holds: begin with a new ``HealthState``.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from dra_driver.model.gpus import Gpu, GpuUuid, Inventory, PartitionKey
from dra_driver.model.health import (
    DEFAULT_HEALTH_RULES,
    Effect,
    Fault,
    GpuEvent,
    HealthReading,
    HealthRules,
    HealthState,
    Look,
    Problem,
)
from dra_driver.plan.health.problems import (
    MOST_REPLAYS_PER_MINUTE,
    NO_ACTION,
    PROBLEMS,
    effect_of,
    needs_recovery,
)

RulesByGpu = Mapping[GpuUuid, HealthRules]

_TOLD_ELSEWHERE = frozenset({Problem.LOST, Problem.RELEASED, Problem.UNMONITORED})
"""What neither a look nor an event ends, and no administrator: it is over when it is over."""

_SILENT = frozenset({Problem.LOST, Problem.RELEASED})
"""As long as a GPU has one of these, no look at it succeeds."""

_Key = tuple[GpuUuid, Problem, str, PartitionKey | None]
_FaultsByKey = dict[_Key, Fault]


def after_events(
    state: HealthState,
    events: Iterable[GpuEvent],
    gpus: Iterable[Gpu],
    rules: RulesByGpu,
    now: float,
) -> HealthState:
    """An event without an effect by the rules leaves no fault. *gpus* say which partition an event
    is about; one of an instance that is not known is of the GPU, and so is a problem that looks
    tell of."""
    faults, by_uuid = _by_key(state), {gpu.uuid: gpu for gpu in gpus}
    faulty: set[GpuUuid] = set()
    for event in events:
        effect = effect_of(event.problem, event.value, rules.get(event.gpu, DEFAULT_HEALTH_RULES))
        if effect is Effect.NONE:
            continue
        lasts = PROBLEMS[event.problem].lasts
        partition = partition_of(by_uuid.get(event.gpu), event.gi) if lasts else None
        fault = Fault(event.gpu, event.problem, label_value(event.value), partition, now)
        known = faults.get(_key(fault), replace(fault, count=0))
        faults[_key(fault)] = replace(
            known, value=fault.value, count=known.count + event.count, well_since=None
        )
        if lasts:
            faulty.add(event.gpu)
    looks = [
        replace(look, faulty_since=True) if look.reading.gpu in faulty else look
        for look in state.looks
    ]
    return _state(state, faults, looks)


def after_reading(
    state: HealthState, reading: HealthReading, rules: RulesByGpu, now: float
) -> HealthState:
    """What a GPU does not tell changes nothing."""
    faults = _by_key(state)
    before = next((look for look in state.looks if look.reading.gpu == reading.gpu), None)
    most_nvlinks = max(before.most_nvlinks if before else 0, reading.nvlinks or 0)
    for problem, value in _conditions(reading, most_nvlinks):
        _observe(faults, Fault(reading.gpu, problem, value or "", None, now), value is not None)
    if before is not None:
        for problem, grows in _growth(before, reading, now):
            _observe(faults, Fault(reading.gpu, problem, "", None, now), grows)
        if not before.faulty_since and _recovered(before.reading, reading):
            for fault in [fault for fault in faults.values() if fault.gpu == reading.gpu]:
                if PROBLEMS[fault.problem].lasts:
                    _observe(faults, replace(fault, since=now), False)
        if _is_more(before.reading.uncorrectable_ecc, reading.uncorrectable_ecc):
            _missed_event(faults, reading.gpu, rules, now)
        reading = _completed(reading, before.reading)
    looks = [look for look in state.looks if look.reading.gpu != reading.gpu]
    return _state(state, faults, [*looks, Look(reading, now, most_nvlinks)])


def after_scan(state: HealthState, inventory: Inventory, now: float) -> HealthState:
    """Which GPUs do not answer. A GPU that the inventory could not read, or does not have, stays as
    it was."""
    faults, lost = _by_key(state), {uuid for uuid, _ in inventory.lost}
    for gpu in inventory.gpus:
        if gpu.uuid in lost or gpu.uuid not in inventory.stale:
            _observe(faults, Fault(gpu.uuid, Problem.LOST, "", None, now), gpu.uuid in lost)
    return _state(state, faults, state.looks)


def after_release(
    state: HealthState, released: Collection[GpuUuid], until: float | None, now: float
) -> HealthState:
    """Exactly *released* are let go of, *until* then; None: until that is over."""
    after = _exactly(state, Problem.RELEASED, released, now)
    faults = {
        key: replace(fault, until=until) if fault.problem is Problem.RELEASED else fault
        for key, fault in _by_key(after).items()
    }
    return _state(state, faults, after.looks)


def after_registration(
    state: HealthState, unmonitored: Collection[GpuUuid], now: float
) -> HealthState:
    """Of exactly *unmonitored* no events are told."""
    return _exactly(state, Problem.UNMONITORED, unmonitored, now)


def settled(state: HealthState, rules: RulesByGpu, now: float) -> HealthState:
    """Without the faults that are over. One that was well at a time to come, since the clock was
    set back, is well since now."""
    faults: _FaultsByKey = {}
    for key, fault in _by_key(state).items():
        well_since = None if fault.well_since is None else min(fault.well_since, now)
        if well_since is None or now < well_since + _recovery_seconds(fault, rules):
            faults[key] = replace(fault, well_since=well_since)
    return _state(state, faults, state.looks)


def next_settlement(state: HealthState, rules: RulesByGpu) -> float | None:
    """When the next fault is over, if it stays well; None: no fault is well."""
    return min(
        (
            fault.well_since + _recovery_seconds(fault, rules)
            for fault in state.faults
            if fault.well_since is not None
        ),
        default=None,
    )


def cleared(
    state: HealthState, gpu: GpuUuid | None = None, partition: PartitionKey | None = None
) -> HealthState:
    """An administrator says that *gpu*, or that *partition* of it, is well; None: every GPU.

    What the last look says is wrong stays, and so does a GPU that does not answer or was let go of.
    """
    wrong = {
        (look.reading.gpu, problem)
        for look in state.looks
        for problem, value in _conditions(look.reading, look.most_nvlinks)
        if value is not None
    }
    faults = {
        key: fault
        for key, fault in _by_key(state).items()
        if (gpu is not None and fault.gpu != gpu)
        or (partition is not None and fault.partition != partition)
        or fault.problem in _TOLD_ELSEWHERE
        or (fault.well_since is None and (fault.gpu, fault.problem) in wrong)
    }
    return _state(state, faults, state.looks)


def taken_over(state: HealthState, kept: HealthState) -> HealthState:
    """*state*, which was read at the start and has seen no event and no look since, once another
    process has *kept* what it saw until now, and what an administrator cleared there."""
    faults = {
        _key(fault): fault
        for known, is_told_here in ((kept, False), (state, True))
        for fault in known.faults
        if (fault.problem in _TOLD_ELSEWHERE) is is_told_here
    }
    return _state(state, faults, kept.looks)


def partition_of(gpu: Gpu | None, gi: int | None) -> PartitionKey | None:
    """The partition of *gpu* that is its GPU instance *gi*; None: it is of no instance, or of one
    that is not known."""
    if gpu is None or gpu.mig is None or gi is None:
        return None
    usable = {instance.gi: instance.key for instance in gpu.mig.instances}
    return ({instance.gi: instance.key for instance in gpu.mig.unusable} | usable).get(gi)


def label_value(text: str) -> str:
    """*text* as the value of a taint: at most 63 characters of those that it can have.

    >>> label_value("route unhealthy: access timeout")
    'route-unhealthy-access-timeout'
    """
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text)[:63].strip("-_.")


def _by_key(state: HealthState) -> _FaultsByKey:
    return {_key(fault): fault for fault in state.faults}


def _key(fault: Fault) -> _Key:
    """Of Xids each number is a fault; of another problem the value is how it is now."""
    value = fault.value if fault.problem is Problem.XID else ""
    return fault.gpu, fault.problem, value, fault.partition


def _state(state: HealthState, faults: _FaultsByKey, looks: Iterable[Look]) -> HealthState:
    """The faults are the same object as before where nothing changed.

    A GPU that is silent after a fault can be reset only after it, whatever was before.
    """
    changed = tuple(sorted(faults.values(), key=_order))
    silent = {
        fault.gpu for fault in changed if fault.problem in _SILENT and fault.well_since is None
    }
    known = (
        replace(look, faulty_since=look.faulty_since and look.reading.gpu not in silent)
        for look in looks
    )
    return HealthState(
        state.faults if changed == state.faults else changed,
        tuple(sorted(known, key=lambda look: look.reading.gpu)),
    )


def _order(fault: Fault) -> tuple[object, ...]:
    """The GPU as a whole is before its partitions."""
    place = fault.partition
    return fault.gpu, fault.problem, fault.value, place is not None, place or ()


def _observe(faults: _FaultsByKey, fault: Fault, wrong: bool) -> None:
    """Something that looks tell of is wrong, or is not. It keeps since when, as long as it was not
    over for long enough. *fault* is as it would be if it were new."""
    key, now = _key(fault), fault.since
    known = faults.get(key)
    if wrong:
        again = known is not None and known.well_since is not None
        known = known or fault
        faults[key] = replace(known, value=fault.value, count=known.count + again, well_since=None)
    elif known is not None:
        well_since = now if known.well_since is None else min(known.well_since, now)
        faults[key] = replace(known, well_since=well_since)


def _conditions(reading: HealthReading, most_nvlinks: int) -> Iterator[tuple[Problem, str | None]]:
    """What a look tells: each problem with its value, or with None where it is not there."""
    flags = {
        Problem.REMAP_PENDING: reading.remap_pending,
        Problem.REMAP_FAILED: reading.remap_failed,
        Problem.THERMAL: reading.thermal_slowdown,
        Problem.POWER_BRAKE: reading.power_brake,
    }
    for problem, is_there in flags.items():
        if is_there is not None:
            yield problem, "" if is_there else None
    if action := reading.recovery_action:
        yield Problem.RECOVERY_ACTION, None if action == NO_ACTION else label_value(action)
    if reading.fabric is not None:
        yield Problem.FABRIC, label_value(reading.fabric) if reading.fabric else None
    if reading.nvlinks is not None:
        missing = most_nvlinks - reading.nvlinks
        yield Problem.NVLINK, str(missing) if missing > 0 else None


def _growth(before: Look, reading: HealthReading, now: float) -> Iterator[tuple[Problem, bool]]:
    """Of counters that should not grow, or slowly: whether they did since the look before."""
    earlier, minutes = before.reading, max(now - before.at, 1.0) / 60
    if reading.pcie_replays is not None and earlier.pcie_replays is not None:
        replays = reading.pcie_replays - earlier.pcie_replays
        yield Problem.PCIE_REPLAYS, replays > MOST_REPLAYS_PER_MINUTE * minutes
    # Without a counter, events tell of them, and a look between them that it is over.
    yield Problem.CORRECTABLE_ECC, _is_more(earlier.correctable_ecc, reading.correctable_ecc)


def _is_more(earlier: int | None, count: int | None) -> bool:
    return earlier is not None and count is not None and count > earlier


def _missed_event(faults: _FaultsByKey, gpu: GpuUuid, rules: RulesByGpu, now: float) -> None:
    """The counter of uncorrectable errors grew. Where an event told of it, it is known already, and
    not about to be over."""
    problem = Problem.UNCORRECTABLE_ECC
    known = (fault for fault in faults.values() if (fault.gpu, fault.problem) == (gpu, problem))
    if any(fault.well_since is None for fault in known):
        return
    if effect_of(problem, "", rules.get(gpu, DEFAULT_HEALTH_RULES)) is not Effect.NONE:
        _observe(faults, Fault(gpu, problem, "", None, now), True)


def _recovered(before: HealthReading, reading: HealthReading) -> bool:
    """Whether the GPU was reset, or its driver loaded anew, between two looks: the driver asks no
    longer for a recovery action, or a counter that only grows fell. That is the one of energy,
    where there is one: those of ECC can be cleared by hand."""
    if needs_recovery(before.recovery_action) and reading.recovery_action == NO_ACTION:
        return True
    for counter in ("energy_mj", "pcie_replays", "uncorrectable_ecc", "correctable_ecc"):
        earlier, count = getattr(before, counter), getattr(reading, counter)
        if earlier is not None and count is not None:
            return bool(count < earlier)
    return False


def _completed(reading: HealthReading, before: HealthReading) -> HealthReading:
    """What this look did not tell of what the next one is compared with is as before."""
    fields = (
        *("recovery_action", "pcie_replays", "energy_mj"),
        *("uncorrectable_ecc", "correctable_ecc"),
    )
    missing = {name: getattr(before, name) for name in fields if getattr(reading, name) is None}
    return replace(reading, **missing) if missing else reading


def _exactly(
    state: HealthState, problem: Problem, gpus: Collection[GpuUuid], now: float
) -> HealthState:
    faults = {
        key: fault
        for key, fault in _by_key(state).items()
        if fault.problem is not problem or fault.gpu in gpus
    }
    for gpu in gpus:
        _observe(faults, Fault(gpu, problem, "", None, now), True)
    return _state(state, faults, state.looks)


def _recovery_seconds(fault: Fault, rules: RulesByGpu) -> float:
    return rules.get(fault.gpu, DEFAULT_HEALTH_RULES).recovery_seconds
