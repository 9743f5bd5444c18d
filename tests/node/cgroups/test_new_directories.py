"""The kernel tells of new directories at once."""

import os
import queue
import shutil
import threading
from pathlib import Path

import pytest

from dra_driver.node.cgroups.watch import DirectoryWatcher
from tests.waiting import eventually

SECONDS = 60.0


class Reports:
    """What was reported, in order."""

    def __init__(self):
        self.queue = queue.SimpleQueue()

    def __call__(self, directory, name):
        self.queue.put((directory, name))

    def next(self):
        return self.queue.get(timeout=SECONDS)


@pytest.fixture
def reports():
    return Reports()


@pytest.fixture
def new(reports):
    watcher = DirectoryWatcher(reports)
    yield watcher
    watcher.stop()


def test_directories_are_told_of_and_files_are_not(tmp_path, reports, new):
    assert new.watch(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "another").mkdir()
    assert reports.next() == (tmp_path, "directory")
    assert reports.next() == (tmp_path, "another")


def test_one_can_be_watched_twice_and_no_longer(tmp_path, reports, new):
    first, second = tmp_path / "one", tmp_path / "two"
    first.mkdir()
    second.mkdir()
    assert new.watch(first)
    assert new.watch(first)
    assert new.watch(second)
    new.unwatch(first)
    new.unwatch(first)
    (first / "not-told").mkdir()
    (second / "told").mkdir()
    assert reports.next() == (second, "told")
    assert new.watched() == {second}


def test_a_directory_that_goes_is_no_longer_watched_and_can_come_again(tmp_path, reports, new):
    directory = tmp_path / "one"
    directory.mkdir()
    assert new.watch(tmp_path)
    assert new.watch(directory)
    shutil.rmtree(directory)
    (tmp_path / "after").mkdir()
    assert reports.next() == (tmp_path, "after")  # events come in order
    assert new.watched() == {tmp_path}

    directory.mkdir()
    assert reports.next() == (tmp_path, "one")
    assert new.watch(directory)
    (directory / "again").mkdir()
    assert reports.next() == (directory, "again")


def test_what_is_not_there_is_not_watched(tmp_path, new):
    assert not new.watch(tmp_path / "gone")
    assert new.watched() == frozenset()


def test_one_that_cannot_be_dealt_with_does_not_keep_the_next_from_it(tmp_path, caplog):
    names = queue.SimpleQueue()

    def report(directory, name):
        names.put(name)
        if name == "bad":
            raise ValueError("bad")

    new = DirectoryWatcher(report)
    new.watch(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "good").mkdir()
    assert [names.get(timeout=SECONDS) for _ in range(2)] == ["bad", "good"]
    new.stop()
    assert "a directory was not dealt with" in caplog.text


def test_stopped_it_leaves_no_thread(tmp_path, reports):
    before = set(threading.enumerate())
    new = DirectoryWatcher(reports)
    new.stop()
    new.watch(tmp_path)
    threads = set(threading.enumerate()) - before
    assert [thread.name for thread in threads] == ["new-directories"]
    new.stop()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert new.watched() == frozenset()


def test_when_the_kernel_loses_events_whatever_is_there_counts_as_new(tmp_path):
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if most > 100_000:
        pytest.skip(f"this kernel keeps {most} events")
    busy, go_on, names = threading.Event(), threading.Event(), set()

    def slowly(directory, name):
        names.add(name)
        busy.set()
        assert go_on.wait(60)

    new = DirectoryWatcher(slowly)
    new.watch(tmp_path)
    (tmp_path / "first").mkdir()
    assert busy.wait(SECONDS)
    old_path, new_path = str(tmp_path / "one"), str(tmp_path / "two")
    Path(old_path).touch()
    for _ in range(most // 2 + 1):  # equal events that follow each other would be one
        os.rename(old_path, new_path)
        os.rename(new_path, old_path)
    (tmp_path / "last").mkdir()
    go_on.set()
    eventually(lambda: "last" in names)
    new.stop()


def test_a_kernel_that_gives_no_more_watches_is_said_once(tmp_path, caplog):
    new = DirectoryWatcher(lambda directory, name: None)
    (tmp_path / "file").touch()
    assert not new.watch(tmp_path / "file")  # ENOTDIR stands for ENOSPC: refused all the same
    assert not new.watch(tmp_path / "file")
    new.stop()
    assert caplog.messages == ["a directory is not watched"]
