"""What is done for several GPUs takes as long as for one."""

import threading

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.base.threads import in_parallel


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
