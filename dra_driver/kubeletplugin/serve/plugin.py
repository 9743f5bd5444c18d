"""A driver's presence on its node: both sockets served, watched and removed in the right order.

The kubelet's rules (registration and rolling update, kubernetes/pkg/kubelet/pluginmanager): the DRA
service answers before the registration socket appears, and the registration socket goes first.

It is asyncio's server and not the threaded one: idle, that one wakes up five times a second (0.04 %
of a core), this one never (measured with grpcio 1.85).
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import DriverError, NodeError, SettingsError, TimedOut
from dra_driver.kubeletplugin.serve import probes
from dra_driver.kubeletplugin.serve.services import (
    DRA_SERVICE_VERSIONS,
    DraService,
    RegistrationService,
)
from dra_driver.kubeletplugin.serve.sockets import (
    SocketFile,
    SocketPaths,
    hidden_path,
    make_directory,
    rename_into_place,
)

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1


class SocketListener:
    """One gRPC server at *path*, made anew when somebody deletes the socket. For one event loop."""

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
        hidden = hidden_path(self._path)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(self._handlers)
        try:
            server.add_insecure_port(f"unix:{hidden}")
        except RuntimeError as error:
            raise NodeError(f"gRPC cannot serve in {self._path.parent}: {error}") from error
        await server.start()
        try:
            self._file = await self._rename_when_free(hidden)
        except BaseException:
            await server.stop(0)
            raise
        self._server = server

    def in_place(self) -> bool:
        """Whether the path still leads to this server."""
        return self._file is not None and self._file.in_place()

    async def heal(self, grace_seconds: float) -> None:
        """Serve anew at the path; calls over the lost socket get *grace_seconds* to end."""
        log.warning("somebody deleted our socket: serving anew", extra={"path": str(self._path)})
        previous = self._server
        await self.open()
        if previous is not None:
            await previous.stop(grace_seconds)

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

    async def _rename_when_free(self, hidden: Path) -> SocketFile:
        deadline = Deadline(self._patience_seconds)
        while (file := rename_into_place(hidden, self._path)) is None:
            if deadline.expired:
                raise SettingsError(
                    f"another live process serves {self._path}: stop it, or give both their "
                    "pod UID (rolling update), so that each has sockets of its own"
                )
            await asyncio.sleep(_POLL_SECONDS)
        return file


_START_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class PluginTimeouts:
    """How long a plugin waits for what."""

    grace_seconds: float = 4.0  # for calls in flight: we have to be gone 5 s after SIGTERM
    watch_seconds: float = 5.0  # between two looks at the sockets
    patience_seconds: float = 6.0  # for a process before us that is in its grace


class KubeletPlugin:
    """Serves *service* at *paths* to the kubelet, from a thread of its own.

    *on_fatal* is called once when serving is over for a reason that a new process may mend;
    *on_round* after every look at the sockets, for what else needs one (it must not block).
    """

    def __init__(
        self,
        paths: SocketPaths,
        service: DraService,
        on_fatal: Callable[[DriverError], None],
        on_round: Callable[[], None] = lambda: None,
        times: PluginTimeouts = PluginTimeouts(),
    ) -> None:
        self._times = times
        self._paths = paths
        self._on_fatal = on_fatal
        self._on_round = on_round
        versions = tuple(version.name for version in DRA_SERVICE_VERSIONS)
        self._registration = RegistrationService(paths.driver, str(paths.service), versions)
        self._listeners = (
            SocketListener(paths.service, 0o750, service.handlers(), times.patience_seconds),
            SocketListener(
                paths.registration, 0o755, self._registration.handlers(), times.patience_seconds
            ),
        )
        self._started: concurrent.futures.Future[asyncio.AbstractEventLoop]
        self._started = concurrent.futures.Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)

    @property
    def registered(self) -> bool:
        """Whether the kubelet accepted us the last time it said something."""
        return self._registration.registered

    def start(self) -> None:
        """Serve. When this returns, the kubelet can find us. DriverError: what is in the way."""
        self._thread.start()
        try:
            self._started.result(_START_SECONDS)
        except TimeoutError as error:
            raise TimedOut(f"gRPC did not serve {self._paths.service} within 20 s") from error

    def stop(self) -> None:
        """Be gone for the kubelet: registration socket, calls in flight (bounded), DRA socket."""
        if not self._started.done() or self._started.exception():
            return
        try:
            self._started.result().call_soon_threadsafe(self._stop.set)
        except RuntimeError:
            return  # it has ended by itself
        self._thread.join(self._times.grace_seconds + 1.0)

    def check(self, timeout_seconds: float = 5.0) -> None:
        """Liveness: ask ourselves as the kubelet does. NodeError: it could not reach us."""
        if not self._started.done() or not self._thread.is_alive():
            raise NodeError(
                f"{self._paths.driver} is not served to the kubelet: not started, or stopped"
            )
        answer = asyncio.run_coroutine_threadsafe(
            probes.check_plugin_sockets(self._paths, timeout_seconds), self._started.result()
        )
        try:
            answer.result(timeout_seconds)
        except TimeoutError as error:
            answer.cancel()
            raise TimedOut(f"our own sockets did not answer in {timeout_seconds:g} s") from error

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # a thread's exception would be lost; who wired us must hear it
            log.exception("serving the kubelet ended")
            if self._started.done():
                fatal = error if isinstance(error, DriverError) else NodeError(f"gRPC: {error}")
                self._on_fatal(fatal)
            else:
                self._started.set_exception(error)

    async def _serve(self) -> None:
        service, registration = self._listeners
        try:
            await service.open()
            await registration.open()
            self._started.set_result(asyncio.get_running_loop())
            await self._watch()
        finally:
            registration.hide()
            await service.close(self._times.grace_seconds)
            await registration.close(0)

    async def _watch(self) -> None:
        while not self._stop.is_set():
            for listener in self._listeners:
                if not listener.in_place():
                    await listener.heal(self._times.grace_seconds)
            try:
                self._on_round()
            except Exception:  # the next round may go better, and the sockets must go on
                log.exception("a regular check failed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._times.watch_seconds)
