"""A node that gives devices out by the device-plugin API, its kubelet and its API server."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cdi.registry import load_registry
from dra_driver.base.errors import NodeError, Unreachable
from dra_driver.k8s.claims import ClaimUid, Pod, PodUid
from dra_driver.k8s.events import Event, NodeRef, PodRef
from dra_driver.k8s.node_labels import NodeStatus
from dra_driver.k8s.pods import ContainerSpec, KubeletPod, NodePod, PodSpec
from dra_driver.kubeletplugin.device_plugin.resources import (
    AllocatedContainer,
    ContainerResponse,
    DeviceId,
    ResourceName,
)
from dra_driver.model.offer import DEVICE_PLUGIN_FEATURES
from dra_driver.model.profiles import (
    AllocationApi,
    GpuSelector,
    Profile,
    ProfileEntry,
    Rules,
)
from dra_driver.model.records import ClaimRecord, DeviceAllocation
from dra_driver.plan.device_plugin.allocations import allocation_uid
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_api import ApiChoice
from dra_driver.plugin.claims.prepared_claims import CallTimeouts
from dra_driver.plugin.device_plugin.allocations import AllocationDependencies, Allocations
from dra_driver.plugin.device_plugin.pods import AllocatedPods, NodePods
from dra_driver.plugin.device_plugin.reconciler import AllocationReconciler
from dra_driver.plugin.node_api.current import NodeApi
from dra_driver.plugin.publish.offers import OfferBuilder
from tests.builders import POOL, gpu_uuid, inventory
from tests.fakes.node import FakeNode
from tests.fakes.preparers import DRIVER, ClaimWorld

GPU = ResourceName("nvidia.com/gpu")
ON = ApiChoice(AllocationApi.DEVICE_PLUGIN, True, AllocationApi.DEVICE_PLUGIN)
DRAINING = ApiChoice(AllocationApi.DEVICE_PLUGIN, False, AllocationApi.DRA, "a class maps it")
OFF = ApiChoice(AllocationApi.DRA, True, AllocationApi.DRA, "a class maps it")


def whole(minor: int = 0) -> DeviceId:
    return DeviceId(gpu_uuid(minor))


def replica(place: int, minor: int = 0) -> DeviceId:
    return DeviceId(f"{gpu_uuid(minor)}::{place}")


def profile_of(**rules: Any) -> Profile:
    return Profile("test", (ProfileEntry(GpuSelector(), Rules(**rules), "spec.gpus[0]"),))


def node_pod(
    name: str, *, namespace: str = "ml", ended: bool = False, root: bool = True, **spec: Any
) -> NodePod:
    uid = PodUid(f"uid-{name}")
    containers = (ContainerSpec("main", frozenset(), root),)
    pod_spec = PodSpec(namespace, name, uid, containers, **spec)
    return NodePod(namespace, Pod(name, uid), ended, pod_spec)


class AllocationWorld(ClaimWorld):
    """``restart`` is what a new process finds; ``reboot`` what a new boot does."""

    def __init__(self, directory: Path, gpus: int = 2, **rules: Any) -> None:
        super().__init__(directory, FakeNode(inventory(gpus)), CallTimeouts(5, 0.1))
        if rules:
            self.profile = profile_of(**rules)
        self.choice = NodeApi()
        self.choice.set(ON)
        self.containers: list[AllocatedContainer] = []  # the kubelet's checkpoint
        self.checkpoint_error: NodeError | None = None
        self.listed: list[KubeletPod] | None = None  # None: PodResources does not answer
        self.node_pods: dict[PodUid, NodePod] = {}  # of the API server
        self.api_down = False
        self.asked = 0  # how often for the pods of the node
        self.before_pods: Callable[[], None] = lambda: None  # they are told
        self.takes_names = True
        self.node_status: NodeStatus | None = NodeStatus()
        self.events: list[Event] = []
        self.observed: list[tuple[str, str]] = []
        self.now = 0.0
        self.allocate_seconds = self.pre_start_seconds = self.others_seconds = 30.0
        self.boot = 1
        self.allocations: Allocations
        self.reconciler: AllocationReconciler
        self.start()

    def start(self, **fields: Any) -> None:
        """A new process, with other parts of its preparer than usual."""
        self.open_disk()
        features = DEVICE_PLUGIN_FEATURES
        ledger = fields.get("ledger", self.ledger)
        usual = OfferBuilder(self.node, lambda: self.profile, lambda: features, ledger)
        self.offers = offers = fields.pop("offers", usual)
        self.preparer = self.preparer_with(offers=offers, **fields)
        self.ledger = ledger
        self.preparer.recover()
        pods = AllocatedPods(
            self._checkpoint, self._list, NodePods(self._read_pods, lambda: self.now)
        )
        self.dependencies = AllocationDependencies(
            preparer=self.preparer,
            ledger=ledger,
            users=fields.get("users", self.users),
            offers=offers,
            node=self.node,
            pods=pods,
            api=self.choice,
            events=self,
            node_ref=lambda: NodeRef(POOL),
            observe=lambda operation, outcome, seconds: self.observed.append((operation, outcome)),
            takes_names=lambda: self.takes_names,
            names=ResourceNames(),
            driver=DRIVER,
            pool=POOL,
            host_root=self.directory / "host",
        )
        self.allocations = Allocations(
            self.dependencies, self.allocate_seconds, self.pre_start_seconds, self.others_seconds
        )
        self.allocations.prepare_soon = lambda: self.reconciler.look_often()
        self.reconciler = AllocationReconciler(
            self.allocations,
            self.preparer,
            ledger,
            pods,
            self.choice,
            ResourceNames(),
            60.0,
            lambda: self.now,
        )

    def open_disk(self) -> None:
        super().open_disk()
        self.ledger = self.ledger_type(self.directory / "claims", f"boot-{self.boot}")

    def reboot(self, agent: bool = True) -> None:
        """Nothing that was done to the node is left but the files of pods, which the kubelet keeps
        in its checkpoint with its old answers."""
        self.boot += 1
        self.node = FakeNode(self.node.now)
        self.node.agent = agent
        self.users.alive.clear()
        for directory in ("cdi", "plugin"):
            for path in sorted((self.directory / directory).rglob("*.json")):
                path.unlink()
        self.start()

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def _checkpoint(self) -> tuple[AllocatedContainer, ...]:
        if self.checkpoint_error:
            raise self.checkpoint_error
        return tuple(self.containers)

    def _list(self) -> tuple[KubeletPod, ...]:
        if self.listed is None:
            raise NodeError("the kubelet's list of pods: no answer")
        return tuple(self.listed)

    def _read_pods(self) -> tuple[NodePod, ...]:
        self.asked += 1
        self.before_pods()
        if self.api_down:
            raise Unreachable("the API server does not answer")
        return tuple(self.node_pods.values())

    # The kubelet

    def allocate(self, *ids: DeviceId, resource: ResourceName = GPU) -> ContainerResponse:
        return self.allocations.allocate(resource, ids)

    def admit(
        self, name: str, *ids: DeviceId, container: str = "main", **fields: Any
    ) -> ContainerResponse:
        """A pod comes, and the kubelet gives these devices to a container of it."""
        answer = self.allocate(*ids)
        pod = node_pod(name, **fields)
        self.node_pods.setdefault(pod.pod.uid, pod)
        given = AllocatedContainer(pod.pod.uid, container, GPU, tuple(sorted(ids)), answer)
        self.containers.append(given)
        return answer

    def run(self, name: str, *ids: DeviceId) -> None:
        """Its container starts, and a process of it uses what it has."""
        self.allocations.pre_start(GPU, ids)
        self.users.alive.setdefault(self.uid(*ids), set()).add(Pod(name, PodUid(f"uid-{name}")))

    def end(self, name: str, *, deleted: bool = True) -> None:
        """Its processes end, and the kubelet has the devices again."""
        uid = PodUid(f"uid-{name}")
        for users in self.users.alive.values():
            users.discard(Pod(name, uid))
        if deleted:
            self.node_pods.pop(uid, None)
        else:
            self.node_pods[uid] = node_pod(name, ended=True)
        self.containers = [each for each in self.containers if each.pod != uid]

    # What is there

    def uid(self, *ids: DeviceId) -> ClaimUid:
        return allocation_uid(DeviceAllocation(GPU, tuple(sorted(ids))))

    def record(self, *ids: DeviceId) -> ClaimRecord | None:
        record: ClaimRecord | None = self.ledger.known(self.uid(*ids))
        return record

    def recorded(self, *ids: DeviceId) -> ClaimRecord:
        """What is recorded of these devices, which has to be something."""
        record = self.record(*ids)
        assert record is not None
        return record

    def pods_of(self, *ids: DeviceId) -> list[str]:
        record = self.record(*ids)
        return [pod.name for pod in record.pods] if record else []

    def told(self) -> list[tuple[str, str]]:
        """The events: whom and what."""
        return [
            (event.regarding.name, event.message)
            for event in self.events
            if isinstance(event.regarding, PodRef | NodeRef)
        ]

    @property
    def cdi_names(self) -> set[str]:
        """The names that the runtime can resolve."""
        return set(load_registry([self.directory / "cdi"]).devices)


@contextlib.contextmanager
def in_threads(*acts: Callable[[], object]) -> Iterator[None]:
    """Each on a thread of its own, until all have ended."""
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def listed(name: str, *ids: Sequence[str], namespace: str = "ml") -> KubeletPod:
    """A pod as PodResources lists it."""
    return KubeletPod(namespace, name, {}, {("main", GPU): frozenset(map(str, ids))})
