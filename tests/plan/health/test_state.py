"""How what is known of the health of GPUs changes with what is seen."""

import pytest

from dra_driver.model.gpus import Inventory
from dra_driver.model.health import Effect, Fault, GpuEvent, HealthRules, HealthState, Problem
from dra_driver.plan.health import state
from tests.builders import gpu_uuid
from tests.fakes.mig import ONE, TWO, partition
from tests.plan.health.sights import (
    Sight,
    cleared,
    looked,
    released,
    saw,
    scanned,
    settled,
    unmonitored,
    xid,
)

NOTHING = HealthState()


def after(*sights: Sight, known: HealthState = NOTHING, now: float = 100) -> HealthState:
    """What is known once all that was seen, every ten seconds something."""
    for number, sight in enumerate(sights):
        known = sight(known, now + 10 * number)
    return known


def problems(known: HealthState) -> list[tuple[Problem, str]]:
    return [(fault.problem, fault.value) for fault in known.faults]


def is_over(known: HealthState) -> bool:
    """Whether nothing is left, if nothing else is seen."""
    return settled(known, 1e9).faults == ()


def test_a_fatal_xid_is_a_fault_of_its_gpu():
    assert after(saw(xid(79, count=2))).faults == (
        Fault(gpu_uuid(), Problem.XID, "79", since=100, count=2),
    )


def test_an_xid_of_an_application_leaves_no_fault_unless_the_profile_says_so():
    rules = {gpu_uuid(): HealthRules(xids=((31, Effect.NO_SCHEDULE),))}

    assert after(saw(xid(31))).faults == ()
    assert problems(after(saw(xid(31), xid(13), rules=rules))) == [(Problem.XID, "31")]


def test_an_event_of_what_looks_tell_of_is_over_once_they_say_so():
    corrected = GpuEvent(gpu_uuid(), Problem.CORRECTABLE_ECC)
    rules = {gpu_uuid(): HealthRules(effects=((Problem.CORRECTABLE_ECC, Effect.NO_SCHEDULE),))}
    known = after(saw(corrected, rules=rules))

    assert problems(known) == [(Problem.CORRECTABLE_ECC, "")]
    same = looked(rules=rules, correctable_ecc=1)
    assert is_over(after(same, same, known=known, now=110))


def test_an_error_of_an_instance_is_of_its_partition():
    known = after(saw(xid(95, 1, gi=7), xid(95, 1, gi=9)))

    assert {fault.partition for fault in known.faults} == {
        partition(ONE, 0).key,
        partition(TWO, 2).key,
    }


@pytest.mark.parametrize(("minor", "gi"), [(1, 8), (0, 7), (1, None)])
def test_an_error_of_an_instance_that_is_not_known_is_of_the_gpu(minor, gi):
    [fault] = after(saw(xid(95, minor, gi=gi))).faults

    assert fault.partition is None


def test_a_reset_ends_a_fatal_xid_after_a_while():
    known = after(saw(xid(79)), looked(energy_mj=1000), looked(energy_mj=7))

    assert state.next_settlement(known, {}) == 180
    assert settled(known, 179).faults
    assert settled(known, 180).faults == ()


def test_the_profile_says_how_long_a_while_is():
    known = after(saw(xid(79)), looked(energy_mj=1000), looked(energy_mj=7))
    rules = {gpu_uuid(): HealthRules(recovery_seconds=300)}

    assert state.next_settlement(known, rules) == 420
    assert state.settled(known, rules, 419).faults
    assert state.settled(known, rules, 420).faults == ()


def test_nothing_is_due_while_nothing_is_well():
    assert state.next_settlement(after(saw(xid(79))), {}) is None


@pytest.mark.parametrize(
    ("before", "later"),
    [
        ({"energy_mj": 1000}, {"energy_mj": 1001}),
        ({"energy_mj": 1000, "correctable_ecc": 5}, {"energy_mj": 1001, "correctable_ecc": 0}),
        ({"energy_mj": 1000}, {}),
        ({"recovery_action": "NONE"}, {"recovery_action": "NONE"}),
        ({"recovery_action": "RECOVER_IMEX_DOMAIN"}, {"recovery_action": "NONE"}),
    ],
)
def test_nothing_else_is_a_reset(before, later):
    assert not is_over(after(saw(xid(79)), looked(**before), looked(**later)))


@pytest.mark.parametrize(
    ("before", "later"),
    [
        ({"recovery_action": "GPU_RESET"}, {"recovery_action": "NONE"}),
        ({"pcie_replays": 3}, {"pcie_replays": 0}),
        ({"uncorrectable_ecc": 1}, {"uncorrectable_ecc": 0}),
    ],
)
def test_a_reset_is_also_seen_by(before, later):
    known = after(saw(xid(79)), looked(**before), looked(), looked(**later))

    assert is_over(known)


def test_a_reset_before_the_fault_does_not_end_it():
    """Both were between two looks."""
    known = after(looked(energy_mj=1000), saw(xid(79)), looked(energy_mj=7))

    assert not is_over(known)
    assert is_over(after(looked(energy_mj=0), known=known, now=130))
    answers_again = (scanned(0, lost=(0,)), scanned(0))
    assert not is_over(
        after(looked(energy_mj=9), *answers_again, saw(xid(79)), looked(energy_mj=7))
    )


@pytest.mark.parametrize("silent", [scanned(0, lost=(0,)), released(0)])
def test_a_reset_of_a_gpu_that_was_silent_after_the_fault_ends_it(silent):
    """No look was possible between the two; in whatever order the first two were seen."""
    for faulty in ([saw(xid(79)), silent], [silent, saw(xid(79))]):
        known = after(looked(energy_mj=1000), *faulty, scanned(0), released())

        assert not is_over(known)
        assert is_over(after(looked(energy_mj=7), known=known, now=200))


def test_a_reset_ends_faults_of_partitions_too():
    known = after(saw(xid(95, 1, gi=7)), looked(1, energy_mj=9), looked(1, energy_mj=1))

    assert is_over(known)


def test_an_xid_that_comes_again_stands_since_the_first_time():
    known = after(saw(xid(79)), looked(energy_mj=9), looked(energy_mj=1), saw(xid(79)))

    assert known.faults == (Fault(gpu_uuid(), Problem.XID, "79", since=100, count=2),)


@pytest.mark.parametrize(
    ("wrong", "well", "problem", "value"),
    [
        ({"remap_pending": True}, {"remap_pending": False}, Problem.REMAP_PENDING, ""),
        ({"remap_failed": True}, {"remap_failed": False}, Problem.REMAP_FAILED, ""),
        ({"thermal_slowdown": True}, {"thermal_slowdown": False}, Problem.THERMAL, ""),
        ({"power_brake": True}, {"power_brake": False}, Problem.POWER_BRAKE, ""),
        ({"fabric": "a b"}, {"fabric": ""}, Problem.FABRIC, "a-b"),
        (
            {"recovery_action": "NODE_REBOOT"},
            {"recovery_action": "NONE"},
            Problem.RECOVERY_ACTION,
            "NODE_REBOOT",
        ),
    ],
)
def test_a_condition_is_a_fault_until_looks_say_otherwise(wrong, well, problem, value):
    known = after(looked(**wrong))

    assert problems(known) == [(problem, value)]
    assert not is_over(after(looked(), known=known, now=200))
    assert is_over(after(looked(**well), known=known, now=200))


def test_a_condition_that_comes_back_keeps_since_when():
    known = after(looked(remap_failed=True), looked(remap_failed=False), looked(remap_failed=True))

    assert known.faults == (Fault(gpu_uuid(), Problem.REMAP_FAILED, since=100, count=2),)


def test_a_condition_that_changes_stands_since_the_first_time():
    known = after(looked(recovery_action="DRAIN_P2P"), looked(recovery_action="GPU_RESET"))

    assert known.faults == (Fault(gpu_uuid(), Problem.RECOVERY_ACTION, "GPU_RESET", since=100),)


def test_a_clock_that_is_set_back_does_not_keep_a_fault():
    known = after(looked(remap_failed=True), looked(remap_failed=False), now=5000)
    known = looked(remap_failed=False)(known, 1000)

    assert settled(known, 1060).faults == ()


def test_a_clock_that_is_set_back_does_not_keep_what_a_reset_ended():
    known = after(saw(xid(79)), looked(energy_mj=1000), looked(energy_mj=7), now=5000)
    known = settled(known, 1000)

    assert state.next_settlement(known, {}) == 1060
    assert settled(known, 1060).faults == ()


def test_links_are_missing_that_were_there_before():
    known = after(looked(nvlinks=16), looked(nvlinks=18), looked(nvlinks=15))

    assert problems(known) == [(Problem.NVLINK, "3")]
    assert is_over(after(looked(nvlinks=18), known=known, now=200))


@pytest.mark.parametrize(("replays", "is_fault"), [(8, False), (9, True)])
def test_replays_are_counted_by_the_minute(replays, is_fault):
    known = looked(pcie_replays=100 + replays)(after(looked(pcie_replays=100)), 160)

    assert problems(known) == [(Problem.PCIE_REPLAYS, "")] * is_fault
    assert is_over(looked(pcie_replays=100 + replays)(known, 220))


def test_corrected_errors_are_a_fault_while_they_become_more():
    known = after(looked(correctable_ecc=1), looked(correctable_ecc=2))

    assert problems(known) == [(Problem.CORRECTABLE_ECC, "")]
    assert is_over(looked(correctable_ecc=2)(known, 200))


def test_the_counter_tells_of_an_uncorrectable_error_whose_event_was_missed():
    known = after(looked(uncorrectable_ecc=0), looked(uncorrectable_ecc=2))

    assert known.faults == (Fault(gpu_uuid(), Problem.UNCORRECTABLE_ECC, since=110),)
    assert not is_over(after(looked(uncorrectable_ecc=2), known=known, now=200))


def test_errors_before_the_first_look_are_not_held_against_a_gpu():
    assert after(looked(uncorrectable_ecc=2), looked(uncorrectable_ecc=2)).faults == ()


def test_the_counter_adds_nothing_to_an_event():
    event = GpuEvent(gpu_uuid(), Problem.UNCORRECTABLE_ECC)
    known = after(looked(uncorrectable_ecc=0), saw(event), looked(uncorrectable_ecc=1))

    assert known.faults == (Fault(gpu_uuid(), Problem.UNCORRECTABLE_ECC, since=110),)


@pytest.mark.parametrize("seen", [{"energy_mj": 2}, {"energy_mj": 0}])
def test_an_error_after_a_reset_whose_event_was_missed_is_not_over_with_the_reset(seen):
    """At the look after the reset, or at the one that sees it."""
    event = GpuEvent(gpu_uuid(), Problem.UNCORRECTABLE_ECC)
    before = [saw(event), looked(energy_mj=1000, uncorrectable_ecc=0)]
    reset = [looked(energy_mj=1, uncorrectable_ecc=0)] if seen["energy_mj"] else []

    known = after(*before, *reset, looked(uncorrectable_ecc=1, **seen))

    assert problems(known) == [(Problem.UNCORRECTABLE_ECC, "")]
    assert not is_over(known)


def test_the_counter_has_no_more_effect_than_the_event():
    rules = {gpu_uuid(): HealthRules(effects=((Problem.UNCORRECTABLE_ECC, Effect.NONE),))}
    known = after(
        looked(rules=rules, uncorrectable_ecc=0), looked(rules=rules, uncorrectable_ecc=1)
    )

    assert known.faults == ()


def test_a_gpu_that_does_not_answer_is_lost_until_it_does():
    known = after(scanned(0, 1, lost=(0,)))

    assert known.faults == (Fault(gpu_uuid(), Problem.LOST, since=100),)
    assert not is_over(after(scanned(0, 1, stale=(0,)), known=known, now=200))
    assert not is_over(after(scanned(1), known=known, now=200))
    assert is_over(after(scanned(0, 1), known=known, now=200))


def test_a_gpu_without_an_inventory_is_not_lost():
    assert state.after_scan(NOTHING, Inventory(), 100).faults == ()


@pytest.mark.parametrize(
    ("those", "problem"), [(released, Problem.RELEASED), (unmonitored, Problem.UNMONITORED)]
)
def test_exactly_those_that_are_named_are_and_at_once(those, problem):
    known = after(those(0, 1), those(1, 2))

    assert known.faults == (
        Fault(gpu_uuid(1), problem, since=100),
        Fault(gpu_uuid(2), problem, since=110),
    )
    assert after(those(), known=known, now=120).faults == ()


def test_a_release_lasts_as_long_as_was_said_last():
    once = state.after_release(after(released(0)), {gpu_uuid(0)}, 700.0, 110)
    longer = state.after_release(once, {gpu_uuid(0)}, 900.0, 120)

    assert [fault.until for fault in once.faults] == [700.0]
    assert [(fault.until, fault.since) for fault in longer.faults] == [(900.0, 100)]


def test_what_another_process_saw_meanwhile_is_known_and_what_was_cleared_there_is_not():
    at_the_start = after(saw(xid(79), xid(119)), looked(thermal_slowdown=True))
    mine = after(scanned(0, 1, lost=(1,)), released(2), known=at_the_start, now=200)
    kept = after(cleared(0), saw(xid(79), xid(95, 1)), known=at_the_start, now=150)

    known = state.taken_over(mine, kept)

    assert [(fault.problem, fault.value, fault.since) for fault in known.faults] == [
        (Problem.THERMAL, "", 110),
        (Problem.XID, "79", 160),
        (Problem.LOST, "", 200),
        (Problem.XID, "95", 160),
        (Problem.RELEASED, "", 210),
    ]
    assert known.looks == kept.looks


def test_an_administrator_ends_what_no_look_would():
    known = after(saw(xid(79), xid(79, 1)), cleared(0))

    assert [fault.gpu for fault in known.faults] == [gpu_uuid(1)]
    assert after(cleared(), known=known).faults == ()


def test_an_administrator_ends_what_is_about_to_be_over():
    known = after(looked(remap_failed=True), looked(remap_failed=False), cleared(0))

    assert known.faults == ()


def test_an_administrator_does_not_end_what_is_seen_to_be_wrong():
    seen = after(
        scanned(0, lost=(0,)), released(0), unmonitored(0), looked(remap_failed=True, fabric="")
    )

    assert cleared(0)(seen, 200) == seen


def test_one_partition_alone_can_be_said_to_be_well():
    known = after(saw(xid(95, 1, gi=7), xid(95, 1, gi=9), xid(79, 1)))
    after_clear = state.cleared(known, gpu_uuid(1), partition(ONE, 0).key)

    assert [fault.partition for fault in after_clear.faults] == [None, partition(TWO, 2).key]
