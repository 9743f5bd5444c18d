"""A socket that is ours is taken away once, and nobody else's ever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.base.threads import StandingThreads
from dra_driver.kubeletplugin.serve.plugin_server import PluginServer

PATIENCE_SECONDS = 1.0


@pytest.fixture
def server() -> PluginServer:
    return PluginServer((), StandingThreads("call", 1))


def test_a_hidden_socket_is_not_taken_away_again_when_its_server_stops(
    short: Path, server: PluginServer
) -> None:
    path, linked = short / "reg.sock", short / "linked"
    server.open({path: 0o755}, PATIENCE_SECONDS)
    os.link(path, linked)
    server.hide(path)
    assert not path.exists()
    os.link(linked, path)  # the next process's socket, which may have got the same inode

    assert server.close(0).wait(60)
    server.hide(path)

    assert path.exists()


def test_a_closed_server_leaves_nothing(short: Path, server: PluginServer) -> None:
    paths = (short / "dra.sock", short / "reg.sock")
    server.open(dict.fromkeys(paths, 0o755), PATIENCE_SECONDS)
    assert sorted(short.iterdir()) == sorted(paths)

    assert server.close(0).wait(60)
    for path in paths:
        server.hide(path)

    assert list(short.iterdir()) == []


def test_a_socket_that_cannot_be_made_takes_the_others_with_it(
    short: Path, server: PluginServer
) -> None:
    (short / "file").touch()

    with pytest.raises(NodeError, match="file"):
        server.open(
            {short / "dra.sock": 0o755, short / "file" / "reg.sock": 0o755}, PATIENCE_SECONDS
        )

    assert os.listdir(short) == ["file"]


def test_grpc_knows_the_listener_that_is_asked_for() -> None:
    """It says so where it does not, and goes on with its own choice."""
    serve = """
from concurrent.futures import ThreadPoolExecutor
from dra_driver.kubeletplugin.serve import plugin
plugin.grpc.server(ThreadPoolExecutor(1))
"""
    other = {"GRPC_EXPERIMENTS": "-no_such_listener"}
    ours, unknown = (
        subprocess.run(
            [sys.executable, "-c", serve], env=env, capture_output=True, text=True, timeout=60
        ).stderr
        for env in ({}, other)
    )
    assert "no_such_listener" in unknown, "this test sees what gRPC does not know"
    assert "listener" not in ours
