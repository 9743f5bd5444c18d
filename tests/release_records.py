"""What this release writes on a node and says between its processes: a file of each kind.

Kept for each release in tests/data/golden/records/<release>. What a later release changes about a
format is seen there, and each release has to read what its neighbours wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dra_driver.agent.state import (
    INCIDENT_LOGS,
    SERVER_STATES,
    IncidentDocument,
    NamespaceState,
    ServerState,
    SpareNamespace,
)
from dra_driver.base.codec import Codec
from dra_driver.k8s.claims import AllocationResult, Claim, ClaimUid, OpaqueConfig
from dra_driver.model.gpus import Gpu, Inventory
from dra_driver.model.health import Fault, HealthReading, HealthState, Look, Problem
from dra_driver.model.mig_layouts import (
    LayoutBefore,
    LayoutInstance,
    LayoutOutcome,
    LayoutState,
    MigState,
)
from dra_driver.model.mps import (
    MpsClient,
    MpsLimits,
    MpsNamespace,
    MpsNamespaceName,
    MpsPriority,
    MpsServer,
    MpsServerName,
    MpsServerRestart,
    MpsStatus,
    ServedNamespace,
)
from dra_driver.model.offer import AdminAccess, Exclusive, Replica
from dra_driver.model.profiles import (
    AllocationApi,
    GpuSelector,
    MigRules,
    Profile,
    ProfileEntry,
    Rules,
)
from dra_driver.model.steps import (
    PodMemoryLimit,
    SetMemoryLimits,
)
from dra_driver.node.mps import agent_protocol
from dra_driver.node.mps.agent_protocol import (
    AgentError,
    LetGoRequest,
    ReleaseRequest,
    RequestDone,
    ServeRequest,
    StatusRequest,
    TerminateRequest,
)
from dra_driver.node.mps.daemon import ControlDaemon
from dra_driver.node.state.health_file import HEALTH_STATES, HealthOfBoot
from dra_driver.node.state.known_gpus import KNOWN_GPUS, GpusOfBoot
from dra_driver.node.state.ledger_files import CLAIM_RECORDS
from dra_driver.node.state.mig_state import MIG_STATES, MigStateOfBoot
from dra_driver.node.state.node_api_file import SERVED_APIS, ServedApi
from dra_driver.node.state.profile_files import LAST_PROFILES
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_annotation import DEVICE_PLUGIN_USES, DevicePluginHolders, DevicePluginUse
from dra_driver.plugin.claims.prepared_claims import CallTimeouts
from dra_driver.plugin.publish.profiles import ProfileCatalog
from tests.builders import (
    MIB,
    allocation,
    config,
    fraction,
    gpu,
    gpu_uuid,
    holding,
    pod,
    record,
    ref,
)
from tests.fakes.mig import ONE, mig_gpu, partition
from tests.fakes.node import FakeNode
from tests.fakes.pods import FakePods, container, pod_spec
from tests.fakes.preparers import ClaimWorld

DIRECTORY = "/data"  # stands for the directory of the node that a test has
CODECS: dict[str, Codec[Any]] = {
    "GpusOfBoot": KNOWN_GPUS,
    "ClaimRecord": CLAIM_RECORDS,
    "HealthOfBoot": HEALTH_STATES,
    "MigStateOfBoot": MIG_STATES,
    "Profile": LAST_PROFILES,
    "ServedApi": SERVED_APIS,
    "DevicePluginUse": DEVICE_PLUGIN_USES,
    "ServerState": SERVER_STATES,
    "IncidentDocument": INCIDENT_LOGS,
    "AgentRequest": agent_protocol.REQUESTS,
    "AgentAnswer": agent_protocol.ANSWERS,
}


class RecordsWorld(ClaimWorld):
    """A node with seven GPUs, of which the last two can have partitions."""

    def __init__(self, directory: Path) -> None:
        gpus: list[Gpu] = [*(gpu(minor) for minor in range(5)), mig_gpu(5), mig_gpu(6)]
        super().__init__(directory, FakeNode(Inventory(tuple(gpus))), CallTimeouts(all=5))
        self.pods = FakePods(
            tuple(pod_spec(name, container("c", (name, ""))) for name in ("mps", "server"))
        )
        self.profile = ProfileCatalog(None).named("mig")

    def state_copy(self) -> tuple[object, ...]:
        """What claims change of the node, as it is now."""
        node, mig = self.node, self.node.mig
        parts = (node.intervals, node.modes, node.limits, node.namespaces)
        return tuple(dict(part) for part in (*parts, mig.modes, mig.instances))

    def ledger_directory(self) -> Path:
        return self.directory / "claims/boot"

    def prepare(self, name: str, *results: AllocationResult, config: OpaqueConfig | None) -> None:
        configs = (config,) if config else ()
        prepared = Claim(ref(name), results, configs, (pod(name),))
        self.preparer.prepare(self.api.put(prepared))


def claim_files(directory: Path) -> Iterator[tuple[str, str]]:
    """The records of claims, as this release writes them: name of the file, and content."""
    world = RecordsWorld(directory)
    world.restart()
    long = config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}})
    mps = config(sharing={"strategy": "MPS"})
    partition_name = "gpu-5-mig-1g10gb-19-0"
    world.prepare("whole", allocation("gpu-0"), config=None)
    world.prepare("interval", allocation("gpu-1"), config=long)
    world.prepare("fraction", fraction("20Gi", "gpu-2"), config=None)
    world.prepare("mps", fraction("20Gi", "gpu-3", cores="30"), config=None)
    world.prepare("server", allocation("gpu-4"), config=mps)
    world.prepare("partition", allocation(partition_name), config=None)
    begun = record("begun", "gpu-0", completed=False)
    places = (
        holding("shapes", "gpu-0", shape=Exclusive()),
        holding("shapes", "gpu-0-1", shape=Replica(1, 4, 20000 * MIB, True)),
        holding("shapes", "gpu-0-mon", shape=AdminAccess(), admin=True),
    )
    steps = (
        SetMemoryLimits(gpu_uuid(), (PodMemoryLimit(pod("p").uid, 20000 * MIB),), strict=True),
    )
    world.ledger.write(begun)
    world.ledger.write(record("shapes", *places, pods=("p",), steps=steps))
    ended = record("ended", "gpu-0")
    world.ledger.write(ended)
    world.ledger.end(ended)
    for path in sorted(world.ledger_directory().iterdir()):
        yield path.name, path.read_text().replace(str(directory), DIRECTORY)


GPU, OTHER_GPU = gpu_uuid(), gpu_uuid(1)
KEY = partition(ONE, 0).key
NAMESPACE = MpsNamespace(
    MpsNamespaceName("c_0"),
    ClaimUid("uid-mps"),
    (GPU,),
    30,
    (20480 * MIB,),
    MpsPriority.BELOW_NORMAL,
    MpsLimits(50, 40960 * MIB),
    "ml",
)
SERVED = ServedNamespace(NAMESPACE, 2, "/run/mps/s0/pipe", "/run/mps/s0/shm")
RESTART = MpsServerRestart(
    3, MpsServerName("s0"), 1e9, "its daemon was gone", (NAMESPACE.name,), clients=2
)
SERVER = ServerState(
    ControlDaemon(MpsServerName("s0"), (GPU,), 2, "/run/mps/s0", "token", MpsLimits(50)),
    (NamespaceState(NAMESPACE, SERVED, MpsNamespaceName("n_0")), NamespaceState(NAMESPACE)),
    "its daemon was gone",
    1,
    SpareNamespace(MpsNamespaceName("n_1"), "/run/mps/s0/pipe/gpu/n_1"),
)
MIG = MigState(
    instances={GPU: (LayoutInstance(KEY, 1, "MIG-1"),)},
    before={OTHER_GPU: LayoutBefore(True, (KEY,))},
    switched=(GPU,),
    left_on=(OTHER_GPU,),
    outcomes={GPU: LayoutOutcome("all-1g.10gb", LayoutState.PENDING, "it is in use")},
    mode_problems={OTHER_GPU: "it does not answer"},
    problem="there is no such layout",
    state=LayoutState.FAILED,
    labelled=True,
    label="all-1g.10gb",
)
HEALTH = HealthState(
    (
        Fault(GPU, Problem.XID, "48", KEY, 1e9, 3),
        Fault(OTHER_GPU, Problem.REMAP_FAILED, since=1e9, well_since=1e9 + 5),
    ),
    (Look(HealthReading(GPU, False, True, "NONE", False, False, 18, "", 1, 2, 3, 4), 1e9, 18),),
)
SERVED_API = ServedApi(AllocationApi.DEVICE_PLUGIN, draining=True)
DEVICE_PLUGIN_USE = DevicePluginUse(ResourceNames(shared=""), DevicePluginHolders(("ml/train",), 2))
PROFILE = Profile(
    "mine",
    (
        ProfileEntry(
            GpuSelector(frozenset({0}), frozenset({GPU}), ("*H100*",)),
            Rules(replicas=4, shares=8, mig=MigRules(True, ("1g.10gb",), "all-1g.10gb", True)),
            "spec.gpus[0]",
            (("mig.profiles", "spec.mig"),),
        ),
    ),
    ("spec.x: has no meaning here",),
)
STATUS = MpsStatus(
    (
        MpsServer(
            MpsServerName("s0"),
            (GPU,),
            2,
            False,
            "its daemon was gone",
            (SERVED,),
            (MpsClient(7, NAMESPACE.name), MpsClient(8)),
            1,
            "ml",
        ),
    ),
    (RESTART,),
    ("/tmp/nvidia-mps",),
)
MESSAGES = (
    ServeRequest(NAMESPACE),
    ReleaseRequest(NAMESPACE.name),
    TerminateRequest(NAMESPACE.name, (7, 8)),
    StatusRequest(),
    LetGoRequest(NAMESPACE.gpus, 1700000600.0),
    SERVED,
    STATUS,
    RequestDone(),
    AgentError("NodeError", "it cannot be served"),
)


def other_documents() -> Iterator[tuple[str, str]]:
    """What is written beside the records of claims, and each message to and from the MPS agent."""
    yield "gpus.json", KNOWN_GPUS.encode(GpusOfBoot("boot", (mig_gpu(),))).decode()
    yield "health.json", HEALTH_STATES.encode(HealthOfBoot("boot", HEALTH), indent=2).decode()
    yield "mig.json", MIG_STATES.encode(MigStateOfBoot("boot", MIG), indent=2).decode()
    yield "api.json", SERVED_APIS.encode(SERVED_API, indent=2).decode()
    yield "device-plugin.json", DEVICE_PLUGIN_USES.encode(DEVICE_PLUGIN_USE).decode()
    yield "profile.json", LAST_PROFILES.encode(PROFILE).decode()
    yield "mps/state/s0.json", SERVER_STATES.encode(SERVER).decode()
    yield "mps/state/incidents.json", INCIDENT_LOGS.encode(IncidentDocument((RESTART,))).decode()
    for message in MESSAGES:
        kind = "AgentRequest" if type(message).__name__.endswith("Request") else "AgentAnswer"
        yield f"{kind}/{type(message).__name__}.json", CODECS[kind].encode(message).decode()


def schemas() -> Iterator[tuple[str, str]]:
    """All that a document of each kind can be, but for what is said of it."""
    for name, codec in CODECS.items():
        schema = json.dumps(_bare(codec.schema()), indent=1, sort_keys=True)
        yield f"schemas/{name}.json", f"{schema}\n"


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    if isinstance(schema, dict):
        said = {"description", "title"}
        return {
            name: _bare(value)
            for name, value in schema.items()
            if name not in said or not isinstance(value, str)
        }
    return schema


def broken_rules(older: Any, newer: Any, path: str = "") -> Iterator[str]:
    """Where two formats, as JSON schema, keep a release from reading documents of the other."""
    if "properties" in older and "properties" in newer:
        yield from _broken_by_fields(older, newer, path)
    for several in ("oneOf", "anyOf", "enum"):
        if gone := [each for each in older.get(several, ()) if each not in newer.get(several, ())]:
            yield f"{path} is no longer {json.dumps(gone)}"
    for name in older.get("$defs", {}).keys() & newer.get("$defs", {}).keys():
        yield from broken_rules(older["$defs"][name], newer["$defs"][name], name)
    if "items" in older and "items" in newer:
        yield from broken_rules(older["items"], newer["items"], f"{path}[]")
    seen = {"properties", "required", "oneOf", "anyOf", "enum", "$defs", "items", "default"}
    one, other = ({k: v for k, v in each.items() if k not in seen} for each in (older, newer))
    if one != other:
        yield f"{path} is of another type"


def _broken_by_fields(older: Any, newer: Any, path: str) -> Iterator[str]:
    fields, next_fields = older["properties"], newer["properties"]
    for name in sorted(fields.keys() | next_fields.keys()):
        if name not in fields:
            if name in newer.get("required", ()):
                yield f"{path}.{name} is new and has no default"
        elif name not in next_fields:
            if name in older.get("required", ()):
                yield f"{path}.{name} is gone and had no default"
        elif name != "release" or path:
            yield from broken_rules(fields[name], next_fields[name], f"{path}.{name}")
