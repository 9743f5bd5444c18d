"""``doctor``'s checks of MPS: does the agent serve what claims were given, and nobody else?

And of compute modes, by which MPS servers keep others from a GPU.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from dra_driver.base.errors import MpsAgentUnreachable, NodeError
from dra_driver.cli.doctor.host_checks import LedgerSnapshot, read_ledger_of_boot, records_of_boot
from dra_driver.cli.findings import Check, Finding, abbreviated, fail, ok, skip, warn
from dra_driver.cli.mps_usage import AskAgent, server_message
from dra_driver.model.gpus import Gpu, GpuUuid
from dra_driver.model.mps import (
    MpsNamespace,
    MpsNamespaceName,
    MpsServer,
    MpsServerRestart,
    MpsStatus,
    ServedNamespace,
)
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import ComputeMode, SetComputeMode
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.gpu_node import GpuNode
from dra_driver.settings import DoctorSettings

PROGRAM, AGENT, SERVERS, UNMANAGED_DAEMONS, NAMESPACES = (
    "MPS programs",
    "MPS agent",
    "MPS servers",
    "other MPS daemons",
    "MPS claims",
)
COMPUTE_MODES = "compute modes"
PROGRAMS = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
_OFF = "switched off (--mps-socket is empty): this node offers no MPS"


def checks(settings: DoctorSettings, node: GpuNode, ask: AskAgent) -> list[Check]:
    socket, ledger = settings.mps_socket, partial(read_ledger_of_boot, settings)
    records = partial(records_of_boot, settings)
    programs: Check = (PROGRAM, lambda: [mps_programs_finding(node.driver)])
    return [
        *([programs] if socket else ()),
        (AGENT, lambda: check_mps_agent(socket, ledger, ask)),
        (
            COMPUTE_MODES,
            lambda: check_compute_modes(records, node.inventory().gpus, node.compute_mode),
        ),
    ]


ReadComputeMode = Callable[[GpuUuid], ComputeMode | None]
"""Reads the compute mode of a GPU. None, or NodeError: it is not known."""


def check_compute_modes(
    read_records: Callable[[], Collection[ClaimRecord]], gpus: Sequence[Gpu], read: ReadComputeMode
) -> Iterator[Finding]:
    """*read_records*: of claims, which can have set a mode. They are read before and after: claims
    come and go meanwhile."""
    before = read_records()
    modes = {gpu: _compute_mode(gpu, read) for gpu in gpus}
    claims = {
        (step.gpu, step.mode): record.claim
        for record in (*before, *read_records())
        for step in record.steps
        if isinstance(step, SetComputeMode)
    }
    default_mode: list[str] = []
    for gpu, mode in modes.items():
        if mode is None:
            yield skip(COMPUTE_MODES, f"{gpu.name} does not report it")
        elif mode is ComputeMode.DEFAULT:
            default_mode.append(gpu.name)
        elif (holder := claims.get((gpu.uuid, mode))) is not None:
            yield ok(COMPUTE_MODES, f"{gpu.name} is in {mode.name}, for claim {holder}")
        else:
            yield _unexpected_mode_finding(gpu, mode)
    if default_mode:
        yield ok(COMPUTE_MODES, f"DEFAULT: {abbreviated(default_mode)}")


def _unexpected_mode_finding(gpu: Gpu, mode: ComputeMode) -> Finding:
    text = f"{gpu.name} is in {mode.name}, which no claim of this node set"
    remedy = f"on the host: nvidia-smi -i {gpu.pci_bus_id} -c DEFAULT"
    if mode is ComputeMode.PROHIBITED:
        return fail(COMPUTE_MODES, f"{text}: nothing can compute there", remedy)
    return warn(
        COMPUTE_MODES,
        f"{text}: one process at a time can compute there, so claims cannot share it",
        f"{remedy}; another MPS daemon leaves it so, and so does NVIDIA's DRA driver",
    )


def _compute_mode(gpu: Gpu, read: ReadComputeMode) -> ComputeMode | None:
    try:
        return read(gpu.uuid)
    except NodeError:
        return None


def mps_programs_finding(driver: DriverRoot) -> Finding:
    problems = []
    for name in PROGRAMS:
        try:
            driver.tool(name)
        except NodeError as e:
            problems.append(str(e))
    if not problems:
        return ok(PROGRAM, f"the driver has {', '.join(PROGRAMS)}")
    return warn(
        PROGRAM,
        "; ".join(dict.fromkeys(problems)),
        "until it is there no claim is served by MPS here; or switch MPS off: chart value "
        "mps.enabled, --mps-socket ''",
    )


def check_mps_agent(
    socket: str, read_ledger: Callable[[], LedgerSnapshot], ask: AskAgent
) -> Iterator[Finding]:
    """The agent at *socket*, and what it serves. *socket*: empty where MPS is switched off."""
    before = read_ledger()
    holders = sorted(_holder(record) for record in before.records.values() if record.namespaces)
    if not socket:
        yield no_mps_agent_finding(holders)
        return
    try:
        status = ask(Path(socket))
    except NodeError as e:
        yield silent_mps_agent_finding(e, holders)
        return
    yield ok(AGENT, f"answers at {socket}")
    yield from mps_server_findings(status.servers, status.incidents)
    yield from unmanaged_daemon_findings(status.unmanaged)
    yield from mps_namespace_findings(status, before, read_ledger())


def _holder(record: ClaimRecord) -> str:
    """What an administrator finds by this name: a claim, or the pod of an allocation."""
    if record.allocation and record.pods:
        return f"pod {record.claim.namespace}/{record.pods[0].name}"
    return f"claim {record.claim}" if record.allocation is None else record.known_as


def no_mps_agent_finding(holders: Sequence[str]) -> Finding:
    if not holders:
        return ok(AGENT, _OFF)
    return fail(
        AGENT,
        f"{_OFF}, and under it are: {abbreviated(holders)}",
        "give --mps-socket again, or delete their pods",
    )


def silent_mps_agent_finding(error: NodeError, holders: Sequence[str]) -> Finding:
    """An agent that is missing is a fault where it is missed."""
    remedy = (
        "kubectl get pods -A -o wide: does the pod of the mps-agent DaemonSet run on this node, "
        "what does it log? Where nobody is to have MPS: --mps-socket ''"
    )
    if not isinstance(error, MpsAgentUnreachable):
        return fail(AGENT, str(error), "look at its log; delete its pod: the servers go on")
    if not holders:
        return warn(AGENT, str(error), remedy)
    return fail(AGENT, f"{error}; nobody looks after the servers of {abbreviated(holders)}", remedy)


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


def mps_namespace_findings(
    status: MpsStatus, before: LedgerSnapshot, after: LedgerSnapshot
) -> Iterator[Finding]:
    """What the ledger and the agent do not agree about; the ledger was read *before* and *after*
    the agent was asked, since claims come and go meanwhile."""
    served = {each.namespace.name: each for each in status.namespaces()}
    prepared_after = {uid for uid, record in after.records.items() if record.completed}
    records = [
        record
        for uid, record in before.records.items()
        if record.completed and uid in prepared_after
    ]
    known = {uid for ledger in (before, after) for uid in (*ledger.records, *ledger.unreadable)}
    lost = [r for r in records if any(n.name not in served for n in r.namespaces)]
    differing = [r for r in records if any(_differs(n, served) for n in r.namespaces)]
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
        f"{name} (claim UID {orphan.namespace.claim})"
        for name, orphan in served.items()
        if orphan.namespace.claim not in known
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


def _differs(namespace: MpsNamespace, served: Mapping[MpsNamespaceName, ServedNamespace]) -> bool:
    """The rules of the node may have changed ``default_limits``: the agent keeps its first."""
    other = served.get(namespace.name)
    if other is None:
        return False
    return replace(other.namespace, default_limits=namespace.default_limits) != namespace


def _named(records: Iterable[ClaimRecord]) -> str:
    return abbreviated(sorted(str(record.claim) for record in records))
