"""A disk that is full, read-only or fails for a moment, while claims come and go."""

import errno
import itertools
import os
import threading
import time
from contextlib import AbstractContextManager

import pytest

from dra_driver.base.errors import DriverError, NodeError
from dra_driver.base.files import hanging_disk_calls
from dra_driver.kubeletplugin.serve.rolling_update import PluginLease
from dra_driver.model.steps import TimeSliceInterval
from tests.builders import claim, config, ref
from tests.fakes.disk import Disk, FailingCalls, small_disk
from tests.plugin.claims.test_prepare import World as Preparing

LONG = config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}})


class World(Preparing):
    """A node whose claims and CDI files are on one disk, with the lease of a real plugin."""

    def restart(self):
        self.open_disk()
        self.turn = PluginLease(self.directory, "pod", lambda: self.preparer.recover())
        self.preparer = self.preparer_with(lease=self.held)
        return self.preparer

    def held(self, seconds: float) -> AbstractContextManager[None]:
        return self.turn.held(seconds)

    def put(self, name="claim"):
        """A claim for a GPU, with an interval that has to be put back."""
        return self.api.put(claim("gpu-0", name=name, configs=(LONG,)))

    @property
    def interval(self):
        return next(iter(self.node.intervals.values()))


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def world(disk):
    return World(disk.path)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_claim_is_given_back_on_a_disk_that_is_full(world, disk, restarted):
    world.preparer.prepare(world.put())
    assert world.interval == TimeSliceInterval.LONG
    disk.fill()
    if restarted:
        world.restart()

    world.preparer.unprepare(ref())

    assert (world.interval, world.files_of_claims) == (TimeSliceInterval.DEFAULT, [])


def test_what_was_not_given_back_on_a_full_disk_is_not_prepared_and_goes_on_after_a_restart(
    world, disk
):
    world.preparer.prepare(world.put())
    disk.fill()
    world.node.undo_fails = True
    with pytest.raises(NodeError):
        world.preparer.unprepare(ref())
    assert [record.completed for record in world.ledger.records()] == [False]
    world.node.undo_fails = False

    world.restart().restore_files()

    assert (world.interval, world.files_of_claims) == (TimeSliceInterval.DEFAULT, [])


@pytest.mark.parametrize("when", ["before it", "while it is done"])
def test_a_claim_for_which_there_is_no_room_is_refused_clearly_and_leaves_nothing(
    world, disk, when
):
    if when == "before it":
        disk.fill()
    else:
        world.node.before_files = disk.fill

    with pytest.raises(NodeError, match=r"No space left on device.* free"):
        world.preparer.prepare(world.put())

    assert (world.interval, world.files_of_claims) == (TimeSliceInterval.DEFAULT, [])
    world.node.before_files = lambda: None
    disk.free()
    assert world.preparer.prepare(ref())


def test_a_prepared_claim_is_answered_on_a_disk_that_is_full(world, disk):
    first = world.preparer.prepare(world.put())
    disk.fill()

    assert world.restart().prepare(ref()) == first
    assert world.interval == TimeSliceInterval.LONG


def test_a_disk_that_is_read_only_is_said_and_all_goes_on_once_it_is_not(world, disk):
    world.preparer.prepare(world.put())
    disk.make("ro")
    for act in (world.preparer.unprepare, world.preparer.prepare):
        with pytest.raises(NodeError, match="Read-only file system"):
            act(ref())
    assert world.interval == TimeSliceInterval.LONG

    disk.make("rw")

    assert world.preparer.prepare(ref())
    world.preparer.unprepare(ref())
    assert (world.interval, world.files_of_claims) == (TimeSliceInterval.DEFAULT, [])


def test_two_processes_on_a_full_disk_know_what_the_other_one_did(world, disk):
    first, second = world, World(disk.path)
    second.api, second.node = first.api, first.node
    second.restart()
    first.preparer.prepare(first.put())
    second.preparer.prepare(ref())
    disk.fill()
    first.preparer.prepare(ref())

    second.preparer.unprepare(ref())

    with pytest.raises(NodeError, match="No space left"):
        first.preparer.prepare(ref())
    assert first.ledger.records() == ()


def still_prepared(world, first):
    """Nothing was taken back, and everything that a claim has is there."""
    assert world.node.undone == []
    assert world.interval == TimeSliceInterval.LONG
    assert world.preparer.prepare(ref()) == first
    assert [record.completed for record in world.ledger.records()] == [True]
    assert len(world.files_of_claims) == 3, world.files_of_claims


def lost(world, pattern):
    """One of the three files of a claim."""
    (path,) = [file for file in world.directory.rglob(pattern) if file.is_file()]
    path.unlink()


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("what", ["", "k8s.*claim_uid-claim.json", "uid-claim_*.json"])
def test_a_disk_call_that_fails_while_a_claim_is_asked_for_again_leaves_it_prepared(
    tmp_path, number, restarted, what
):
    """Whichever it is; also where one of its files is gone."""
    world = World(tmp_path)
    first = world.preparer.prepare(world.put())
    for at in itertools.count():
        if what:
            lost(world, what)
        if restarted:
            world.restart()  # its first turn looks at the disk
        with FailingCalls(tmp_path, at, number) as failing:
            try:
                assert world.preparer.prepare(ref()) == first
            except DriverError as error:
                assert type(error) is NodeError, error
        still_prepared(world, first)
        if failing.calls <= at:
            break
    assert at > 3, "it has so many calls at least"


@pytest.mark.parametrize("damage", [None, b"", b'{"version": 4'])
def test_a_record_that_is_lost_is_written_again_from_the_claims_files(tmp_path, damage):
    world = World(tmp_path)
    first = world.preparer.prepare(world.put())
    (record,) = tmp_path.glob("claims/*/*.json")
    before = record.read_bytes()
    record.unlink()
    if damage is not None:
        record.write_bytes(damage)

    assert world.preparer.prepare(ref()) == first

    assert record.read_bytes() == before
    still_prepared(world, first)


def test_a_claim_of_which_all_is_lost_can_be_given_back_and_is_not_made_anew(tmp_path):
    world = World(tmp_path)
    world.preparer.prepare(world.put())
    for path in tmp_path.rglob("*.json"):
        path.unlink()

    with pytest.raises(NodeError, match="delete the pods that use it"):
        world.preparer.prepare(ref())

    assert world.node.undone == []
    world.preparer.unprepare(ref())
    assert (world.interval, world.files_of_claims) == (TimeSliceInterval.DEFAULT, [])


def test_what_waits_for_the_disk_with_the_turn_held_is_told_of_and_goes_on_when_that_answers(
    tmp_path,
):
    world = World(tmp_path)
    first = world.preparer.prepare(world.put())
    (document,) = tmp_path.rglob("metadata/*.json")
    document.unlink()
    os.mkfifo(document)  # whoever reads it waits for somebody who writes
    call = f"look after device metadata in {document.parent}"
    answers = []
    thread = threading.Thread(target=lambda: answers.append(world.preparer.prepare(ref())))
    thread.start()

    deadline = time.monotonic() + 30
    while (writer := opened(document)) is None:
        assert time.monotonic() < deadline
    assert call in str(hanging_disk_calls(-1))

    os.close(writer)
    thread.join(30)
    assert answers == [first]
    assert call not in str(hanging_disk_calls(-1))
    still_prepared(world, first)


def opened(pipe):
    """For writing; None: nobody reads it yet."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def test_files_that_somebody_removed_are_put_back(tmp_path):
    world = World(tmp_path)
    first = world.preparer.prepare(world.put())
    lost(world, "uid-claim_*.json")

    world.preparer.restore_files()

    assert len(world.files_of_claims) == 3
    still_prepared(world, first)


def test_the_disk_that_a_test_fills_is_full(disk: Disk) -> None:
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        (disk.path / "file").write_bytes(b"x")
    (disk.path / "file").rename(disk.path / "renamed")
    disk.free()
    (disk.path / "file").write_bytes(b"x")
