"""What holds of the health of GPUs whatever is seen of them, and in whatever order."""

import re
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.codec import Codec
from dra_driver.model.health import DEFAULT_HEALTH_RULES, Effect, HealthRules, HealthState, Problem
from dra_driver.model.offer import Device
from dra_driver.model.profiles import Rules
from dra_driver.plan.health.problems import PROBLEMS, problem_of
from dra_driver.plan.health.taints import device_taints
from tests.builders import gpu_uuid
from tests.fakes.mig import ONE, TWO, partition
from tests.plan.health.sights import (
    GPUS,
    HISTORIES,
    MINORS,
    cleared,
    events,
    known_after,
    looked,
    released,
    saw,
    scanned,
    settled,
    sights,
    unmonitored,
    without_counts,
    xid,
)

CODEC = Codec(HealthState)
DEVICES = (
    *(Device(gpu) for gpu in GPUS),
    Device(GPUS[1], partition=partition(ONE, 0)),
    Device(GPUS[1], partition=partition(TWO, 2)),
)
WELL: dict[str, Any] = {
    "remap_pending": False,
    "remap_failed": False,
    "recovery_action": "NONE",
    "thermal_slowdown": False,
    "power_brake": False,
    "nvlinks": 18,
    "fabric": "",
    "pcie_replays": 0,
    "energy_mj": 0,
    "uncorrectable_ecc": 0,
    "correctable_ecc": 0,
}


def taints(known: HealthState, rules: HealthRules = DEFAULT_HEALTH_RULES):
    devices = [replace(device, rules=Rules(health=rules)) for device in DEVICES]
    return [device_taints(device, known.faults) for device in devices]


def of_gpu(known: HealthState, minor: int):
    uuid = gpu_uuid(minor)
    return (
        [fault for fault in known.faults if fault.gpu == uuid],
        [look for look in known.looks if look.reading.gpu == uuid],
    )


@given(HISTORIES)
def test_a_restart_at_any_time_changes_nothing(history):
    """What is known and what was seen is all that matters."""
    known, restarted, now = HealthState(), HealthState(), 1000.0
    for seconds, sight in history:
        now += seconds
        known = sight(known, now)
        restarted = sight(CODEC.decode(CODEC.encode(restarted)), now)
        assert restarted == known
        assert taints(restarted) == taints(known)


@given(HISTORIES, st.data())
def test_the_same_events_again_change_only_counts(history, data):
    known, now = known_after(history)
    again = saw(*data.draw(st.lists(events(data.draw(st.sampled_from(MINORS))), max_size=5)))
    once = again(known, now)

    assert without_counts(again(once, now + 1)) == without_counts(once)


@given(HISTORIES, st.data())
def test_what_is_seen_of_one_gpu_changes_no_other(history, data):
    known, now = known_after(history)
    minor = data.draw(st.sampled_from(MINORS))
    after = data.draw(sights(minor))(known, now + 1)

    for other in set(MINORS) - {minor}:
        assert of_gpu(after, other) == of_gpu(known, other)


@given(HISTORIES, st.tuples(*map(sights, MINORS)), st.permutations(MINORS))
def test_the_order_of_what_is_seen_of_several_gpus_does_not_matter(history, each, order):
    known, now = known_after(history)
    in_order, _ = known_after([(0, sight) for sight in each], known, now)
    otherwise, _ = known_after([(0, each[minor]) for minor in order], known, now)

    assert in_order == otherwise


@given(HISTORIES)
def test_faults_are_the_same_object_while_nothing_changes(history):
    known, now = HealthState(), 1000.0
    for seconds, sight in history:
        now += seconds
        before, known = known, sight(known, now)
        assert (known.faults == before.faults) is (known.faults is before.faults)


@given(HISTORIES)
def test_each_problem_is_one_fault_of_a_gpu_or_partition_and_each_xid_is(history):
    known, _ = known_after(history)
    keys = [
        (fault.gpu, fault.partition, fault.problem, fault.value * (fault.problem is Problem.XID))
        for fault in known.faults
    ]

    assert len(keys) == len(set(keys))
    assert [look.reading.gpu for look in known.looks] == sorted(
        {look.reading.gpu for look in known.looks}
    )


@given(
    HISTORIES,
    st.dictionaries(st.sampled_from(Problem), st.sampled_from(Effect)),
    st.dictionaries(st.sampled_from([31, 79, 95]), st.sampled_from(Effect)),
)
def test_the_api_server_can_take_the_taints_of_every_device(history, effects, xids):
    known, _ = known_after(history)
    rules = HealthRules(tuple(effects.items()), tuple(xids.items()))
    for device in taints(known, rules):
        keys = [taint.key for taint in device]
        assert keys == sorted(set(keys))
        assert len(keys) <= 16
        for taint in device:
            assert problem_of(taint.key)
            assert taint.effect in (Effect.NO_SCHEDULE, Effect.NO_EXECUTE)
            assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", taint.value)
            assert 0 < len(taint.reason) <= 1024
            assert taint.since > 0


@given(HISTORIES)
def test_what_a_partition_has_its_gpu_has_too(history):
    known, _ = known_after(history)
    _, whole, _, *partitions = ({taint.key for taint in device} for device in taints(known))

    for tainted in partitions:
        assert tainted <= whole


@given(HISTORIES, st.sampled_from(MINORS))
def test_no_fault_of_events_outlives_an_administrators_word(history, minor):
    known, now = known_after(history)
    after = cleared(minor)(known, now)

    of_events = {problem for problem, entry in PROBLEMS.items() if entry.lasts}
    assert not [fault for fault in of_gpu(after, minor)[0] if fault.problem in of_events]
    assert cleared(minor)(after, now) == after


@given(HISTORIES)
def test_nothing_outlives_a_reset_after_which_all_is_well(history):
    """A look before the reset, and one after it."""
    before = [looked(minor, energy_mj=1) for minor in MINORS]
    after = [looked(minor, **WELL) for minor in MINORS]
    rest = [scanned(*MINORS), released(), unmonitored()]
    known, now = known_after(
        [*history, (0, settled), *((1, sight) for sight in [*before, *after, *after, *rest])]
    )

    assert settled(known, now + 60).faults == ()


@given(HISTORIES, st.integers(0, 59))
def test_nothing_is_over_before_it_was_well_for_long_enough(history, seconds):
    known, now = known_after(history)
    known, _ = known_after([(0, settled)], known, now)
    well, _ = known_after([(0, looked(minor, **WELL)) for minor in MINORS], known, now)
    kept = settled(well, now + seconds)

    alive = {fault for fault in known.faults if fault.well_since is None}
    left = {replace(fault, count=0, well_since=None) for fault in kept.faults}
    assert {replace(fault, count=0, well_since=None) for fault in alive} <= left


@given(st.lists(st.tuples(st.integers(1, 90), st.sampled_from([True, False, None])), max_size=15))
def test_a_condition_stands_from_the_first_bad_look_until_good_ones_lasted(looks):
    """Against what it should be by the words of the rule."""
    known, now, seen, since = HealthState(), 1000.0, [], None
    for seconds, failed in looks:
        now += seconds
        known = settled(known, now)
        since = since if _stands(seen, now) else None
        known = settled(looked(remap_failed=failed)(known, now), now)
        seen.append((now, failed))
        if _stands(seen, now):
            since = since or now
        assert [fault.since for fault in known.faults] == ([since] if _stands(seen, now) else [])
        [taint] = taints(known)[0] or [None]
        assert (taint.since if taint else None) == (since if _stands(seen, now) else None)


def _stands(seen, now) -> bool:
    bad = max((time for time, failed in seen if failed), default=None)
    if bad is None:
        return False
    good = min((time for time, failed in seen if failed is False and time > bad), default=None)
    return good is None or now < good + 60


@given(st.lists(st.integers(0, 5) | st.none(), max_size=12))
def test_a_reset_is_seen_by_a_counter_that_fell_between_looks_after_the_fault(counts):
    """None: the same Xid comes again."""
    known, now, last, fell = saw_one(), 1001.0, None, False
    for count in counts:
        now += 1
        if count is None:
            known, last, fell = saw_one(known, now), None, False
            continue
        known = looked(energy_mj=count)(known, now)
        fell = fell or (last is not None and count < last)
        last = count
    [fault] = known.faults
    assert (fault.well_since is not None) is fell


def saw_one(known: HealthState | None = None, now: float = 1001) -> HealthState:
    return known_after([(0, saw(xid(79)))], known, now)[0]
