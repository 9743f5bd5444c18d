"""What is done for a request shares the time of the request."""

import threading

import pytest

from dra_driver.base.deadlines import (
    Deadline,
    request_deadline,
    seconds_within_request,
    within_request,
)
from dra_driver.base.errors import TimedOut


def test_without_a_request_there_is_the_whole_time():
    assert seconds_within_request(8.0) == 8.0
    assert 7 < within_request(8.0, "it").remaining <= 8


def test_in_a_request_there_is_what_is_left_and_some_of_it_is_for_undoing():
    with request_deadline(10.0, undoing=4.0):
        assert 5 < seconds_within_request(8.0) <= 6
        assert 7 < seconds_within_request(8.0, undoing=True) <= 8
        assert 9 < seconds_within_request(20.0, undoing=True) <= 10
        assert seconds_within_request(1.0) == 1.0
    assert seconds_within_request(8.0) == 8.0


def test_a_request_of_one_thread_is_none_of_another():
    seconds = []
    with request_deadline(0.0):
        thread = threading.Thread(target=lambda: seconds.append(seconds_within_request(8.0)))
        thread.start()
        thread.join()

    assert seconds == [8.0]


def test_what_has_no_time_left_says_what_it_was():
    with request_deadline(0.0):
        deadline = within_request(5.0, "an answer of MPS server s1")
        assert deadline.expired
        with pytest.raises(TimedOut, match=r"an answer of MPS server s1 took more than 0 s"):
            deadline.check()


def test_a_deadline_on_another_clock_ends_with_the_one_that_it_is_within():
    now, stopped = [0.0], Deadline(5.0, clock=lambda: 0.0)
    within = Deadline(9.0, clock=lambda: now[0])
    deadline = Deadline(5.0, within=within, clock=lambda: 0.0)

    assert (stopped.remaining, deadline.remaining, deadline.seconds) == (5.0, 5.0, 5.0)
    now[0] = 7.0
    assert deadline.remaining == 2.0
    now[0] = 10.0
    assert (deadline.expired, stopped.expired, deadline.remaining) == (True, False, 0.0)
