"""Who waits for changes of directories is woken by the kernel, or has to look."""

import logging
import threading

import pytest

from dra_driver.base.inotify import CONTENTS, NAMES, DirectoryChanges
from tests.fakes.open_files import no_more_files

AT_ONCE, LONG = 0.0, 60.0


@pytest.fixture
def changes():
    changes = DirectoryChanges(NAMES)
    yield changes
    changes.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda at: (at / "new").touch(),
        lambda at: (at / "old").unlink(),
        lambda at: (at / "old").rename(at.parent / "away"),
        lambda at: at.rename(at.parent / "moved"),
    ],
    ids=["comes", "goes", "moves away", "the directory itself"],
)
def test_a_name_that_comes_or_goes_wakes_who_waits(tmp_path, changes, change):
    directory = tmp_path / "watched"
    directory.mkdir()
    (directory / "old").touch()
    assert changes.watch([directory])
    assert not changes.wait(AT_ONCE)

    change(directory)

    assert changes.wait(LONG)
    changes.clear()
    assert not changes.wait(AT_ONCE)


def test_only_what_it_was_told_counts(tmp_path, changes):
    (tmp_path / "file").touch()
    changes.watch([tmp_path])

    (tmp_path / "file").write_text("text")
    assert not changes.wait(AT_ONCE)

    contents = DirectoryChanges(NAMES | CONTENTS)
    contents.watch([tmp_path])
    (tmp_path / "file").write_text("more")
    assert contents.wait(LONG)
    contents.close()


def test_directories_that_are_named_no_more_are_not_watched(tmp_path, changes):
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
        changes.watch([directory])
    changes.clear()

    (first / "new").touch()
    assert not changes.wait(AT_ONCE)
    (second / "new").touch()
    assert changes.wait(LONG)


def test_directories_that_were_watched_beside_a_missing_one_are_not_watched_for_ever(
    tmp_path, changes
):
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    assert not changes.watch([first, tmp_path / "missing"])
    assert changes.watch([second])
    changes.clear()

    (first / "new").touch()

    assert not changes.wait(AT_ONCE)


def test_any_thread_can_wake_who_waits_or_waits_next(changes):
    threading.Timer(0.05, changes.set).start()
    assert changes.wait(None)
    changes.clear()
    assert not changes.wait(AT_ONCE)


def test_what_is_missing_is_not_watched(tmp_path, changes, caplog):
    caplog.set_level(logging.WARNING)
    assert not changes.watch([tmp_path / "missing"])
    assert not changes.watch([])
    assert not caplog.text  # it may come

    assert changes.watch([tmp_path])


def test_with_no_files_left_it_can_be_waited_all_the_same(tmp_path, caplog):
    changes = DirectoryChanges(NAMES)
    with no_more_files():
        for _ in range(2):
            assert not changes.watch([tmp_path])
        changes.set()
        assert changes.wait(LONG)
    changes.close()

    assert caplog.text.count("directories cannot be watched") == 1


def test_after_its_end_nobody_is_woken(changes):
    changes.close()

    changes.set()
