"""A node goes on with the revision that is in force, whatever is gone when its plugin starts."""

import threading
from typing import Any

import pytest

from dra_driver.base.errors import ApiServerError, SettingsError, Unreachable
from dra_driver.model.profiles import Profile
from dra_driver.node.state.profile_files import LastProfileFile
from dra_driver.plugin.publish.profiles import ActiveProfile, ProfileCatalog
from dra_driver.plugin.publish.selection import NodeProfileReader, ProfileSelector
from tests.fakes.mortal import Killed
from tests.plugin.publish.node_profiles import (
    LABEL,
    NAMESPACE,
    ChoosingNode,
    named,
    put_profile,
    put_revision,
)
from tests.waiting import eventually


class Plugin:
    """The plugin of one node: its state outlives its processes."""

    def __init__(self, client, directory):
        self.client = client
        self.directory = directory
        self.last = LastProfileFile(directory / "profile.json")
        self.node = ChoosingNode()
        self.choice: Any = None

    def start(self):
        self.stop()
        profiles = ProfileCatalog(self.directory / "profiles")
        reader = NodeProfileReader(self.client, NAMESPACE)
        selector = ProfileSelector(self.node, profiles.named, "", reader)
        self.choice = ActiveProfile(profiles, selector, self.node, 0.01, self.last)
        self.choice.start(0.0)
        return self

    def stop(self):
        if self.choice is not None:
            self.choice.stop()
            self.choice = None

    def in_force(self):
        try:
            profile = self.choice.current()
        except (SettingsError, ApiServerError):
            return None
        return profile.revision or f"file {profile.name}"


@pytest.fixture
def plugin(client, tmp_path):
    (tmp_path / "profiles").mkdir()
    made = Plugin(client, tmp_path)
    yield made
    made.stop()


def write_file(plugin, name, text="spec: {gpus: [{replicas: 2}]}"):
    head = "apiVersion: resource.nvidia.com/v1beta1\nkind: NodeProfile\n"
    (plugin.directory / "profiles" / name).write_text(f"{head}{text}\n")


@pytest.fixture
def given(server, plugin):
    """The node has a revision in force that the controller gave it."""
    name = put_revision(server, "inference", 4)
    put_profile(server, "inference", 4)
    plugin.node.given = name
    assert plugin.start().in_force() == name
    return name


def api_server_gone(server, plugin):
    server.refuse_connections()
    plugin.node.error = Unreachable("no answer")


def revision_gone(server, plugin):
    server.remove("controllerrevisions", plugin.node.given, NAMESPACE)


def profile_gone(server, plugin):
    server.remove("nodeprofiles", "inference")


def kind_gone(server, plugin):
    server.fail(404, "GET", "nodeprofiles", times=10**6)


def controller_gone(server, plugin):
    plugin.node.given = None


def files_gone(server, plugin):
    (plugin.directory / "profiles").rmdir()


LOSSES = {
    "API server": (api_server_gone,),
    "revision": (revision_gone,),
    "NodeProfile": (profile_gone, revision_gone),
    "CRD": (kind_gone, revision_gone),
    "annotation": (controller_gone,),
    "annotation and CRD": (kind_gone, controller_gone),
    "ConfigMap": (files_gone,),
    "all": (files_gone, kind_gone, revision_gone, controller_gone, api_server_gone),
}


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_whatever_is_lost_the_revision_stays_in_force(server, plugin, given, losses, restarts):
    for lose in losses:
        lose(server, plugin)
    plugin.node.set(plugin.node.given)

    for _ in range(restarts):
        plugin.start()
    assert plugin.in_force() == given
    assert plugin.last.read().revision == given


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
def test_a_labelled_profile_stays_in_force_too(server, plugin, losses):
    put_profile(server, "inference", 4)
    plugin.node.labels = {LABEL: "inference"}
    plugin.node.given = put_revision(server, "inference", 4)
    plugin.start()
    for lose in losses:
        lose(server, plugin)

    assert plugin.start().in_force() == named("inference", 4)


def test_a_revision_that_cannot_be_used_leaves_the_last_one_and_is_said_after_a_restart(
    server, plugin, given
):
    plugin.node.set("inference-gone")
    assert eventually(lambda: plugin.choice.error)

    for _ in range(2):
        state = plugin.choice.state
        assert plugin.in_force() == given
        assert state.selected.revision == "inference-gone"
        assert "not found" in str(state.problem)
        assert plugin.choice.error.endswith("; profile 'inference' stays in force")
        plugin.start()


def test_a_revision_that_comes_late_is_found_without_another_change(server, plugin, given):
    plugin.node.set(named("inference", 8))
    assert eventually(lambda: plugin.choice.error)

    put_revision(server, "inference", 8)
    assert eventually(lambda: plugin.in_force() == named("inference", 8), seconds=15)


def test_a_node_that_has_nothing_and_can_ask_nobody_has_no_profile(server, plugin):
    put_profile(server, "inference", 4)
    api_server_gone(server, plugin)
    assert plugin.start().in_force() is None

    server.accept_connections()
    plugin.node.error = None
    plugin.node.set()
    assert eventually(lambda: plugin.in_force() == named("inference", 4))


def test_from_the_controllers_word_the_files_hold_again_also_after_a_restart(server, plugin, given):
    write_file(plugin, "default")
    plugin.node.set("")
    assert eventually(lambda: plugin.in_force() == "file default")

    controller_gone(server, plugin)
    assert plugin.start().in_force() == "file default"


def test_a_change_of_the_files_counts_on_a_node_of_files(server, plugin):
    write_file(plugin, "default")
    assert plugin.start().in_force() == "file default"
    put_profile(server, "inference", 4)

    write_file(plugin, "default", "spec: {gpus: [{replicas: 3}]}")
    assert eventually(lambda: plugin.choice.current().entries[0].rules.replicas == 3)
    assert plugin.start().in_force() == "file default"


def test_a_new_revision_counts_within_moments_by_one_request(server, plugin, given):
    server.forget_requests()
    plugin.node.set(put_revision(server, "inference", 8))

    assert eventually(lambda: plugin.in_force() == named("inference", 8))
    assert [request.method for request in server.requests] == ["GET"]


class MortalFile:
    """Keeps the profile, and dies before or after that."""

    def __init__(self, last, carried_out):
        self._last = last
        self._carried_out = carried_out

    def read(self):
        return self._last.read()

    def keep(self, profile):
        if self._carried_out:
            self._last.keep(profile)
        raise Killed


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("before", ["", "inference-1"])
def test_a_plugin_that_dies_at_the_write_is_followed_by_one_that_has_the_same(
    server, plugin, before, carried_out
):
    """And what was not kept was not in force: nobody was told of it."""
    plugin.node.given = put_revision(server, "inference", 4)
    if before:
        plugin.last.keep(Profile("inference", revision=before))
    kept, plugin.last = plugin.last, MortalFile(plugin.last, carried_out)
    with pytest.raises(Killed):
        plugin.start()
    assert plugin.in_force() == (before or None)
    plugin.choice, plugin.last = None, kept

    assert plugin.start().in_force() == named("inference", 4)
    assert plugin.last.read().revision == named("inference", 4)


def test_a_disk_that_is_full_keeps_no_revision_from_coming_into_force(server, plugin):
    plugin.last = LastProfileFile(plugin.directory / "profiles" / "none" / "profile.json")
    (plugin.directory / "profiles" / "none").write_text("a file in the way")
    plugin.node.given = put_revision(server, "inference", 4)

    assert plugin.start().in_force() == named("inference", 4)


def test_the_moment_is_known_since_when_a_revision_is_in_force(server, plugin, given):
    before = plugin.choice.state.since
    changed = threading.Event()
    plugin.choice.on_change.append(changed.set)
    plugin.node.set(put_revision(server, "inference", 8))

    assert changed.wait(20)
    assert plugin.choice.state.since > before
