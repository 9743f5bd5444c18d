"""What daemons write is shown where one fails, and does not fill the host's memory."""

import logging
import os

import pytest

from dra_driver.node.mps.directories import KEPT_LOG_BYTES, MAX_LOG_BYTES, last_log_lines, trim_logs

LINE = b"%09d of a server's log\n"


@pytest.fixture
def log(tmp_path):
    directory = tmp_path / "log"
    (directory / "gpu").mkdir(parents=True)
    return directory


def lines(size: int) -> bytes:
    return b"".join(LINE % number for number in range(size // len(LINE % 0) + 1))


def test_the_last_lines_of_each_file_are_shown(log):
    (log / "control.log").write_text("first\n" * 5 + "".join(f"line {n}\n\n" for n in range(6)))
    (log / "gpu/server.log").write_text("failed\n")
    os.mkfifo(log / "gpu/pipe")

    shown = last_log_lines(str(log)).splitlines()

    assert shown == ["", *(f"control.log: line {n}" for n in range(6)), "server.log: failed"]
    assert last_log_lines(str(log / "never")) == ""


@pytest.mark.parametrize("name", ["control.log", "gpu/server.log"])
def test_a_log_that_has_grown_keeps_its_last_lines_and_is_the_same_file(log, name):
    file = log / name
    text = lines(MAX_LOG_BYTES + (1 << 20))
    file.write_bytes(text)
    with file.open("ab") as writer:
        trim_logs(str(log))
        writer.write(b"and on\n")

    kept = file.read_bytes()
    assert KEPT_LOG_BYTES - len(LINE % 0) <= len(kept) - len(b"and on\n") <= KEPT_LOG_BYTES
    assert kept.startswith(b"0") and (text + b"and on\n").endswith(b"\n" + kept)


def test_one_that_has_not_is_left_alone(log):
    text = lines(MAX_LOG_BYTES - 8192)
    (log / "control.log").write_bytes(text)

    trim_logs(str(log))

    assert (log / "control.log").read_bytes() == text


def test_of_one_whose_writer_goes_on_where_it_was_only_what_it_takes_counts(log):
    file = log / "control.log"
    with file.open("wb", buffering=0) as writer:
        writer.write(lines(2 * MAX_LOG_BYTES))
        for number in range(3):
            trim_logs(str(log))
            writer.write(b"later %d\n" % number)
            assert os.stat(file).st_size > 2 * MAX_LOG_BYTES
            assert os.stat(file).st_blocks * 512 < 2 * KEPT_LOG_BYTES

    kept = file.read_bytes()
    assert kept.startswith(b"0") and kept.endswith(b"later 0\nlater 1\nlater 2\n")


def test_what_is_left_after_a_hole_begins_with_a_line(log):
    file = log / "control.log"
    with file.open("wb") as writer:
        writer.write(lines(MAX_LOG_BYTES + 8192))
        writer.seek(4 * MAX_LOG_BYTES)
        writer.write(b"\nlast\n")

    trim_logs(str(log))

    assert file.read_bytes() == b"last\n"


def test_a_link_in_place_of_a_log_is_not_followed(log, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "precious").write_bytes(lines(2 * MAX_LOG_BYTES))
    (log / "control.log").symlink_to(tmp_path / "precious")
    os.mkfifo(log / "pipe")

    trim_logs(str(log))

    assert (tmp_path / "precious").stat().st_size >= 2 * MAX_LOG_BYTES
    assert [record.getMessage() for record in caplog.records] == [
        "the log of an MPS daemon cannot be cut"
    ]
