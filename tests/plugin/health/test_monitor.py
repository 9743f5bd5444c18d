"""What is seen of GPUs becomes what is published of them, and outlives restarts."""

import errno
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.base.errors import NodeError, SettingsError
from dra_driver.model.gpus import Inventory, MigInfo
from dra_driver.model.health import Effect, GpuEvent, HealthReading, HealthRules, Problem
from dra_driver.model.profiles import GpuSelector, Profile, ProfileEntry, Rules
from dra_driver.plan.health.state import after_release, cleared
from dra_driver.plugin.health.energy import EnergyReads
from tests.builders import gpu, gpu_uuid
from tests.fakes.disk import FailingCalls, small_disk
from tests.fakes.mig import H100, ONE, instance, partition
from tests.fakes.mortal import Killed
from tests.plugin.health.world import World, xid

SICK = (gpu_uuid(0), Problem.XID, "79")


def test_an_error_of_a_gpu_is_published_and_the_other_gpus_stay_well(world):
    world.step(xid(79))

    assert world.published() == [SICK]
    assert world.changes == 1


def test_what_is_published_is_the_same_object_while_nothing_changes(world):
    world.step(xid(79))
    before = world.scan()
    world.step(after=40)
    world.inventory = replace(world.inventory)

    assert world.scan() is before
    assert world.changes == 1


def test_an_error_of_a_program_is_told_and_nothing_is_published(world):
    world.step(xid(31))

    assert world.published() == []
    assert world.told() == [("node-1", "GPUHealthEvent")]


def test_an_error_of_an_instance_since_the_last_scan_is_of_its_partition(world):
    """It was created for a claim a moment before."""
    before, after = (
        Inventory((gpu(0, mig=MigInfo(True, True, True, H100, instances)),))
        for instances in ((), (instance(ONE, 2, 9),))
    )
    world.inventory = before
    world.step()
    world.inventory_now = after

    world.step(xid(48, gi=9))
    world.inventory = after
    world.step(xid(48, gi=9), xid(79), after=1)

    assert {fault.partition for fault in world.scan()} == {None, partition(ONE, 2).key}
    assert world.scans == 1, "the second time it was known"


def test_an_error_of_an_instance_is_of_the_gpu_while_no_scan_is_possible(world):
    world.step()
    world.inventory_now = NodeError("the PCI bus cannot be read")

    world.step(xid(48, gi=9))

    assert world.published() == [(gpu_uuid(0), Problem.XID, "48")]


def test_a_gpu_that_is_lost_is_in_the_faults_of_that_very_scan(world, caplog):
    world.step()
    world.inventory = replace(world.inventory, lost=((gpu_uuid(3), "it is lost"),))

    assert [fault.problem for fault in world.monitor.faults_for(world.inventory)] == [Problem.LOST]
    assert "a GPU does not answer" in caplog.text
    assert world.changes == 0
    world.monitor.step()
    assert world.changes == 1  # who listens hears of it, too


def test_a_gpu_that_is_back_is_well_after_a_minute_without_a_break(world):
    healthy = world.inventory
    world.inventory = replace(healthy, lost=((gpu_uuid(3), "it is lost"),))
    world.step()
    world.inventory = healthy
    seconds = world.step(after=10)
    assert seconds <= 60
    assert world.published() == [(gpu_uuid(3), Problem.LOST, "")]
    world.step(after=59)
    assert world.published() != []

    world.step(after=1.5)

    assert world.published() == []
    assert world.told() == [("node-1", "GPUUnhealthy"), ("node-1", "GPURecovered")]


def test_a_gpu_that_answers_in_spite_of_an_event_is_well_after_a_minute(world):
    """No scan finds it lost, so what the scans find stays the same."""
    world.step()
    world.step(GpuEvent(gpu_uuid(3), Problem.LOST), after=5)
    assert world.published() == [(gpu_uuid(3), Problem.LOST, "")]

    world.step(after=59)
    assert world.published() != []
    world.step(after=1.5)
    assert world.published() == []


def test_a_restart_publishes_what_was_published_since_the_same_moment(world):
    world.step(xid(79))
    before = world.scan()
    world.now += 500
    world.start()

    assert world.scan() == before
    world.step()
    assert world.scan() == before
    assert len(world.events) == 1  # it was told before


def test_a_reboot_makes_gpus_well(world):
    world.step(xid(79))
    world.boot = "next"
    world.start()

    world.step()
    assert world.published() == []


def test_a_reset_while_the_plugin_was_away_is_noticed(world):
    world.step()
    world.step(xid(79), after=40)
    world.step(after=6)  # the look after the event
    world.step(after=700)  # and one that is kept
    world.readings[gpu_uuid(0)] = HealthReading(gpu_uuid(0), energy_mj=1)
    world.start()

    world.step(after=40)
    world.step(after=61)

    assert world.published() == []


def test_a_reset_is_seen_at_the_next_look(world):
    world.step()
    world.step(xid(79), after=40)
    world.step(after=6)
    world.readings[gpu_uuid(0)] = HealthReading(gpu_uuid(0), energy_mj=1)
    world.step(after=40)
    assert world.published() == [SICK]

    world.step(after=61)

    assert world.published() == []


def test_the_energy_of_gpus_that_are_well_is_asked_for_less_and_less_often(world):
    everybody = set(world.readings)
    asked = []
    for _ in range(100):
        world.step(after=30)
        asked += [world.now] * (world.energy_of == everybody)
        assert world.energy_of in (everybody, set())

    waits = [later - earlier for earlier, later in pairwise(asked)]
    assert waits[:5] == [30, 60, 120, 240, 480]
    assert set(waits[5:]) == {600}


def test_a_gpu_whose_energy_could_not_be_read_is_asked_again_at_the_next_look(world):
    well = dict(world.readings)
    world.readings = {gpu: NodeError("it does not answer") for gpu in well}
    world.step()
    world.readings = well
    world.step(after=40)
    assert world.energy_of == set(well)


def test_a_reset_soon_after_the_driver_was_loaded_is_seen(world):
    def use(energy_mj):
        world.readings[gpu_uuid(0)] = HealthReading(gpu_uuid(0), energy_mj=energy_mj)

    use(10)
    world.step()
    for look in range(1, 9):
        use(10 + 3000 * look)
        world.step(after=30)
    world.step(xid(79), after=1)
    world.readings[gpu_uuid(0)] = NodeError("GPU 0 is lost")
    world.inventory = replace(world.inventory, lost=((gpu_uuid(0), "it is gone"),))
    world.step(after=40)
    world.inventory = replace(world.inventory, lost=())
    use(3000)
    world.step(after=40)
    world.step(after=61)

    assert world.published() == []


def test_a_gpu_that_was_reset_is_asked_as_one_that_is_new(world):
    for _ in range(40):
        world.step(after=30)
    world.step(xid(79), after=1)
    world.step(after=40)
    world.readings[gpu_uuid(0)] = HealthReading(gpu_uuid(0), energy_mj=1)
    world.step(after=40)
    world.step(after=90)  # it is well
    assert world.published() == []

    world.step(after=60)
    assert world.energy_of == {gpu_uuid(0)}


def test_the_energy_of_a_sick_gpu_is_asked_for_at_every_look(world):
    world.step(xid(79))
    asked = []
    for _ in range(9):
        world.step(after=40)
        asked.append(world.energy_of)

    assert all(gpu_uuid(0) in gpus for gpus in asked)
    assert {gpu_uuid(0)} in asked


def test_a_gpu_that_was_asked_often_while_it_was_sick_is_asked_no_less_often_after_it():
    gpu, reads = gpu_uuid(0), EnergyReads(30.0)
    for now in range(0, 250, 10):
        assert reads.due([gpu], [gpu], now) == {gpu}
        reads.answered([HealthReading(gpu, energy_mj=now + 1)], now)

    asked = [now for now in range(250, 2000, 10) if is_asked(reads, gpu, now)]

    assert asked == [450, 930, 1530]


def is_asked(reads, gpu, now):
    if reads.due([gpu], [], now):
        reads.answered([HealthReading(gpu, energy_mj=now + 1)], now)
        return True
    return False


def test_a_reset_of_a_gpu_that_was_well_for_long_and_then_fell_silent_is_seen(world):
    world.step()
    world.step(after=500)
    world.step(xid(79), after=1)
    world.readings[gpu_uuid(0)] = NodeError("GPU 0 is lost")
    world.inventory = replace(world.inventory, lost=((gpu_uuid(0), "it is gone"),))
    world.step(after=40)
    world.inventory = replace(world.inventory, lost=())
    world.readings[gpu_uuid(0)] = HealthReading(gpu_uuid(0), energy_mj=1)
    world.step(after=40)
    world.step(after=61)

    assert world.published() == []


def test_an_event_asks_for_a_look_soon(world):
    world.step()
    assert world.looks == 1
    world.step(after=10)
    assert world.looks == 1

    seconds = world.step(xid(79), after=1)
    assert seconds <= 1
    world.step(after=1)

    assert world.looks == 2


def test_an_event_is_published_before_the_gpus_are_looked_at(world):
    """One of them may hang, and a look takes seconds then."""
    published = []
    look = world.look

    def slow_look(energy_of):
        published.append((world.published(), world.changes))
        return look(energy_of)

    world.look = slow_look
    world.start()
    world.step()
    changes = world.changes
    world.step(xid(79), after=31)

    assert published[1:] == [([SICK], changes + 1)]


def test_a_problem_that_comes_back_at_the_last_look_was_never_over(world):
    for after, is_failed in ((0, True), (30, False), (30, False), (30, True)):
        world.readings[gpu_uuid(0)] = HealthReading(gpu_uuid(0), remap_failed=is_failed)
        world.step(after=after)
    world.step(xid(79), after=30)

    assert world.scan()[0].since == 1000
    assert world.changes == 2


def test_gpus_of_which_none_answers_are_looked_at_less_and_less_often(world):
    world.readings = {gpu_uuid(0): NodeError("it does not answer")}
    for _ in range(3600):
        world.step(after=1)

    assert 5 < world.looks < 13


@pytest.mark.parametrize("gone", ["lost", "gpus"])
def test_gpus_that_answer_again_are_looked_at_soon(world, gone):
    """Lost, or without a driver for a while: they may have been reset meanwhile."""
    world.step(xid(79))
    world.step(after=6)
    there, readings = world.inventory, world.readings
    reasons = tuple((gpu.uuid, "it is lost") for gpu in there.gpus)
    world.inventory = replace(there, **{gone: reasons if gone == "lost" else ()})
    world.readings = dict.fromkeys(readings, NodeError("it does not answer"))
    for _ in range(3600):
        world.step(after=1)
    world.readings = {uuid: HealthReading(uuid, energy_mj=1) for uuid in readings}
    world.inventory = there
    for _ in range(70):
        world.step(after=1)

    assert world.published() == []


def test_a_look_that_is_asked_for_during_another_is_not_forgotten(world):
    world.readings = {gpu_uuid(0): NodeError("it does not answer")}
    look = world.look

    def look_and_be_asked(energy_of):
        world.look = look
        world.monitor.look_soon()
        return look(energy_of)

    world.look = look_and_be_asked
    world.start()
    assert world.step() <= 0.01

    world.step(after=0.1)

    assert world.looks == 2


def test_one_gpu_that_does_not_answer_keeps_no_other_from_being_looked_at(world):
    world.readings[gpu_uuid(0)] = NodeError("it does not answer")
    world.readings[gpu_uuid(1)] = HealthReading(gpu_uuid(1), remap_failed=True)
    world.step()
    world.step(after=31)

    assert world.published() == [(gpu_uuid(1), Problem.REMAP_FAILED, "")]
    assert world.looks == 2


def test_a_thousand_events_in_a_second_are_few_writes_and_few_events(world):
    world.step()
    writes, told = world.writes, len(world.events)
    for _ in range(50):
        world.step(xid(79, count=10), xid(31, minor=1, count=10), after=0.02)
    world.step(after=1)

    assert world.monitor.faults[0].value == "79"
    assert world.writes - writes <= 3
    assert len(world.events) - told <= 5
    assert world.changes == 1
    value = world.metrics.registry.get_sample_value
    for minor, number in ((0, "79"), (1, "31")):
        labels = {"gpu": gpu_uuid(minor), "xid": number}
        assert value("dra_driver_gpu_xid_total", labels) == 500


def test_events_of_thousands_of_processes_take_little_memory(world):
    world.step()
    for pid in range(5000):
        world.monitor.saw([xid(31, pid=pid)])

    assert len(world.monitor._pending) <= 1025
    world.step(after=1)
    labels = {"gpu": gpu_uuid(), "xid": "31"}
    assert world.metrics.registry.get_sample_value("dra_driver_gpu_xid_total", labels) == 5000


def test_a_profile_says_what_follows(world):
    health = HealthRules(xids=((31, Effect.NO_SCHEDULE),))
    entry = ProfileEntry(GpuSelector(frozenset({0})), Rules(health=health), "spec.gpus[0]")
    world.profile = Profile("strict", (entry,))
    world.step(xid(31), xid(31, minor=1))

    assert world.published() == [(gpu_uuid(0), Problem.XID, "31")]


def test_while_no_profile_can_be_used_the_last_one_counts(world):
    world.step(xid(79))

    def broken():
        raise SettingsError("it is broken")

    world.monitor._inputs = replace(world.monitor._inputs, profile=broken)
    world.step(xid(48, minor=1), after=1)

    assert world.published() == [SICK, (gpu_uuid(1), Problem.XID, "48")]


def test_an_administrator_says_that_a_gpu_is_well_once_that_is_kept(world):
    world.step(xid(79), xid(48, minor=1))
    world.requests.edit = lambda state: cleared(state, gpu_uuid(0))
    done = world.requests.done_count

    world.step(after=1)

    assert world.published() == [(gpu_uuid(1), Problem.XID, "48")]
    assert world.requests.done_count == done + 1
    world.start()
    assert world.published() == [(gpu_uuid(1), Problem.XID, "48")]


def test_what_an_administrator_says_is_not_forgotten_while_the_disk_fails(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        world = World(disk.path)
        world.step(xid(79))
        disk.make("ro")
        world.requests.edit = cleared
        done = world.requests.done_count
        world.step(after=1)
        assert (world.published(), world.requests.done_count) == ([], done)

        disk.make("rw")
        world.step(after=11)

        assert world.requests.done_count == done + 1


def test_who_lets_go_of_a_gpu_has_that_published_by_the_next_step(world):
    world.step()
    woken = []
    world.monitor.wake = lambda: woken.append(1)
    world.monitor.change(lambda state, now: after_release(state, [gpu_uuid(2)], None, now))
    world.step()

    assert woken == [1]
    assert world.published() == [(gpu_uuid(2), Problem.RELEASED, "")]


def test_a_gpu_without_events_is_told_once(world):
    world.unmonitored = {gpu_uuid(5): "not supported"}
    world.step()
    world.start()
    world.step(after=1)

    assert world.told() == [("node-1", "GPUHealthEvent")]


def test_an_older_process_tells_and_keeps_nothing_and_knows_what_the_newer_one_does(
    world, tmp_path
):
    newer = World(tmp_path)
    world.step()
    newer.step(after=1)
    world.newest = False
    world.step(after=1)
    writes = world.writes

    for each in (world, newer):
        each.step(xid(79), after=1)
    assert (world.events, world.writes) == ([], writes)
    world.step(after=1)
    assert world.scan() == newer.scan()
    newer.requests.edit = cleared
    newer.step(after=1)
    world.newest = True  # the newer one has ended
    world.step(after=1)

    assert world.published() == []


def test_what_happens_while_a_newer_process_starts_is_kept_for_it(world, tmp_path):
    world.step()
    newer = World(tmp_path)
    world.newest = False  # long before the newer one hears of events

    world.step(xid(79), after=1)
    world.step(after=1)
    assert world.events == []
    newer.step(after=5)
    assert newer.published() == [SICK]
    assert newer.told() == [("node-1", "GPUUnhealthy")]

    newer.requests.edit = cleared
    newer.step(after=1)
    world.step(xid(95), after=5)  # the newer one heard of it, too, if it happened
    assert world.published() == newer.published() == []
    assert world.start().faults == ()


def test_a_process_that_looked_while_a_newer_one_began_writes_nothing_over_it(world, tmp_path):
    world.step()
    newer = World(tmp_path)
    look = world.look

    def slow_look(energy_of):
        world.newest = False
        newer.step(xid(79), after=31)
        return look(energy_of) | {gpu_uuid(1): HealthReading(gpu_uuid(1), remap_failed=True)}

    world.look = slow_look
    world.start()
    world.step(after=31)

    assert newer.published() == [SICK]
    assert newer.start().faults == newer.scan()
    assert newer.published() == [SICK]


def test_what_is_cleared_while_a_newer_process_starts_stays_cleared(world, tmp_path):
    world.step(xid(79))
    newer = World(tmp_path)
    world.requests.edit = cleared
    world.step(after=1)  # it does not know of the newer one yet

    newer.step(after=1)

    assert newer.published() == []
    assert world.start().faults == ()


def test_before_the_first_scan_nothing_is_forgotten(world):
    world.step(xid(79))
    world.start()

    assert world.monitor.step() is None
    assert [fault.value for fault in world.monitor.faults] == ["79"]


@pytest.mark.parametrize("effects", range(7))
def test_killed_at_any_moment_the_state_is_right_after_the_restart(world, effects):
    """What was published is published again; what never was is seen as if it had not happened, or
    is published."""
    world.step(xid(48, minor=1))
    before = world.scan()
    world.now += 10
    world.effects_left = effects
    world.requests.edit = lambda state: cleared(state, gpu_uuid(1))
    died = False
    try:
        world.step(xid(79))
    except Killed:
        died = True
    published = world.monitor.faults
    changed = world.changes > 1
    world.start()

    after = world.scan()
    if changed or not died:
        assert after == published
        assert [fault.value for fault in after] == ["79"]
    else:
        assert after in (before, published)
    world.step(after=1)
    assert world.scan() == after


@pytest.mark.parametrize("text", ["", "{", '{"HealthOfBoot": {}}', "[]"])
def test_a_damaged_file_is_set_aside_and_looks_find_what_is_wrong_again(world, text, caplog):
    world.readings[gpu_uuid(4)] = HealthReading(gpu_uuid(4), remap_failed=True)
    world.step(xid(79))
    world.path.write_text(text)

    world.start()
    world.step(after=1)

    assert world.published() == [(gpu_uuid(4), Problem.REMAP_FAILED, "")]
    assert world.path.with_name("health.json.damaged").read_text() == text
    assert "cannot be understood" in caplog.text
    world.start()
    assert world.published() == [(gpu_uuid(4), Problem.REMAP_FAILED, "")]


def test_a_disk_that_fails_keeps_nothing_from_being_published_and_is_said_once(tmp_path, caplog):
    with small_disk(tmp_path / "disk") as disk:
        world = World(disk.path)
        world.step()
        disk.make("ro")
        for second in range(30):
            world.step(xid(79), xid(200 + second), after=1)

        assert len(world.published()) == 31
        assert caplog.text.count("is not kept for a restart") == 1
        disk.make("rw")
        world.step(after=11)
        before = world.scan()
        world.start()
        assert world.scan() == before


def test_a_file_that_cannot_be_read_is_no_reason_not_to_watch(world):
    world.step()
    with FailingCalls(world.path.parent, 0, errno.EIO):
        world.start()
    world.step(xid(79), after=1)

    assert world.published() == [SICK]


FATAL, OF_PROGRAMS = (48, 79, 95), (13, 31)
MINORS = st.integers(0, 2)
ACTIONS = st.one_of(
    st.tuples(st.just("xid"), MINORS, st.sampled_from((*FATAL, *OF_PROGRAMS))),
    st.tuples(st.just("lost"), MINORS, st.just(0)),
    st.tuples(st.just("restart"), MINORS, st.just(0)),
    st.tuples(st.just("wait"), MINORS, st.sampled_from((0.1, 1, 40))),
)


def since(world):
    """Since when each problem is published."""
    faults = world.scan()
    return {(fault.gpu, fault.problem, fault.value): fault.since for fault in faults}


@given(actions=st.lists(ACTIONS, max_size=12))
@settings(max_examples=60, deadline=None)
def test_what_is_published_follows_from_what_was_seen_and_from_nothing_else(actions):
    """However events come together, and however often the plugin is started again."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        expected = set()
        world.step()
        for action, minor, number in actions:
            match action:
                case "xid":
                    world.step(xid(number, minor))
                    if number in FATAL:
                        expected.add((gpu_uuid(minor), Problem.XID, str(number)))
                case "lost":
                    lost = {*world.inventory.lost, (gpu_uuid(minor), "it is lost")}
                    world.inventory = replace(world.inventory, lost=tuple(sorted(lost)))
                    expected.add((gpu_uuid(minor), Problem.LOST, ""))
                    assert expected & set(world.published())
                case "restart":
                    world.step(after=0.5)  # what waits in a flood
                    published = since(world)
                    world.start()
                    assert since(world) == published
                case "wait":
                    world.step(after=number)
        world.step(after=0.5)

        assert set(world.published()) == expected
