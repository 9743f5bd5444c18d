"""What takes long does not keep others waiting, and what fails is not tried at once."""

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


@pytest.fixture
def tasks(clock):
    """They are carried out at once."""
    return BackgroundTasks(clock, lambda work: work())


@pytest.fixture
def done():
    """The names of the tasks that were carried out."""
    return []


def task(name, done, error=None, again=30.0):
    def act():
        done.append(name)
        if error is not None:
            raise error

    return BackgroundTask(name, act, again)


def test_the_tasks_of_a_lane_go_one_after_another_whatever_fails(tasks, done):
    failing = task("first", done, NodeError("no"))
    assert tasks.go("lane", [failing, task("second", done)])
    assert done == ["first", "second"]


def test_what_failed_is_tried_again_later_and_not_before(tasks, done, clock):
    failing = task("it", done, NodeError("no"))
    tasks.go("lane", [failing])

    clock.now += 29.9
    assert not tasks.go("lane", [failing])
    clock.now += 0.1
    assert tasks.go("lane", [failing])
    assert done == ["it", "it"]


def test_what_failed_does_not_hold_up_the_rest_of_its_lane(tasks, done):
    failing = task("it", done, NodeError("no"))
    tasks.go("lane", [failing])

    assert tasks.go("lane", [failing, task("other", done)])
    assert done == ["it", "other"]


def test_what_went_well_can_be_done_again_at_once(tasks, done):
    for _ in range(2):
        assert tasks.go("lane", [task("it", done)])
    assert done == ["it", "it"]


def test_the_same_error_is_logged_once_and_another_one_again(tasks, caplog):
    for error in ("one", "one", "two", "two"):
        tasks.go("lane", [task("it", [], NodeError(error), again=0.0)])

    assert [record.error for record in caplog.records] == ["one", "two"]
    assert {record.task for record in caplog.records} == {"it"}


def test_an_error_after_a_success_is_logged_anew(tasks, caplog):
    for error in (NodeError("one"), None, NodeError("one")):
        tasks.go("lane", [task("it", [], error, again=0.0)])

    assert [record.error for record in caplog.records] == ["one", "one"]


def test_an_error_is_forgotten_after_a_while(tasks, clock, caplog):
    for _ in range(2):
        tasks.go("lane", [task("it", [], NodeError("one"))])
        clock.now += 3600

    assert len(caplog.records) == 2


def test_lanes_do_not_wait_for_each_other_and_a_busy_one_takes_nothing():
    began, end, done = threading.Event(), threading.Event(), threading.Event()

    def wait():
        began.set()
        assert end.wait(SECONDS)

    tasks = BackgroundTasks()
    try:
        assert tasks.go("slow", [BackgroundTask("it", wait, 1.0)])
        assert began.wait(SECONDS)
        assert not tasks.go("slow", [task("more", [])])
        assert tasks.go("other", [BackgroundTask("it too", done.set, 1.0)])
        assert done.wait(SECONDS)
    finally:
        end.set()
    for thread in threading.enumerate():
        if thread.name == "background-task":
            thread.join(SECONDS)
    assert tasks.go("slow", [task("more", [])])
