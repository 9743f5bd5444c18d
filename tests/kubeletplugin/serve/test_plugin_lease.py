"""Two processes take turns: never both inside, nobody starves, a dead one holds nothing."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.kubeletplugin.serve.rolling_update import PluginLease
from tests.fakes.disk import small_disk
from tests.waiting import eventually

HOLD = """
import sys, threading
from pathlib import Path
from dra_driver.kubeletplugin.serve.rolling_update import PluginLease
turn = PluginLease(Path(sys.argv[1]), "pod-other", lambda: None)
for line in sys.stdin:
    with turn.held():
        print("inside", flush=True)
        sys.stdin.readline()
    print("outside", flush=True)
"""


class Other:
    """Another process, which enters and leaves when told."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def say(self, expected: str) -> None:
        assert self._process.stdout is not None
        self.begin()
        assert self._process.stdout.readline() == f"{expected}\n"

    def begin(self) -> None:
        """Enter as soon as that is possible."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)


@contextmanager
def other_process(directory: Path) -> Iterator[Other]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Other(process)
        finally:
            process.kill()


def turn(directory: Path, owner: str = "pod-here") -> PluginLease:
    return PluginLease(directory, owner, lambda: None)


def test_threads_of_one_process_are_inside_together(short: Path) -> None:
    ours, together = turn(short), threading.Barrier(8, timeout=5)

    def enter(_: int) -> None:
        with ours.held():
            together.wait()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(enter, range(8))) == [None] * 8


def test_a_process_waits_for_the_other_one(short: Path) -> None:
    entered = threading.Event()
    with other_process(short) as rival, ThreadPoolExecutor(1) as pool:
        rival.say("inside")

        def enter() -> None:
            with turn(short).held():
                entered.set()

        waiting = pool.submit(enter)
        assert not entered.wait(0.1)
        rival.say("outside")
        waiting.result(5)
        assert entered.is_set()


def test_a_wait_that_is_too_long_names_who_is_inside(short: Path) -> None:
    with other_process(short) as rival:
        rival.say("inside")
        ours = turn(short)
        message = r"waited for the plugin process of pod-other \(pid \d+\)"
        with pytest.raises(TimedOut, match=message), ours.held(0.05):
            pass
        rival.say("outside")
        with ours.held():  # and the next one gets in
            pass


def test_a_killed_process_holds_nothing(short: Path) -> None:
    with other_process(short) as rival:
        rival.say("inside")
        rival.kill()
        with turn(short).held(1.0):
            pass


def test_a_busy_process_lets_the_waiting_one_in_and_gets_back_in_itself(short: Path) -> None:
    first, second = turn(short, "first"), turn(short, "second")
    stop, log = threading.Event(), []

    def busy(ours: PluginLease, which: int) -> None:
        while not stop.is_set():
            with ours.held():
                log.append(which)
                time.sleep(0.002)

    # Three threads of each never leave a moment in which none is inside.
    threads = [
        threading.Thread(target=busy, args=(ours, which))
        for which, ours in enumerate((first, second))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: sum(a != b for a, b in itertools.pairwise(log)) >= 6, "a fair share")
    stop.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.point(11)
def test_never_are_two_processes_inside(short: Path) -> None:
    turns = [turn(short, f"pod-{n}") for n in range(3)]
    guard, inside, clashes = threading.Lock(), [0, 0, 0], []

    def enter(n: int) -> None:
        which = n % 3
        with turns[which].held():
            with guard:
                inside[which] += 1
                clashes.extend(n for lease in range(3) if lease != which and inside[lease])
            time.sleep(0.001)
            with guard:
                inside[which] -= 1

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(enter, range(60))) == [None] * 60
    assert clashes == []


def test_who_waited_in_vain_leaves_no_trace(short: Path) -> None:
    changes: list[str] = []
    ours = PluginLease(short, "ours", lambda: changes.append("ours"))
    with ours.held(), pytest.raises(TimedOut), turn(short, "rival").held(0.05):
        pass

    def join() -> None:
        with ours.held(1.0):
            pass

    with ours.held(), ThreadPoolExecutor(1) as pool:
        pool.submit(join).result(5)  # threads enter together again
    assert changes == ["ours"], "nobody else held it"


def test_a_process_that_was_killed_while_it_waited_is_not_waited_for(short: Path) -> None:
    ours = turn(short)
    with ours.held(), other_process(short) as rival:
        rival.begin()
        eventually(lambda: not is_whole(short), "the rival to wait")
        with pytest.raises(TimedOut), ours.held(0.05):  # no thread joins meanwhile
            pass
        rival.kill()
    with ours.held(1.0):
        assert is_whole(short)


def is_whole(directory: Path) -> bool:
    """Whether the holder's line is as it wrote it: nobody waits."""
    return (directory / "serialize.lock").read_text().endswith("\n")


def test_a_full_disk_lets_one_in_after_the_other(short: Path) -> None:
    with small_disk(short / "disk") as disk:
        (disk.path / "serialize.lock").touch()
        (disk.path / "serialize.wanted").touch()
        disk.fill()
        changes: list[str] = []
        first = PluginLease(disk.path, "first", lambda: changes.append("first"))
        second = PluginLease(disk.path, "second", lambda: changes.append("second"))
        for ours in (first, second, first):
            with ours.held(), pytest.raises(TimedOut), turn(disk.path).held(0.05):
                pass
        assert changes == ["first", "second", "first"]


def test_on_a_disk_that_filled_up_threads_are_still_inside_together(short: Path) -> None:
    with small_disk(short / "disk") as disk:
        for owner in ("another", "pod-here"):
            with turn(disk.path, owner).held():
                pass
        ours = PluginLease(disk.path, "ours", lambda: None)
        disk.fill()
        both = threading.Barrier(2, timeout=10)

        def enter() -> None:
            with ours.held():
                both.wait()

        threads = [threading.Thread(target=enter) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not both.broken


def test_a_process_knows_whether_another_had_the_turn_since(short: Path) -> None:
    first = turn(short, "first")
    assert first.changed_hands()
    with first.held():
        assert not first.changed_hands()
    assert not first.changed_hands()

    with turn(short, "second").held():
        pass

    assert first.changed_hands()


def test_who_had_the_turn_is_told_of_a_process_that_died_while_it_was_told(short: Path) -> None:
    events: list[str] = []
    first = PluginLease(short, "first", lambda: events.append("first"))
    with first.held():
        pass

    def dies() -> None:
        raise SystemExit

    with pytest.raises(SystemExit), PluginLease(short, "second", dies).held():
        pass

    with first.held():
        assert events == ["first", "first"]


def test_who_gets_the_turn_from_another_is_told_before_anybody_enters(short: Path) -> None:
    events: list[str] = []
    first = PluginLease(short, "first", lambda: events.append("first"))
    second = PluginLease(short, "second", lambda: events.append("second"))
    for ours in (first, first, second, second, first):
        with ours.held():
            events.append("-")
    assert events == ["first", "-", "-", "second", "-", "-", "first", "-"]


def test_a_failed_reload_is_that_claims_error_and_is_tried_again(short: Path) -> None:
    tries: list[int] = []

    def reload() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise NodeError("the ledger cannot be read")

    ours = PluginLease(short, "pod", reload)
    with pytest.raises(NodeError, match="the ledger"), ours.held():
        pass
    with ours.held():
        pass
    with ours.held():
        pass
    assert len(tries) == 2
    with turn(short, "other").held(1.0):  # nothing is left locked
        pass


def test_a_lock_file_that_was_deleted_does_not_let_two_in(short: Path) -> None:
    with turn(short).held():
        (short / "serialize.lock").unlink()
    first, second = turn(short, "first"), turn(short, "second")
    with first.held(), pytest.raises(TimedOut), second.held(0.05):
        pass


def test_a_damaged_record_means_that_another_had_the_turn(short: Path) -> None:
    calls: list[int] = []
    (short / "serialize.lock").write_text("{")
    with PluginLease(short, "pod", lambda: calls.append(1)).held():
        pass
    assert calls == [1]


def test_a_directory_that_is_gone_is_an_error_of_the_node(short: Path) -> None:
    with pytest.raises(NodeError, match=r"cannot lock .*nowhere"), turn(short / "nowhere").held():
        pass
