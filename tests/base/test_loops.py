"""What is done again and again goes on whatever happens to it."""

import threading

from dra_driver.base.errors import NodeError
from dra_driver.base.threads import Loop


class Steps:
    """Counts, and fails as often as it is told to."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.done = 0
        self.changed = threading.Condition()

    def __call__(self):
        with self.changed:
            self.done += 1
            self.changed.notify_all()
        if self.errors:
            raise self.errors.pop(0)

    def wait(self, number):
        with self.changed:
            return self.changed.wait_for(lambda: self.done >= number, 30)


def test_no_error_ends_it():
    steps = Steps(NodeError("away"), ValueError("a bug"))
    loop = Loop("test", steps, 0.001)

    loop.start()

    assert steps.wait(4)
    loop.stop()


def test_a_step_can_ask_to_be_done_again_sooner():
    steps = Steps()
    loop = Loop("test", lambda: steps() or 0.001, 3600)

    loop.start()

    assert steps.wait(3)
    loop.stop()


def test_it_does_not_wait_when_asked_to_do_it_soon():
    steps = Steps()
    loop = Loop("test", steps, 3600)
    loop.start()
    assert steps.wait(1)

    loop.soon()

    assert steps.wait(2)
    loop.stop()


def test_once_stopped_it_does_nothing_more():
    steps = Steps()
    loop = Loop("test", steps, 3600)
    loop.start()
    assert steps.wait(1)

    loop.stop()
    loop.join(5)

    assert not loop.alive
    assert steps.done == 1
