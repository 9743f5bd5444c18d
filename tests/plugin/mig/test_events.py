"""Events about layouts and MIG modes are events of the Node; each is posted once."""

import threading
import time

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.k8s.events import EventRecorder
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.k8s.watch import WatchIntervals
from dra_driver.plan.mig.manager.state import MigEvent, failure_event
from dra_driver.plugin.mig.start import post_event
from tests.plugin.mig.reconciler import profile

NODE = "n1"


def test_an_error_while_partitioning_is_told_and_so_is_that_it_works_again(scene, board):
    def step(call):
        if call.startswith("CI"):
            raise NodeError("NVML: unknown error")

    scene.label, scene.boards.step = "all-1g.5gb", step
    scene.look()
    ((reason, words),) = scene.new_events()
    assert (reason, "NVML: unknown error" in words) == ("MIGLayoutFailed", True)
    assert words.endswith("the GPU is as it was before")

    scene.next_process()

    assert [reason for reason, _ in scene.new_events()] == ["MIGLayoutApplied"]


def test_a_board_that_cannot_be_switched_is_told_once_for_each_change_of_the_words(scene, board):
    scene.profile = profile(dynamic=True)
    for pid in (4711, 4711, 12):
        board.used = {None: pid}
        scene.look()

    waits = "MIG mode of gpu-0 is not turned on yet: processes use it"
    assert scene.new_events() == [
        ("MIGModeNotSet", f"{waits}: process {pid}") for pid in (4711, 12)
    ]


@pytest.fixture
def labels(server, client):
    server.put(node("uid-node"))
    labels = NodeLabels(client, NODE, WatchIntervals(watch=60, first_retry=0.01))
    yield labels
    labels.stop()


def node(uid, **labels):
    metadata = {"name": NODE, "uid": uid, "labels": labels}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


@pytest.fixture
def events(client):
    events = EventRecorder(client, "gpu.nvidia.com", NODE)
    yield events
    events.stop()


def written(server):
    return [
        (event["involvedObject"], event["type"], event["reason"], event["message"])
        for event in server.objects("events")
    ]


def test_the_own_node_has_it_as_an_event(server, labels, events):
    labels.start(lambda: None, 5)

    post_event(events, labels, failure_event("there is no layout 'x'"))
    post_event(
        events,
        labels,
        MigEvent("MIGLayoutApplied", "all", "partitioned as layout 'all' says: gpu-0"),
    )

    assert server.wait(lambda: len(written(server)) == 2)
    own = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "uid-node"}
    assert sorted(written(server), key=lambda event: event[1]) == [
        (own, "Normal", "MIGLayoutApplied", "partitioned as layout 'all' says: gpu-0"),
        (own, "Warning", "MIGLayoutFailed", "there is no layout 'x'"),
    ]


def test_a_node_that_registered_again_has_its_own_events(server, labels, events):
    changed = threading.Event()
    labels.start(lambda: None, 5)
    labels.start(changed.set, 5)
    assert server.wait(lambda: server.count("WATCH", "nodes") == 1)
    server.remove("nodes", NODE)
    server.put(node("uid-new", a="b"))
    assert changed.wait(5)

    post_event(events, labels, failure_event("there is no layout 'x'"))

    assert server.wait(lambda: len(written(server)) == 1)
    assert written(server)[0][0]["uid"] == "uid-new"


def test_nobody_waits_for_an_api_server_that_is_away(server, labels, events):
    server.refuse_connections()
    began = time.monotonic()

    for number in range(500):
        post_event(events, labels, failure_event(f"there is no layout '{number}'"))

    assert time.monotonic() - began < 20
