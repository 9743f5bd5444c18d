"""What is done for a request shares the time of the request."""

import threading

import pytest

from dra_driver.base.deadlines import Deadline, request_deadline, seconds_within_request
from dra_driver.base.errors import TimedOut


def test_without_a_request_there_is_the_whole_time():
    assert seconds_within_request(8.0) == 8.0
    assert 7 < Deadline(8.0, "it").left() <= 8


def test_in_a_request_there_is_what_is_left_and_some_of_it_is_for_undoing():
    with request_deadline(10.0, undoing=4.0):
        assert 5 < seconds_within_request(8.0) <= 6
        assert 7 < seconds_within_request(8.0, undoing=True) <= 8
        assert 9 < seconds_within_request(20.0, undoing=True) <= 10
        assert seconds_within_request(1.0) == 1.0
    assert seconds_within_request(8.0) == 8.0


def test_a_request_of_one_thread_is_none_of_another():
    seen = []
    with request_deadline(0.0):
        thread = threading.Thread(target=lambda: seen.append(seconds_within_request(8.0)))
        thread.start()
        thread.join()

    assert seen == [8.0]


def test_what_has_no_time_left_says_what_it_was():
    with request_deadline(0.0):
        deadline = Deadline(5.0, "an answer of MPS server s1")
        assert deadline.over
        with pytest.raises(TimedOut, match=r"an answer of MPS server s1 took more than 0 s"):
            deadline.left()
