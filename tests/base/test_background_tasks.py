"""Errands: what takes long does not keep others waiting, and what fails is not tried at once."""

import threading

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.base.threads import BackgroundTask, BackgroundTasks

SECONDS = 60.0


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def at_once(clock):
    return BackgroundTasks(clock, lambda work: work())


def errand(name, done, error=None, again=30.0):
    def act():
        done.append(name)
        if error is not None:
            raise error

    return BackgroundTask(name, act, again)


def test_the_errands_of_a_lane_go_one_after_another_whatever_fails(clock):
    done = []
    errands = at_once(clock)

    failing = errand("first", done, NodeError("no"))
    assert errands.go("lane", [failing, errand("second", done)])
    assert done == ["first", "second"]


def test_what_failed_is_tried_again_later_and_not_before(clock):
    done = []
    errands = at_once(clock)
    failing = errand("it", done, NodeError("no"))
    errands.go("lane", [failing])

    clock.now += 29.9
    assert not errands.go("lane", [failing])
    clock.now += 0.1
    assert errands.go("lane", [failing])
    assert done == ["it", "it"]


def test_what_failed_does_not_hold_up_the_rest_of_its_lane(clock):
    done = []
    errands = at_once(clock)
    failing = errand("it", done, NodeError("no"))
    errands.go("lane", [failing])

    assert errands.go("lane", [failing, errand("other", done)])
    assert done == ["it", "other"]


def test_what_went_well_can_be_done_again_at_once(clock):
    done = []
    errands = at_once(clock)

    for _ in range(2):
        assert errands.go("lane", [errand("it", done)])
    assert done == ["it", "it"]


def test_the_same_error_is_logged_once_and_another_one_again(clock, caplog):
    errands = at_once(clock)
    for error in ("one", "one", "two", "two"):
        errands.go("lane", [errand("it", [], NodeError(error), again=0.0)])

    assert [record.error for record in caplog.records] == ["one", "two"]
    assert {record.task for record in caplog.records} == {"it"}


def test_an_error_after_a_success_is_logged_anew(clock, caplog):
    errands = at_once(clock)
    for error in (NodeError("one"), None, NodeError("one")):
        errands.go("lane", [errand("it", [], error, again=0.0)])

    assert [record.error for record in caplog.records] == ["one", "one"]


def test_an_error_is_forgotten_after_a_while(clock, caplog):
    errands = at_once(clock)
    for _ in range(2):
        errands.go("lane", [errand("it", [], NodeError("one"))])
        clock.now += 3600

    assert len(caplog.records) == 2


def test_lanes_do_not_wait_for_each_other_and_a_busy_one_takes_nothing():
    began, end, done = threading.Event(), threading.Event(), threading.Event()

    def wait():
        began.set()
        assert end.wait(SECONDS)

    errands = BackgroundTasks()
    try:
        assert errands.go("slow", [BackgroundTask("it", wait, 1.0)])
        assert began.wait(SECONDS)
        assert not errands.go("slow", [errand("more", [])])
        assert errands.go("other", [BackgroundTask("it too", done.set, 1.0)])
        assert done.wait(SECONDS)
    finally:
        end.set()
    for thread in threading.enumerate():
        if thread.name == "background-task":
            thread.join(SECONDS)
    assert errands.go("slow", [errand("more", [])])
