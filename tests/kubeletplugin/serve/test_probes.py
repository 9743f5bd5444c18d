"""Who serves a node, seen from outside."""

import socket
import threading

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.kubeletplugin.serve.probes import other_plugins, registered_plugins
from dra_driver.kubeletplugin.serve.rolling_update import PluginInstances
from tests.fakes.registrar import Registrar


def test_every_socket_is_asked_who_it_is(tmp_path):
    with (
        Registrar(tmp_path / "a-reg.sock", "driver-a.example", "/plugins/a/dra.sock"),
        Registrar(tmp_path / "b-reg.sock", "driver-b.example", "/plugins/b/dra.sock"),
    ):
        plugins = registered_plugins(tmp_path, timeout_seconds=2)

    assert [(plugin.socket.name, plugin.name, plugin.endpoint) for plugin in plugins] == [
        ("a-reg.sock", "driver-a.example", "/plugins/a/dra.sock"),
        ("b-reg.sock", "driver-b.example", "/plugins/b/dra.sock"),
    ]


def test_a_socket_that_a_dead_process_left_has_no_name_and_says_why(tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead-reg.sock"))

    (plugin,) = registered_plugins(tmp_path, timeout_seconds=2)

    assert not plugin.name
    assert "refused" in plugin.error.lower()


def test_a_process_that_does_not_answer_is_waited_for_so_long_and_no_longer(tmp_path):
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute-reg.sock"))
        mute.listen()

        (plugin,) = registered_plugins(tmp_path, timeout_seconds=0.1)

    assert "deadline" in plugin.error.lower()


def test_a_process_of_ours_that_ends_while_others_are_asked_is_no_other_driver(tmp_path):
    registry = tmp_path / "registry"
    registry.mkdir()
    ours = registry / "gpu.example.com-reg.sock"
    instance = PluginInstances(tmp_path / "instances")
    ending = threading.Timer(0.3, instance.leave)
    with (
        Registrar(ours, "gpu.example.com", "/plugins/gpu.example.com/dra.sock"),
        socket.socket(socket.AF_UNIX) as mute,  # so long the others are asked
    ):
        mute.bind(str(registry / "mute-reg.sock"))
        mute.listen()
        ending.start()
        plugins = other_plugins(registry, tmp_path, "gpu.example.com", timeout_seconds=1)
    ending.join()

    assert [plugin.socket.name for plugin in plugins] == ["mute-reg.sock"]


def test_what_the_kubelet_ignores_is_ignored(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as hidden:
        hidden.bind(str(tmp_path / ".hidden"))

    assert registered_plugins(tmp_path, timeout_seconds=1) == ()


def test_a_registry_that_is_not_there_is_named(tmp_path):
    with pytest.raises(NodeError, match="registry"):
        registered_plugins(tmp_path / "registry", timeout_seconds=1)
