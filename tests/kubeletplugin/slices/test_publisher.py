"""Slices stay as we want them, whatever happens to them and to the API server."""

import logging
import threading
import time
from typing import cast

import pytest

from dra_driver.base.errors import Gone, NodeError
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient as Client
from dra_driver.k8s.client import ApiTimeouts
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.k8s.watch import WatchIntervals
from dra_driver.kubeletplugin.slices.pool_writer import PoolWriter
from dra_driver.kubeletplugin.slices.publisher import Publisher, PublishIntervals
from dra_driver.kubeletplugin.slices.reconcile import Pool, SliceContent, split_into_slices
from tests.waiting import eventually

DRIVER, NODE = "gpu.example.com", "n1"
FAST = PublishIntervals(WatchIntervals(60, 0.01, 0.1), standby=0.05, settle=0.01)
TAINT = {"key": "k", "effect": "NoSchedule"}


class Recorder:
    """An observer that can be waited for."""

    def __init__(self):
        self.changed = threading.Condition()
        self.successes = []
        self.failures = []
        self.drops = []

    def published(self, devices, writes):
        self._note(self.successes, (devices, writes))

    def failed(self, error):
        self._note(self.failures, error)

    def dropped(self, fields):
        self._note(self.drops, fields)

    def wait(self, predicate, seconds=60):
        with self.changed:
            return self.changed.wait_for(lambda: predicate(self), seconds)

    def _note(self, values, value):
        with self.changed:
            values.append(value)
            self.changed.notify_all()


class Running:
    """A publisher on a fake API server."""

    def __init__(self, server, path, **parts):
        self.server = server
        self.recorder = Recorder()
        self.client = Client(load_kubeconfig(server.kubeconfig(path)), ApiTimeouts(retry=0.005))
        writer = PoolWriter(ResourceApi(self.client), DRIVER, NODE)
        self.publisher = Publisher(writer, observer=self.recorder, **{"intervals": FAST, **parts})

    def start(self, pool):
        self.publisher.want(pool)
        self.publisher.start()
        return self

    def is_quiet(self):
        """Look once more and sit in a watch again: whether all is then as wanted."""
        watches, successes = self.server.count("WATCH"), len(self.recorder.successes)
        self.publisher.wake()
        assert self.recorder.wait(lambda recorder: len(recorder.successes) > successes)
        assert self.server.wait(lambda: self.server.count("WATCH") > watches)
        return self.publisher.healthy()

    def close(self):
        assert self.publisher.stop()
        self.client.close()


@pytest.fixture(autouse=True)
def node(server):
    server.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})


@pytest.fixture
def run(server, tmp_path):
    started = []

    def run(pool=None, **parts):
        started.append(Running(server, tmp_path / f"kubeconfig{len(started)}", **parts))
        return started[-1].start(pool) if pool else started[-1]

    yield run
    for each in started:
        each.close()


def pool(*slices):
    """A pool of slices, each a string with one letter per device."""
    contents = (SliceContent(tuple({"name": name} for name in letters)) for letters in slices)
    return Pool(NODE, tuple(contents))


def shown(server):
    """Devices by slice, in order, of our driver."""
    return [
        "".join(device["name"] for device in each["spec"].get("devices", ()))
        for each in server.objects("resourceslices")
        if each["spec"]["driver"] == DRIVER
    ]


def writes(server):
    return sum(server.count(method, "resourceslices") for method in ("POST", "PUT", "DELETE"))


def test_the_first_slice_takes_four_requests(server, run):
    run(pool("ab"))
    assert server.wait(lambda: server.count("WATCH") == 1)

    assert shown(server) == ["ab"]
    assert [(each.method, each.path.rpartition("/")[2]) for each in server.requests] == [
        ("GET", "resource.k8s.io"),
        ("GET", "resourceslices"),
        ("GET", NODE),
        ("POST", "resourceslices"),
        ("WATCH", "resourceslices"),
    ]


@pytest.mark.point(62)
@pytest.mark.parametrize("served", [["v1", "v1beta2"], ["v1beta2", "v1beta1"], ["v1beta1"]])
def test_every_served_version_is_spoken(server, run, served):
    server.served = served
    devices = [{"name": "a", "attributes": {"type": {"string": "gpu"}}, "taints": [TAINT]}]
    running = run(split_into_slices(NODE, devices))
    assert running.recorder.wait(lambda recorder: recorder.successes)

    (made,) = server.objects("resourceslices")
    assert made["spec"]["devices"][0]["attributes"] == devices[0]["attributes"]
    assert server.count("POST", f"/{served[0]}/resourceslices") == 1
    assert running.is_quiet()
    assert writes(server) == 1


def test_an_api_server_that_speaks_another_version_after_an_upgrade_is_followed(server, run):
    server.served = ["v1beta1"]
    running = run(pool("ab"))
    assert running.is_quiet()
    server.served = ["v1"]
    server.end_watches()

    assert server.wait(lambda: server.count("WATCH", "/v1/resourceslices"))
    running.publisher.want(pool("ac"))
    assert server.wait(lambda: shown(server) == ["ac"])


@pytest.mark.point(67)
def test_nothing_is_written_when_nothing_changed(server, run):
    running = run(pool("ab", "cd"))
    assert running.is_quiet()
    server.forget_requests()

    running.publisher.want(pool("ab", "cd"))
    for _ in range(3):
        assert running.is_quiet()
    assert {each.method for each in server.requests} == {"WATCH"}


def test_a_second_process_finds_what_the_first_left_and_writes_nothing(server, run):
    first = run(pool("ab", "cd"))
    assert first.is_quiet()
    first.publisher.stop()
    server.forget_requests()

    second = run(pool("ab", "cd"))
    assert second.recorder.wait(lambda recorder: recorder.successes)
    assert writes(server) == 0


def delete_all(server):
    for each in server.objects("resourceslices"):
        server.remove("resourceslices", each["metadata"]["name"])


def edit_first(server):
    edited, *_ = server.objects("resourceslices")
    server.put({**edited, "spec": {**edited["spec"], "devices": [{"name": "z"}]}})


@pytest.mark.point(68, 69, 73)
@pytest.mark.parametrize("change", [delete_all, edit_first])
def test_slices_that_others_change_or_delete_are_restored_within_two_seconds(server, run, change):
    running = run(pool("ab", "cd"))
    assert running.is_quiet()

    change(server)

    assert server.wait(lambda: shown(server) == ["ab", "cd"], seconds=2)
    assert running.is_quiet()


def test_what_is_wanted_can_change_at_any_time(server, run):
    running = run(pool("a"))
    for target in (pool("ab"), pool("ab", "c"), pool(""), pool("xyz")):
        running.publisher.want(target)
        assert not running.publisher.status().published
        expected = ["".join(d["name"] for d in each.devices) for each in target.slices]
        assert server.wait(lambda expected=expected: shown(server) == expected)
    assert running.is_quiet()


@pytest.mark.point(71)
def test_an_api_server_that_is_down_at_the_start_is_waited_for(server, run):
    server.refuse_connections()
    running = run(pool("ab"))
    assert running.recorder.wait(lambda recorder: recorder.failures)

    assert not running.publisher.healthy()
    assert "cannot be reached" in running.publisher.status().error
    server.accept_connections()
    assert server.wait(lambda: shown(server) == ["ab"])
    assert running.is_quiet()
    assert running.publisher.status().error is None


def test_an_api_server_that_goes_and_comes_back_finds_its_watcher_again(server, run):
    running = run(pool("ab"))
    assert running.is_quiet()
    server.refuse_connections()
    assert running.recorder.wait(lambda recorder: recorder.failures)
    watches = server.count("WATCH")
    server.accept_connections()
    assert server.wait(lambda: server.count("WATCH") > watches)
    server.remove("resourceslices", server.objects("resourceslices")[0]["metadata"]["name"])

    assert server.wait(lambda: shown(server) == ["ab"])


@pytest.mark.point(72)
@pytest.mark.parametrize(
    ("status", "method"),
    [(409, "POST"), (409, "PUT"), (500, "POST"), (403, "POST"), (404, "PUT"), (422, "PUT")],
)
def test_a_write_that_failed_is_done_again(server, run, status, method):
    running = run()
    if method == "PUT":
        running.start(pool("a"))
        assert running.is_quiet()
        server.fail(status, method, "resourceslices")
        running.publisher.want(pool("ab"))
    else:
        server.fail(status, method, "resourceslices")
        running.start(pool("ab"))

    assert server.wait(lambda: shown(server) == ["ab"])
    assert [str(status) in str(error) for error in running.recorder.failures] == [True]


@pytest.mark.point(72)
def test_a_slice_that_is_gone_before_it_is_deleted_is_no_failure(server, run):
    running = run(pool("a", "b"))
    assert running.is_quiet()
    server.fail(404, "DELETE")
    running.publisher.want(pool("a"))

    assert running.recorder.wait(lambda recorder: recorder.successes[-1] == (1, 2))
    assert running.recorder.failures == []


@pytest.mark.point(72)
def test_a_watch_that_fell_behind_begins_anew(server, run):
    running = run(pool("ab"))
    assert running.is_quiet()
    lists = server.count("GET", "resourceslices")
    server.forget_history()

    assert server.wait(lambda: server.count("GET", "resourceslices") > lists)
    assert running.is_quiet()
    assert running.recorder.failures == []
    assert writes(server) == 1


def test_a_watch_goes_on_where_the_last_one_ended_or_its_last_bookmark_was(server, run):
    server.bookmark_seconds = 0.05
    running = run(pool("ab"), intervals=PublishIntervals(WatchIntervals(1, 0.01)))
    assert server.wait(lambda: server.count("WATCH") == 1)
    node = server.put({"kind": "Node", "metadata": {"name": "other"}})
    assert server.wait(lambda: server.count("WATCH") == 2)

    since = int(server.requests[-1].query["resourceVersion"])
    assert since >= int(node["metadata"]["resourceVersion"])
    assert server.count("GET", "resourceslices") == 1
    assert running.publisher.healthy()


def test_a_node_that_is_not_there_yet_is_waited_for(server, run):
    server.remove("nodes", NODE)
    running = run(pool("ab"))
    assert running.recorder.wait(lambda recorder: recorder.failures)
    assert "node n1 has to register" in running.publisher.status().error

    server.put({"kind": "Node", "metadata": {"name": NODE}})
    assert server.wait(lambda: shown(server) == ["ab"])


@pytest.mark.point(63)
def test_slices_vanish_with_their_node_and_belong_to_the_one_that_is_created_anew(server, run):
    running = run(pool("ab"))
    assert running.is_quiet()
    (slice_before,) = server.objects("resourceslices")
    server.remove("nodes", NODE)
    node = server.put({"kind": "Node", "metadata": {"name": NODE}})
    server.collect_garbage()
    assert slice_before not in server.objects("resourceslices")

    assert server.wait(lambda: shown(server) == ["ab"])
    (made,) = server.objects("resourceslices")
    assert made["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"]


@pytest.mark.point(76)
def test_fields_that_the_api_server_drops_are_said_once_and_not_written_for_ever(
    server, run, caplog
):
    server.disable("DRADeviceTaints", "DRAConsumableCapacity")
    capacity = {"m": {"value": "1Gi", "requestPolicy": {"default": "0"}}}
    device = {"name": "a", "taints": [TAINT], "capacity": capacity}
    running = run(split_into_slices(NODE, [device | {"allowMultipleAllocations": True}]))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert running.is_quiet()

    assert writes(server) == 1
    assert running.recorder.drops == [
        (
            "devices[].allowMultipleAllocations",
            "devices[].capacity.m.requestPolicy",
            "devices[].taints",
        )
    ]
    assert running.publisher.healthy()
    assert len([each for each in caplog.records if "drops fields" in each.message]) == 1


@pytest.mark.point(76)
def test_what_was_dropped_is_sent_again_to_an_api_server_that_came_back(server, run):
    server.disable("DRADeviceTaints")
    running = run(split_into_slices(NODE, [{"name": "a", "taints": [TAINT]}]))
    assert running.is_quiet()
    server.enable("DRADeviceTaints")
    server.refuse_connections()
    assert running.recorder.wait(lambda recorder: recorder.failures)
    server.accept_connections()

    assert running.recorder.wait(lambda recorder: recorder.drops == [("devices[].taints",), ()])
    (made,) = server.objects("resourceslices")
    assert made["spec"]["devices"][0]["taints"][0]["key"] == "k"


def test_a_pool_that_cannot_be_published_is_not_sent_and_what_was_there_stays(server, run):
    running = run(pool("a"))
    assert running.is_quiet()
    running.publisher.want(pool("bb"))
    assert running.recorder.wait(lambda recorder: recorder.failures)

    assert "device 'b' is there more than once" in running.publisher.status().error
    assert shown(server) == ["a"]
    assert writes(server) == 1


def test_only_when_it_is_our_turn_the_api_server_is_asked_at_all(server, run):
    turn = threading.Event()
    was_asked = threading.Event()

    def may_publish():
        was_asked.set()
        return turn.is_set()

    running = run(pool("ab"), may_publish=may_publish, intervals=PublishIntervals(standby=60))
    assert was_asked.wait(5)
    running.publisher.wake()
    assert server.count() == 0
    assert running.publisher.healthy()

    turn.set()
    running.publisher.wake()
    assert running.recorder.wait(lambda recorder: recorder.successes)
    assert shown(server) == ["ab"]
    assert not running.publisher.status().standby


def test_a_process_whose_turn_is_over_leaves_the_slices_to_the_newer_one(server, run):
    turn = threading.Event()
    turn.set()
    running = run(pool("ab"), may_publish=turn.is_set)
    assert running.is_quiet()
    turn.clear()
    newer = run(pool("xy"))
    assert newer.is_quiet()

    running.publisher.wake()
    assert newer.is_quiet()
    assert shown(server) == ["xy"]
    assert running.publisher.status().standby


def test_two_that_want_different_things_do_not_write_as_fast_as_they_can(server, run):
    slow = PublishIntervals(WatchIntervals(60, 0.2, 60), settle=0.05)
    run(pool("a"), intervals=slow)
    run(pool("b"), intervals=slow)

    assert server.wait(lambda: writes(server) >= 6)
    assert not server.wait(lambda: writes(server) > 14, seconds=0.3)


@pytest.mark.point(105)
def test_stopping_is_quick_and_leaves_the_slices(server, run):
    running = run(pool("ab"))
    assert running.is_quiet()

    assert running.publisher.stop(timeout_seconds=0.5)
    assert shown(server) == ["ab"]


def test_an_outage_is_logged_once_and_not_with_every_try(server, run, caplog):
    server.fail(503, "GET", times=10**6)
    with caplog.at_level(logging.WARNING):
        running = run(pool("ab"))
        assert running.recorder.wait(lambda recorder: len(recorder.failures) >= 2)

    assert len([each for each in caplog.records if "not published" in each.message]) == 1


def test_a_fault_of_our_own_does_not_end_the_thread(server, run, caplog):
    faults = iter([True])

    def may_publish():
        if next(faults, False):
            raise ZeroDivisionError("a bug")
        return True

    running = run(pool("ab"), may_publish=may_publish)

    assert server.wait(lambda: shown(server) == ["ab"])
    assert "ZeroDivisionError" in str(running.recorder.failures[0])
    assert "a bug" in caplog.text


def test_the_status_says_when_all_was_last_well(server, run):
    running = run(pool("ab"))
    assert running.is_quiet()
    before = running.publisher.status().last_success
    server.refuse_connections()
    assert running.recorder.wait(lambda recorder: recorder.failures)

    status = running.publisher.status()
    assert before
    assert status.last_success >= before
    assert (status.published, status.standby) == (False, False)


class AlwaysBehind:
    """A door to an API server whose watches are all too old."""

    dropped = ()

    def __init__(self):
        self.looks = 0

    def forget(self, error=None):
        pass

    def write(self, pool):
        self.looks += 1
        return 0

    def watch(self, seconds):
        raise Gone("the resource version is too old")


@pytest.mark.point(72)
def test_an_api_server_whose_watches_are_always_too_old_is_not_asked_without_a_pause():
    behind = AlwaysBehind()
    publisher = Publisher(cast(PoolWriter, behind))
    publisher.want(Pool("n"))
    publisher.start()
    time.sleep(0.5)
    publisher.stop()

    assert 1 <= behind.looks <= 4


def test_a_file_lock_that_fails_is_an_error_that_is_tried_again():
    tries = []

    def fail():
        tries.append(1)
        raise NodeError("cannot read the instances")

    publisher = Publisher(cast(PoolWriter, AlwaysBehind()), may_publish=fail)
    publisher.want(Pool("n"))
    publisher.start()
    time.sleep(0.5)
    publisher.stop()

    assert len(tries) >= 2
    assert publisher.status().error == "cannot read the instances"


class Switch:
    """Whether nothing is published."""

    def __init__(self):
        self.withdrawn = False

    def __call__(self):
        return self.withdrawn


def is_withdrawn(running):
    return eventually(lambda: running.publisher.status().withdrawn)


def test_what_is_withdrawn_is_removed_and_comes_back_when_it_is_wanted_again(server, run):
    switch = Switch()
    running = run(pool("ab", "c"), is_withdrawn=switch)
    assert running.is_quiet()

    switch.withdrawn = True
    running.publisher.wake()
    assert is_withdrawn(running)
    assert shown(server) == []
    assert running.publisher.healthy()
    # It may be looked at once more, and the observer is told last.
    assert running.recorder.wait(lambda recorder: (0, 2) in recorder.successes)

    switch.withdrawn = False
    running.publisher.wake()
    assert running.recorder.wait(lambda recorder: recorder.successes[-1][0] == 3)
    assert shown(server) == ["ab", "c"]
    assert not running.publisher.status().withdrawn


def test_while_nothing_is_to_be_published_an_earlier_process_leaves_nothing_and_nobody_watches(
    server, run
):
    run(pool("ab")).close()
    before = server.count("WATCH")
    running = run(is_withdrawn=lambda: True)
    running.publisher.start()
    assert is_withdrawn(running)
    assert shown(server) == []
    assert server.count("WATCH") == before


def test_a_pool_that_is_wanted_meanwhile_waits(server, run):
    switch = Switch()
    switch.withdrawn = True
    running = run(pool("a"), is_withdrawn=switch)
    assert is_withdrawn(running)
    running.publisher.want(pool("ab"))
    assert is_withdrawn(running)
    assert shown(server) == []

    switch.withdrawn = False
    running.publisher.want(None)
    assert eventually(lambda: not running.publisher.status().withdrawn)
    assert shown(server) == []
    running.publisher.want(pool("abc"))
    assert server.wait(lambda: shown(server) == ["abc"])


def test_an_api_server_without_dra_has_nothing_to_remove(server, run, caplog):
    server.served = []
    running = run(is_withdrawn=lambda: True)
    running.publisher.start()
    assert is_withdrawn(running)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_slices_that_cannot_be_removed_are_not_withdrawn_until_they_are(server, run):
    switch = Switch()
    running = run(pool("ab"), is_withdrawn=switch)
    assert running.is_quiet()
    server.deny("delete", "resourceslices")
    switch.withdrawn = True
    running.publisher.wake()
    assert running.recorder.wait(lambda recorder: recorder.failures)
    assert not running.publisher.status().withdrawn
    server.heal()
    assert is_withdrawn(running)
    assert shown(server) == []


def test_slices_of_other_drivers_and_nodes_stay(server, run):
    spec = {"driver": "other.example.com", "nodeName": NODE, "devices": [{"name": "x"}]}
    other = {"pool": {"name": "p", "generation": 1, "resourceSliceCount": 1}}
    server.put({"kind": "ResourceSlice", "metadata": {"name": "theirs"}, "spec": spec | other})
    running = run(is_withdrawn=lambda: True)
    running.publisher.start()
    assert is_withdrawn(running)
    assert len(server.objects("resourceslices")) == 1
