"""Pods and nodes are told what happened to them, at best and without anybody waiting for it."""

import threading
import time
from dataclasses import replace

import pytest

from dra_driver.base.errors import Forbidden, Unreachable
from dra_driver.k8s.claims import ClaimRef, ClaimUid
from dra_driver.k8s.events import Event, EventRecorder, NodeRef, PodRef
from tests.waiting import eventually

POD = PodRef("team", "web", "uid-web")
EVENTS = "/api/v1/namespaces/team/events"


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Desk:
    """An API server that passes on, fails or waits as it is told, and knows what was asked."""

    def __init__(self, api):
        self._api = api
        self.calls = []
        self.error = None
        self.open = threading.Event()
        self.open.set()

    def create(self, path, document):
        return self._pass("create", lambda: self._api.create(path, document))

    def patch(self, path, patch):
        return self._pass("patch", lambda: self._api.patch(path, patch))

    def _pass(self, name, call):
        assert self.open.wait(60)
        try:
            if self.error is not None:
                raise self.error
            return call()
        finally:
            self.calls.append(name)

    def wait_for(self, count):
        eventually(lambda: len(self.calls) >= count)
        return self.calls


@pytest.fixture
def api(client):
    return client


@pytest.fixture
def desk(api):
    return Desk(api)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def record(clock):
    """A recorder that writes to this API server; without a clock of the test it does so at once."""
    recorders = []

    def record(api, **options):
        options = options or {"clock": clock}
        recorders.append(EventRecorder(api, "gpu.nvidia.com", "node-1", **options))
        return recorders[-1]

    yield record
    for recorder in recorders:
        recorder.stop()


@pytest.fixture
def events(record, desk):
    return record(desk)


def event(message="it is above", pod=POD, reason="GPUMemoryAboveShare", about="a"):
    return Event(pod, reason, about, message)


def of_node(message="it does not fit", uid="uid-node"):
    return Event(NodeRef("node-1", uid), "MIGLayoutFailed", "gpu-0", message)


def test_an_event_is_what_kubectl_describe_shows(events, desk, api):
    events.emit(event())
    desk.wait_for(1)

    (document,) = api.list(EVENTS, {"fieldSelector": "involvedObject.uid=uid-web"})["items"]
    assert document["metadata"]["name"].startswith("web.")
    assert document["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "team",
        "name": "web",
        "uid": "uid-web",
    }
    assert (document["type"], document["reason"]) == ("Warning", "GPUMemoryAboveShare")
    assert (document["message"], document["count"]) == ("it is above", 1)
    assert document["source"] == {"component": "gpu.nvidia.com", "host": "node-1"}
    assert document["firstTimestamp"] == document["lastTimestamp"]


@pytest.mark.parametrize(("uid", "as_uid"), [("uid-node", "uid-node"), ("", "node-1")])
def test_an_event_of_a_node_is_what_kubectl_describe_shows_of_it(events, desk, api, uid, as_uid):
    events.emit(of_node(uid=uid))
    desk.wait_for(1)

    (event,) = api.list("/api/v1/namespaces/default/events")["items"]
    assert event["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Node",
        "name": "node-1",
        "uid": as_uid,
    }
    assert (event["reason"], event["message"]) == ("MIGLayoutFailed", "it does not fit")


def test_an_event_of_a_claim_is_in_its_namespace(events, desk, api):
    claim = ClaimRef("team", "one-gpu", ClaimUid("uid-claim"))
    events.emit(Event(claim, "GPUUnhealthy", "gpu-0", "it does not answer"))
    desk.wait_for(1)

    (event,) = api.list(EVENTS)["items"]
    assert event["involvedObject"] == {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "namespace": "team",
        "name": "one-gpu",
        "uid": "uid-claim",
    }


def test_what_went_well_is_no_warning(events, desk, api):
    events.emit(replace(of_node(), is_warning=False))
    desk.wait_for(1)

    assert api.list("/api/v1/namespaces/default/events")["items"][0]["type"] == "Normal"


def test_an_event_takes_no_more_room_than_the_api_server_has_for_one(events, desk, api):
    events.emit(event("its devices: " + "GPU-5c1b, " * 1000))
    desk.wait_for(1)
    (document,) = api.list(EVENTS)["items"]
    assert len(document["message"]) == 1024
    assert document["message"].endswith("…")


def test_the_last_words_are_written_though_they_came_soon_after_others(events, desk, clock, api):
    for words in ("first", "second", "third"):
        events.emit(event(words))
    events.emit(event("another", about="b"))
    desk.wait_for(2)
    clock.now += 10
    events.emit(event("another yet", about="c"))  # whatever comes next makes it look
    desk.wait_for(4)

    assert sorted(desk.calls) == ["create", "create", "create", "patch"]
    counts = {document["message"]: document["count"] for document in api.list(EVENTS)["items"]}
    assert counts == {"third": 3, "another": 1, "another yet": 1}


def test_the_last_words_are_written_though_nothing_else_is_told(desk, api, record):
    events = record(desk, min_update_seconds=0.02)
    for words in ("first", "second", "last"):
        events.emit(event(words))

    assert desk.wait_for(2)[-1] == "patch"
    eventually(lambda: api.list(EVENTS)["items"][0]["message"] == "last")
    (document,) = api.list(EVENTS)["items"]
    assert (document["message"], document["count"]) == ("last", 3)


def test_a_thread_that_has_nothing_to_write_ends_with_its_events(desk):
    events = EventRecorder(desk, "gpu.nvidia.com", "node-1")
    events.emit(event())
    events.emit(event("again"))
    desk.wait_for(1)
    (thread,) = (t for t in threading.enumerate() if t.name == "events")

    events.stop()
    thread.join(5)

    assert not thread.is_alive()
    assert desk.calls == ["create"]


def test_what_is_told_hundreds_of_times_at_once_is_written_once(events, desk, clock, api):
    for _ in range(50):
        events.emit(event())
    events.emit(event(about="the end"))
    desk.wait_for(2)
    clock.now += 60
    events.emit(event("once more"))
    desk.wait_for(3)

    assert desk.calls == ["create", "create", "patch"]
    counts = {document["message"]: document["count"] for document in api.list(EVENTS)["items"]}
    assert counts == {"it is above": 1, "once more": 51}


@pytest.mark.parametrize(
    "different",
    [
        event(reason="GPUMemoryProcessEnded"),
        event(about="b"),
        event(pod=PodRef("team", "web", "uid-of-the-next")),
    ],
)
def test_something_else_is_an_event_of_its_own(events, desk, api, different):
    events.emit(event())
    events.emit(different)
    desk.wait_for(2)

    assert len(api.list(EVENTS)["items"]) == 2


def test_an_event_that_the_api_server_forgot_is_written_anew(events, desk, clock, api):
    events.emit(event())
    desk.wait_for(1)
    (document,) = api.list(EVENTS)["items"]
    api.delete(f"{EVENTS}/{document['metadata']['name']}")
    clock.now += 60
    events.emit(event())
    desk.wait_for(3)

    assert desk.calls == ["create", "patch", "create"]
    assert api.list(EVENTS)["items"][0]["count"] == 1


def test_after_an_hour_it_is_a_new_event(events, desk, clock, api):
    events.emit(event())
    desk.wait_for(1)
    clock.now += 3600
    events.emit(event())
    desk.wait_for(2)

    assert len(api.list(EVENTS)["items"]) == 2


def test_a_refused_event_is_lost_and_the_next_one_is_not(events, desk, api):
    desk.error = Forbidden("create events: 403")
    events.emit(event())
    desk.wait_for(1)
    desk.error = None
    events.emit(event())
    desk.wait_for(2)

    assert len(api.list(EVENTS)["items"]) == 1


def test_what_is_told_while_the_api_server_is_away_is_written_once_it_is_back(
    desk, api, record, caplog
):
    events = record(desk, min_update_seconds=0.02)
    desk.error = Unreachable("create events: it is away")
    for words in ("first", "second"):
        events.emit(event(words))
    events.emit(event("another", about="b"))
    desk.wait_for(4)
    desk.error = None
    eventually(lambda: len(api.list(EVENTS)["items"]) == 2)

    counts = {document["message"]: document["count"] for document in api.list(EVENTS)["items"]}
    assert counts == {"second": 2, "another": 1}
    assert caplog.text.count("events wait for the API server") == 1


def test_one_event_that_is_never_taken_keeps_no_other_waiting(api, record):
    class Picky(Desk):
        def create(self, path, document):
            self.error = Unreachable("500") if document["message"] == "bad" else None
            return super().create(path, document)

    desk = Picky(api)
    events = record(desk, min_update_seconds=0.02)
    events.emit(event("bad"))
    for about in "bcd":
        events.emit(event(about, about=about))
    desk.wait_for(8)
    events.stop()

    assert {written["message"] for written in api.list(EVENTS)["items"]} == {"b", "c", "d"}


def test_nobody_waits_for_an_api_server_that_does_not_answer(events, desk):
    desk.open.clear()
    began = time.monotonic()
    for number in range(500):
        events.emit(event(about=str(number)))
    events.stop()

    assert time.monotonic() - began < 20
    desk.open.set()


class Memory:
    """An API server that takes everything, and knows what it took."""

    def __init__(self):
        self.messages = []

    def create(self, path, document):
        self.messages.append(document["message"])
        return {"metadata": {"name": "made"}}

    def patch(self, path, patch):
        return {}


def test_where_more_wait_than_may_the_oldest_are_lost_and_that_is_told_once(record, clock, caplog):
    memory = Memory()
    desk = Desk(memory)
    events = record(desk)
    desk.error = Unreachable("create events: it is away")
    for number in range(1030):
        events.emit(event(str(number), about=str(number)))
        desk.wait_for(number + 1 - 32)  # so that the queue holds them
    desk.wait_for(1030)
    desk.error = None
    clock.now += 60
    events.emit(event("1029", about="1029"))  # known already: it pushes nothing out

    assert len(desk.wait_for(1030 + 1024)) == 1030 + 1024
    assert sorted(memory.messages, key=int) == [str(number) for number in range(6, 1030)]
    assert caplog.text.count("an event is lost: too many wait to be written") == 1


def test_what_is_written_is_forgotten_before_what_waits(record, clock, caplog):
    desk = Desk(Memory())
    events = record(desk)
    for number in range(1024):
        events.emit(event(about=str(number)))
        desk.wait_for(number + 1 - 32)
    desk.wait_for(1024)
    events.emit(event("again", about="0"))  # too soon after the first time: it waits
    events.emit(event(about="one more"))
    desk.wait_for(1025)
    clock.now += 60
    events.emit(event(about="1"))

    assert sorted(desk.wait_for(1027)[1025:]) == ["create", "patch"]
    assert "an event is lost" not in caplog.text


def test_of_very_many_pods_only_the_latest_are_remembered(record, clock):
    desk = Desk(Memory())
    events = record(desk)
    for number in range(1030):
        events.emit(event(about=str(number)))
        desk.wait_for(number + 1 - 32)  # so that no more wait than may
    desk.wait_for(1030)
    clock.now += 60
    events.emit(event(about="0"))
    events.emit(event(about="1029"))

    assert desk.wait_for(1032)[1030:] == ["create", "patch"]
