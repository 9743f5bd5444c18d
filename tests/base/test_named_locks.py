"""Locks by name: taken in one order, given back whatever happens, gone when nobody wants them."""

import threading

import pytest

from dra_driver.base.errors import TimedOut
from dra_driver.base.threads import NamedLocks


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
                clashes.extend(other for other in inside if set(other) & set(names))
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
