"""Locks by name, calls side by side, standing threads, and loops that no error ends."""

import threading
import time
from concurrent.futures import wait

import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.base.threads import (
    UNTIL_WOKEN,
    Loop,
    NamedLocks,
    StandingThreads,
    after_call,
    in_parallel,
)
from tests.waiting import eventually


def test_answers_come_in_the_order_of_the_questions():
    assert in_parallel(str, range(20)) == [str(number) for number in range(20)]
    assert in_parallel(str, [7]) == ["7"]
    assert in_parallel(str, []) == []


def test_nobody_waits_for_another():
    together = threading.Barrier(8, timeout=5)

    assert in_parallel(lambda _: together.wait(), range(8))


def test_one_that_fails_keeps_no_other_from_being_done():
    done = []

    def act(number):
        if number == 0:
            raise NodeError("0 is broken")
        done.append(number)

    with pytest.raises(NodeError, match="0 is broken"):
        in_parallel(act, range(4))

    assert sorted(done) == [1, 2, 3]


def count(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_each_call_has_a_thread_at_once_up_to_the_most_and_few_threads_stay():
    threads = StandingThreads("up-to-eight", 8, standing=2)
    together, go = threading.Barrier(9, timeout=60), threading.Event()

    def meet():
        together.wait()
        assert go.wait(60)

    first = [threads.submit(meet) for _ in range(8)]
    together.wait()
    queued = [threads.submit(str, number) for number in range(4)]
    assert count("up-to-eight") == 8
    assert not any(call.done() for call in queued)
    go.set()

    assert [call.result(60) for call in queued] == ["0", "1", "2", "3"]
    assert not wait(first, 60).not_done
    eventually(lambda: count("up-to-eight") == 2)


def test_threads_that_stand_take_the_next_calls():
    threads = StandingThreads("reused", 8, standing=2)

    for number in range(50):
        assert threads.submit(str, number).result(60) == str(number)

    eventually(lambda: 1 <= count("reused") <= 2)


def test_a_call_that_waits_for_a_thread_can_be_cancelled_and_one_that_fails_harms_no_other():
    threads, go = StandingThreads("one", 1), threading.Event()
    running = threads.submit(go.wait, 60)
    cancelled, failing = threads.submit(str), threads.submit(int, "x")
    assert cancelled.cancel()
    go.set()

    assert running.result(60)
    assert isinstance(failing.exception(60), ValueError)
    assert threads.submit(str, 1).result(60) == "1"


def test_what_comes_after_a_call_keeps_nobody_waiting_for_its_answer():
    threads, go = StandingThreads("later", 1), threading.Event()
    done: list[object] = []

    def answer(number):
        after_call(lambda: done.append((number, go.wait(60))))
        after_call(lambda: done.append(threading.current_thread().name))
        return number

    assert threads.submit(answer, 1).result(60) == 1
    assert done == []
    go.set()
    assert threads.submit(answer, 2).result(60) == 2
    eventually(lambda: done == [(1, True), "later", (2, True), "later"])


def test_what_comes_after_a_call_and_fails_is_logged_and_the_next_call_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads = StandingThreads("failing", 1)
    threads.submit(after_call, lambda: int("x")).result(60)
    assert threads.submit(str, 1).result(60) == "1"
    assert "what comes after a call failed" in caplog.messages


def test_where_no_call_is_carried_out_it_is_done_at_once():
    done = []
    after_call(lambda: done.append(1))
    assert done == [1]


@pytest.fixture
def locks() -> NamedLocks:
    return NamedLocks("{name} was busy for {seconds} s")


def test_what_is_held_cannot_be_taken_and_the_one_in_the_way_is_named(locks: NamedLocks) -> None:
    with locks.hold(["b"], 1):
        with pytest.raises(TimedOut, match=r"b was busy for 0\.01 s"), locks.hold("abc", 0.01):
            pass
        with locks.hold(["a", "c"], 1):  # what it had taken already was given back
            pass


def test_different_names_do_not_wait_for_each_other(locks: NamedLocks) -> None:
    with locks.hold(["a"], 1), locks.hold(["b"], 0):
        pass


def test_locks_exist_only_while_somebody_wants_them(locks: NamedLocks) -> None:
    with pytest.raises(ZeroDivisionError), locks.hold("abc", 1):
        assert len(locks) == 3
        _ = 1 / 0

    assert len(locks) == 0


def test_whatever_order_they_are_asked_in_nobody_waits_for_ever(locks: NamedLocks) -> None:
    inside: list[str] = []
    clashes: list[str] = []

    def work(names: str) -> None:
        for _ in range(50):
            with locks.hold(names, 10):
                clashes.extend(busy for busy in inside if set(busy) & set(names))
                inside.append(names)
                inside.remove(names)

    threads = [threading.Thread(target=work, args=(names,)) for names in ("ab", "ba", "bca", "cb")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert not any(thread.is_alive() for thread in threads)
    assert clashes == []
    assert len(locks) == 0


class Steps:
    """Counts, and fails as often as it is told to."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.done = 0
        self.changed = threading.Condition()

    def __call__(self):
        with self.changed:
            self.done += 1
            self.changed.notify_all()
        if self.errors:
            raise self.errors.pop(0)

    def wait(self, number):
        with self.changed:
            return self.changed.wait_for(lambda: self.done >= number, 30)


def test_no_error_ends_it():
    steps = Steps(NodeError("away"), ValueError("a bug"))
    loop = Loop("test", steps, 0.001)

    loop.start()

    assert steps.wait(4)
    loop.stop()


def test_a_step_can_ask_to_be_done_again_sooner():
    steps = Steps()
    loop = Loop("test", lambda: steps() or 0.001, 3600)

    loop.start()

    assert steps.wait(3)
    loop.stop()


def test_a_step_without_work_waits_until_it_is_woken():
    steps = Steps()
    loop = Loop("test", lambda: steps() or UNTIL_WOKEN, 0.001)
    loop.start()
    assert steps.wait(1)
    time.sleep(0.1)
    assert steps.done == 1

    loop.soon()

    assert steps.wait(2)
    loop.stop()


def test_it_does_not_wait_when_asked_to_do_it_soon():
    steps = Steps()
    loop = Loop("test", steps, 3600)
    loop.start()
    assert steps.wait(1)

    loop.soon()

    assert steps.wait(2)
    loop.stop()


def test_once_stopped_it_does_nothing_more():
    steps = Steps()
    loop = Loop("test", steps, 3600)
    loop.start()
    assert steps.wait(1)

    loop.stop()
    loop.join(5)

    assert not loop.alive
    assert steps.done == 1
