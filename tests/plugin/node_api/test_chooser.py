"""A node goes from one API to the other and back, whatever happens in between."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.base.errors import NodeError
from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.node.state.node_api_file import ServedApi, ServedApiFile
from dra_driver.plan.node_annotation import DevicePluginHolders
from dra_driver.plan.node_api import ApiState
from dra_driver.plugin.node_api.facts import ClusterFacts
from tests.plugin.node_api.world import (
    APIS,
    AUTO,
    DEVICE_PLUGIN,
    DRA,
    NEW,
    NOBODY_ANSWERS,
    OLD,
    SETTLE_SECONDS,
    Killed,
    World,
)

ON, DRAINING, OFF = ApiState.ON, ApiState.DRAINING, ApiState.OFF
OTHER = {DRA: DEVICE_PLUGIN, DEVICE_PLUGIN: DRA}
HELD = ("pod default/train",)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def serving(world, api):
    """The node serves *api*, as its profile says."""
    world.asked = api
    world.settle()
    assert world.state(api) is ON
    return world


def kept(world):
    return ServedApiFile(world.path).read()


@pytest.mark.parametrize(("cluster", "api"), [(NEW, DRA), (OLD, DEVICE_PLUGIN)])
def test_a_new_node_serves_what_its_cluster_can_do_after_one_look(tmp_path, cluster, api):
    world = World(tmp_path, cluster)
    assert world.node_api.serving is None
    world.step()
    assert world.state(api) is ON
    assert world.served == {api}
    assert kept(world) == ServedApi(api)
    assert (world.looks, world.lists) == (1, 0)


def test_a_node_at_rest_asks_nobody_and_writes_nothing(world):
    serving(world, DRA)
    looks, writes = world.looks, world.file.writes
    for _ in range(9):
        world.step(30.0)
    assert (world.looks, world.lists, world.file.writes) == (looks, 0, writes)
    assert world.step() > 30.0


@pytest.mark.point(160)
@pytest.mark.parametrize("api", APIS)
def test_a_node_changes_once_nobody_holds_a_gpu_and_nothing_can_come_any_more(world, api):
    serving(world, api)
    world.holders[api] = HELD
    world.asked = OTHER[api]
    world.settle(3600)
    assert world.state(api) is ON
    assert world.node_api.choice.waits_for == HELD

    world.holders[api] = ()
    world.chooser.given_back()
    world.step()
    assert world.state(api) is DRAINING
    assert world.state(OTHER[api]) is OFF
    assert not world.slices
    assert "is about to" in (world.node_api.refusal(api) or "")
    began = world.now
    while world.state(api) is not OFF:
        world.step(0.5)
        assert not (ON in {world.state(api)} and world.served == set(APIS))
    assert world.now - began >= SETTLE_SECONDS
    assert world.state(OTHER[api]) is ON
    assert kept(world) == ServedApi(OTHER[api])


@pytest.mark.parametrize("api", APIS)
def test_what_comes_while_the_node_drains_takes_it_back(world, api):
    serving(world, api)
    world.asked = OTHER[api]
    world.step()
    assert world.state(api) is DRAINING
    world.holders[api] = HELD
    world.settle(SETTLE_SECONDS + 5)
    assert world.state(api) is ON
    assert kept(world) == ServedApi(api)

    world.holders[api] = ()
    world.settle()
    assert world.state(OTHER[api]) is ON


@pytest.mark.parametrize("api", APIS)
def test_that_nobody_held_anything_before_the_node_drained_is_no_answer(world, api):
    """Something may have been given out until then, of which the kubelet was not asked yet."""
    serving(world, api)
    world.asked_at = world.now
    world.asked = OTHER[api]
    world.step(1.0)
    assert world.state(api) is DRAINING
    world.settle(SETTLE_SECONDS + 5)
    assert world.served == {api}

    world.asked_at = float("inf")
    world.settle()
    assert world.state(OTHER[api]) is ON


@pytest.mark.parametrize("api", APIS)
def test_a_node_goes_back_as_it_came(world, api):
    serving(world, api)
    serving(world, OTHER[api])
    assert world.slices is (OTHER[api] is DRA)
    serving(world, api)
    assert world.slices is (api is DRA)


def test_all_claims_are_listed_once_nothing_can_come_and_not_meanwhile(world):
    serving(world, DRA)
    world.asked = DEVICE_PLUGIN
    world.settle()
    assert world.state(DEVICE_PLUGIN) is ON
    assert world.lists == 2


def test_who_is_waited_for_is_asked_ever_more_seldom_and_often_again_when_something_came_back(
    world,
):
    serving(world, DRA)
    world.holders[DRA] = ("claim default/allocated",)
    world.asked = DEVICE_PLUGIN
    waits = [world.step()]
    for _ in range(9):
        waits.append(world.step(waits[-1]))
    assert waits[0] <= 2
    assert waits[-1] == 60
    world.chooser.given_back()
    assert world.step() <= 2


@pytest.mark.parametrize("api", APIS)
def test_who_holds_gpus_is_not_known_and_so_nothing_changes(world, api):
    serving(world, api)
    world.holders[api] = None
    world.asked = OTHER[api]
    world.settle(3600)
    assert world.state(api) is ON
    assert world.node_api.choice.waits_for == ("an answer to who holds GPUs",)


def test_slices_that_cannot_be_removed_keep_the_node_from_changing(world):
    serving(world, DRA)
    world.api_server_is_away = True
    world.asked = DEVICE_PLUGIN
    world.settle(3600)
    assert world.state(DRA) is DRAINING
    assert world.slices

    world.api_server_is_away = False
    world.settle()
    assert world.state(DEVICE_PLUGIN) is ON
    assert not world.slices


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("held", [(), HELD])
def test_an_outage_changes_nothing(world, api, held):
    serving(world, api)
    world.asked = AUTO
    world.cluster = NOBODY_ANSWERS
    world.holders[api] = held
    world.chooser.ask_again()
    world.settle(3600)
    assert world.state(api) is ON
    world.start()
    assert world.state(api) is ON
    world.settle(3600)
    assert world.state(api) is ON


@pytest.mark.parametrize("api", APIS)
def test_an_outage_ends_a_change_that_has_not_come_far(tmp_path, api):
    world = serving(World(tmp_path, NEW if api is DRA else OLD), api)
    world.asked = AUTO
    world.cluster = OLD if api is DRA else NEW
    world.chooser.ask_again()
    world.step()
    assert world.state(api) is DRAINING
    world.cluster = NOBODY_ANSWERS
    world.chooser.ask_again()
    world.settle(3600)
    assert world.state(api) is ON

    world.cluster = OLD if api is DRA else NEW
    world.chooser.ask_again()
    world.settle(600)
    assert world.state(OTHER[api]) is ON


def test_while_nothing_is_known_from_the_start_nothing_is_served_and_it_is_asked_again(tmp_path):
    world = World(tmp_path, NOBODY_ANSWERS)
    waits = [world.step()]
    for _ in range(12):
        waits.append(world.step(waits[-1]))
    assert world.served == set()
    assert kept(world) is None
    assert waits[0] <= 1
    assert waits[-1] == 60

    world.cluster = NEW
    world.settle(60)
    assert world.state(DRA) is ON


@pytest.mark.parametrize("api", APIS)
def test_a_restart_changes_nothing(world, api):
    serving(world, api)
    world.cluster = NOBODY_ANSWERS
    world.start()
    assert world.state(api) is ON
    assert world.served == {api}


@pytest.mark.parametrize("api", APIS)
def test_a_restart_while_the_node_drains_goes_on_with_that(world, api):
    serving(world, api)
    world.asked = OTHER[api]
    world.step()
    assert world.state(api) is DRAINING
    world.start()
    assert world.state(api) is DRAINING
    began = world.now
    world.settle(SETTLE_SECONDS / 2)
    assert world.state(api) is DRAINING  # what was found before the restart does not count
    world.settle()
    assert world.now > began
    assert world.state(OTHER[api]) is ON


@pytest.mark.parametrize("api", APIS)
def test_a_node_whose_choice_is_lost_goes_on_with_what_is_held(world, api):
    serving(world, api)
    world.holders[api] = HELD
    world.path.write_text("{")
    world.cluster = NOBODY_ANSWERS
    world.start()
    assert world.state(api) is ON


@pytest.mark.parametrize("kill", ["before", "after"])
@pytest.mark.parametrize("write", [1, 2])
@pytest.mark.parametrize("api", APIS)
def test_killed_at_any_write_of_a_change_the_next_process_ends_it(world, api, write, kill):
    """The first write is that the node drains, the second one that it has changed."""
    serving(world, api)
    world.asked = OTHER[api]
    until = world.file.writes + write
    with pytest.raises(Killed):
        while True:
            world.file.kill = kill if world.file.writes == until - 1 else ""
            world.step(1.0)
            assert world.served != set(APIS)

    world.start()
    assert world.served != set(APIS)
    world.settle()
    assert world.served == {OTHER[api]}
    assert world.state(OTHER[api]) is ON


def test_nobody_acts_on_a_choice_that_cannot_be_kept(world):
    serving(world, DRA)
    world.asked = DEVICE_PLUGIN
    world.file.full = True
    for _ in range(9):
        with pytest.raises(NodeError, match="no space"):
            world.step(30.0)
        assert world.state(DRA) is ON

    world.file.full = False
    world.settle()
    assert world.state(DEVICE_PLUGIN) is ON


def test_a_listener_that_fails_is_called_again_soon_and_keeps_no_other_from_hearing(world, caplog):
    serving(world, DRA)
    calls = []

    def fail():
        calls.append("fails")
        if len(calls) < 3:
            raise ValueError("a fault")

    world.node_api.listeners.insert(0, fail)
    world.asked = DEVICE_PLUGIN
    assert world.step() <= 1
    assert not world.slices
    world.step(1.0)
    world.step(1.0)
    assert len(calls) == 3
    world.step(1.0)
    assert len(calls) == 3


def test_a_process_that_a_newer_one_replaces_follows_it_and_asks_nobody(world, tmp_path):
    serving(world, DRA)
    looks = world.looks
    world.is_newest = False
    world.asked = DEVICE_PLUGIN
    assert world.step() == 2
    assert world.state(DRA) is ON

    ServedApiFile(world.path).write(ServedApi(DRA, draining=True))
    world.step(2)
    assert world.state(DRA) is DRAINING
    ServedApiFile(world.path).write(ServedApi(DEVICE_PLUGIN))
    world.step(2)
    assert world.served == {DEVICE_PLUGIN}
    assert world.looks == looks

    world.is_newest = True  # the newer one ended
    world.step(2)
    assert world.state(DEVICE_PLUGIN) is ON


@pytest.mark.parametrize("api", APIS)
def test_a_process_that_is_the_newest_again_waits_anew_until_nothing_can_come(world, api):
    """The newer one may have given something out a moment ago."""
    serving(world, api)
    world.asked = OTHER[api]
    world.step()
    world.step()
    assert world.state(api) is DRAINING
    world.is_newest = False
    world.step(2)
    world.is_newest = True
    looks = world.looks
    world.step(60)
    began = world.now
    assert world.state(api) is DRAINING
    assert world.looks == looks + 1, "the cluster may be another one now"
    while world.state(api) is not OFF:
        world.step(0.5)
    assert world.now - began >= SETTLE_SECONDS


def test_a_kubelet_that_was_restarted_is_asked_for_its_version_once_it_has_told(world):
    world.cluster = replace(NEW, kubelet=(1, 33))
    serving(world, DEVICE_PLUGIN)
    world.asked = AUTO
    world.settle()
    assert world.state(DEVICE_PLUGIN) is ON

    told = []
    world.chooser.kubelet_changed = lambda: told.append("it started")
    world.kubelet, world.cluster = 1, NEW
    world.settle(60)
    assert world.state(DRA) is ON
    assert told == ["it started"]


def test_a_class_that_comes_later_is_noticed_soon(tmp_path):
    world = World(tmp_path, replace(NEW, device_class=""))
    world.step()
    assert world.state(DEVICE_PLUGIN) is ON
    world.cluster = NEW
    world.settle(60)
    assert world.state(DRA) is ON


SOCKET = "/var/lib/kubelet/device-plugins/nvidia-gpu.sock"


@pytest.mark.parametrize("api", APIS)
def test_beside_another_device_plugin_nothing_is_offered_until_it_is_gone(world, api):
    serving(world, api)
    world.sockets = (SOCKET,)
    world.step()
    assert world.state(api) is DRAINING
    assert SOCKET in (world.node_api.refusal(api) or "")
    assert kept(world) == ServedApi(api, other_plugin=True)
    world.start()
    assert world.state(api) is DRAINING

    world.sockets = ()
    world.settle(45)
    assert world.state(api) is ON
    assert kept(world) == ServedApi(api)


def test_a_new_node_beside_another_device_plugin_offers_nothing(tmp_path):
    world = World(tmp_path)
    world.sockets = (SOCKET,)
    world.settle()
    assert world.state(DRA) is DRAINING
    assert not world.slices


def test_a_node_can_change_while_another_device_plugin_is_there(world):
    serving(world, DRA)
    world.sockets = (SOCKET,)
    world.asked = DEVICE_PLUGIN
    world.settle()
    assert world.served == {DEVICE_PLUGIN}
    assert world.state(DEVICE_PLUGIN) is DRAINING


def test_beside_another_device_plugin_it_is_known_who_has_gpus_of_ours_from_before(world):
    serving(world, DEVICE_PLUGIN)
    world.gpu_holders = train = DevicePluginHolders(("ml/train",), 1)
    world.settle(20)
    assert world.node_api.choice.holders is None, "who asks for GPUs has them"

    world.sockets = (SOCKET,)
    for holders in (train, DevicePluginHolders(), None, train):
        world.gpu_holders = holders
        world.settle(20)
        assert world.node_api.choice.holders == holders
        assert world.node_api.choice.waits_for == ()


def test_who_has_gpus_beside_another_device_plugin_is_not_known_before_the_first_look(world):
    serving(world, DEVICE_PLUGIN)
    world.sockets = (SOCKET,)
    world.settle(20)
    world.start()
    assert world.node_api.choice.other_plugin
    assert world.node_api.choice.holders is None
    world.step()
    assert world.node_api.choice.holders == DevicePluginHolders()


def test_nobody_has_gpus_by_the_device_plugin_api_where_they_are_given_out_by_dra(world):
    serving(world, DRA)
    world.gpu_holders = None
    world.sockets = (SOCKET,)
    world.settle(20)
    assert world.node_api.choice.holders == DevicePluginHolders()


def test_a_node_that_waits_for_pods_looks_as_often_beside_another_device_plugin(world):
    serving(world, DEVICE_PLUGIN)
    world.holders[DEVICE_PLUGIN], world.gpu_holders = (
        HELD,
        DevicePluginHolders(("default/train",), 1),
    )
    world.sockets, world.asked = (SOCKET,), DRA
    world.settle(SETTLE_SECONDS * 6)
    assert world.node_api.choice.waits_for == HELD
    assert world.node_api.choice.holders == DevicePluginHolders(("default/train",), 1)
    before = world.looks
    world.settle(600)
    assert world.looks - before <= 11, "each minute, and not each ten seconds"


def test_a_resource_of_ours_that_we_do_not_serve_is_of_another_plugin(tmp_path):
    world = World(tmp_path, replace(NEW, allocatable=("nvidia.com/gpu",)))
    world.step()
    assert "nvidia.com/gpu is allocatable" in (world.node_api.refusal(DRA) or "")
    world.cluster = NEW
    world.settle(60)
    assert world.state(DRA) is ON


def test_a_plugin_that_lists_other_devices_as_our_resource_is_named_while_it_is_there(world):
    serving(world, DEVICE_PLUGIN)
    world.registered = {ResourceName("nvidia.com/gpu"): (DeviceId("vgpu-1"),)}
    world.settle(20)
    assert world.state(DEVICE_PLUGIN) is ON, "what it listed is remembered, but it is gone"

    world.registered = {}
    world.settle(3600)
    world.registered = {ResourceName("nvidia.com/gpu"): (DeviceId("vgpu-1"),)}
    world.step()
    world.cluster = replace(NEW, allocatable=("nvidia.com/gpu",))  # a kubelet is some seconds late
    world.settle(20)
    assert world.state(DEVICE_PLUGIN) is DRAINING
    assert "the device vgpu-1 of nvidia.com/gpu" in (world.node_api.refusal(DEVICE_PLUGIN) or "")
    world.start()
    assert world.state(DEVICE_PLUGIN) is DRAINING
    world.cluster = NEW
    world.settle(80)
    assert world.state(DEVICE_PLUGIN) is ON


def test_a_plugin_whose_devices_could_be_ours_is_noticed_within_seconds_while_claims_are_served(
    world,
):
    """It has no socket by which it is known, and lists the UUIDs of GPUs."""
    serving(world, DRA)
    world.settle(3600)
    world.registered = {ResourceName("nvidia.com/gpu"): (DeviceId("GPU-1"),)}
    world.step(10)
    world.cluster = replace(NEW, allocatable=("nvidia.com/gpu",))  # a kubelet is some seconds late
    world.settle(20)

    assert world.state(DRA) is DRAINING
    assert "nvidia.com/gpu is allocatable" in (world.node_api.refusal(DRA) or "")


def test_a_plugin_that_comes_back_while_the_kubelet_remembers_it_is_noticed_within_seconds(world):
    serving(world, DRA)
    there = replace(NEW, allocatable=("nvidia.com/gpu",))
    world.registered = {ResourceName("nvidia.com/gpu"): (DeviceId("GPU-1"),)}
    world.cluster = there
    world.settle(60)
    assert world.state(DRA) is DRAINING
    world.cluster = NEW
    world.settle(100)
    assert world.state(DRA) is ON

    world.cluster = there
    world.settle(20)
    assert world.state(DRA) is DRAINING


def test_what_is_listed_by_this_driver_itself_is_no_reason_to_ask_the_api_server(world):
    serving(world, DEVICE_PLUGIN)
    world.settle(60)
    before = world.looks
    for ids in ("GPU-1::0", "GPU-1::1"), ("GPU-1",), ():
        world.registered = {ResourceName("nvidia.com/gpu"): tuple(map(DeviceId, ids))}
        world.settle(30)

    assert world.looks == before


def test_what_we_served_ourselves_until_a_moment_ago_is_of_no_other_plugin(world):
    serving(world, DEVICE_PLUGIN)
    world.cluster = replace(NEW, allocatable=("nvidia.com/gpu",))
    world.asked = DRA
    world.settle(20)
    assert world.state(DRA) is ON
    world.start()
    world.settle(20)
    assert world.state(DRA) is ON

    world.settle(60)  # the kubelet writes its status every ten seconds
    assert world.state(DRA) is DRAINING


def test_what_the_node_said_before_its_kubelet_knew_better_is_of_no_other_plugin(world):
    serving(world, DEVICE_PLUGIN)
    world.cluster = replace(NEW, allocatable=("nvidia.com/gpu",))
    world.asked = DRA
    world.settle(15)
    assert world.state(DRA) is ON
    world.cluster = NEW  # the kubelet's next status
    seen = set()
    until = world.now + 120
    while world.now < until:
        world.step(min(1.0, world.chooser.step()))
        seen.add(world.state(DRA))
    assert seen == {ON}


def test_each_change_is_one_line_in_the_log(world, caplog):
    caplog.set_level(logging.INFO)

    def lines():
        return [record for record in caplog.records if "API by which" in record.message]

    serving(world, DRA)
    (first,) = lines()
    assert first.api == "DRA"
    world.asked = DEVICE_PLUGIN
    for holders in (("pod a/a",), ("pod a/b",)):
        world.holders[DRA] = holders
        world.settle(120)
    assert len(lines()) == 2
    assert (lines()[1].wanted, lines()[1].api) == (DEVICE_PLUGIN, "DRA")

    world.holders[DRA] = ()
    world.settle()
    assert [each.api for each in lines()[2:]] == ["DRA", "DevicePlugin"]

    world.asked, world.cluster = DRA, OLD
    world.chooser.ask_again()
    world.settle()
    assert lines()[-1].levelno == logging.WARNING
    assert "spec.api" in lines()[-1].problem


clusters = st.builds(
    ClusterFacts,
    dra_served=st.sampled_from([None, False, True]),
    kubelet=st.sampled_from([None, (1, 26), (1, 33), (1, 36)]),
    device_class=st.sampled_from([None, "", "gpu.nvidia.com"]),
    allocatable=st.sampled_from([(), ("nvidia.com/gpu",)]),
)
held = st.sampled_from([None, (), HELD])
changes = st.one_of(
    st.tuples(st.just("asked"), st.sampled_from([None, AUTO, DRA, DEVICE_PLUGIN])),
    st.tuples(st.just("cluster"), clusters),
    st.tuples(st.just("sockets"), st.sampled_from([(), (SOCKET,)])),
    st.tuples(st.just("api_server_is_away"), st.booleans()),
    st.tuples(st.just("kubelet"), st.integers(0, 3)),
)
happenings = st.lists(
    st.one_of(
        changes,
        st.tuples(st.just("holds"), st.tuples(st.sampled_from(APIS), held)),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("kill"), st.sampled_from(["before", "after"])),
        st.tuples(st.just("time"), st.sampled_from([0.5, 5.0, 30.0, 900.0])),
    ),
    max_size=40,
)


def happen(world, what, value):
    match what:
        case "holds":
            api, holders = value
            # Only who is served can give something out, and only while that is on.
            if holders != HELD or world.state(api) is ON:
                world.holders[api] = holders
        case "restart":
            world.start()
        case "kill":
            world.file.kill = value
        case "time":
            world.now += value
        case _:
            setattr(world, what, value)
            world.chooser.ask_again()


@settings(max_examples=300, deadline=None)
@given(happenings)
def test_whatever_happens_one_api_at_most_is_served_and_none_is_left_while_something_is_held(
    tmp_path_factory, happened
):
    world = World(tmp_path_factory.mktemp("node"))
    for what, value in happened:
        before = world.node_api.serving
        happen(world, what, value)
        try:
            world.step()
        except Killed:
            world.start()
        assert len(world.served) <= 1
        assert [world.state(api) for api in APIS].count(OFF) >= 1
        if before is not None and world.holders[before] != ():
            assert world.node_api.serving is before
        if world.node_api.serving is DEVICE_PLUGIN:
            assert not world.slices
        if world.sockets:
            assert ON not in {world.state(api) for api in APIS}
        assert kept(world) is None or kept(world).api is world.node_api.serving


def test_the_directory_of_the_state_is_made(tmp_path: Path):
    world = World(tmp_path)
    world.step()
    assert world.path.exists()
