"""The log of a simulated kernel names the process of each Xid, once."""

import re

import pytest

from dra_driver.sim.host.directory import SimulatedHost
from dra_driver.sim.live_node import LiveNode
from tests.fakes.simulated import Node, two_gpus


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path, two_gpus())
    assert node.host
    return node


def log(node):
    """Its messages."""
    node.live.current()
    records = (node.root / "dev/kmsg").read_text().splitlines()
    for number, record in enumerate(records):
        assert re.match(rf"4,{number},\d+,-;NVRM: Xid ", record)
    return [record.partition(";")[2] for record in records]


def test_it_is_empty_at_first(node):
    assert log(node) == []


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"xid": 79}, "NVRM: Xid (PCI:0000:1b:00): 79, simulated"),
        (
            {"xid": 31, "pid": 1234, "name": "train"},
            "NVRM: Xid (PCI:0000:1b:00): 31, pid=1234, name=train, simulated",
        ),
        (
            {"xid": 31, "gi": 1, "ci": 0, "pid": 7},
            "NVRM: Xid (PCI:0000:1b:00 GPU-I:01 GPU-CI:00): 31, pid=7, name=python, simulated",
        ),
        ({"xid": 31, "gi": 12}, "NVRM: Xid (PCI:0000:1b:00 GPU-I:12): 31, simulated"),
    ],
)
def test_an_xid_is_logged_in_the_words_of_the_driver(node, event, message):
    node.change(0, events=[event])
    assert log(node) == [message]


def test_what_is_added_is_appended_for_each_time_it_happened(node):
    node.change(0, events=[{"xid": 13}])
    node.change(1, events=[{"xid": 43, "times": 2}, {"ecc": "uncorrectable"}])
    log(node)
    node.change(0, events=[{"xid": 13}, {"xid": 79}])
    assert [line.split(": ")[2].split(",")[0] for line in log(node)] == ["13", "43", "43", "79"]


def test_several_processes_log_an_xid_once(node):
    other = LiveNode(node.file)
    SimulatedHost(other, node.root)
    node.change(0, events=[{"xid": 79}])
    other.current()
    assert len(log(node)) == 1
    SimulatedHost(LiveNode(node.file), node.root)
    assert len(log(node)) == 1
