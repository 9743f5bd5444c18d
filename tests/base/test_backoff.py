"""What failed is tried again after a while, or once something is different."""

import itertools
import threading
import time

import pytest

from dra_driver.base.backoff import Backoff, FailedAttempts, Retrying


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def attempts(now):
    return FailedAttempts(5.0, 12.0, lambda: now[0])


def test_what_failed_rests_for_a_while(attempts, now):
    attempts.failed("gpu-0", "inputs", "in use")

    assert attempts.reason_to_wait("gpu-0", "inputs") == "in use"
    assert attempts.reason_to_wait("gpu-1", "inputs") == ""
    now[0] = 4.9
    assert attempts.reason_to_wait("gpu-0", "inputs") == "in use"
    now[0] = 5.0
    assert attempts.reason_to_wait("gpu-0", "inputs") == ""


def test_what_fails_again_and_again_rests_ever_longer_up_to_a_limit(attempts, now):
    rests = []
    for _ in range(4):
        attempts.failed("gpu-0", "inputs", "in use")
        begun = now[0]
        while attempts.reason_to_wait("gpu-0", "inputs"):
            now[0] += 1
        rests.append(now[0] - begun)

    assert rests == [5, 10, 12, 12]


def test_with_other_inputs_it_is_tried_at_once_and_begins_anew(attempts, now):
    attempts.failed("gpu-0", "inputs", "in use")
    attempts.failed("gpu-0", "inputs", "in use")

    assert attempts.reason_to_wait("gpu-0", "others") == ""
    attempts.failed("gpu-0", "others", "in use")
    now[0] = 5.0
    assert attempts.reason_to_wait("gpu-0", "others") == ""


def test_what_worked_meanwhile_begins_anew(attempts, now):
    attempts.failed("gpu-0", "inputs", "in use")
    attempts.succeeded("gpu-0")

    assert attempts.reason_to_wait("gpu-0", "inputs") == ""
    attempts.failed("gpu-0", "inputs", "in use")
    now[0] = 5.0
    assert attempts.reason_to_wait("gpu-0", "inputs") == ""


def test_waits_double_up_to_the_last_and_begin_anew_after_a_success():
    backoff = Backoff(0.25, 1.5)

    assert [backoff.next_seconds() for _ in range(5)] == [0.25, 0.5, 1.0, 1.5, 1.5]
    backoff.reset()
    assert backoff.next_seconds() == 0.25


def test_a_randomized_wait_is_between_half_and_all():
    waits = [Backoff(4.0, 4.0, randomized=True).next_seconds() for _ in range(100)]

    assert 2.0 <= min(waits) < max(waits) <= 4.0


def retrying(asked_seconds=0.0):
    return Retrying(0.001, threading.Event(), lambda error: asked_seconds)


def failing_attempt(error):
    """An attempt that always fails, and the numbers of its calls."""
    calls = itertools.count(1)
    made = []

    def attempt():
        made.append(next(calls))
        raise error(f"attempt {made[-1]}")

    return attempt, made


def test_the_error_of_the_third_attempt_counts():
    attempt, made = failing_attempt(ConnectionError)

    with pytest.raises(ConnectionError, match="attempt 3"):
        retrying().call(attempt, lambda error: True, seconds=10)

    assert made == [1, 2, 3]


def test_an_error_that_will_not_change_is_raised_at_once():
    attempt, made = failing_attempt(ValueError)

    with pytest.raises(ValueError, match="attempt 1"):
        retrying().call(attempt, lambda error: isinstance(error, ConnectionError), seconds=10)

    assert made == [1]


def test_no_attempt_begins_after_its_time():
    attempt, made = failing_attempt(ConnectionError)
    begun = time.monotonic()

    with pytest.raises(ConnectionError, match="attempt 1"):
        retrying(asked_seconds=60.0).call(attempt, lambda error: True, seconds=5)

    assert made == [1] and time.monotonic() - begun < 5


def test_no_wait_goes_on_once_the_process_stops():
    attempt, made = failing_attempt(ConnectionError)
    stopping = threading.Event()
    stopping.set()
    begun = time.monotonic()

    with pytest.raises(ConnectionError, match="attempt 3"):
        Retrying(30.0, stopping, lambda error: None).call(attempt, lambda error: True, seconds=600)

    assert made == [1, 2, 3] and time.monotonic() - begun < 5
