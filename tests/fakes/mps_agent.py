"""An MPS agent in memory, for one protocol: what it refuses is what the real one refuses."""

import re
from collections.abc import Collection
from dataclasses import replace

from dra_driver.base.errors import MpsAgentUnreachable, NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import (
    MpsClient,
    MpsNamespace,
    MpsNamespaceName,
    MpsServer,
    MpsServerName,
    MpsServerRestart,
    MpsStatus,
    ServedNamespace,
    mps_server_name,
)
from dra_driver.plan.mps.servers import protocol_over
from dra_driver.plan.mps.usage import server_for

_LEGAL = re.compile("[a-z0-9_]{1,64}")


class FakeMpsAgent:
    """Its servers are over sets of GPUs. ``down``, ``hangs`` and ``wedged`` make it fail."""

    def __init__(self, protocol: int = 3) -> None:
        self.protocol = protocol
        self.now = 1_000_000.0  # seconds since the epoch
        self.down = False  # nobody answers
        self.hangs = False  # somebody took the question
        self.wedged = False  # clients cannot be ended
        self.asked = 0  # for its status
        self.ended: list[tuple[MpsNamespaceName, tuple[int, ...]]] = []  # calls of terminate
        self._servers: dict[MpsServerName, MpsServer] = {}
        self._incidents: tuple[MpsServerRestart, ...] = ()

    # What the plugin can ask

    def serve(self, namespace: MpsNamespace) -> ServedNamespace:
        self._answer()
        if not _LEGAL.fullmatch(namespace.name):
            raise NodeError(f"{namespace.name!r} is no name of a namespace: [a-z0-9_]{{1,64}}")
        protocol = protocol_over(namespace.gpus, self.protocol)
        name = mps_server_name(namespace.gpus, namespace.tenant if protocol == 2 else "")
        server = self._servers.get(name, MpsServer(name, namespace.gpus, protocol, ready=True))
        for served in server.namespaces:
            if served.namespace.name == namespace.name:
                if served.namespace != namespace:
                    raise NodeError(f"namespace {namespace.name} exists already with other limits")
                return served
        directory = f"/run/mps/{name}/pipe" + (f"/gpu/{namespace.name}" if protocol > 2 else "")
        made = ServedNamespace(namespace, protocol, directory)
        self._servers[name] = replace(server, namespaces=(*server.namespaces, made))
        return made

    def release(self, name: MpsNamespaceName) -> None:
        self._answer()
        for server in tuple(self._servers.values()):
            kept = tuple(
                namespace for namespace in server.namespaces if namespace.namespace.name != name
            )
            clients = tuple(client for client in server.clients if client.namespace != name)
            self._servers[server.name] = replace(server, namespaces=kept, clients=clients)
            if not kept:
                del self._servers[server.name]

    def terminate(self, name: MpsNamespaceName, pids: Collection[int]) -> None:
        self._answer()
        self.ended.append((name, tuple(sorted(pids))))
        for server in tuple(self._servers.values()):
            if any(namespace.namespace.name == name for namespace in server.namespaces):
                if self.wedged:
                    raise TimedOut("client terminate was still running after 5 s")
                self._keep(server, {client.pid for client in server.clients} - set(pids))

    def status(self) -> MpsStatus:
        self.asked += 1
        self._answer()
        return MpsStatus(tuple(self._servers.values()), self._incidents)

    # What happens to it

    def connect(self, pid: int, namespace: MpsNamespace) -> None:
        """A process becomes a client. NodeError: nobody serves that namespace."""
        server = server_for(namespace.name, MpsStatus(tuple(self._servers.values())))
        if server is None:
            raise NodeError(f"namespace {namespace.name} is not served")
        client = MpsClient(pid, namespace.name if server.protocol > 2 else None)
        kept = (client for client in server.clients if client.pid != pid)
        self._servers[server.name] = replace(server, clients=(*kept, client))

    def leave(self, pid: int) -> None:
        """A process ends."""
        for server in tuple(self._servers.values()):
            self._keep(server, {client.pid for client in server.clients} - {pid})

    def ready(self, gpu: GpuUuid, ready: bool) -> None:
        """The server over this GPU is, or is not."""
        name = mps_server_name([gpu])
        self._servers[name] = replace(self._servers[name], ready=ready)

    def restart(self, *gpus: GpuUuid, reason: str = "it died") -> None:
        """A server comes again with everything but its clients."""
        server = self._servers[mps_server_name(gpus)]
        number = max((incident.number for incident in self._incidents), default=0) + 1
        namespaces = tuple(namespace.namespace.name for namespace in server.namespaces)
        lost = len(server.clients)
        incident = MpsServerRestart(number, server.name, self.now, reason, namespaces, lost)
        self._incidents = (*self._incidents, incident)
        self._keep(replace(server, restarts=server.restarts + 1), set())

    def forget(self) -> None:
        """Its directory was removed: it begins anew."""
        self._servers, self._incidents = {}, ()

    def _keep(self, server: MpsServer, pids: set[int]) -> None:
        clients = tuple(client for client in server.clients if client.pid in pids)
        self._servers[server.name] = replace(server, clients=clients)

    def _answer(self) -> None:
        if self.down:
            raise MpsAgentUnreachable(
                "the MPS agent of this node does not answer at /run/mps/agent.sock"
            )
        if self.hangs:
            raise TimedOut("waited 10 s for the MPS agent")
