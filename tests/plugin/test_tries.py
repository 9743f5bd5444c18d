"""What failed is tried again after a while, or once something is different."""

import pytest

from dra_driver.base.backoff import Backoff


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def tries(now):
    return Backoff(5.0, 12.0, lambda: now[0])


def test_what_failed_rests_for_a_while(tries, now):
    tries.failed("gpu-0", "facts", "in use")

    assert tries.why_not("gpu-0", "facts") == "in use"
    assert tries.why_not("gpu-1", "facts") == ""
    now[0] = 4.9
    assert tries.why_not("gpu-0", "facts") == "in use"
    now[0] = 5.0
    assert tries.why_not("gpu-0", "facts") == ""


def test_what_fails_again_and_again_rests_ever_longer_up_to_a_limit(tries, now):
    rests = []
    for _ in range(4):
        tries.failed("gpu-0", "facts", "in use")
        begun = now[0]
        while tries.why_not("gpu-0", "facts"):
            now[0] += 1
        rests.append(now[0] - begun)

    assert rests == [5, 10, 12, 12]


def test_with_other_facts_it_is_tried_at_once_and_begins_anew(tries, now):
    tries.failed("gpu-0", "facts", "in use")
    tries.failed("gpu-0", "facts", "in use")

    assert tries.why_not("gpu-0", "others") == ""
    tries.failed("gpu-0", "others", "in use")
    now[0] = 5.0
    assert tries.why_not("gpu-0", "others") == ""


def test_what_worked_meanwhile_begins_anew(tries, now):
    tries.failed("gpu-0", "facts", "in use")
    tries.worked("gpu-0")

    assert tries.why_not("gpu-0", "facts") == ""
    tries.failed("gpu-0", "facts", "in use")
    now[0] = 5.0
    assert tries.why_not("gpu-0", "facts") == ""
