"""Clients that end slowly are waited for, and one that does not end at all is told apart."""

import time

import pytest

from dra_driver.base.deadlines import request_deadline, within_request
from dra_driver.base.errors import CommandFailed, MpsClientStuck, NodeError, TimedOut
from dra_driver.node.mps.draining import drain_clients


class Clients:
    """Each takes so many seconds to end; None: for ever."""

    def __init__(self, **seconds):
        self.ended = []
        self.seconds = {int(name[1:]): took for name, took in seconds.items()}

    def end(self, pid):
        def end(deadline):
            took, remaining = self.seconds[pid], deadline.check()
            if took is None or took > remaining:
                time.sleep(remaining)
                raise TimedOut("client terminate was still running")
            time.sleep(took)
            self.ended.append(pid)

        return end

    def drain(self, seconds, until=5.0):
        drain_clients(
            {pid: self.end(pid) for pid in self.seconds}, seconds, within_request(until, "all")
        )


def test_many_that_are_slow_are_all_ended_with_each_its_own_time():
    """One after the other they would take longer than one may."""
    clients = Clients(**{f"p{pid}": 0.1 for pid in range(12)})

    clients.drain(seconds=0.25)
    Clients().drain(seconds=0.25)

    assert sorted(clients.ended) == list(range(12))


def test_a_client_is_stuck_if_it_does_not_end_in_its_time_nor_others_meanwhile():
    """A server may end one after the other."""
    with pytest.raises(MpsClientStuck, match=r"MPS client 7 did not end in 0\.05 s"):
        Clients(p7=None).drain(0.05)

    clients = Clients(p7=None, p8=0.02, p9=0.04)
    with pytest.raises(NodeError, match=r"MPS client 7 did not end yet, others did") as caught:
        clients.drain(0.08)
    assert not isinstance(caught.value, TimedOut)
    assert sorted(clients.ended) == [8, 9]


def test_too_little_time_is_no_reason_to_call_a_client_wedged():
    with pytest.raises(NodeError) as caught:
        Clients(**{f"p{pid}": None for pid in range(9)}).drain(1.0, until=0.05)
    assert not isinstance(caught.value, MpsClientStuck)


def test_the_time_of_a_request_is_kept():
    began = time.monotonic()
    with request_deadline(0.1), pytest.raises(NodeError, match="ask again"):
        Clients(**{f"p{pid}": 0.04 for pid in range(1000)}).drain(0.05)
    assert time.monotonic() - began < 20, "all of them would take 40 s"


def test_another_error_is_raised_once_the_others_have_ended():
    def refused(deadline):
        raise CommandFailed("no")

    clients = Clients(p8=0.01)
    with pytest.raises(CommandFailed):
        drain_clients({7: refused, 8: clients.end(8)}, 1.0, within_request(5.0, "all"))
    assert clients.ended == [8]
