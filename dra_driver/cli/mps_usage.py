"""What claims have of MPS: the ledger's spaces, and what the MPS agent and the GPUs tell of them.

The limits are what the ledger says. Who runs there is known while the agent answers.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dra_driver.cli.sizes import gib
from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Holding, Record
from dra_driver.model.mps import (
    MpsServer,
    MpsStatus,
    Served,
    ServerName,
    Space,
    SpaceName,
    server_name,
)
from dra_driver.plan.mps import served_steps


@dataclass(frozen=True, slots=True)
class Told:
    """What was learned of MPS besides the ledger."""

    status: MpsStatus | None = None  # None: the agent was not asked, or does not answer
    problem: str = ""  # why it does not answer
    pods: Mapping[int, PodUid] = field(default_factory=dict)  # of clients, where that was found out
    used: Mapping[GpuUuid, Mapping[int, int | None]] = field(default_factory=dict)  # by process

    def server(self, gpus: Iterable[GpuUuid]) -> MpsServer | None:
        name = server_name(gpus)
        servers = self.status.servers if self.status else ()
        return next((one for one in servers if one.name == name), None)


@dataclass(frozen=True, slots=True)
class MpsUse:
    """What one claim has of MPS on one GPU."""

    space: Space
    gpu: GpuUuid
    served: Served | None = None  # None: the agent does not serve it, or was not asked
    lost: bool = False  # the agent was asked, and does not serve a claim that is prepared
    clients: tuple[int, ...] | None = None  # by the host's numbers; None: not known
    used_bytes: int | None = None  # by its clients on this GPU; None: not known

    @property
    def memory_bytes(self) -> int | None:
        """The most that a client can have of this GPU; None: no limit."""
        limits = dict(zip(self.space.gpus, self.space.memory_bytes, strict=False))
        return limits.get(self.gpu)

    @property
    def server(self) -> ServerName:
        return server_name(self.space.gpus)


@dataclass(frozen=True, slots=True)
class MpsUses:
    """Every claim under MPS: *records* and what was *told* of them."""

    records: Sequence[Record] = ()
    told: Told = Told()

    def of(self, record: Record, holding: Holding) -> MpsUse | None:
        """None: the claim does not use that GPU under MPS."""
        gpu = holding.gpu
        space = next((one for one in spaces(record) if gpu in one.gpus), None)
        if gpu is None or space is None or holding.admin:
            return None
        server = self.told.server(space.gpus)
        spaces_there = server.spaces if server else ()
        served = next((one for one in spaces_there if one.space.name == space.name), None)
        if server is None or served is None:
            return MpsUse(space, gpu, lost=record.completed and self.told.status is not None)
        clients = _clients(space, self._owners(server))
        return MpsUse(space, gpu, served, clients=clients, used_bytes=self._used(gpu, clients))

    def of_claim(self, record: Record) -> Iterator[MpsUse]:
        """Once for each GPU."""
        found = {h.gpu: use for h in record.holdings if (use := self.of(record, h))}
        yield from found.values()

    def claims_of(self, server: MpsServer) -> tuple[str, ...]:
        """Which claims have a space of it, by the ledger."""
        names = {served.space.name for served in server.spaces}
        return tuple(
            str(record.claim)
            for record in self.records
            if any(space.name in names for space in spaces(record))
        )

    @property
    def servers(self) -> tuple[MpsServer, ...]:
        return self.told.status.servers if self.told.status else ()

    @property
    def gpus(self) -> frozenset[GpuUuid]:
        """Those that some claim is on under MPS, by the ledger."""
        return frozenset(
            gpu for record in self.records for space in spaces(record) for gpu in space.gpus
        )

    def _used(self, gpu: GpuUuid, clients: tuple[int, ...] | None) -> int | None:
        used = self.told.used.get(gpu)
        if used is None or clients is None:
            return None
        sizes = [used[pid] for pid in clients if pid in used]
        if clients and not sizes:
            return None  # what the GPU lists are other numbers
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def _owners(self, server: MpsServer) -> Mapping[int, SpaceName | None]:
        """Of each client whose it is; None: nobody can tell."""
        return {
            client.pid: client.space or self._by_pod(client.pid, server)
            for client in server.clients
        }

    def _by_pod(self, pid: int, server: MpsServer) -> SpaceName | None:
        """Protocol 2 does not tell whose client a process is; its pod does, unless that has several
        claims there."""
        mine = {served.space.name for served in server.spaces}
        if len(mine) == 1:
            return next(iter(mine))
        pod = self.told.pods.get(pid)
        owners = {
            space.name
            for record in self.records
            if pod in {each.uid for each in record.pods}
            for space in spaces(record)
            if space.name in mine
        }
        return owners.pop() if len(owners) == 1 else None


def spaces(record: Record) -> Iterator[Space]:
    """What a claim has of MPS, by the ledger."""
    yield from (step.space for step in served_steps(record))


def clients_without_space(status: MpsStatus) -> Collection[int]:
    """Of whom only their pod can tell whose they are."""
    return {
        client.pid
        for server in status.servers
        if len(server.spaces) > 1
        for client in server.clients
        if client.space is None
    }


def use_words(use: MpsUse) -> tuple[str, ...]:
    """What is told of a claim under MPS, for people; empty: not of this one."""
    limit = use.memory_bytes
    return (
        f"{use.space.percent} %",
        "" if limit is None else f"limit {gib(limit)}",
        "not served by the agent" if use.lost else _client_words(use),
    )


def server_words(server: MpsServer) -> str:
    """What is told of a server, for people."""
    again = "restarted once" if server.restarts == 1 else f"restarted {server.restarts} times"
    number = len(server.clients)
    words = (
        f"protocol {server.protocol}",
        "ready" if server.ready else f"not ready: {server.reason or 'it does not say why'}",
        f"over {len(server.gpus)} GPUs" if len(server.gpus) > 1 else "",
        _counted(number),
        again if server.restarts else "",
    )
    return f"MPS server {server.name}: {', '.join(filter(None, words))}"


def _clients(space: Space, owners: Mapping[int, SpaceName | None]) -> tuple[int, ...] | None:
    if None in owners.values():
        return None
    return tuple(sorted(pid for pid, owner in owners.items() if owner == space.name))


def _client_words(use: MpsUse) -> str:
    if use.clients is None:
        return ""
    number = len(use.clients)
    if not number or use.used_bytes is None:
        return _counted(number)
    return f"{_counted(number)} {'use' if number > 1 else 'uses'} {gib(use.used_bytes)}"


def _counted(clients: int) -> str:
    return "1 client" if clients == 1 else f"{clients or 'no'} clients"
