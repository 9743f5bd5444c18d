"""What ends a process, and with which code."""

import os
import signal

import pytest

from dra_driver.errors import NodeError
from dra_driver.process.ending import Ending


@pytest.fixture
def ending():
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield Ending("cannot go on")
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_it_to_end_and_that_is_no_failure(ending, number):
    assert not ending.event.is_set()

    os.kill(os.getpid(), number)

    assert ending.event.wait(5)
    assert not ending.failed


def test_an_error_that_leaves_no_choice_is_a_failure(ending, caplog):
    ending.on_fatal(NodeError("the socket is gone"))

    assert ending.event.is_set()
    assert ending.failed
    (record,) = caplog.records
    assert record.getMessage() == "cannot go on"
    assert record.error == "the socket is gone"
