"""Child processes: they end in time, and their last words are heard."""

import doctest
import os
import time
from pathlib import Path

import pytest

from dra_driver.base.errors import CommandFailed, NodeError, TimedOut
from dra_driver.node.driver import commands
from dra_driver.node.driver.commands import Command, in_chroot, run_command, run_daemon
from tests.waiting import eventually


def shell(script: str) -> Command:
    return Command("/bin/sh", ("-c", script))


def test_what_a_program_writes_is_given_back() -> None:
    assert run_command(shell("echo 580.95.05"), 10) == "580.95.05\n"


def test_a_program_sees_nothing_of_our_own_environment() -> None:
    os.environ["DRA_DRIVER_TEST"] = "secret"
    try:
        assert "secret" not in run_command(shell("env"), 10)
    finally:
        del os.environ["DRA_DRIVER_TEST"]


def test_the_library_path_of_the_driver_is_set() -> None:
    command = Command("/bin/sh", ("-c", "echo $LD_LIBRARY_PATH"), library_path="/opt/lib64")
    assert run_command(command, 10) == "/opt/lib64\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo No devices were found >&2; exit 9", r"/bin/sh -c .*failed with code 9: No devices"),
        ("echo Insufficient Permissions; exit 4", "code 4: Insufficient Permissions"),
        ("exit 3", "code 3: it said nothing"),
        ("kill -9 $$", "ended by signal 9"),
    ],
)
def test_a_failure_says_which_command_and_its_last_words(script: str, message: str) -> None:
    with pytest.raises(NodeError, match=message):
        run_command(shell(script), 10)


def test_only_the_end_of_a_long_complaint_is_kept() -> None:
    with pytest.raises(NodeError) as e:
        run_command(shell("head -c 9000 /dev/zero | tr '\\0' x >&2; echo END >&2; exit 1"), 10)
    assert str(e.value).endswith("xEND") and len(str(e.value)) < 2300


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(NodeError, match=r"cannot run /no/nvidia-smi -L .*No such file"):
        run_command(Command("/no/nvidia-smi", ("-L",)), 10)


def test_a_program_that_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(TimedOut, match=r"still running after 0.3 s and was killed"):
        run_command(shell(f"sleep 60 & echo $! > {tmp_path}/pid; wait"), 0.3)
    assert time.monotonic() - started < 50
    child = int((tmp_path / "pid").read_text())
    _wait_for_end(child)


def test_a_descendant_that_keeps_the_pipe_does_not_keep_us(tmp_path: Path) -> None:
    started = time.monotonic()
    script = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 60' & wait"
    with pytest.raises(TimedOut):
        run_command(shell(script), 0.3)
    assert time.monotonic() - started < 50
    os.kill(int((tmp_path / "pid").read_text()), 9)


@pytest.mark.parametrize(
    ("host_root", "root", "argv", "libraries"),
    [
        ("/", "/", ("/run/driver/bin/x", "-L"), "/run/driver/lib64"),
        ("/host", "/", ("chroot", "/host", "/run/driver/bin/x", "-L"), "/run/driver/lib64"),
        ("/host", "/run/driver", ("chroot", "/host/run/driver", "/bin/x", "-L"), "/lib64"),
    ],
    ids=["on the host", "on a host that is mounted", "in a driver container"],
)
def test_a_program_runs_where_its_driver_is(
    host_root: str, root: str, argv: tuple[str, ...], libraries: str
) -> None:
    command = in_chroot(host_root, root, "/run/driver/bin/x", "/run/driver/lib64", ("-L",))
    assert (command.argv, command.library_path) == (argv, libraries)


def test_the_examples_in_the_docs_hold() -> None:
    assert doctest.testmod(commands).failed == 0


def _wait_for_end(pid: int) -> None:
    """The kernel may take a moment for it."""
    eventually(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    """Whether it is there and no zombie that waits for a reaper."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_goes_into_the_background_is_not_waited_for_and_writes_on(tmp_path: Path) -> None:
    output = tmp_path / "output"
    started = time.monotonic()
    script = f"echo up; (echo $$ > {tmp_path}/pid; sleep 0.3; echo later; exec sleep 60) & "
    run_daemon(shell(script + "sleep 0.1"), output, 10)
    assert time.monotonic() - started < 50
    time.sleep(0.5)
    assert output.read_text() == "up\nlater\n"
    os.killpg(int((tmp_path / "pid").read_text()), 9)


def test_what_does_not_come_up_says_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="failed with code 3: no GPU"):
        run_daemon(shell("echo no GPU >&2; exit 3"), tmp_path / "output", 10)


def test_what_does_not_go_into_the_background_is_killed(tmp_path: Path) -> None:
    with pytest.raises(TimedOut, match=r"into the background after 0.3 s and was killed: waiting"):
        run_daemon(
            shell(f"echo $$ > {tmp_path}/pid; echo waiting; sleep 60"), tmp_path / "output", 0.3
        )
    _wait_for_end(int((tmp_path / "pid").read_text()))


def test_what_cannot_be_put_into_the_background_is_named(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"cannot run /no/daemon -d .*No such file"):
        run_daemon(Command("/no/daemon", ("-d",)), tmp_path / "output", 10)


def test_what_a_program_is_told_reaches_it() -> None:
    command = Command("/bin/sh", ("-c", "cat; echo $WHO"), variables=(("WHO", "me"),), stdin="hi\n")
    assert run_command(command, 10) == "hi\nme\n"


def test_what_failed_keeps_the_words_of_the_program_apart_from_ours() -> None:
    with pytest.raises(CommandFailed) as e:
        run_command(shell("echo no such device; exit 9"), 10)
    assert e.value.output == "no such device"


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_program_that_writes_more_than_a_mebibyte_is_killed(stream: str, tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; exec head -c 1G /dev/zero >&{stream}"
    with pytest.raises(NodeError, match=r"/bin/sh -c .* wrote more than 1 MiB and was killed"):
        run_command(shell(script), 60)
    _wait_for_end(int((tmp_path / "pid").read_text()))


def test_a_mebibyte_is_read_whole_beside_a_long_input_and_complaints() -> None:
    most = (1 << 20) - 1000
    command = Command(
        "/bin/sh",
        ("-c", f"head -c {most} /dev/zero | tr '\\0' x; echo hm >&2; wc -c"),
        stdin="y" * 500_000,
    )
    assert run_command(command, 60) == "x" * most + "500000\n"


def test_a_program_that_does_not_read_what_it_is_told_is_not_waited_for() -> None:
    assert (
        run_command(Command("/bin/sh", ("-c", "exec echo done"), stdin="y" * 500_000), 60)
        == "done\n"
    )


def test_of_a_long_output_of_what_stays_the_end_is_told(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"code 3: …x+END$") as e:
        run_daemon(
            shell("head -c 3M /dev/zero | tr '\\0' x; echo END; exit 3"), tmp_path / "output", 60
        )
    assert len(str(e.value)) < 2300


@pytest.mark.parametrize("ends", ["exit 125", "exit 126", "exit 127", "kill -9 $$"])
def test_what_never_ran_or_was_killed_gave_no_answer(ends: str) -> None:
    """As chroot fails, or a library is not there, or memory is short."""
    with pytest.raises(NodeError, match=r"failed with code 12|ended by signal 9") as e:
        run_command(shell(ends), 10)
    assert not isinstance(e.value, CommandFailed)


def test_what_stays_has_a_umask_that_lets_others_in_whatever_ours_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        run_daemon(shell("umask"), tmp_path / "output", 10)
    finally:
        os.umask(before)
    assert (tmp_path / "output").read_text() == "0022\n"


def test_what_stays_goes_on_at_the_end_of_an_output_that_is_cut(tmp_path: Path) -> None:
    output, go = tmp_path / "output", tmp_path / "go"
    script = f"(until [ -e {go} ]; do sleep 0.01; done; echo after) & echo before"
    run_daemon(shell(script), output, 10)
    os.truncate(output, 0)
    go.touch()

    eventually(output.read_text)
    assert output.read_text() == "after\n"


def test_what_a_program_starts_by_name_is_looked_for_beside_it_first() -> None:
    command = Command("/opt/nvidia/bin/control", ("-d",)).with_neighbours()

    first, *others = command.env["PATH"].split(":")
    assert first == "/opt/nvidia/bin" and "/usr/bin" in others
    assert command.argv == ("/opt/nvidia/bin/control", "-d")
