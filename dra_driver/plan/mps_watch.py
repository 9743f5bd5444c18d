"""What follows from what the MPS agent serves: claims that lack it, and processes that go past it.

The agent is asked first and the ledger read after that: a record is written before its space is
made, so a space without a record is nobody's.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dra_driver.kubeletplugin.claims import ClaimRef, ClaimUid, Pod, PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Holding, Record
from dra_driver.model.mig import Instance
from dra_driver.model.mps import ALL_CORES, Incident, MpsServer, MpsStatus, Space, SpaceName
from dra_driver.model.processes import Process
from dra_driver.plan.memory_look import GpuLook
from dra_driver.plan.memory_shares import Share
from dra_driver.plan.mps_clients import Owners, clients_of, owners

NEWS_SECONDS: Final = 120.0  # an older restart is no news for a process that has just started
CONNECTING_SECONDS: Final = 5.0  # what a process may be on a GPU before its server knows of it


@dataclass(frozen=True, slots=True)
class ClaimSpace:
    """What a recorded claim has of MPS, and who uses the claim."""

    claim: ClaimRef
    pods: tuple[Pod, ...]
    space: Space
    completed: bool
    names: tuple[str, ...]  # of the GPUs or MIG partitions of the space, in its order: "gpu-0"
    over: tuple[GpuUuid, Instance] | None = None  # the MIG instance that it is over, of which GPU

    @property
    def known_as(self) -> Mapping[GpuUuid, str]:
        """The GPUs of the space, each as people know it."""
        both = zip(self.space.gpus, self.names, strict=True)
        return {gpu: f"{name} ({gpu})" for gpu, name in both}


@dataclass(frozen=True, slots=True)
class Clients:
    """Who may be a client of a space, and of which others. *of_pods*: those whose pod we know."""

    may_be: Owners = field(default_factory=dict)
    of_pods: Mapping[PodUid, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stray:
    """A process that uses a GPU for claims under MPS, and is no client of their server."""

    process: Process
    gpu: GpuUuid
    claims: tuple[ClaimRef, ...]  # several: they cannot be told apart


@dataclass(frozen=True, slots=True)
class MpsUse:
    """What one claim has and does under MPS on one GPU. None: not known now."""

    claim: ClaimRef
    gpu: GpuUuid
    percent: int
    clients: int | None = None
    unserved: int | None = None


def claim_spaces(records: Iterable[Record]) -> tuple[ClaimSpace, ...]:
    """Everything that is to be served; also what is just being prepared."""
    return tuple(
        ClaimSpace(
            record.claim,
            record.pods,
            space,
            record.completed,
            _names(record, space),
            _over(record, space),
        )
        for record in records
        for space in record.spaces
    )


def _names(record: Record, space: Space) -> tuple[str, ...]:
    names = {holding.uuid: holding.unit for holding in record.holdings}
    return tuple(names.get(gpu, "a GPU") for gpu in space.gpus)


def _over(record: Record, space: Space) -> tuple[GpuUuid, Instance] | None:
    held = ((one.gpu, one.instance) for one in record.holdings)
    found = ((gpu, its) for gpu, its in held if gpu is not None and its is not None)
    return next((one for one in found if one[1].uuid in space.gpus), None)


def lacking(spaces: Iterable[ClaimSpace], status: MpsStatus) -> tuple[ClaimUid, ...]:
    """The prepared claims of which the agent does not serve everything."""
    served = {one.space.name for one in status.spaces()}
    return tuple(
        sorted({s.claim.uid for s in spaces if s.completed and s.space.name not in served})
    )


def unknown(
    spaces: Iterable[ClaimSpace], status: MpsStatus, unreadable: Collection[ClaimUid]
) -> tuple[Space, ...]:
    """What the agent serves for nobody. Whose record is *unreadable* may well have it."""
    recorded = {one.space.name for one in spaces}
    return tuple(
        one.space
        for one in status.spaces()
        if one.space.name not in recorded and one.space.claim not in unreadable
    )


def news(incidents: Sequence[Incident], last: int | None, now: float) -> tuple[Incident, ...]:
    """The incidents that were not told yet; *last*: the number of the last one that was.

    Where none was (None), or where the agent counts anew, it is those of the last minutes.
    """
    if last is None or latest(incidents) < last:
        return tuple(one for one in incidents if now - one.at < NEWS_SECONDS)
    return tuple(one for one in incidents if one.number > last)


def latest(incidents: Iterable[Incident]) -> int:
    """The number of the last one; 0: there was none."""
    return max((one.number for one in incidents), default=0)


def server_of(space: SpaceName, status: MpsStatus) -> MpsServer | None:
    """None: the agent does not serve it."""
    return next(
        (
            server
            for server in status.servers
            if any(served.space.name == space for served in server.spaces)
        ),
        None,
    )


def clients(
    spaces: Iterable[ClaimSpace], status: MpsStatus, pods: Mapping[int, PodUid]
) -> Mapping[SpaceName, Clients]:
    """Who may be a client of those spaces that are served. *pods*: of which pod each client of any
    server is, where that is known."""
    users = {one.space.name: frozenset(pod.uid for pod in one.pods) for one in spaces}
    return {
        served.space.name: _clients(served.space.name, users, owners(server, users, pods), pods)
        for server in status.servers
        for served in server.spaces
        if served.space.name in users
    }


def _clients(
    space: SpaceName,
    users: Mapping[SpaceName, frozenset[PodUid]],
    whose: Owners,
    pods: Mapping[int, PodUid],
) -> Clients:
    """Where a pod has the space for itself, its clients are the pod's, seen or not."""
    its = users[space]
    alone = next(iter(its)) if len(its) == 1 else None
    of_pods: dict[PodUid, set[int]] = {}
    may_be = {pid: names for pid, names in whose.items() if space in names}
    for pid, names in may_be.items():
        pod = pods.get(pid) or (alone if names == {space} else None)
        if pod is not None and pod in its:
            of_pods.setdefault(pod, set()).add(pid)
    return Clients(may_be, {pod: frozenset(pids) for pod, pids in of_pods.items()})


def gpu_shares(
    records: Iterable[Record], spaces: Iterable[ClaimSpace]
) -> Mapping[GpuUuid, tuple[Share, ...]]:
    """For each GPU that a prepared claim has under MPS, everybody who has anything of it."""
    gpus = {gpu for one in spaces if one.completed for gpu in one.space.gpus}
    held: dict[GpuUuid, list[Share]] = {gpu: [] for gpu in sorted(gpus)}
    for record in records:
        its: dict[GpuUuid, list[Holding]] = {}
        for holding in record.holdings:
            if (gpu := holding.uuid) in gpus:
                its.setdefault(gpu, []).append(holding)
        pods = frozenset(pod.uid for pod in record.pods)
        for gpu, holdings in its.items():
            admin = all(holding.admin for holding in holdings)
            held[gpu].append(Share(record.claim, pods, None, admin=admin))
    return {gpu: tuple(shares) for gpu, shares in held.items()}


def strays(
    looks: Iterable[GpuLook], spaces: Sequence[ClaimSpace], status: MpsStatus
) -> frozenset[Stray]:
    """The processes on GPUs that go past MPS.

    Where a server is not ready, or a space not served, its clients cannot be told. A process that
    may be there for a claim without MPS is none.
    """
    return frozenset(stray for look in looks for stray in _strays_on(look, spaces, status))


def _strays_on(look: GpuLook, spaces: Iterable[ClaimSpace], status: MpsStatus) -> Iterable[Stray]:
    served: dict[ClaimUid, frozenset[int] | None] = {}  # None: nobody can tell
    refs: dict[ClaimUid, ClaimRef] = {}
    for one in spaces:
        if one.completed and look.gpu in one.space.gpus:
            refs[one.claim.uid] = one.claim
            before = served.get(one.claim.uid, frozenset())
            its = _may_be_clients(one.space.name, status)
            served[one.claim.uid] = None if before is None or its is None else before | its
    for use in look.uses:
        allowed = [served.get(uid) for uid in use.claims]
        known = [pids for pids in allowed if pids is not None]
        if not known or len(known) < len(allowed):
            continue
        if not any(use.process.pid in pids for pids in known):
            yield Stray(use.process, look.gpu, tuple(sorted(refs[uid] for uid in use.claims)))


def _may_be_clients(space: SpaceName, status: MpsStatus) -> frozenset[int] | None:
    server = server_of(space, status)
    if server is None or not server.ready:
        return None
    return frozenset(one.pid for one in server.clients if one.space in (None, space))


def confirmed(since: Mapping[Stray, float], now: float) -> frozenset[Stray]:
    """Those that had the time to connect, and did not."""
    return frozenset(one for one, at in since.items() if now - at >= CONNECTING_SECONDS)


def uses(
    spaces: Iterable[ClaimSpace],
    found: Mapping[SpaceName, Clients] | None,
    unserved: Collection[Stray] | None,
) -> tuple[MpsUse, ...]:
    """Every prepared claim on each of its GPUs. *found*: the clients of the spaces that are served.

    None: that is not known, because the agent does not answer. Nor is the number of a claim's
    clients while one of them may be another claim's.
    """
    by_claim: dict[tuple[ClaimRef, GpuUuid], list[Space]] = {}
    for one in spaces:
        for gpu in one.space.gpus if one.completed else ():
            by_claim.setdefault((one.claim, gpu), []).append(one.space)
    return tuple(
        MpsUse(
            claim,
            gpu,
            min(ALL_CORES, sum(space.percent for space in its)),
            None if found is None else _count(found, its),
            None
            if unserved is None
            else sum(one.gpu == gpu and claim in one.claims for one in unserved),
        )
        for (claim, gpu), its in by_claim.items()
    )


def _count(found: Mapping[SpaceName, Clients], spaces: Iterable[Space]) -> int | None:
    names = {one.name for one in spaces}
    whose = {pid: its for name in names if name in found for pid, its in found[name].may_be.items()}
    pids = clients_of(names, whose)
    return None if pids is None else len(pids)
