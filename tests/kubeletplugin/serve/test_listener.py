"""A socket that is ours is taken away once, and nobody else's ever."""

import asyncio
import os
from pathlib import Path

from dra_driver.kubeletplugin.serve.plugin import SocketListener


def test_a_hidden_socket_is_not_taken_away_again_when_its_server_stops(short: Path) -> None:
    path, linked = short / "reg.sock", short / "linked"

    async def scenario() -> None:
        listener = SocketListener(path, 0o755, (), 1.0)
        await listener.open()
        os.link(path, linked)
        listener.hide()
        assert not path.exists()
        os.link(linked, path)  # the next process's socket, which may have got the same inode
        await listener.close(0)

    asyncio.run(scenario())

    assert path.exists()


def test_a_closed_socket_is_gone(short: Path) -> None:
    async def scenario() -> None:
        listener = SocketListener(short / "dra.sock", 0o755, (), 1.0)
        await listener.open()
        await listener.close(0)

    asyncio.run(scenario())

    assert list(short.iterdir()) == []
