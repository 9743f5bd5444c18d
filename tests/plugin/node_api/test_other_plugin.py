"""Another device plugin is seen while it is there, and what it has left is waited for."""

import json
import socket
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import PodUid
from dra_driver.kubeletplugin.device_plugin.checkpoint import KubeletCheckpoint
from dra_driver.kubeletplugin.device_plugin.resources import (
    AllocatedContainer,
    ContainerResponse,
    DeviceId,
    ResourceName,
)
from dra_driver.node.state.node_api_file import ServedApi, ServedApiFile
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_api import ApiState
from dra_driver.plugin.node_api.other_plugin import (
    TakenResources,
    nvidia_sockets,
    registered_devices,
)
from tests.fakes.allocations import GPU, node_pod
from tests.plugin.node_api.world import APIS, DEVICE_PLUGIN, DRA, World

ON, DRAINING = ApiState.ON, ApiState.DRAINING
SOCKET = "/var/lib/kubelet/device-plugins/nvidia-gpu.sock"


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def serving(world, api):
    world.asked = api
    world.settle()
    assert world.state(api) is ON
    return world


def give(world, id_="GPU-0"):
    """The other device plugin gives a device to the pod ml/train."""
    answer = ContainerResponse(env=(("NVIDIA_VISIBLE_DEVICES", id_),))
    uid, resource = PodUid("uid-train"), ResourceName(GPU)
    world.containers = (AllocatedContainer(uid, "main", resource, (DeviceId(id_),), answer),)
    world.pods = {uid: node_pod("train", namespace="ml")}


def end(world):
    """The pod has ended; the kubelet goes on to list it."""
    world.pods = {uid: replace(pod, ended=True) for uid, pod in world.pods.items()}


def why(world, api):
    return world.node_api.refusal(api) or ""


@pytest.mark.parametrize("api", APIS)
def test_one_that_is_gone_for_a_moment_is_waited_for(world, api):
    """A kubelet that starts takes all sockets away, and so does an update of the plugin."""
    serving(world, api)
    world.sockets = (SOCKET,)
    world.step()
    world.sockets = ()
    world.settle(25)
    assert SOCKET in why(world, api)
    world.sockets = (SOCKET,)
    world.step(1)
    world.sockets = ()
    world.settle(25)
    assert world.state(api) is DRAINING
    world.settle(35)
    assert world.state(api) is ON
    assert world.pod_lists == 0, "no container has devices"


def test_by_dra_nothing_is_offered_until_the_pods_have_ended_that_have_its_gpus(world):
    serving(world, DRA)
    world.sockets = (SOCKET,)
    give(world)
    world.step()
    world.sockets = ()
    world.settle(600)
    assert world.state(DRA) is DRAINING
    assert not world.slices
    assert why(world, DRA).endswith("until they have ended: pod ml/train")
    assert world.pod_lists <= 20

    end(world)
    world.settle(35)
    assert world.state(DRA) is ON


def test_a_plugin_that_was_away_meanwhile_asks_who_has_its_gpus_before_it_offers_any(world):
    serving(world, DRA)
    give(world)
    world.start()
    assert world.state(DRA) is DRAINING
    assert why(world, DRA).endswith("the API server was not asked yet")
    world.step()
    assert "pod ml/train" in why(world, DRA)

    end(world)
    world.settle(35)
    assert world.state(DRA) is ON
    world.start()
    assert world.state(DRA) is DRAINING, "the kubelet goes on to list it"
    world.step()
    assert world.state(DRA) is ON


def test_by_the_device_plugin_api_the_list_keeps_what_has_the_id_of_a_gpu(world):
    serving(world, DEVICE_PLUGIN)
    give(world)
    world.start()
    assert world.state(DEVICE_PLUGIN) is ON
    world.settle()
    assert (world.state(DEVICE_PLUGIN), world.pod_lists) == (ON, 0)


def test_by_the_device_plugin_api_who_has_an_id_of_no_gpu_is_waited_for(world):
    serving(world, DEVICE_PLUGIN)
    world.sockets = (SOCKET,)
    give(world, "nvidia0")
    world.step()
    world.sockets = ()
    assert not world.node_api.choice.other_plugin_is_gone
    world.settle(120)
    assert "pod ml/train" in why(world, DEVICE_PLUGIN)
    assert world.node_api.choice.other_plugin_is_gone
    end(world)
    world.settle(35)
    assert world.state(DEVICE_PLUGIN) is ON


def test_a_pod_that_the_api_server_does_not_know_is_waited_for_while_it_has_processes(world):
    """A static pod without a mirror, or one that was deleted by force."""
    serving(world, DRA)
    give(world)
    world.pods, world.running = {}, {PodUid("uid-train")}
    world.start()
    world.settle(300)
    assert why(world, DRA).endswith("pod uid-train")
    world.running = set()
    world.settle(50)
    assert world.state(DRA) is ON


def test_a_pod_of_which_nothing_is_seen_may_be_about_to_start(world):
    serving(world, DRA)
    give(world)
    mirror, world.pods = world.pods, {}
    world.start()
    world.settle(10)
    assert why(world, DRA).endswith("pod uid-train")
    world.pods = mirror
    world.settle(60)
    assert why(world, DRA).endswith("pod ml/train")
    world.pods = {}
    world.settle(60)
    assert world.state(DRA) is ON


def test_a_pod_that_had_ended_is_seen_again_where_the_other_one_was_back(world):
    serving(world, DRA)
    give(world)
    end(world)
    world.start()
    world.step()
    assert world.state(DRA) is ON
    world.sockets = (SOCKET,)
    world.step(30)
    give(world)
    world.sockets = ()
    world.settle(120)
    assert why(world, DRA).endswith("pod ml/train")


def test_a_pod_that_got_its_gpu_anew_is_waited_for_anew_while_nothing_is_seen_of_it(world):
    """A static pod, say, which has one UID for ever, and is between two containers."""
    serving(world, DRA)
    give(world)
    world.pods = {}
    world.start()
    world.step()
    assert why(world, DRA).endswith("pod uid-train")
    world.sockets = (SOCKET,)
    world.step(5)
    world.sockets = ()
    world.step(30)
    assert why(world, DRA).endswith("pod uid-train")
    world.settle(60)
    assert world.state(DRA) is ON


@pytest.mark.parametrize("when", ["it is here at the start", "it was seen before"])
@pytest.mark.parametrize("api", APIS)
def test_one_that_was_here_before_a_restart_of_ours_is_waited_for(world, api, when):
    serving(world, api)
    if when == "it was seen before":
        world.sockets = (SOCKET,)
        world.step()
        world.sockets = ()
        world.start()
    else:
        world.sockets = (SOCKET,)
        world.start()
        world.sockets = ()
    world.settle(25)
    assert world.state(api) is DRAINING
    assert not world.node_api.choice.other_plugin_is_gone, "it may have the resource"
    world.settle(35)
    assert world.state(api) is ON
    assert kept(world) == ServedApi(api)


def test_a_process_that_a_newer_one_replaced_for_a_while_looks_anew(world):
    serving(world, DRA)
    world.is_newest = False
    world.step()
    give(world)  # of which the newer process knew, until it went
    world.is_newest = True
    world.step(5)
    assert why(world, DRA).endswith("pod ml/train")


def test_beside_another_one_nothing_is_offered_also_where_the_disk_is_full(world):
    serving(world, DRA)
    world.sockets = (SOCKET,)
    world.file.full = True
    with pytest.raises(NodeError):
        world.step()
    assert world.state(DRA) is DRAINING
    assert not world.slices
    world.file.full = False
    world.step()
    assert kept(world) == ServedApi(DRA, other_plugin=True)


def test_who_has_gpus_is_asked_again_where_nobody_tells(world):
    serving(world, DRA)
    give(world)
    world.pods = None
    world.start()
    world.settle(100)
    assert why(world, DRA).endswith("the API server does not tell which pods have ended")
    give(world)
    end(world)
    assert world.pod_lists < 12
    world.settle(65)
    assert world.state(DRA) is ON


def kept(world):
    return ServedApiFile(world.path).read()


@pytest.mark.parametrize("api", APIS)
def test_nothing_is_offered_while_the_kubelet_does_not_tell_what_containers_have(world, api):
    serving(world, api)
    world.checkpoint_error = NodeError("the checkpoint cannot be read")
    world.start()
    world.settle(100)
    assert why(world, api).endswith("gone: the checkpoint cannot be read")
    world.checkpoint_error = None
    world.settle(65)
    assert world.state(api) is ON


def test_devices_that_anybody_listed_as_ours_are_known_from_the_kubelet(tmp_path):
    checkpoint, names = KubeletCheckpoint(tmp_path), ResourceNames()
    file = tmp_path / "kubelet_internal_checkpoint"
    registered = {
        "nvidia.com/gpu": ["GPU-1", "vgpu-1"],
        "nvidia.com/gpu.shared": ["GPU-1::0"],
        "nvidia.com/mig-1g.10gb": None,
    }
    document = {"PodDeviceEntries": None, "RegisteredDevices": registered | {"a/fpga": ["f-0"]}}
    assert registered_devices(checkpoint, names) == {}
    file.write_text(json.dumps({"Data": document}))
    assert registered_devices(checkpoint, names) == {
        "nvidia.com/gpu": ("GPU-1", "vgpu-1"),
        "nvidia.com/gpu.shared": ("GPU-1::0",),
    }
    file.write_text("{")
    assert registered_devices(checkpoint, names) == {}


def test_what_another_plugin_has_not_taken_is_known_once_it_has_had_the_time_to_take_all():
    now, sockets = 0.0, ["/d/nvidia-gpu.sock"]
    gpu, shared = ResourceName("nvidia.com/gpu"), ResourceName("nvidia.com/gpu.shared")
    taken = TakenResources(lambda: tuple(sockets), dict, ResourceNames(), lambda: now)
    assert taken.not_taken([gpu, shared]) == set()
    now = 9.0
    sockets.append("/d/nvidia-gpu.shared.sock")
    assert taken.not_taken([gpu, shared]) == set()
    now = 18.0
    sockets.pop()
    assert taken.not_taken([gpu, shared]) == set()
    now = 28.0
    assert taken.not_taken([gpu, shared]) == {shared}


def test_live_sockets_of_nvidias_plugin_are_found_and_dead_ones_are_not():
    with tempfile.TemporaryDirectory(prefix="dra", dir="/tmp") as home, ExitStack() as stack:
        directory = Path(home)
        assert nvidia_sockets(directory) == ()
        assert nvidia_sockets(directory / "none") == ()
        for name in ("nvidia-gpu.sock", "nvidia.sock", "dra-nvidia.com_gpu.sock", "kubelet.sock"):
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(str(directory / name))
            listening.listen()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(directory / "nvidia-dead.sock"))
        (directory / "nvidia-file.sock").write_text("")
        assert nvidia_sockets(directory) == (
            f"{directory}/nvidia-gpu.sock",
            f"{directory}/nvidia.sock",
        )
