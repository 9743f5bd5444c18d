"""One gRPC server on one unix socket, put back when somebody deletes the socket's path.

It is asyncio's server and not the threaded one: idle, that one wakes up five times a second (0.04 %
of a core), this one never (measured with grpcio 1.85).
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio

from dra_driver.errors import NodeError, SettingsError
from dra_driver.kubeletplugin.sockets import SocketFile, hidden_name, make_directory, reveal

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1


class Listener:
    """Serves *handlers* at *path*. All methods belong to one event loop."""

    def __init__(
        self,
        path: Path,
        directory_mode: int,
        handlers: Sequence[grpc.GenericRpcHandler],
        patience_seconds: float,
    ) -> None:
        self._path = path
        self._directory_mode = directory_mode
        self._handlers = handlers
        self._patience_seconds = patience_seconds
        self._server: grpc.aio.Server | None = None
        self._file: SocketFile | None = None

    async def open(self) -> None:
        """Serve, then let the socket appear.

        SettingsError: another live process has the path, and keeps it longer than our patience.
        """
        make_directory(self._path.parent, self._directory_mode)
        hidden = hidden_name(self._path)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(self._handlers)
        try:
            server.add_insecure_port(f"unix:{hidden}")
        except RuntimeError as error:
            raise NodeError(f"gRPC cannot serve in {self._path.parent}: {error}") from error
        await server.start()
        try:
            self._file = await self._reveal(hidden)
        except BaseException:
            await server.stop(0)
            raise
        self._server = server

    def in_place(self) -> bool:
        """Whether who dials the path gets us."""
        return self._file is not None and self._file.in_place()

    async def heal(self, grace_seconds: float) -> None:
        """Serve anew at the path; calls over the lost socket get *grace_seconds* to end."""
        log.warning("somebody deleted our socket: serving anew", extra={"path": str(self._path)})
        before = self._server
        await self.open()
        if before is not None:
            await before.stop(grace_seconds)

    def hide(self) -> None:
        """Remove the path, once; calls go on.

        Not again when the server has stopped: by then the next process's socket may have the inode
        that was ours.
        """
        if self._file is not None:
            self._file.remove()
            self._file = None

    async def close(self, grace_seconds: float) -> None:
        """Take no more calls, let those in flight end, remove the path."""
        if self._server is not None:
            await self._server.stop(grace_seconds)
        self.hide()

    async def _reveal(self, hidden: Path) -> SocketFile:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_seconds
        while (file := reveal(hidden, self._path)) is None:
            if loop.time() >= deadline:
                raise SettingsError(
                    f"another live process serves {self._path}: stop it, or give both their "
                    "pod UID (rolling update), so that each has sockets of its own"
                )
            await asyncio.sleep(_POLL_SECONDS)
        return file
