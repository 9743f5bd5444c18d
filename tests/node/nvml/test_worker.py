"""A worker bounds the wait for calls that may never return."""

import threading
import time

import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.node.nvml.threads import CallThread
from tests.waiting import eventually


@pytest.fixture
def worker():
    worker = CallThread("test")
    yield worker
    worker.stop()


@pytest.fixture
def stuck(worker):
    """An event that ends the call in which the worker is stuck, beyond its deadline."""
    returns = threading.Event()
    pending = worker.submit("reading a dead GPU", returns.wait, 0.02)
    with pytest.raises(TimedOut, match=r"^reading a dead GPU: no answer within 0.02 s$"):
        pending.result()
    yield returns
    returns.set()


def test_the_answer_of_a_call_comes_back(worker):
    assert worker.submit("adding", lambda: 1 + 1, 1.0).result() == 2


@pytest.mark.parametrize("error", [NodeError("no"), TimeoutError("its own")])
def test_what_a_call_raises_is_raised_where_its_answer_is_waited_for(worker, error):
    """Also where the call itself times out: it is not taken for an overdue one."""

    def refuse():
        raise error

    with pytest.raises(type(error), match=f"^{error}$"):
        worker.submit("refusing", refuse, 1.0).result()


def test_while_a_call_is_overdue_the_next_is_refused_at_once(worker, stuck):
    message = r"^next: an earlier call \(reading a dead GPU\) has not returned since 20..-.*Z$"
    began = time.monotonic()
    with pytest.raises(TimedOut, match=message):
        worker.submit("next", lambda: 1, 60.0)
    assert time.monotonic() - began < 30


def test_a_worker_recovers_by_itself_when_the_overdue_call_returns(worker, stuck):
    assert not worker.idle
    stuck.set()
    eventually(lambda: worker.idle)
    assert worker.submit("next", lambda: 1, 1.0).result() == 1


def test_a_call_that_nobody_waits_for_any_more_is_not_made_late(worker):
    returns, made = threading.Event(), []
    first = worker.submit("slow", returns.wait, 60.0)
    with pytest.raises(TimedOut):
        worker.submit("impatient", lambda: made.append(1), 0.01).result()
    returns.set()
    first.result()
    eventually(lambda: worker.idle)
    assert made == []


def test_calls_are_made_one_after_another_in_the_order_they_came(worker):
    made: list[int] = []
    pending = [worker.submit("noting", lambda n=n: made.append(n), 1.0) for n in range(20)]
    for call in pending:
        call.result()
    assert made == list(range(20))


def test_who_still_asks_for_a_call_that_was_cancelled_is_told_so(worker):
    returns = threading.Event()
    first = worker.submit("slow", returns.wait, 60.0)
    cancelled = worker.submit("unwanted", lambda: 1, 60.0)
    cancelled.cancel()
    with pytest.raises(TimedOut, match=r"^unwanted: nobody waited for it any longer$"):
        cancelled.result()
    returns.set()
    first.result()


def test_the_end_of_a_call_is_told_once_whenever_it_is_asked_for(worker):
    ends = []
    pending = worker.submit("adding", lambda: 1, 60.0)
    pending.when_done(lambda: ends.append("before or after"))
    pending.result()
    eventually(lambda: ends == ["before or after"])
    pending.when_done(lambda: ends.append("after"))
    assert ends == ["before or after", "after"]
