"""What claims have of MPS: the ledger's spaces, and what the MPS agent and the GPUs tell of them.

The limits are what the ledger says. Who runs there is known while the agent answers.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dra_driver.cli.mps_devices import spaces_of_device
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
)
from dra_driver.plan.mps_clients import clients_of, owners
from dra_driver.plan.mps_watch import server_of


@dataclass(frozen=True, slots=True)
class Told:
    """What was learned of MPS besides the ledger."""

    status: MpsStatus | None = None  # None: the agent was not asked, or does not answer
    problem: str = ""  # why it does not answer
    pods: Mapping[int, PodUid] = field(default_factory=dict)  # of clients, where that was found out
    used: Mapping[GpuUuid, Mapping[int, int | None]] = field(default_factory=dict)  # by process

    def server(self, space: Space) -> MpsServer | None:
        """The one that serves it."""
        return server_of(space.name, self.status) if self.status else None


@dataclass(frozen=True, slots=True)
class SpaceUse:
    """What one claim has on one GPU, or MIG instance, in one of its spaces: it has several there
    where containers of its own use it by different requests."""

    space: Space
    gpu: GpuUuid
    served: Served | None = None  # None: the agent does not serve it, or was not asked
    server: ServerName | None = None  # that serves it
    lost: bool = False  # the agent was asked, and does not serve a claim that is prepared
    clients: tuple[int, ...] | None = None  # by the host's numbers; None: not known
    used_bytes: int | None = None  # by its clients on this GPU; None: not known

    @property
    def memory_bytes(self) -> int | None:
        """The most that a client can have of this GPU; None: no limit. A server of protocol 3 has
        one value for all of its GPUs."""
        if self.served is not None and self.served.protocol > 2:
            return self.space.allowance.memory_bytes
        limits = dict(zip(self.space.gpus, self.space.memory_bytes, strict=False))
        return limits.get(self.gpu)


@dataclass(frozen=True, slots=True)
class MpsUses:
    """Every claim under MPS: *records* and what was *told* of them."""

    records: Sequence[Record] = ()
    told: Told = Told()

    def of(self, record: Record, holding: Holding) -> tuple[SpaceUse, ...]:
        """Empty: the claim does not use that device under MPS. Several: it has several spaces on
        the device's GPU, and nobody can tell in which the device is."""
        gpu = holding.uuid
        if gpu is None or holding.admin:
            return ()
        there = [space for space in record.spaces if gpu in space.gpus]
        served = {space.name: one for space in there if (one := self._served(space))}
        its = there if len(there) < 2 else spaces_of_device(record, holding, there, served)
        return tuple(self._use(record, space, gpu) for space in its)

    def of_claim(self, record: Record) -> Iterator[SpaceUse]:
        """Each of its spaces, once for each GPU."""
        for space in record.spaces:
            yield from (self._use(record, space, gpu) for gpu in space.gpus)

    def claims_of(self, server: MpsServer) -> tuple[str, ...]:
        """Which claims have a space of it, by the ledger."""
        names = {served.space.name for served in server.spaces}
        return tuple(
            str(record.claim)
            for record in self.records
            if any(space.name in names for space in record.spaces)
        )

    @property
    def servers(self) -> tuple[MpsServer, ...]:
        return self.told.status.servers if self.told.status else ()

    @property
    def gpus(self) -> frozenset[GpuUuid]:
        """Those that some claim is on under MPS, by the ledger."""
        return frozenset(
            gpu for record in self.records for space in record.spaces for gpu in space.gpus
        )

    def _use(self, record: Record, space: Space, gpu: GpuUuid) -> SpaceUse:
        server, served = self.told.server(space), self._served(space)
        if server is None or served is None:
            return SpaceUse(space, gpu, lost=record.completed and self.told.status is not None)
        pids = clients_of({space.name}, owners(server, self._users(), self.told.pods))
        clients = None if pids is None else tuple(sorted(pids))
        used = self._used(gpu, clients)
        return SpaceUse(space, gpu, served, server.name, clients=clients, used_bytes=used)

    def _served(self, space: Space) -> Served | None:
        server = self.told.server(space)
        served = server.spaces if server else ()
        return next((one for one in served if one.space.name == space.name), None)

    def _users(self) -> Mapping[SpaceName, Collection[PodUid]]:
        return {
            space.name: frozenset(pod.uid for pod in record.pods)
            for record in self.records
            for space in record.spaces
        }

    def _used(self, gpu: GpuUuid, clients: tuple[int, ...] | None) -> int | None:
        used = self.told.used.get(gpu)
        if used is None or clients is None:
            return None
        sizes = [used[pid] for pid in clients if pid in used]
        if clients and not sizes:
            return None  # what the GPU lists are other numbers
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None


def use_words(use: SpaceUse) -> tuple[str, ...]:
    """What is told of a claim in one of its spaces, for people; empty: not of this one."""
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
        f"of namespace {server.tenant}" if server.tenant and server.protocol == 2 else "",
        f"over {len(server.gpus)} GPUs" if len(server.gpus) > 1 else "",
        _counted(number),
        again if server.restarts else "",
    )
    return f"MPS server {server.name}: {', '.join(filter(None, words))}"


def _client_words(use: SpaceUse) -> str:
    if use.clients is None:
        return ""
    number = len(use.clients)
    if not number or use.used_bytes is None:
        return _counted(number)
    return f"{_counted(number)} {'use' if number > 1 else 'uses'} {gib(use.used_bytes)}"


def _counted(clients: int) -> str:
    return "1 client" if clients == 1 else f"{clients or 'no'} clients"
