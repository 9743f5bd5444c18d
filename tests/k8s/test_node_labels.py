"""The labels of the own Node are followed; in an outage they are as they were seen last."""

import threading
import time

import pytest

from dra_driver.base.errors import ApiServerError
from dra_driver.k8s.node_labels import NodeLabels, NodeStatus
from dra_driver.k8s.watch import WatchIntervals
from tests.waiting import eventually

NODE = "n1"
FAST = WatchIntervals(watch=60, first_retry=0.01, last_retry=0.05)


@pytest.fixture
def label(server):
    """Give the Node this label."""

    def put(value):
        metadata = {"name": NODE, "uid": f"uid-{value}", "labels": {"profile": value}}
        server.put({"apiVersion": "v1", "kind": "Node", "metadata": metadata})

    return put


@pytest.fixture
def follow(client):
    """The labels, followed; and a list of their values after each change."""
    started = []

    def start(intervals=FAST, wait_seconds=5.0):
        labels, values = NodeLabels(client, NODE, intervals, ["revision", "other"]), []
        started.append(labels)
        labels.start(lambda: values.append(value_of(labels)), wait_seconds)
        return labels, values

    yield start
    for labels in started:
        labels.stop()


def value_of(labels):
    try:
        return labels.now().get("profile")
    except ApiServerError:
        return None


def comes(labels, value):
    return eventually(lambda: value_of(labels) == value)


def is_watching(server, times=1):
    return server.wait(lambda: server.count("WATCH", "nodes") >= times)


def test_only_the_own_node_is_read_and_watched(server, label, follow):
    label("a")
    server.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n2"}})

    labels, _ = follow()
    assert is_watching(server)

    assert (labels.node, labels.uid, labels.now()) == (NODE, "uid-a", {"profile": "a"})
    assert [(request.method, request.path) for request in server.requests] == [
        ("GET", "/api/v1/nodes"),
        ("WATCH", "/api/v1/nodes"),
    ]


def test_no_more_than_the_metadata_is_asked_for_with_each_change(server, label, follow):
    label("a")
    labels, _ = follow()
    assert is_watching(server)
    assert "as=PartialObjectMetadata" in server.requests[1].headers["Accept"]

    label("b")

    assert comes(labels, "b")
    assert labels.uid == "uid-a"
    assert {request.query["fieldSelector"] for request in server.requests} == {"metadata.name=n1"}


def test_each_listener_hears_of_a_label_that_changes(server, label, follow):
    label("a")
    labels, values = follow()
    heard = threading.Event()
    labels.start(heard.set, 0.0)
    assert is_watching(server)

    label("b")

    assert comes(labels, "b")
    assert heard.wait(60)
    assert values == ["a", "b"]
    assert server.count("GET", "nodes") == 1


def test_an_api_server_that_does_not_answer_keeps_nobody_waiting(server, label, follow):
    label("a")
    server.delay(0.5, "GET", "nodes")
    labels, _ = follow(wait_seconds=0.01)

    with pytest.raises(ApiServerError, match="labels of node n1 were not read yet"):
        labels.now()
    assert comes(labels, "a")


def test_a_right_that_is_missing_is_named_and_logged_once(server, label, follow, caplog):
    label("a")
    server.deny("list", "nodes")
    labels, _ = follow()

    with pytest.raises(ApiServerError, match='allow the verb "list" on "nodes"'):
        labels.now()
    assert server.wait(lambda: server.count("GET") > 4)
    messages = [record.getMessage() for record in caplog.records]
    assert len([message for message in messages if "cannot watch" in message]) == 1
    server.heal()
    assert comes(labels, "a")


def test_a_node_that_has_not_registered_yet_is_waited_for(label, follow):
    labels, _ = follow()

    with pytest.raises(ApiServerError, match="node n1 has to register"):
        labels.now()
    label("a")
    assert comes(labels, "a")


def test_in_an_outage_the_last_labels_count_and_afterwards_the_new_ones(server, label, follow):
    label("a")
    labels, values = follow()
    assert is_watching(server)

    server.refuse_connections()
    label("b")
    time.sleep(0.1)
    assert (labels.now(), values) == ({"profile": "a"}, ["a"])

    server.accept_connections()
    assert comes(labels, "b")


def test_a_watch_that_ends_or_falls_behind_is_opened_again(server, label, follow):
    label("a")
    labels, _ = follow()
    assert is_watching(server)

    server.fail(410, "WATCH", "nodes")
    server.end_watches()
    assert is_watching(server, times=3)

    label("b")
    assert comes(labels, "b")


def test_after_a_watch_whose_time_is_over_the_node_is_not_read_again(server, label, follow):
    label("a")
    labels, _ = follow(WatchIntervals(watch=1, first_retry=0.01))
    assert server.wait(lambda: server.count("WATCH", "nodes") >= 3, 30)

    label("b")

    assert comes(labels, "b")
    assert server.count("GET", "nodes") == 1


def test_an_api_server_that_ends_every_watch_at_once_is_asked_ever_less(server, label, follow):
    label("a")
    server.fail(410, "WATCH", "nodes", times=10**6)
    follow(WatchIntervals(watch=60, first_retry=0.05, last_retry=60))

    assert is_watching(server, times=2)
    time.sleep(0.3)
    assert server.count("WATCH", "nodes") <= 6


def test_a_node_that_is_deleted_keeps_its_labels_and_a_new_one_is_heard(server, label, follow):
    label("a")
    labels, _ = follow()
    assert is_watching(server)

    server.remove("nodes", NODE)
    time.sleep(0.05)
    assert value_of(labels) == "a"

    label("b")
    assert comes(labels, "b")
    assert labels.uid == "uid-b"


def test_an_annotation_that_is_followed_is_known_and_heard_of(server, label, follow):
    label("a")
    labels, _ = follow()
    assert (is_watching(server), labels.annotations()) == (True, {})
    seen = []
    labels.start(lambda: seen.append(dict(labels.annotations())), 0.0)

    for revision in ("", "p-1", None):
        annotate(server, revision=revision, elsewhere=str(revision))

    assert eventually(lambda: len(seen) == 3)
    assert seen == [{"revision": ""}, {"revision": "p-1"}, {}]


def test_an_annotation_that_nobody_follows_disturbs_nobody(server, label, follow):
    label("a")
    labels, values = follow()
    assert is_watching(server)

    annotate(server, elsewhere="1")
    annotate(server, revision="p-1")

    assert eventually(labels.annotations)
    assert values == ["a", "a"]


def annotate(server, **annotations):
    (node,) = server.objects("nodes")
    metadata = node["metadata"]
    every = {**(metadata.get("annotations") or {}), **annotations}
    kept = {name: value for name, value in every.items() if value is not None}
    server.put({**node, "metadata": {**metadata, "annotations": kept}})


def test_a_node_that_comes_back_with_the_same_labels_is_heard_of(server, label, follow):
    label("a")
    labels, values = follow()
    assert is_watching(server)

    server.remove("nodes", NODE)
    metadata = {"name": NODE, "uid": "another", "labels": {"profile": "a"}}
    server.put({"apiVersion": "v1", "kind": "Node", "metadata": metadata})

    assert eventually(lambda: labels.uid == "another")
    assert eventually(lambda: values == ["a", "a"])


def test_annotations_of_a_node_that_was_never_read_are_not_known(follow):
    labels, _ = follow(wait_seconds=0.0)

    with pytest.raises(ApiServerError):
        labels.annotations()


def put_with_status(server, kubelet, **allocatable):
    status = {"nodeInfo": {"kubeletVersion": kubelet}, "allocatable": allocatable}
    server.put({"kind": "Node", "metadata": {"name": NODE, "uid": "uid"}, "status": status})


def test_the_status_is_as_it_was_when_the_node_was_read_until_somebody_asks(server, follow):
    put_with_status(server, "v1.30.14", cpu="2")
    labels, _ = follow()
    assert is_watching(server)
    assert labels.status == NodeStatus("v1.30.14", {"cpu": "2"})

    put_with_status(server, "v1.36.3")
    assert labels.status == NodeStatus("v1.30.14", {"cpu": "2"})
    assert labels.read_status() == labels.status == NodeStatus("v1.36.3", {})


def test_in_an_outage_the_last_status_counts(server, follow):
    labels, _ = follow(wait_seconds=0.0)
    assert labels.status is None
    put_with_status(server, "v1.30.14")
    eventually(lambda: labels.status)
    server.fail(503, "GET", f"nodes/{NODE}", times=100)
    with pytest.raises(ApiServerError):
        labels.read_status()
    assert labels.status == NodeStatus("v1.30.14", {})
