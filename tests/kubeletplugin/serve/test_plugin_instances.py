"""Which of several plugin processes is the newest, whatever happened to the others."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.kubeletplugin.serve.rolling_update import PluginInstances, plugin_processes

LIVE = """
import sys, threading
from pathlib import Path
from dra_driver.kubeletplugin.serve.rolling_update import PluginInstances
instances = PluginInstances(Path(sys.argv[1]), "other")
print(instances.is_newest(), flush=True)
threading.Event().wait()
"""


@contextmanager
def other_process(directory: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", LIVE, str(directory)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        try:
            yield process
        finally:
            process.kill()


def names(directory: Path) -> list[str]:
    return sorted(n.partition("-")[2] for n in os.listdir(directory) if not n.startswith("."))


def test_the_last_to_start_is_the_newest(short: Path) -> None:
    directory = short / "instances"
    old = PluginInstances(directory, "old")
    assert old.is_newest()
    new = PluginInstances(directory, "new")
    assert (old.is_newest(), new.is_newest()) == (False, True)
    new.leave()
    assert old.is_newest()
    old.leave()
    assert names(directory) == []


def test_many_that_start_at_once_agree_on_one(short: Path) -> None:
    made: list[PluginInstances] = []
    threads = [
        threading.Thread(target=lambda n=n: made.append(PluginInstances(short, f"pod-{n}")))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sum(instance.is_newest() for instance in made) == 1
    for instance in made:
        instance.leave()


@pytest.mark.point(12)
def test_a_killed_newest_makes_the_older_the_newest_again(short: Path) -> None:
    old = PluginInstances(short, "old")
    with other_process(short) as process:
        assert not old.is_newest()
        process.kill()
        process.wait(10)
        assert old.is_newest()
        assert names(short) == ["old"]
    old.leave()


def test_a_process_that_starts_again_in_its_pod_is_newer_than_its_dead_self(short: Path) -> None:
    with other_process(short) as process:
        process.kill()
        process.wait(10)
    with other_process(short):
        assert names(short) in (["other"], ["other", "other"])


def test_notes_of_dead_processes_go_when_the_next_one_starts(short: Path) -> None:
    for _ in range(2):
        with other_process(short) as process:
            process.kill()
            process.wait(10)

    new = PluginInstances(short, "new")

    assert names(short) == ["new"]
    new.leave()


def test_an_emptied_directory_is_filled_again(short: Path) -> None:
    old, new = PluginInstances(short, "old"), PluginInstances(short, "new")
    for path in short.iterdir():
        path.unlink()
    assert new.is_newest()
    assert not old.is_newest()
    assert names(short) == ["new", "old"]
    new.leave()
    old.leave()


def test_unfinished_files_of_a_process_that_died_while_starting_go(short: Path) -> None:
    (short / ".0123456789abcdef.new").touch()
    (short / "README").touch()
    instance = PluginInstances(short, "pod")
    assert names(short) == ["", "pod"] and instance.is_newest()
    assert not list(short.glob(".*.new"))
    instance.leave()


def test_a_directory_that_cannot_be_used_is_named(short: Path) -> None:
    (short / "instances").touch()
    with pytest.raises(NodeError, match=r"cannot note this plugin process in .*instances"):
        PluginInstances(short / "instances", "pod")


def test_others_see_which_process_has_started(short: Path) -> None:
    old, new = PluginInstances(short, "old"), PluginInstances(short, "new")
    old.note_started()

    started = {process.owner: process.started for process in plugin_processes(short)}

    assert started == {"old": True, "new": False}
    new.leave()
    old.leave()


def test_that_a_process_has_started_is_seen_also_after_its_file_was_removed(short: Path) -> None:
    instance = PluginInstances(short, "pod")
    instance.note_started()
    for path in short.iterdir():
        path.unlink()

    assert instance.is_newest()
    assert [process.started for process in plugin_processes(short)] == [True]
    instance.leave()


def test_live_processes_are_listed_the_oldest_first_and_dead_ones_stay_untouched(
    tmp_path: Path,
) -> None:
    first = PluginInstances(tmp_path, "0b7e-1")
    second = PluginInstances(tmp_path, None)
    (tmp_path / "5-dead").write_text("")
    try:
        processes = plugin_processes(tmp_path)
    finally:
        first.leave()
        second.leave()

    assert [process.pod_uid for process in processes] == ["0b7e-1", None]
    assert (tmp_path / "5-dead").exists()


def test_where_none_ever_ran_there_is_none(tmp_path: Path) -> None:
    assert plugin_processes(tmp_path / "instances") == ()
