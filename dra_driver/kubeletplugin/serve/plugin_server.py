"""A gRPC server for the kubelet, at sockets that appear once it serves.

Idle, its thread looks five times a second whether it has to end, which takes 0.03 % of a core
(measured with grpcio 1.85). It is the threaded one all the same: with asyncio's a call crosses an
event loop and then a thread, and a prepare takes 0.5 ms longer.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import grpc

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import NodeError, SettingsError
from dra_driver.base.threads import StandingThreads
from dra_driver.kubeletplugin.serve.sockets import (
    SocketFile,
    hidden_path,
    make_directory,
    rename_into_place,
)

_POLL_SECONDS = 0.1


class PluginServer:
    """A gRPC server at several paths. The sockets appear in their order, once it serves."""

    def __init__(self, handlers: Sequence[grpc.GenericRpcHandler], threads: StandingThreads):
        # gRPC asks no more of its threads than ``submit``.
        self._server = grpc.server(cast(ThreadPoolExecutor, threads), list(handlers))
        self._files: dict[Path, SocketFile] = {}

    def open(self, sockets: Mapping[Path, int], patience_seconds: float) -> None:
        """Serve at the paths of *sockets*; each has the mode of its directory.

        SettingsError: another live process has a path, and keeps it longer than our patience.
        """
        for path, mode in sockets.items():
            make_directory(path.parent, mode)
        hidden = {path: hidden_path(path) for path in sockets}
        try:
            for path in hidden.values():
                self._bind(path)
            self._server.start()
            for path in sockets:
                self._files[path] = _rename_when_free(hidden[path], path, patience_seconds)
        except BaseException:
            for path in sockets:
                self.hide(path)
                hidden[path].unlink(missing_ok=True)
            self.close(0)
            raise

    def lost(self) -> tuple[Path, ...]:
        """The paths that do not lead to this server any longer. Each is told once."""
        lost = tuple(path for path, file in self._files.items() if not file.in_place())
        for path in lost:
            del self._files[path]
        return lost

    @property
    def in_place(self) -> bool:
        """Whether its paths lead to this server, as far as ``lost`` did not tell of them."""
        return all(file.in_place() for file in tuple(self._files.values()))

    @property
    def is_reachable(self) -> bool:
        """Whether a path is left that may lead here."""
        return bool(self._files)

    def hide(self, path: Path) -> None:
        """Remove *path*, once; calls go on.

        Not again when the server has stopped: by then the next process's socket may have the inode
        that was ours.
        """
        if file := self._files.pop(path, None):
            file.remove()

    def close(self, grace_seconds: float) -> threading.Event:
        """Take no more calls; the event is set when those in flight have ended, or were ended."""
        return self._server.stop(grace_seconds)

    def _bind(self, hidden: Path) -> None:
        try:
            self._server.add_insecure_port(f"unix:{hidden}")
        except RuntimeError as error:
            raise NodeError(f"gRPC cannot serve in {hidden.parent}: {error}") from error


def _rename_when_free(hidden: Path, path: Path, patience_seconds: float) -> SocketFile:
    deadline = Deadline(patience_seconds)
    while (file := rename_into_place(hidden, path)) is None:
        if deadline.expired:
            raise SettingsError(
                f"another live process serves {path}: stop it, or give both their "
                "pod UID (rolling update), so that each has sockets of its own"
            )
        time.sleep(_POLL_SECONDS)
    return file
