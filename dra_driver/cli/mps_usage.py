"""What claims use of MPS on this node: by the ledger, the MPS agent and the processes on the GPUs.

The limits of a claim come from the ledger. Its clients are known while the agent answers. The
ledger does not say in which of its MPS namespaces a claim has a device. The device's CDI edits do:
they name the namespace's pipe directory.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from cdi.encoding import from_text
from cdi.errors import CdiError
from cdi.spec import parse_name
from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import frozen
from dra_driver.cli.terminal import format_gib
from dra_driver.cli.usage import known_sum
from dra_driver.k8s.claims import PodUid
from dra_driver.model.gpus import ALL_GPUS, GpuUuid, Inventory, UnavailableGpu
from dra_driver.model.mps import (
    MpsNamespace,
    MpsNamespaceName,
    MpsServer,
    MpsServerName,
    MpsStatus,
    ServedNamespace,
)
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.machine import OpenNode
from dra_driver.node.mps.agent_client import MpsAgentClient
from dra_driver.plan.mps.usage import (
    client_owners,
    clients_without_namespace,
    counted_clients,
    server_for,
)
from dra_driver.plan.prepare.cdi_spec import mps_edits

_PIPE = "CUDA_MPS_PIPE_DIRECTORY="
_PROTOCOLS = (2, 3)


def namespaces_of_device(
    record: ClaimRecord,
    holding: Holding,
    candidates: Sequence[MpsNamespace],
    served: Callable[[MpsNamespace], ServedNamespace | None],
) -> Sequence[MpsNamespace]:
    """Those of the namespaces *candidates* that the device can be in; one, where that is known.

    *served*: as the agent serves it; None: it does not, or was not asked.
    """
    env = _environment(record, holding)
    directory = next((e.removeprefix(_PIPE) for e in env if e.startswith(_PIPE)), None)
    if directory is None:
        return candidates
    matching = []
    for namespace in candidates:
        as_served = served(namespace)
        if as_served is not None and as_served.pipe_directory != directory:
            continue
        protocols = (as_served.protocol,) if as_served else _PROTOCOLS
        forms = (ServedNamespace(namespace, protocol, directory) for protocol in protocols)
        if any(env >= set(mps_edits(form).env) for form in forms):
            matching.append(namespace)
    return matching or candidates


def _environment(record: ClaimRecord, holding: Holding) -> frozenset[str]:
    """What containers get with the device; empty where it is not prepared."""
    try:
        spec = from_text(record.spec or "")
    except CdiError:
        return frozenset()
    names = {
        parse_name(text).device
        for prepared in record.prepared or ()
        if (prepared.device, prepared.share) == (holding.device, holding.share)
        for text in prepared.cdi_ids
    }
    edits = (device.container_edits for device in spec.devices if device.name in names)
    return frozenset(entry for prepared in edits for entry in prepared.env)


@frozen
class MpsReport:
    """What was learned of MPS besides the ledger."""

    status: MpsStatus | None = None  # None: the agent was not asked, or does not answer
    problem: str = ""  # why it does not answer
    pods: Mapping[int, PodUid] = field(default_factory=dict)  # of clients, where that was found out
    used: Mapping[GpuUuid, Mapping[int, int | None]] = field(default_factory=dict)  # by process

    @property
    def answers(self) -> bool | None:
        """Whether the agent does; None: it was not asked."""
        return False if self.problem else True if self.status else None

    def server(self, namespace: MpsNamespace) -> MpsServer | None:
        """The one that serves it."""
        return server_for(namespace.name, self.status) if self.status else None


AskAgent = Callable[[Path], MpsStatus]
"""Asks the MPS agent at a socket. NodeError: it does not answer."""


def read_gpus(
    open_node: OpenNode, used_of: Collection[GpuUuid]
) -> tuple[Inventory, Mapping[GpuUuid, Mapping[int, int | None]]]:
    """The GPUs that can be seen, and why others cannot; and of the GPUs *used_of* the memory that
    each process uses there."""
    try:
        with open_node() as node:
            return node.refresh(), {gpu: _used(node, gpu) for gpu in sorted(used_of)}
    except NodeError as e:
        return Inventory(unavailable=(UnavailableGpu(ALL_GPUS, str(e)),)), {}


def ask_agent(socket: Path) -> MpsStatus:
    return MpsAgentClient(socket).status()


def read_mps_report(ask: AskAgent, socket: str) -> MpsReport:
    """What the agent at *socket* tells, or why it tells nothing."""
    if not socket:
        return MpsReport(problem="--mps-socket is empty: there is no MPS agent to ask")
    try:
        status = ask(Path(socket))
    except NodeError as e:
        return MpsReport(problem=str(e))
    return MpsReport(status, pods=_pods(clients_without_namespace(status)))


def _used(node: GpuNode, gpu: GpuUuid) -> Mapping[int, int | None]:
    try:
        return {process.pid: process.memory_bytes for process in node.processes(gpu)}
    except NodeError:
        return {}  # it is gone, or does not say: then nothing is known of its clients' use


def _pods(pids: Collection[int]) -> Mapping[int, PodUid]:
    processes = ContainerProcesses()
    if not pids or not processes.sees_pods():
        return {}
    return {pid: process.pod for pid in pids if (process := processes.find(pid)) is not None}


@frozen
class MpsNamespaceUsage:
    """What one claim has on one GPU, or MIG instance, in one of its namespaces. It has
    several there where its containers use different requests."""

    namespace: MpsNamespace
    gpu: GpuUuid
    served: ServedNamespace | None = None  # None: the agent does not serve it, or was not asked
    server: MpsServerName | None = None  # that serves it
    lost: bool = False  # the agent was asked, and does not serve a claim that is prepared
    clients: tuple[int, ...] | None = None  # by the host's numbers; None: not known
    used_bytes: int | None = None  # by its clients on this GPU; None: not known

    @property
    def memory_bytes(self) -> int | None:
        """The most that a client can have of this GPU; None: no limit. A server of protocol 3 has
        one value for all of its GPUs."""
        if self.served is not None and self.served.protocol > 2:
            return self.namespace.limits.memory_bytes
        limits = dict(zip(self.namespace.gpus, self.namespace.memory_bytes, strict=False))
        return limits.get(self.gpu)


@frozen
class ClaimsMpsUsage:
    """Every claim under MPS: *records*, and the *report* of the agent and the GPUs."""

    records: Sequence[ClaimRecord] = ()
    report: MpsReport = MpsReport()

    def of(self, record: ClaimRecord, holding: Holding) -> tuple[MpsNamespaceUsage, ...]:
        """Empty: the claim does not use that device under MPS. Several: it has several namespaces
        on the device's GPU, and it is not known in which the device is."""
        gpu = holding.uuid
        if gpu is None or holding.admin:
            return ()
        candidates = [namespace for namespace in record.namespaces if gpu in namespace.gpus]
        if len(candidates) > 1:
            candidates = list(namespaces_of_device(record, holding, candidates, self._served))
        return tuple(self._use(record, namespace, gpu) for namespace in candidates)

    def of_claim(self, record: ClaimRecord) -> Iterator[MpsNamespaceUsage]:
        """Each of its namespaces, once for each GPU."""
        for namespace in record.namespaces:
            yield from (self._use(record, namespace, gpu) for gpu in namespace.gpus)

    def claims_of(self, server: MpsServer) -> tuple[str, ...]:
        """Which claims have a namespace of it, by the ledger."""
        names = {served.namespace.name for served in server.namespaces}
        return tuple(
            str(record.claim)
            for record in self.records
            if any(namespace.name in names for namespace in record.namespaces)
        )

    @property
    def servers(self) -> tuple[MpsServer, ...]:
        return self.report.status.servers if self.report.status else ()

    @property
    def gpus(self) -> frozenset[GpuUuid]:
        """Those that some claim is on under MPS, by the ledger."""
        return frozenset(
            gpu
            for record in self.records
            for namespace in record.namespaces
            for gpu in namespace.gpus
        )

    def _use(self, record: ClaimRecord, namespace: MpsNamespace, gpu: GpuUuid) -> MpsNamespaceUsage:
        server, served = self.report.server(namespace), self._served(namespace)
        if server is None or served is None:
            lost = record.completed and self.report.status is not None
            return MpsNamespaceUsage(namespace, gpu, lost=lost)
        owners = client_owners(server, self._users(), self.report.pods)
        pids = counted_clients({namespace.name}, owners)
        clients = None if pids is None else tuple(sorted(pids))
        used = self._used(gpu, clients)
        return MpsNamespaceUsage(
            namespace, gpu, served, server.name, clients=clients, used_bytes=used
        )

    def _served(self, namespace: MpsNamespace) -> ServedNamespace | None:
        server = self.report.server(namespace)
        served = server.namespaces if server else ()
        return next((each for each in served if each.namespace.name == namespace.name), None)

    def _users(self) -> Mapping[MpsNamespaceName, Collection[PodUid]]:
        return {
            namespace.name: frozenset(pod.uid for pod in record.pods)
            for record in self.records
            for namespace in record.namespaces
        }

    def _used(self, gpu: GpuUuid, clients: tuple[int, ...] | None) -> int | None:
        used = self.report.used.get(gpu)
        if used is None or clients is None:
            return None
        sizes = [used[pid] for pid in clients if pid in used]
        if clients and not sizes:
            return None  # what the GPU lists are other numbers
        return known_sum(sizes)


def usage_messages(use: MpsNamespaceUsage) -> tuple[str, ...]:
    """What people read of a claim in one of its namespaces; empty: does not apply."""
    limit = use.memory_bytes
    return (
        f"{use.namespace.percent} %",
        "" if limit is None else f"limit {format_gib(limit)}",
        "not served by the agent" if use.lost else _client_words(use),
    )


def server_message(server: MpsServer) -> str:
    """What people read of a server."""
    again = "restarted once" if server.restarts == 1 else f"restarted {server.restarts} times"
    number = len(server.clients)
    parts = (
        f"protocol {server.protocol}",
        "ready" if server.ready else f"not ready: {server.reason or 'it does not say why'}",
        f"of namespace {server.tenant}" if server.tenant and server.protocol == 2 else "",
        f"over {len(server.gpus)} GPUs" if len(server.gpus) > 1 else "",
        _counted(number),
        again if server.restarts else "",
    )
    return f"MPS server {server.name}: {', '.join(filter(None, parts))}"


def _client_words(use: MpsNamespaceUsage) -> str:
    if use.clients is None:
        return ""
    number = len(use.clients)
    if not number or use.used_bytes is None:
        return _counted(number)
    return f"{_counted(number)} {'use' if number > 1 else 'uses'} {format_gib(use.used_bytes)}"


def _counted(clients: int) -> str:
    return "1 client" if clients == 1 else f"{clients or 'no'} clients"
