"""All MPS servers of the node, and who waits for whom.

A change of a server holds that server's lock; servers do not wait for each other, and no wait is
longer than its caller's timeout.

An *orphan* is the directory of a server of which nothing is recorded, since its state file was lost
or cannot be read: it is removed with the processes that live in it. MPS daemons that somebody else
started are *unmanaged*: they are reported and left alone.
"""

import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from dra_driver.agent.dependencies import AgentDependencies
from dra_driver.agent.server import ManagedServer
from dra_driver.agent.state import new_daemon_token, new_server_state
from dra_driver.base.deadlines import request_deadline, seconds_within_request
from dra_driver.base.errors import DriverError, NodeError, TimedOut
from dra_driver.base.files import disk_errors
from dra_driver.base.threads import NamedLocks
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import (
    MpsNamespace,
    MpsNamespaceName,
    MpsServerName,
    MpsServerRestart,
    MpsStatus,
    ServedNamespace,
    mps_server_name,
)
from dra_driver.node.mps.daemon import ControlDaemon
from dra_driver.plan.mps.servers import protocol_over

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"s[0-9a-f]{12}")


_UNMANAGED_SECONDS: Final = 60.0  # between two searches
_SERVE_LOCK_SECONDS: Final = 8.0  # to wait for others; the start of a daemon takes about as much
_LOCK_SECONDS: Final = 2.0
_QUICK_LOCK_SECONDS: Final = 0.05  # a status hardly waits
_STATUS_SECONDS: Final = 3.0  # to check servers for a status, all together
_CLIENTS_SECONDS: Final = 1.0  # how old the clients in a status can be

ForEachServer = Callable[[Iterable[Callable[[], None]]], None]
"""Makes several calls, side by side or one after the other. Some may go on afterwards."""


def sequentially(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()


class MpsSupervisor:
    """Thread safe. ``recover`` comes first."""

    def __init__(
        self, dependencies: AgentDependencies, for_each: ForEachServer = sequentially
    ) -> None:
        self._dependencies = dependencies
        self._daemons = dependencies.daemons
        self._files = dependencies.files
        self._clock = dependencies.clock
        self._for_each = for_each
        self._lock = threading.Lock()
        self._servers: dict[MpsServerName, ManagedServer] = {}
        self._namespace_locks = NamedLocks(
            "waited {seconds} s: the MPS namespace {name} is being changed"
        )
        self._server_locks = NamedLocks(
            "waited {seconds} s: the MPS server {name} is being started, ended or looked at"
        )
        self._orphans: frozenset[MpsServerName] = frozenset()
        self._unmanaged: tuple[str, ...] = ()
        self._unmanaged_checked_at = float("-inf")
        self._maintained: set[MpsServerName] = set()  # at this moment
        self._checked_at: float | None = None
        self._began_at = dependencies.clock.passed()
        self.on_problem: Callable[[], None] = lambda: None  # called to have ``maintain`` soon

    def recover(self) -> None:
        """Take over the servers of an earlier agent; ``maintain`` repairs them.

        A server whose state cannot be read is ended. NodeError: the directory cannot be used.
        """
        for state in self._files.load():
            log.info("an MPS server is known", extra={"server": state.daemon.name})
            self._servers[state.daemon.name] = ManagedServer(state, self._dependencies)
            self._detach(state.daemon)
        for name, why in self._files.of_other_release.items():
            log.error("an MPS server is left alone", extra={"server": name, "error": why})
        for name, why in self._files.set_aside.items():
            now = self._clock.since_epoch()
            self._files.record(MpsServerRestart(0, name, now, f"it was ended: {why}"))
        directory = Path(self._dependencies.directory)
        with disk_errors(f"look for what was left in {directory}"):
            directories = [entry.name for entry in directory.iterdir() if entry.is_dir()]
        names = (MpsServerName(name) for name in directories if _NAME.fullmatch(name))
        known = (*self._servers, *self._files.of_other_release)
        self._orphans = frozenset(names).difference(known)
        for name in sorted(self._orphans):
            self._try_to_remove_orphan(name)

    def serve(self, namespace: MpsNamespace) -> ServedNamespace:
        """Serve *namespace*. Repeating it gives the same answer; a failure is undone."""
        timeouts = self._dependencies.timeouts
        with (
            request_deadline(timeouts.serve, timeouts.undoing),
            self._namespace_locks.hold(
                [namespace.name], seconds_within_request(_SERVE_LOCK_SECONDS)
            ),
        ):
            served = None
            while served is None:  # at most once for each server of these GPUs
                name = self._server_of(namespace)
                with self._changing(name, _SERVE_LOCK_SECONDS):
                    served = self._serve_in(name, namespace)
            return served

    def _serve_in(self, name: MpsServerName, namespace: MpsNamespace) -> ServedNamespace | None:
        """None: it belongs in another server by now."""
        if (holder := self._holder(namespace.name)) is not None:
            _refuse_other_limits(holder, namespace)
        self._files.refuse_other_release(name)
        if (server := self._servers.get(name)) is not None:
            self._finish_interrupted(server)
            if self._server_of(namespace) != name:  # it speaks an older protocol by now
                return None
            if not server.gone:
                return server.serve(namespace)
        protocol = protocol_over(namespace.gpus, self._daemons.protocol())
        self._remove_orphan(name)
        server = ManagedServer(
            new_server_state(name, namespace, protocol, self._dependencies.directory),
            self._dependencies,
        )
        with self._lock:
            self._servers[name] = server
        return server.start(namespace)

    def _server_of(self, namespace: MpsNamespace) -> MpsServerName:
        """The server that serves it already, else the one in which it belongs: with protocol 2, its
        tenant's own."""
        holder = self._holder(namespace.name)
        if holder is not None and holder.serves(namespace.name):
            return holder.name
        name = mps_server_name(namespace.gpus)
        if not namespace.tenant:
            return name
        protocol = protocol_over(namespace.gpus, self._daemons.protocol())
        if (shared := self._servers.get(name)) is not None:
            protocol = min(protocol, shared.daemon.protocol)
        return mps_server_name(namespace.gpus, namespace.tenant) if protocol == 2 else name

    def release(self, name: MpsNamespaceName) -> None:
        """Serve it no longer. An unknown one is fine; a server without any other ends. NodeError:
        only another release can do that."""
        with (
            request_deadline(self._dependencies.timeouts.release),
            self._namespace_locks.hold([name], seconds_within_request(_LOCK_SECONDS)),
        ):
            if (server := self._holder(name)) is None:
                return self._files.refuse_other_release(name)
            with self._changing(server.name, _LOCK_SECONDS):
                server.release(name)

    def terminate(self, name: MpsNamespaceName, pids: Collection[int]) -> None:
        """End clients of a namespace; a server that cannot do that is started again.

        NodeError: not all have ended yet.
        """
        if (server := self._holder(name)) is None:
            return
        with (
            request_deadline(self._dependencies.timeouts.terminate),
            self._changing(server.name, _LOCK_SECONDS),
        ):
            if not server.gone:
                server.terminate(pids)

    def let_go(self, gpus: Collection[GpuUuid], until: float) -> None:
        """End the servers over these GPUs and MIG instances that have no clients, and start none
        *until* then. Those of other GPUs are started again, soon."""
        released, before = self._dependencies.released, self._dependencies.released.gpus
        released.until, released.gpus = until, frozenset(gpus)
        if released.gpus != before:
            log.info("GPUs are released", extra={"gpus": sorted(gpus), "until": until})
        for server in self._all():
            with suppress(TimedOut), self._locked(server.name, _QUICK_LOCK_SECONDS):
                if not server.gone:
                    server.let_go()
        if before - released.gpus:
            self.on_problem()

    def make_spares(self) -> None:
        """Create the spare namespaces that are missing, while no request waits for them.

        A failure costs the next claim some milliseconds, after which it is tried again.
        """
        for server in self._all():
            if server.lacks_spare:
                self._make_spare(server)

    def status(self) -> MpsStatus:
        """All that is known. It takes a few seconds at most, whatever the servers do."""
        end = self._clock.passed() + _STATUS_SECONDS
        for server in self._all():
            if self._clock.passed() < end:
                self._check_quickly(server)
        servers = tuple(server.status() for server in self._all())
        return MpsStatus(servers, self._files.incidents, self._unmanaged)

    @property
    def servers_in_container(self) -> int:
        """How many servers end with the container of this agent."""
        return sum(not self._daemons.is_detached(server.daemon) for server in self._all())

    def maintain(self) -> float | None:
        """Check all servers and repair what can be; the seconds until the next time, where that is
        sooner than usual."""
        self._began_at = self._clock.passed()
        self._for_each([partial(self._maintain, server) for server in self._all()])
        for name in sorted(self._orphans):
            with suppress(TimedOut), self._locked(name, _QUICK_LOCK_SECONDS):
                self._try_to_remove_orphan(name)
        self._look_for_unmanaged()
        self._checked_at = self._clock.passed()
        waits = [server.seconds_to_wait() for server in self._all()]
        return min((wait for wait in waits if wait is not None), default=None)

    def problem(self, within_seconds: float) -> str | None:
        """Why the servers are not maintained; None: they are."""
        if self._checked_at is None:
            return "the MPS servers were not checked yet"
        passed = self._clock.passed() - self._checked_at
        if passed > within_seconds:
            return f"the last check of the MPS servers ended {passed:.0f} s ago"
        return None

    def stuck(self, seconds: float) -> str | None:
        """Whether no round of ``maintain`` has begun for so long; None: one has."""
        passed = self._clock.passed() - self._began_at
        return None if passed <= seconds else f"the last round began {passed:.0f} s ago"

    def _detach(self, daemon: ControlDaemon) -> None:
        """Move a daemon of an earlier agent out of this container."""
        try:
            self._daemons.detach(daemon)
        except DriverError as e:
            extra = {"server": daemon.name, "error": str(e)}
            log.warning(
                "it is not known whether an MPS server outlives this container", extra=extra
            )

    def _remove_orphan(self, name: MpsServerName) -> None:
        """If it is one; its caller holds the lock of that server. NodeError: it is still there."""
        if name not in self._orphans:
            return
        log.warning("removing an MPS server without a record", extra={"server": name})
        directory = f"{self._dependencies.directory}/{name}"
        self._daemons.remove_orphan(ControlDaemon(name, (), 2, directory, new_daemon_token()))
        self._orphans -= {name}

    def _try_to_remove_orphan(self, name: MpsServerName) -> None:
        try:
            self._remove_orphan(name)
        except DriverError as e:
            extra = {"server": name, "error": str(e)}
            log.warning("what an MPS server left cannot be removed, will try again", extra=extra)

    def _look_for_unmanaged(self) -> None:
        """Unless that was just done. After a failure it is done with the next ``maintain``."""
        now = self._clock.passed()
        if now - self._unmanaged_checked_at < _UNMANAGED_SECONDS:
            return
        tokens = [server.daemon.token for server in self._all()]
        try:
            daemons = self._daemons.unmanaged(tokens)
        except DriverError as e:
            log.info("unmanaged MPS daemons cannot be looked for", extra={"error": str(e)})
            return
        if [server.daemon.token for server in self._all()] != tokens:
            return  # one of ours was started meanwhile, and may be in there
        if daemons != self._unmanaged:
            log.warning("MPS daemons that are not ours", extra={"daemons": list(daemons)})
        self._unmanaged, self._unmanaged_checked_at = daemons, now

    def _make_spare(self, server: ManagedServer) -> None:
        try:
            with self._changing(server.name, 0):
                if not server.gone:
                    server.make_spare()
        except TimedOut as e:  # the next request tries it again
            log.debug("an MPS server is busy", extra={"server": server.name, "error": str(e)})
        except DriverError as e:
            extra = {"server": server.name, "error": str(e)}
            log.info("no MPS namespace is ready for the next claim", extra=extra)

    def _maintain(self, server: ManagedServer) -> None:
        """Unless the last time is not over: threads do not pile up behind a server that hangs."""
        with self._lock:
            if server.name in self._maintained:
                return
            self._maintained.add(server.name)
        try:
            with self._locked(server.name, _LOCK_SECONDS):
                self._maintain_locked(server)
        except TimedOut:
            log.debug("an MPS server is busy", extra={"server": server.name})
        finally:
            with self._lock:
                self._maintained.discard(server.name)

    def _maintain_locked(self, server: ManagedServer) -> None:
        try:
            if not server.gone:
                server.maintain()
        except DriverError as e:
            extra = {"server": server.name, "error": str(e)}
            log.warning("an MPS server is not well, will try again", extra=extra)
        except Exception:  # another server may fare better
            log.exception("maintaining an MPS server failed", extra={"server": server.name})

    def _check_quickly(self, server: ManagedServer) -> None:
        was_well = server.is_well
        try:
            with self._locked(server.name, _QUICK_LOCK_SECONDS):
                if not server.gone:
                    server.check(_CLIENTS_SECONDS)
        except TimedOut:
            log.debug("an MPS server is busy", extra={"server": server.name})
        if was_well and not server.is_well:
            self.on_problem()

    def _finish_interrupted(self, server: ManagedServer) -> None:
        try:
            server.finish_interrupted()
        except NodeError as e:
            raise type(e)(
                f"the MPS server over {', '.join(server.daemon.gpus)} does not come back: {e}"
            ) from e

    @contextmanager
    def _changing(self, name: MpsServerName, seconds: float) -> Iterator[None]:
        """As ``_locked``; a server that is not well afterwards is maintained soon."""
        try:
            with self._locked(name, seconds):
                yield
        finally:
            server = self._servers.get(name)
            if server is not None and not server.is_well:
                self.on_problem()

    @contextmanager
    def _locked(self, name: MpsServerName, seconds: float) -> Iterator[None]:
        """Hold the lock of this server. One that is gone in the end is forgotten."""
        with self._server_locks.hold([name], seconds_within_request(seconds)):
            try:
                yield
            finally:
                with self._lock:
                    if (server := self._servers.get(name)) is not None and server.gone:
                        del self._servers[name]

    def _holder(self, name: MpsNamespaceName) -> ManagedServer | None:
        """The server that serves it; else one that still has to remove it."""
        holders = [server for server in self._all() if server.state.find(name)]
        return min(holders, key=lambda server: not server.serves(name), default=None)

    def _all(self) -> list[ManagedServer]:
        with self._lock:
            return [self._servers[name] for name in sorted(self._servers)]


def _refuse_other_limits(holder: ManagedServer, namespace: MpsNamespace) -> None:
    """One name is one namespace: its limits do not change while somebody may use it."""
    known = holder.state.find(namespace.name)
    if known is None or known.served is None:
        return
    # The rules of the node may have changed, and with them the defaults.
    if replace(namespace, default_limits=known.namespace.default_limits) != known.namespace:
        raise NodeError(
            f"the MPS namespace {namespace.name} of claim {namespace.claim} exists already with "
            "other limits: delete the pods that use it"
        )
