"""What is followed is followed for good: whatever fails, and however often."""

import math
import threading

import pytest

from dra_driver.base.errors import ApiServerError, Gone, Unreachable
from dra_driver.k8s.watch import Watcher, WatchIntervals

FAST = WatchIntervals(watch=60, first_retry=0.001, last_retry=0.002)


class Events:
    """A watch that gives *events* and then waits until it is closed."""

    def __init__(self, *events, ends=False):
        self.events = events
        self.closed = threading.Event()
        if ends:
            self.closed.set()

    def __iter__(self):
        yield from self.events
        assert self.closed.wait(60)

    def close(self):
        self.closed.set()


class Followed:
    """Answers each look with the next of *looks*; afterwards with a watch without events."""

    def __init__(self, *looks, see=lambda event: None):
        self.looks = list(looks)
        self.seen, self.errors, self.done = [], [], threading.Event()
        self._see = see
        self.watcher = Watcher("test", self.look, self.see, self.errors.append, FAST)

    def look(self, seconds):
        assert 54 <= seconds <= 66
        if not self.looks:
            self.done.set()
            return Events()
        answer = self.looks.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def see(self, event):
        self.seen.append(event)
        return self._see(event)

    def run(self):
        self.watcher.start()
        self.watcher.start()
        assert self.done.wait(60)
        assert self.watcher.stop(60)


def test_after_the_end_of_a_watch_it_is_looked_again():
    followed = Followed(Events("a", "b", ends=True), Events("c", ends=True))

    followed.run()

    assert (followed.seen, followed.errors) == (["a", "b", "c"], [])


@pytest.mark.parametrize("error", [Gone("too old"), Unreachable("away")])
def test_what_fails_is_told_and_tried_again(error):
    followed = Followed(error, error)

    followed.run()

    assert followed.errors == [error, error]


def test_a_fault_of_our_own_is_told_too(caplog):
    followed = Followed(ZeroDivisionError("a bug"))

    followed.run()

    (error,) = followed.errors
    assert type(error) is ApiServerError
    assert "please report: ZeroDivisionError" in str(error)
    assert "a bug" in caplog.text


def test_what_is_seen_may_end_the_watch():
    watch = Events("a", "b", ends=True)
    followed = Followed(watch, see=lambda event: 0.0)

    followed.run()

    assert followed.seen == ["a"]
    assert watch.closed.is_set()


def test_nothing_to_watch_is_looked_at_again_when_woken():
    followed = Followed(math.inf)
    waiting = followed.watcher
    waiting.start()
    while followed.looks:
        pass
    assert not followed.done.wait(0.01)

    waiting.wake()

    assert followed.done.wait(60)
    assert waiting.stop(60)


def test_a_watcher_that_never_began_can_be_stopped():
    assert Followed().watcher.stop(0)
