"""What ends a process, and with which code."""

import os
import queue
import signal

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.base.signals import Shutdown


@pytest.fixture
def codes():
    """The exit codes with which something ended this process."""
    return queue.Queue()


@pytest.fixture
def ending(codes):
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield Shutdown("cannot go on", seconds=0.01, leave=codes.put)
    signal.set_wakeup_fd(-1)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_it_to_end_and_that_is_no_failure(ending, codes, number):
    assert not ending.event.is_set()

    os.kill(os.getpid(), number)

    assert ending.event.wait(30)
    assert not ending.failed
    assert codes.get(timeout=30) == 0, "it does not end by itself here"


def test_an_error_that_leaves_no_choice_is_a_failure(ending, codes, caplog):
    ending.on_fatal(NodeError("the socket is gone"))

    assert ending.event.wait(30)
    assert ending.failed
    (record,) = caplog.records
    assert record.getMessage() == "cannot go on"
    assert record.error == "the socket is gone"
    assert codes.get(timeout=30) == 1


def test_another_signal_ends_nothing(ending, codes):
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not ending.event.wait(0.05)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert codes.empty()
