"""What becomes of a profile is on the Node, in one condition, once it is true."""

import math
import time
from typing import Any

import pytest

from dra_driver.base.errors import NodeError, NotFound, SettingsError, Unreachable
from dra_driver.model.node_profiles import NodeReport
from dra_driver.model.offer import Offer
from dra_driver.model.profiles import Profile
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.profiles.report import report_condition
from dra_driver.plan.profiles.selection import SelectedProfile
from dra_driver.plugin.node_condition import ConditionWriter
from dra_driver.plugin.publish.condition import UnlistedDevices, node_report, not_offered_so
from dra_driver.plugin.publish.profiles import ActiveProfileState
from tests.builders import gpu
from tests.plan.device_plugin.offers import offer_of
from tests.plugin.publish.node_profiles import NODE, ChoosingNode
from tests.plugin.publish.test_scanner import Scene

READY = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "it is ready"}
PATH = f"nodes/{NODE}/status"
IN_FORCE = NodeReport("inference", "inference-1")
REFUSED = NodeReport("inference", "inference-2", refusal="spec.gpus: no")


class Reporting:
    """A writer of the condition of a Node, which says *report*."""

    def __init__(self, server, client, report=None):
        self.server = server
        self.report = report
        self.node: Any = ChoosingNode()
        self.is_newest = True
        register(server)
        self.restart(client)

    def restart(self, client):
        self.writer = ConditionWriter(
            client,
            self.node,
            "GPUsConfigured",
            lambda: self.report and report_condition(self.report),
            lambda: self.is_newest,
        )

    def write(self, report=None):
        """Have *report* written; the seconds until the condition is looked at again."""
        self.report = report or self.report
        self.writer.update()
        return self.writer.write()

    @property
    def condition(self):
        """The condition on the Node without the time; None: there is none."""
        conditions = self.server.objects("nodes")[0]["status"]["conditions"]
        assert READY in conditions
        return next((each for each in conditions if each["type"] == "GPUsConfigured"), None)

    @property
    def message(self):
        return self.condition and self.condition["message"]

    def writes(self):
        return self.server.count("PATCH", PATH)


def register(server):
    metadata = {"name": NODE, "labels": {}}
    status = {"conditions": [READY], "capacity": {"cpu": "8"}}
    server.put({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status})


@pytest.fixture
def node(server, client):
    return Reporting(server, client)


def test_the_condition_says_what_is_in_force_and_nothing_else_changes(server, node):
    node.write(IN_FORCE)

    condition = node.condition
    assert condition.pop("lastTransitionTime").endswith("Z")
    assert condition.pop("lastHeartbeatTime").endswith("Z")
    assert condition == {
        "type": "GPUsConfigured",
        "status": "True",
        "reason": "ProfileInForce",
        "message": "NodeProfile inference, revision inference-1: in force",
    }
    assert server.objects("nodes")[0]["status"]["capacity"] == {"cpu": "8"}


def test_it_is_written_when_it_changes_and_not_again(node):
    for report in (IN_FORCE, IN_FORCE, REFUSED, REFUSED):
        node.write(report)

    assert node.writes() == 2
    assert node.condition["reason"] == "ProfileRefused"


def test_the_time_is_that_of_the_last_other_status(server, node, client):
    node.write(IN_FORCE)
    times = dict.fromkeys(("lastTransitionTime", "lastHeartbeatTime"), "2020-01-01T00:00:00Z")
    before = {**node.condition, **times}
    [stored] = server.objects("nodes")
    stored["status"]["conditions"] = [READY, before]
    server.put(stored)
    node.restart(client)

    node.write(NodeReport("inference", "inference-1", pending=1, pending_gpus=("gpu-0",)))
    assert node.condition["lastTransitionTime"] == "2020-01-01T00:00:00Z"
    assert node.condition["lastHeartbeatTime"] != "2020-01-01T00:00:00Z"
    node.write(REFUSED)
    assert node.condition["lastTransitionTime"] != "2020-01-01T00:00:00Z"


def test_a_restart_writes_nothing_that_is_there_already(node, client):
    node.write(IN_FORCE)
    node.restart(client)

    node.write(IN_FORCE)
    assert node.writes() == 1


def test_where_an_older_release_wrote_no_time_it_is_written_again(server, node, client):
    node.write(IN_FORCE)
    condition = node.condition
    del condition["lastHeartbeatTime"]
    [stored] = server.objects("nodes")
    stored["status"]["conditions"] = [READY, condition]
    server.put(stored)
    node.restart(client)

    node.write(IN_FORCE)
    assert node.condition["lastHeartbeatTime"]


def test_it_is_looked_at_within_ten_minutes_and_not_by_all_nodes_at_once(server, node):
    waits = {node.write(IN_FORCE) for _ in range(20)}
    assert len(waits) > 1
    assert all(300 < wait <= 600 for wait in waits)

    register(server)  # somebody took it away
    assert node.condition is None
    node.writer.write()
    assert node.message.endswith("in force")


def test_a_node_that_registered_again_gets_it_at_once(server, node):
    node.write(IN_FORCE)
    server.remove("nodes", NODE)
    register(server)
    node.node.uid = "uid-2"

    node.write()
    assert node.message.endswith("in force")


def test_a_node_that_registered_again_gets_another_report_with_a_time_of_its_own(server, node):
    node.write(IN_FORCE)
    server.remove("nodes", NODE)
    register(server)
    node.node.uid = "uid-2"

    node.write(NodeReport("inference", "inference-3"))
    assert node.condition["lastTransitionTime"]


def test_an_older_process_leaves_it_to_the_newest(node):
    node.is_newest = False
    node.write(IN_FORCE)
    assert node.condition is None

    node.is_newest = True
    node.writer.write()
    assert node.message.endswith("in force")


@pytest.mark.parametrize("status", [403, 422, 503, 404])
def test_an_api_server_that_refuses_it_is_told_once_and_asked_ever_more_seldom(
    server, node, caplog, status
):
    server.fail(status, "PATCH", PATH, times=100)

    waits = [node.write(IN_FORCE) for _ in range(12)]

    messages = [record for record in caplog.records if "is not on the Node" in record.message]
    assert len(messages) == 1
    assert waits[0] <= 1
    assert 150 <= waits[-1] <= 300
    server.heal()
    assert node.write() > 300
    assert node.message.endswith("in force")


def test_scans_hasten_no_write_that_failed(server, node):
    server.fail(403, "PATCH", PATH, times=100)
    node.report = IN_FORCE
    node.writer.loop.start()
    for _ in range(30):
        node.writer.update()
        time.sleep(0.01)
    node.writer.loop.stop()

    assert node.writes() <= 2


def test_another_report_is_written_at_once_although_the_last_write_failed(server, node):
    server.fail(403, "PATCH", PATH, times=100)
    for _ in range(12):
        node.write(IN_FORCE)
    node.writer.loop.start()
    assert server.wait(lambda: node.writes() == 13)
    server.heal()

    node.report = REFUSED
    node.writer.update()

    assert server.wait(lambda: "refused" in (node.message or ""), 20)
    node.writer.loop.stop()


@pytest.mark.parametrize("kill", ["before", "after"])
def test_a_process_that_dies_at_the_write_leaves_it_to_the_next_one(server, node, client, kill):
    node.write(REFUSED)
    if kill == "before":
        server.hang_up("PATCH", PATH)
    node.write(IN_FORCE)
    node.restart(client)

    node.write(IN_FORCE)
    assert node.message.endswith("in force")
    assert node.condition["status"] == "True"


def test_while_nothing_is_known_nothing_is_written(node):
    assert node.write() == math.inf
    node.write(IN_FORCE)
    node.report = None
    node.write()

    assert node.writes() == 1


SELECTED = SelectedProfile("inference", "the controller", of_files=False, revision="inference-1")
PROFILE = Profile("inference", revision="inference-1")


def test_a_profile_is_reported_in_force_once_it_is_in_an_offer():
    state = ActiveProfileState(PROFILE, SELECTED, since=10.0)

    assert node_report(state, 9.0, ()) is None
    assert node_report(state, 10.0, ()) is None
    assert node_report(state, 11.0, ()) == NodeReport("inference", "inference-1")


def test_gpus_in_use_are_counted_and_named():
    state = ActiveProfileState(PROFILE, SELECTED, since=10.0)

    pending = ("gpu-0", "gpu-3")
    report = NodeReport("inference", "inference-1", pending=2, pending_gpus=pending)
    assert node_report(state, 11.0, pending) == report


@pytest.mark.parametrize("problem", [SettingsError("no"), NotFound("it is gone")])
@pytest.mark.parametrize("in_force", [None, Profile("old", revision="old-1")])
def test_what_cannot_be_used_is_reported_with_the_reason_whatever_stays_in_force(problem, in_force):
    state = ActiveProfileState(in_force, SELECTED, problem, since=10.0)

    report = node_report(state, -math.inf, ())
    assert report == NodeReport("inference", "inference-1", refusal=str(problem))


def test_what_the_kubelet_is_not_told_is_reported_and_found_once_for_each_offer():
    state = ActiveProfileState(PROFILE, SELECTED, since=10.0)
    offer, nameless = offer_of(gpu(0)), UnlistedDevices(ResourceNames(gpu=""))

    problems = nameless.problems(offer)

    assert nameless.problems(offer) is problems
    assert nameless.problems(Offer()) == ()
    report = node_report(state, 11.0, (), problems)
    assert report is not None
    assert report.not_possible == (
        "gpu-0: nobody can ask for it, because --extended-resource-name is empty"
    )


def test_gpus_that_cannot_be_offered_as_the_profile_says_are_reported_by_reason():
    state = ActiveProfileState(PROFILE, SELECTED, since=10.0)
    possible = offer_of(gpu(0), replicas=4, limited=False)
    too_many = offer_of(gpu(0), gpu(1), replicas=10**6, limited=False)

    assert tuple(not_offered_so(possible)) == ()
    report = node_report(state, 11.0, (), tuple(not_offered_so(too_many)))
    assert report is not None
    assert report.not_possible.startswith(
        "gpu-0, gpu-1: profile 'p', spec.gpus[0]: 1000000 replicas would be as many devices"
    )


def test_an_outage_is_no_refusal():
    state = ActiveProfileState(PROFILE, SELECTED, Unreachable("no answer"), since=10.0)

    assert node_report(state, 11.0, ()) is None


def test_a_profile_of_the_files_is_reported_as_such():
    state = ActiveProfileState(
        Profile("default"), SelectedProfile("default", "nothing chooses another"), since=10.0
    )

    assert node_report(state, 11.0, ()) == NodeReport("default", of_files=True)


def test_while_it_is_not_known_what_is_selected_nothing_is_reported():
    state = ActiveProfileState(PROFILE, None, Unreachable("no answer"), since=10.0)

    assert node_report(state, 11.0, ()) is None


def test_gpus_that_cannot_be_read_put_nothing_in_force():
    """What was reported before stays: the controller waits, and gives up at its deadline."""
    scene = Scene()
    scene.scanner.scan()
    state = ActiveProfileState(PROFILE, SELECTED, since=scene.scanner.scanned_at + 1e9)

    def fail():
        raise NodeError("the PCI bus cannot be read")

    scene.profile = fail
    updates = []
    scene.scanner.scanned = lambda: updates.append(
        node_report(state, scene.scanner.scanned_at, scene.scanner.pending_gpus)
    )
    scene.scanner.scan()
    assert updates == [None]
