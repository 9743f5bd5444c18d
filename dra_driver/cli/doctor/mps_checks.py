"""``doctor``'s checks of MPS: does the agent serve what claims were given, and nobody else?"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dra_driver.base.errors import MpsAgentUnreachable, NodeError
from dra_driver.cli.doctor.host_checks import LedgerSnapshot
from dra_driver.cli.findings import Finding, abbreviated, fail, ok, warn
from dra_driver.cli.mps_usage import AskAgent, server_message
from dra_driver.k8s.claims import ClaimRef, ClaimUid
from dra_driver.model.mps import (
    MpsNamespace,
    MpsNamespaceName,
    MpsServer,
    MpsServerRestart,
    MpsStatus,
    ServedNamespace,
)
from dra_driver.model.records import ClaimRecord
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.state.ledger_files import read_ledger_directory

PROGRAM, AGENT, SERVERS, UNMANAGED_DAEMONS, NAMESPACES = (
    "MPS programs",
    "MPS agent",
    "MPS servers",
    "other MPS daemons",
    "MPS claims",
)
PROGRAMS = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
_OFF = "switched off (--mps-socket is empty): this node offers no MPS"


@dataclass(frozen=True, slots=True)
class MpsAgentSnapshot:
    """The agent's status, and the ledger before and after it: claims come and go meanwhile."""

    status: MpsStatus
    before: LedgerSnapshot
    after: LedgerSnapshot

    @property
    def steady_records(self) -> Iterator[ClaimRecord]:
        """Claims that were prepared all the time."""
        for uid, record in self.before.records.items():
            record_after = self.after.records.get(uid)
            if record.completed and record_after is not None and record_after.completed:
                yield record

    def may_have(self, uid: ClaimUid) -> bool:
        """Whether a claim can have something of MPS as far as the ledger tells."""
        return any(
            uid in ledger.records or uid in ledger.unreadable
            for ledger in (self.before, self.after)
        )


class CheckedMpsAgent:
    """The agent at a socket and the ledger beside it. The agent is asked once."""

    def __init__(self, socket: str, ledger: Callable[[], Path], ask: AskAgent) -> None:
        """*socket*: empty where MPS is switched off; *ledger*: the directory of this boot."""
        self.socket = socket
        self._ledger = ledger
        self._ask = ask

    def ledger_snapshot(self) -> LedgerSnapshot:
        return LedgerSnapshot(*read_ledger_directory(self._ledger()))

    def holders(self) -> tuple[ClaimRef, ...]:
        """The claims under MPS, by the ledger."""
        records = self.ledger_snapshot().records.values()
        return tuple(sorted(r.claim for r in records if r.namespaces))

    @functools.cached_property
    def snapshot(self) -> MpsAgentSnapshot | NodeError:
        """NodeError: why the agent does not answer."""
        before = self.ledger_snapshot()
        try:
            status = self._ask(Path(self.socket))
        except NodeError as e:
            return e
        return MpsAgentSnapshot(status, before, self.ledger_snapshot())


def check_mps_programs(agent: CheckedMpsAgent, driver: DriverRoot) -> Iterator[Finding]:
    if not agent.socket:
        return
    missing: list[str] = []
    for name in PROGRAMS:
        try:
            driver.tool(name)
        except NodeError as e:
            missing.append(str(e))
    yield mps_programs_finding(missing)


def check_mps_agent(agent: CheckedMpsAgent) -> Iterator[Finding]:
    holders = agent.holders()
    if not agent.socket:
        yield no_mps_agent_finding(holders)
    elif isinstance(agent.snapshot, MpsAgentSnapshot):
        yield ok(AGENT, f"answers at {agent.socket}")
    else:
        yield silent_mps_agent_finding(agent.snapshot, holders)


def check_mps_servers(agent: CheckedMpsAgent) -> Iterator[Finding]:
    if (snapshot := _answer(agent)) is not None:
        yield from mps_server_findings(snapshot.status.servers, snapshot.status.incidents)


def check_unmanaged_daemons(agent: CheckedMpsAgent) -> Iterator[Finding]:
    if (snapshot := _answer(agent)) is not None:
        yield from unmanaged_daemon_findings(snapshot.status.unmanaged)


def check_mps_claims(agent: CheckedMpsAgent) -> Iterator[Finding]:
    if (snapshot := _answer(agent)) is not None:
        yield from mps_namespace_findings(snapshot)


def mps_programs_finding(problems: Sequence[str]) -> Finding:
    if not problems:
        return ok(PROGRAM, f"the driver has {', '.join(PROGRAMS)}")
    return warn(
        PROGRAM,
        "; ".join(dict.fromkeys(problems)),
        "until it is there no claim is served by MPS here; or switch MPS off: chart value "
        "mps.enabled, --mps-socket ''",
    )


def no_mps_agent_finding(holders: Sequence[ClaimRef]) -> Finding:
    if not holders:
        return ok(AGENT, _OFF)
    return fail(
        AGENT,
        f"{_OFF}, and {len(holders)} claims are under it: {abbreviated(map(str, holders))}",
        "give --mps-socket again, or delete their pods",
    )


def silent_mps_agent_finding(error: NodeError, holders: Sequence[ClaimRef]) -> Finding:
    """An agent that is missing is a fault where it is missed."""
    remedy = (
        "kubectl get pods -A -o wide: does the pod of the mps-agent DaemonSet run on this node, "
        "what does it log? Where nobody is to have MPS: --mps-socket ''"
    )
    if not isinstance(error, MpsAgentUnreachable):
        return fail(AGENT, str(error), "look at its log; delete its pod: the servers go on")
    if not holders:
        return warn(AGENT, str(error), remedy)
    held = f"{len(holders)} claims are under MPS: {abbreviated(map(str, holders))}"
    return fail(AGENT, f"{error}; {held}, and nobody looks after their servers", remedy)


def mps_server_findings(
    servers: Sequence[MpsServer], incidents: Sequence[MpsServerRestart]
) -> Iterator[Finding]:
    last = {incident.server: incident for incident in incidents}
    for server in servers:
        text, incident = server_message(server).removeprefix("MPS server "), last.get(server.name)
        if not server.ready:
            yield fail(
                SERVERS,
                text,
                "the agent starts it again by itself; where that does not help: its log "
                "directory beside the agent's socket, and nvidia-smi -q",
            )
        elif server.restarts:
            why = f"; the last time: {incident.reason}" if incident else ""
            lost = f", and {incident.clients} clients were lost" if incident else ""
            yield warn(
                SERVERS,
                f"{text}{why}{lost}",
                "its pods were told by events; a client that is killed in the midst of its work "
                "can do that to all of them",
            )
        else:
            yield ok(SERVERS, text)
    if not servers:
        yield ok(SERVERS, "none runs; the first claim under MPS starts one")


def unmanaged_daemon_findings(daemons: Sequence[str]) -> Iterator[Finding]:
    for daemon in daemons:
        yield warn(
            UNMANAGED_DAEMONS,
            f"{daemon} is none of the agent's, and is left alone",
            "it may have put GPUs into EXCLUSIVE_PROCESS, which bars servers of the agent's and "
            "all other processes; programs without CUDA_MPS_PIPE_DIRECTORY reach whichever has "
            "/tmp/nvidia-mps, and no limit of a claim holds there. Where nobody needs it: echo "
            "quit | nvidia-cuda-mps-control, and nvidia-smi -c DEFAULT",
        )
    if not daemons:
        yield ok(UNMANAGED_DAEMONS, "none")


def mps_namespace_findings(snapshot: MpsAgentSnapshot) -> Iterator[Finding]:
    """What the ledger and the agent do not agree about."""
    served = {one.namespace.name: one for one in snapshot.status.namespaces()}
    records = list(snapshot.steady_records)
    lost = [r for r in records if any(s.name not in served for s in r.namespaces)]
    differing = [r for r in records if any(_differs(s, served) for s in r.namespaces)]
    if lost:
        yield fail(
            NAMESPACES,
            f"{len(lost)} claims are prepared under MPS, and the agent does not serve them: "
            f"{_named(lost)}",
            "what runs in their pods has no limits of MPS, or does not start: delete those pods; "
            "the agent's log says what became of the servers",
        )
    if differing:
        yield fail(
            NAMESPACES,
            f"{len(differing)} claims are served with other limits than the ledger has: "
            f"{_named(differing)}",
            "delete their pods; report this: it is a fault of ours",
        )
    orphans = sorted(
        f"{name} (claim UID {one.namespace.claim})"
        for name, one in served.items()
        if not snapshot.may_have(one.namespace.claim)
    )
    if orphans:
        yield warn(
            NAMESPACES,
            f"the agent serves {len(orphans)} of which the ledger knows nothing: "
            f"{abbreviated(orphans)}",
            "start the plugin anew, which ends them",
        )
    if not (lost or differing or orphans):
        number = sum(1 for record in records if record.namespaces)
        yield ok(
            NAMESPACES, f"{number} are prepared, and the agent serves them as the ledger has them"
        )


def _answer(agent: CheckedMpsAgent) -> MpsAgentSnapshot | None:
    """None: the agent does not answer; its own check says why."""
    snapshot = agent.snapshot if agent.socket else None
    return snapshot if isinstance(snapshot, MpsAgentSnapshot) else None


def _differs(namespace: MpsNamespace, served: Mapping[MpsNamespaceName, ServedNamespace]) -> bool:
    """The rules of the node may have changed ``default_limits``: the agent keeps its first."""
    other = served.get(namespace.name)
    if other is None:
        return False
    return replace(other.namespace, default_limits=namespace.default_limits) != namespace


def _named(records: Iterable[ClaimRecord]) -> str:
    return abbreviated(sorted(str(record.claim) for record in records))
