"""A label of the own Node, and of no other, says how far its layouts are."""

import pytest

from dra_driver.base.errors import ApiServerError
from dra_driver.base.threads import UNTIL_WOKEN
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.k8s.watch import WatchIntervals
from dra_driver.model.mig_layouts import LayoutState
from dra_driver.plugin.mig.state_label import MigStateLabel

NODE, LABEL = "n1", "nvidia.com/mig.config.state"
OTHERS = {"kubernetes.io/hostname": NODE}


@pytest.fixture(autouse=True)
def nodes(server):
    for name in (NODE, "n2"):
        server.put(node(OTHERS, name))


@pytest.fixture
def state(server, client):
    """The labels are read anew each time, not watched."""
    return MigStateLabel(client, NODE, lambda: labels_of(server))


def node(labels, name=NODE):
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


def labels_of(server, name=NODE):
    nodes = {each["metadata"]["name"]: each for each in server.objects("nodes")}
    return nodes[name]["metadata"].get("labels", {})


def patches(server):
    return server.count("PATCH", "nodes")


def test_the_state_is_a_label_of_the_own_node_beside_the_others(server, state):
    state.tell(LayoutState.SUCCESS)
    state.write()

    assert labels_of(server) == {**OTHERS, LABEL: "success"}
    assert labels_of(server, "n2") == OTHERS


def test_it_is_written_only_when_it_changes(server, state):
    for each in (LayoutState.PENDING, LayoutState.PENDING, LayoutState.FAILED, LayoutState.FAILED):
        state.tell(each)
        state.write()

    assert labels_of(server)[LABEL] == "failed"
    assert patches(server) == 2


class Slices:
    """What is published: everything that was so later than *at*."""

    at = float("-inf")

    def since(self, moment):
        return self.at > moment


@pytest.mark.parametrize("before", [LayoutState.PENDING, LayoutState.FAILED])
def test_success_is_told_once_the_slices_say_so(server, client, before):
    slices = Slices()
    state = MigStateLabel(client, NODE, lambda: labels_of(server), published=slices.since)
    server.put(node({**OTHERS, LABEL: "success"}))  # of another layout
    state.tell(before)
    state.tell(LayoutState.SUCCESS)

    assert (state.write() or 60) < 1
    assert labels_of(server)[LABEL] == "pending"
    slices.at = 0.0  # what was published some time before does not count
    assert (state.write() or 60) < 1

    slices.at = float("inf")
    assert state.write() == UNTIL_WOKEN
    assert labels_of(server)[LABEL] == "success"
    slices.at = float("-inf")
    assert state.write() == UNTIL_WOKEN
    assert (labels_of(server)[LABEL], patches(server)) == ("success", 2)


def test_a_new_process_does_not_take_back_what_is_there(server, client):
    state = MigStateLabel(client, NODE, lambda: labels_of(server), published=Slices().since)
    server.put(node({**OTHERS, LABEL: "success"}))
    state.tell(LayoutState.SUCCESS)

    assert state.write() == UNTIL_WOKEN
    assert patches(server) == 0


def test_an_api_server_that_is_away_is_not_asked_in_a_hurry(server, client):
    state = MigStateLabel(client, NODE, lambda: OTHERS, published=Slices().since)
    server.refuse_connections()
    state.tell(LayoutState.PENDING)
    state.tell(LayoutState.SUCCESS)

    assert state.write() is None


def test_it_comes_back_with_a_node_that_registered_again(server, state):
    state.tell(LayoutState.SUCCESS)
    state.write()
    server.put(node(OTHERS))

    state.write()

    assert labels_of(server)[LABEL] == "success"


def test_without_a_layout_our_label_goes(server, state):
    state.tell(LayoutState.SUCCESS)
    state.write()
    state.tell(None)
    state.write()

    assert labels_of(server) == OTHERS


def test_so_does_the_label_of_an_earlier_process_of_ours(server, client):
    server.put(node({**OTHERS, LABEL: "success"}))
    state = MigStateLabel(client, NODE, lambda: labels_of(server), ours=True)

    state.write()
    assert labels_of(server)[LABEL] == "success"  # nobody has said yet what is wanted
    state.tell(None)
    state.write()

    assert labels_of(server) == OTHERS


def test_without_a_layout_the_label_of_somebody_else_stays(server, state):
    server.put(node({**OTHERS, LABEL: "rebooting"}))

    state.tell(None)
    state.write()

    assert labels_of(server)[LABEL] == "rebooting"
    assert patches(server) == 0


def test_an_api_server_that_is_away_is_asked_again_and_that_is_told_once(server, state, caplog):
    state.tell(LayoutState.FAILED)
    server.fail(503, "PATCH", times=2)
    state.write()
    state.write()
    assert LABEL not in labels_of(server)
    assert caplog.text.count("the state of the layout is not on the Node") == 1

    state.write()
    assert labels_of(server)[LABEL] == "failed"


def test_a_right_that_is_missing_is_told(server, state, caplog):
    server.deny("patch", "nodes")

    state.tell(LayoutState.FAILED)
    state.write()

    assert "nodes is forbidden" in caplog.text


def test_nothing_is_written_while_the_labels_are_not_known(server, client):
    def unknown():
        raise ApiServerError("not read yet")

    state = MigStateLabel(client, NODE, unknown)

    state.tell(LayoutState.SUCCESS)
    state.write()

    assert patches(server) == 0


def test_its_thread_writes_soon_after_it_is_told(server, client):
    labels = NodeLabels(client, NODE, WatchIntervals(watch=60, first_retry=0.01))
    state = MigStateLabel(client, NODE, labels.now)
    labels.start(lambda: None, 5.0)
    labels.start(state.loop.soon, 0.0)
    state.loop.start()

    state.tell(LayoutState.PENDING)
    assert server.wait(lambda: labels_of(server).get(LABEL) == "pending")
    server.put(node(OTHERS))
    assert server.wait(lambda: labels_of(server).get(LABEL) == "pending")

    state.loop.stop()
    labels.stop()
