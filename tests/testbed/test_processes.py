"""Background processes: known by their record, and never mistaken for another."""

import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from hack.testbed.errors import ClusterError
from hack.testbed.processes import Process

ENVIRONMENT = {"PATH": os.environ["PATH"]}


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process("sleeper", tmp_path / "sleeper", tmp_path / "sleeper.log")


def test_what_was_started_is_known_and_can_be_stopped(process: Process) -> None:
    process.spawn(["sleep", "600"], ENVIRONMENT)
    assert process.pid() is not None
    process.stop()
    assert process.pid() is None
    process.stop()  # once more is no error


def test_a_lock_of_who_starts_it_is_not_kept_by_what_was_started(
    process: Process, tmp_path: Path
) -> None:
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(lock, True)  # as flock(1) hands it to the program that it runs
    fcntl.flock(lock, fcntl.LOCK_EX)
    process.spawn(["sleep", "600"], ENVIRONMENT)
    try:
        os.close(lock)
        with (tmp_path / "lock").open() as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        process.stop(signal.SIGKILL)


def test_what_does_not_heed_sigterm_is_killed(process: Process) -> None:
    process.spawn(["sh", "-c", "trap '' TERM; echo ready; sleep 600 & wait; wait"], ENVIRONMENT)
    while "ready" not in process.log.read_text():
        time.sleep(0.01)
    process.stop(signal.SIGTERM, grace_seconds=0.2)
    assert process.pid() is None


def test_a_program_that_ended_at_once_is_reported_with_its_log(process: Process) -> None:
    process.spawn(["sh", "-c", "echo no such flag; exit 1"], ENVIRONMENT)
    while process.pid() is not None:
        time.sleep(0.01)
    with pytest.raises(ClusterError, match="no such flag"):
        process.check_alive()


def test_another_process_with_a_recycled_number_is_left_alone(
    process: Process, tmp_path: Path
) -> None:
    second = Process("other", tmp_path / "other", tmp_path / "other.log")
    second.spawn(["sleep", "600"], ENVIRONMENT)
    boot, stat = second.record.read_text().split("\n", 1)
    front, back = stat.rsplit(")", 1)
    fields = back.split(" ")
    fields[20] = str(int(fields[20]) - 1)  # the start time: the same number, but earlier
    process.record.write_text(f"{boot}\n{front}){' '.join(fields)}")
    assert process.pid() is None
    process.stop(signal.SIGKILL)
    assert second.pid() is not None
    second.stop(signal.SIGKILL)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param("", id="an empty record"),
        pytest.param("0000-0000\n1 (init) S 0\n", id="a record of another boot"),
    ],
)
def test_a_record_that_says_nothing_means_not_running(process: Process, record: str) -> None:
    process.record.write_text(record)
    assert process.pid() is None
