"""What commands read of the own Node is there while it holds, in one annotation."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from dra_driver.base.errors import Unreachable
from dra_driver.plugin.node_api.annotation import AnnotationWriter

NODE, NAME = "node-1", "gpu.nvidia.com/device-plugin"


@dataclass
class Seen:
    """The Node as its labels and annotations were seen last."""

    there: dict[str, str] = field(default_factory=dict)
    is_away: bool = False
    node: str = NODE

    def annotations(self):
        if self.is_away:
            raise Unreachable("the API server does not answer")
        return self.there


class Scene:
    def __init__(self, server, client):
        self.server = server
        self.seen = Seen()
        self.text = "one"
        self.is_writer = True
        node: Any = self.seen
        self.writer = AnnotationWriter(
            client, node, NAME, lambda: self.text, lambda: self.is_writer
        )
        server.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})

    @property
    def annotations(self):
        (node,) = self.server.objects("nodes")
        return node["metadata"].get("annotations") or {}

    def write(self):
        """The seconds until the next try; the Node is seen as it is then."""
        seconds = self.writer.write()
        self.seen.there = dict(self.annotations)
        return seconds


@pytest.fixture
def scene(server, client):
    return Scene(server, client)


def test_it_is_written_once_and_again_where_it_changes_or_is_gone(scene):
    for _ in range(3):
        scene.write()
    assert scene.annotations == {NAME: "one"}
    assert scene.server.count("PATCH", f"nodes/{NODE}") == 1
    scene.text = "two"
    scene.write()
    assert scene.annotations == {NAME: "two"}
    scene.seen.there = {}  # of a Node that has registered again
    scene.write()
    assert scene.server.count("PATCH", f"nodes/{NODE}") == 3


def test_what_goes_without_a_word_is_written_again_at_the_next_look(scene):
    """While the watch was broken, for example: the Node was never seen with it."""
    seconds = scene.writer.write()
    metadata = {"name": NODE, "annotations": {}}
    scene.server.put({"apiVersion": "v1", "kind": "Node", "metadata": metadata})
    assert scene.annotations == {}

    assert seconds == 600, "nobody wakes it"
    scene.write()

    assert scene.annotations == {NAME: "one"}


def test_it_goes_where_there_is_nothing_to_say_and_others_stay(scene):
    metadata = {"name": NODE, "annotations": {NAME: "old", "other": "x"}}
    scene.server.put({"apiVersion": "v1", "kind": "Node", "metadata": metadata})
    scene.seen.there = {NAME: "old"}
    scene.text = None
    scene.write()
    scene.write()
    assert scene.annotations == {"other": "x"}
    assert scene.server.count("PATCH", f"nodes/{NODE}") == 1


def test_a_process_that_a_newer_one_replaces_writes_nothing(scene):
    scene.is_writer = False
    assert 0 < scene.write() < math.inf
    assert scene.annotations == {}


def test_a_write_that_fails_is_tried_again_and_told_once(scene, caplog):
    scene.server.fail(503, "PATCH", f"nodes/{NODE}", times=2)
    assert 0 < scene.write() < math.inf
    assert 0 < scene.write() < math.inf
    assert caplog.text.count("cannot be written") == 1
    assert scene.write() == 600
    assert scene.annotations == {NAME: "one"}


def test_while_the_annotations_are_not_known_nothing_is_written(scene):
    scene.seen.is_away = True
    assert 0 < scene.write() < math.inf
    assert scene.server.count("PATCH", f"nodes/{NODE}") == 0
