"""Which processes are clients of which claim, which bypass MPS, and what their pods are told.

Protocol 3 says in which namespace a client is. Protocol 2 does not: the clients of a server with
one namespace are all in that; with several, a client may be in those that its pod uses. Where that
leaves more than one, the client counts for none, and their number of clients is unknown.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import ClaimRef, ClaimUid, Pod, PodUid
from dra_driver.model.gpus import GpuUuid, MigInstance
from dra_driver.model.mps import (
    ALL_CORES,
    MpsNamespace,
    MpsNamespaceName,
    MpsServer,
    MpsServerRestart,
    MpsStatus,
)
from dra_driver.model.processes import ContainerProcess
from dra_driver.model.records import ClaimRecord
from dra_driver.plan.memory.usage import GpuMemorySample, MemoryShare

RESTART_REPORT_SECONDS: Final = 120.0  # an older restart is no news for a new process
CONNECTING_SECONDS: Final = 5.0  # what a process may be on a GPU before its server knows of it

ClientOwners = Mapping[int, frozenset[MpsNamespaceName]]
"""Of each client, by the host's number, the namespaces of which it may be."""


def clients_without_namespace(status: MpsStatus) -> frozenset[int]:
    """The clients whose namespace can only be found out by their pod."""
    return frozenset(
        client.pid
        for server in status.servers
        if len(server.namespaces) > 1
        for client in server.clients
        if client.namespace is None
    )


def client_owners(
    server: MpsServer,
    users: Mapping[MpsNamespaceName, Collection[PodUid]],
    pods: Mapping[int, PodUid],
) -> ClientOwners:
    """*users*: the pods that use each namespace; *pods*: of clients, where that was found out."""
    every = frozenset(served.namespace.name for served in server.namespaces)

    def of_pod(pod: PodUid | None) -> frozenset[MpsNamespaceName]:
        used_by_pod = frozenset(name for name in every if pod in users.get(name, ()))
        return used_by_pod or every  # of a pod that we were not told of yet, too

    return {
        client.pid: of_pod(pods.get(client.pid))
        if client.namespace is None
        else frozenset({client.namespace})
        for client in server.clients
    }


def counted_clients(
    namespaces: Set[MpsNamespaceName], owners: ClientOwners
) -> frozenset[int] | None:
    """The clients that these namespaces have together. None: one may be theirs or another's."""
    possible = {pid: names for pid, names in owners.items() if names & namespaces}
    return frozenset(possible) if all(map(namespaces.__ge__, possible.values())) else None


@frozen
class ClaimNamespace:
    """What a recorded claim has of MPS, and who uses the claim."""

    claim: ClaimRef
    pods: tuple[Pod, ...]
    namespace: MpsNamespace
    completed: bool
    display_names: Mapping[GpuUuid, str]  # of its GPUs or MIG partitions: "gpu-0 (GPU-…)"
    instance: tuple[GpuUuid, MigInstance] | None = None  # that it is over, and of which GPU

    @property
    def name(self) -> MpsNamespaceName:
        return self.namespace.name


@frozen
class NamespaceClients:
    """The possible clients of a namespace. *by_pod*: those whose pod is known."""

    candidates: ClientOwners = field(default_factory=dict)
    by_pod: Mapping[PodUid, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class MpsSnapshot:
    """What the agent serves and what claims have of MPS, at one moment.

    The agent is asked before the ledger is read: a record is written before its namespace is
    created, so a namespace without a record is orphaned.
    """

    status: MpsStatus
    records: Sequence[ClaimRecord]
    pods: Mapping[int, PodUid] = field(default_factory=dict)  # of clients, where that is known

    @cached_property
    def namespaces(self) -> tuple[ClaimNamespace, ...]:
        """Everything that is to be served."""
        return claim_namespaces(self.records)

    @cached_property
    def clients(self) -> Mapping[MpsNamespaceName, NamespaceClients]:
        """The possible clients of each namespace that is served for a claim."""
        users = {
            namespace.name: frozenset(pod.uid for pod in namespace.pods)
            for namespace in self.namespaces
        }
        return {
            name: _clients(name, users[name], owners, self.pods)
            for server in self.status.servers
            for owners in [client_owners(server, users, self.pods)]
            for name in (served.namespace.name for served in server.namespaces)
            if name in users
        }


@frozen
class BypassingProcess:
    """A process that uses a GPU for claims under MPS, and is no client of their server."""

    process: ContainerProcess
    gpu: GpuUuid
    claims: tuple[ClaimRef, ...]  # several: they cannot be told apart


@frozen
class ClaimMpsUsage:
    """What one claim has and does under MPS on one GPU. None: not known now."""

    claim: ClaimRef
    gpu: GpuUuid
    percent: int
    clients: int | None = None
    unserved: int | None = None


def claim_namespaces(records: Iterable[ClaimRecord]) -> tuple[ClaimNamespace, ...]:
    """Everything that is to be served; also what is just being prepared."""
    return tuple(
        _claim_namespace(record, namespace) for record in records for namespace in record.namespaces
    )


def _claim_namespace(record: ClaimRecord, namespace: MpsNamespace) -> ClaimNamespace:
    units = {holding.uuid: holding.unit for holding in record.holdings}
    instances = ((holding.gpu, holding.instance) for holding in record.holdings if holding.instance)
    return ClaimNamespace(
        record.claim,
        record.pods,
        namespace,
        record.completed,
        {gpu: f"{units.get(gpu, 'a GPU')} ({gpu})" for gpu in namespace.gpus},
        next((pair for pair in instances if pair[1].uuid in namespace.gpus), None),
    )


def unserved_claims(
    snapshot: MpsSnapshot, lost: Collection[MpsNamespaceName] = ()
) -> tuple[ClaimUid, ...]:
    """The prepared claims of which the agent does not serve everything, but for *lost*."""
    served = {namespace.namespace.name for namespace in snapshot.status.namespaces()}
    return tuple(
        sorted(
            {
                namespace.claim.uid
                for namespace in snapshot.namespaces
                if namespace.completed and namespace.name not in {*served, *lost}
            }
        )
    )


def server_failures(
    snapshot: MpsSnapshot, lost: Collection[MpsNamespaceName], unserved: Collection[ClaimUid]
) -> dict[ClaimUid, str]:
    """The prepared claims that cannot use MPS now, and why. *unserved*: those that the agent does
    not serve again."""
    failures: dict[ClaimUid, str] = {}
    for namespace in snapshot.namespaces:
        server = server_for(namespace.name, snapshot.status)
        if not namespace.completed:
            continue
        if namespace.name in lost:
            why = "the MIG instance of its MPS server is gone"
        elif server is not None and not server.ready:
            why = f"the MPS server of {_gpus([namespace])} does not work: {server.reason}"
        elif server is None and namespace.claim.uid in unserved:
            why = f"no MPS server of {_gpus([namespace])} serves it"
        else:
            continue
        failures.setdefault(namespace.claim.uid, why)
    return failures


def orphaned_namespaces(
    snapshot: MpsSnapshot, unreadable: Collection[ClaimUid]
) -> tuple[MpsNamespace, ...]:
    """What the agent serves and no record has. An *unreadable* record may have what its claim
    names."""
    recorded = {namespace.name for namespace in snapshot.namespaces}
    return tuple(
        served.namespace
        for served in snapshot.status.namespaces()
        if served.namespace.name not in recorded and served.namespace.claim not in unreadable
    )


def new_restarts(
    incidents: Sequence[MpsServerRestart], last: int | None, now: float
) -> tuple[MpsServerRestart, ...]:
    """The incidents that were not told yet; *last*: the number of the last one that was.

    Where none was (None), or where the agent counts anew, it is those of the last minutes.
    """
    if last is None or last_restart(incidents) < last:
        return tuple(
            incident for incident in incidents if now - incident.at < RESTART_REPORT_SECONDS
        )
    return tuple(incident for incident in incidents if incident.number > last)


def last_restart(incidents: Iterable[MpsServerRestart]) -> int:
    """The number of the last one; 0: there was none."""
    return max((incident.number for incident in incidents), default=0)


def server_for(namespace: MpsNamespaceName, status: MpsStatus) -> MpsServer | None:
    """None: the agent does not serve it."""
    return next(
        (
            server
            for server in status.servers
            if any(served.namespace.name == namespace for served in server.namespaces)
        ),
        None,
    )


def _clients(
    namespace: MpsNamespaceName,
    users: frozenset[PodUid],
    owners: ClientOwners,
    pods: Mapping[int, PodUid],
) -> NamespaceClients:
    """Where a pod has the namespace for itself, its clients are the pod's, seen or not."""
    only_user = next(iter(users)) if len(users) == 1 else None
    by_pod: dict[PodUid, set[int]] = {}
    candidates = {pid: names for pid, names in owners.items() if namespace in names}
    for pid, names in candidates.items():
        pod = pods.get(pid) or (only_user if names == {namespace} else None)
        if pod in users:
            by_pod.setdefault(pod, set()).add(pid)
    return NamespaceClients(candidates, {pod: frozenset(pids) for pod, pids in by_pod.items()})


def mps_memory_shares(snapshot: MpsSnapshot) -> Mapping[GpuUuid, tuple[MemoryShare, ...]]:
    """For each GPU that a prepared claim has under MPS, the share of every claim on it."""
    gpus = {
        gpu
        for namespace in snapshot.namespaces
        if namespace.completed
        for gpu in namespace.namespace.gpus
    }
    return {
        gpu: tuple(
            MemoryShare(
                record.claim,
                frozenset(pod.uid for pod in record.pods),
                None,
                admin=all(holding.admin for holding in holdings),
            )
            for record in snapshot.records
            if (holdings := [holding for holding in record.holdings if holding.uuid == gpu])
        )
        for gpu in sorted(gpus)
    }


def bypassing_processes(
    samples: Iterable[GpuMemorySample], snapshot: MpsSnapshot
) -> frozenset[BypassingProcess]:
    """The processes on GPUs that bypass MPS.

    Where a server is not ready, or a namespace not served, its clients are unknown. A process that
    may use the GPU for a claim without MPS does not count.
    """
    return frozenset(bypass for sample in samples for bypass in _bypasses_on(sample, snapshot))


def _bypasses_on(sample: GpuMemorySample, snapshot: MpsSnapshot) -> Iterable[BypassingProcess]:
    clients: dict[ClaimUid, frozenset[int] | None] = {}  # None: nobody can tell
    refs: dict[ClaimUid, ClaimRef] = {}
    for namespace in snapshot.namespaces:
        if namespace.completed and sample.gpu in namespace.namespace.gpus:
            uid = namespace.claim.uid
            refs[uid] = namespace.claim
            known_pids = clients.get(uid, frozenset())
            pids = _possible_clients(namespace.name, snapshot)
            clients[uid] = None if known_pids is None or pids is None else known_pids | pids
    for usage in sample.usages:
        allowed = [clients.get(uid) for uid in usage.claims]
        known = [pids for pids in allowed if pids is not None]
        if (
            known
            and len(known) == len(allowed)
            and usage.process.pid not in frozenset().union(*known)
        ):
            claims = tuple(sorted(refs[uid] for uid in usage.claims))
            yield BypassingProcess(usage.process, sample.gpu, claims)


def _possible_clients(name: MpsNamespaceName, snapshot: MpsSnapshot) -> frozenset[int] | None:
    server = server_for(name, snapshot.status)
    if server is None or not server.ready:
        return None
    return frozenset(client.pid for client in server.clients if client.namespace in (None, name))


def confirmed_bypasses(
    since: Mapping[BypassingProcess, float], now: float
) -> frozenset[BypassingProcess]:
    """Those that had the time to connect, and did not."""
    return frozenset(bypass for bypass, at in since.items() if now - at >= CONNECTING_SECONDS)


def mps_usages(
    namespaces: Iterable[ClaimNamespace],
    clients: Mapping[MpsNamespaceName, NamespaceClients] | None = None,
    bypasses: Collection[BypassingProcess] | None = None,
) -> tuple[ClaimMpsUsage, ...]:
    """Every prepared claim on each of its GPUs. *clients*: those of served namespaces.

    None: unknown, because the agent does not answer. So is the number of a claim's clients while
    one of them may be another claim's.
    """
    by_claim: dict[tuple[ClaimRef, GpuUuid], list[MpsNamespace]] = {}
    for used in namespaces:
        for gpu in used.namespace.gpus if used.completed else ():
            by_claim.setdefault((used.claim, gpu), []).append(used.namespace)
    return tuple(
        ClaimMpsUsage(
            claim,
            gpu,
            min(ALL_CORES, sum(namespace.percent for namespace in of_claim)),
            None if clients is None else _count(clients, of_claim),
            None
            if bypasses is None
            else sum(bypass.gpu == gpu and claim in bypass.claims for bypass in bypasses),
        )
        for (claim, gpu), of_claim in by_claim.items()
    )


def _count(
    clients: Mapping[MpsNamespaceName, NamespaceClients], namespaces: Iterable[MpsNamespace]
) -> int | None:
    names = {namespace.name for namespace in namespaces}
    owners = {
        pid: candidates
        for name in names & clients.keys()
        for pid, candidates in clients[name].candidates.items()
    }
    pids = counted_clients(names, owners)
    return None if pids is None else len(pids)


def server_restarted_message(incident: MpsServerRestart, used: ClaimNamespace) -> str:
    """The server of this namespace was restarted."""
    return (
        f"the MPS server of {_gpus([used])} was restarted ({incident.reason}): what "
        f"ran there for claim {used.claim} was ended, and a program that is still there fails at "
        "its next call of CUDA; restart the container if it does not restart by itself"
    )


def bypass_message(bypass: BypassingProcess, gpu: str) -> str:
    """A process bypasses its server. *gpu*: as people know it."""
    return (
        f"process {bypass.process.pid} of the host uses {gpu} for {_claims(bypass)} and is no "
        "client of the claim's MPS server: it runs without the limits of MPS. Either it unset or "
        "changed CUDA_MPS_PIPE_DIRECTORY, or it is from before a restart of the server, or the "
        "server does not serve its user; restart the container with the variable as it was given"
    )


def agent_down_message(used: ClaimNamespace, seconds: float, error: str) -> str:
    """The agent does not answer."""
    return (
        f"the MPS agent of this node has not answered for {seconds:g} s: claim {used.claim} goes "
        f"on with its limits on {_gpus([used])}, but nobody restarts its MPS server when that "
        "fails, and new claims under MPS wait; look at the pod of the DaemonSet …-mps-agent on "
        f"this node ({error})"
    )


def pod_not_served_message(namespaces: Sequence[ClaimNamespace], problems: Iterable[str]) -> str:
    """Containers of a pod that joined the claim of *namespaces* cannot use it like this."""
    return (
        f"claim {namespaces[0].claim}, which is under MPS on {_gpus(namespaces)}, was prepared "
        f"before this pod came, and does not serve all of it: {'; '.join(problems)}"
    )


def bypass_subject(bypass: BypassingProcess) -> str:
    """What processes have in common that bypass MPS in the same way."""
    return f"{bypass.gpu} {_claims(bypass)}"


def _gpus(namespaces: Iterable[ClaimNamespace]) -> str:
    return ", ".join(
        dict.fromkeys(name for namespace in namespaces for name in namespace.display_names.values())
    )


def _claims(bypass: BypassingProcess) -> str:
    word = "claim" if len(bypass.claims) == 1 else "claims"
    return f"{word} {' or '.join(map(str, bypass.claims))}"
