"""Which names sockets have in a directory that all device plugins share."""

import os
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.errors import SettingsError
from dra_driver.kubeletplugin.device_plugin.resources import ResourceName
from dra_driver.kubeletplugin.device_plugin.sockets import (
    is_own_socket,
    remove_dead_sockets,
    resource_sockets,
)

DIRECTORY = Path("/var/lib/kubelet/device-plugins")
POD = "0f25f90b-5e9d-47f5-a890-3f3dc4779360"

RESOURCES = st.from_regex(
    r"[a-z][a-z.]{0,40}/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[a-z])?", fullmatch=True
)
INSTANCES = st.sampled_from([POD, POD.replace("0", "1"), "1a2b3c4d5e6f7081"])


def test_names_say_the_resource_and_the_process() -> None:
    sockets = resource_sockets(DIRECTORY, ResourceName("nvidia.com/gpu"), POD)

    assert sockets.endpoint == DIRECTORY / f"dra-nvidia.com_gpu-{POD}.sock"
    assert sockets.owner == DIRECTORY / "dra-nvidia.com_gpu.sock"


@pytest.mark.point(120)
@given(resources=st.tuples(RESOURCES, RESOURCES), instances=st.tuples(INSTANCES, INSTANCES))
def test_paths_always_fit_and_only_the_owner_is_shared(
    resources: tuple[str, str], instances: tuple[str, str]
) -> None:
    one, other = (
        resource_sockets(DIRECTORY, ResourceName(name), instance)
        for name, instance in zip(resources, instances, strict=True)
    )
    same_resource, same_process = resources[0] == resources[1], instances[0] == instances[1]

    for path in (one.endpoint, one.owner):
        assert len(os.fsencode(path)) <= 107
        assert is_own_socket(path.name)
    assert (one.owner == other.owner) == same_resource
    assert (one.endpoint == other.endpoint) == (same_resource and same_process)
    assert one.endpoint not in (one.owner, other.owner)


def test_a_directory_without_room_is_refused_with_what_to_change() -> None:
    with pytest.raises(SettingsError, match="use a shorter kubelet directory"):
        resource_sockets(Path("/" + "d" * 90), ResourceName("nvidia.com/gpu"), POD)


@pytest.mark.parametrize("name", ["kubelet.sock", "nvidia-gpu.sock", "dra-x", "kubelet_checkpoint"])
def test_other_names_are_of_others(name: str) -> None:
    assert not is_own_socket(name)


@pytest.mark.point(121)
def test_what_dead_processes_left_is_removed_and_nothing_else(short: Path) -> None:
    dead = ["dra-nvidia.com_gpu-old.sock", ".dra-nvidia.com_gpu-1a2b3c4"]
    others = [".dra-notes", "nvidia-gpu.sock", "kubelet.sock"]
    listening = bound(short / "dra-nvidia.com_gpu-live.sock", listen=True)
    for name in (*dead, *others):
        bound(short / name).close()
    hour_ago = time.time() - 3600
    os.utime(short / dead[1], (hour_ago, hour_ago))
    bound(short / ".dra-nvidia.com_gpu-begins1a2b3c4").close()  # may be about to listen
    (short / "dra-directory.sock").mkdir()

    remove_dead_sockets(short)

    assert sorted(path.name for path in short.iterdir()) == sorted(
        [
            *others,
            ".dra-nvidia.com_gpu-begins1a2b3c4",
            "dra-nvidia.com_gpu-live.sock",
            "dra-directory.sock",
        ]
    )
    listening.close()


def bound(path: Path, listen: bool = False) -> socket.socket:
    new = socket.socket(socket.AF_UNIX)
    new.bind(os.fspath(path))
    if listen:
        new.listen()
    return new
