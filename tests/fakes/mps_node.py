"""A node with claims under MPS: agent, processes and pods are values, and time is told to pass."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from dra_driver.base.errors import MigInstanceNotFound, NodeError, Unreachable
from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.k8s.pods import Container, PodDeletion, PodSpec
from dra_driver.model.gpus import DeviceName, GpuUuid, MigInstance, PartitionKey
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName
from dra_driver.model.processes import ContainerProcess, GpuProcess
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.node.cgroups.containers import NoContainer
from dra_driver.plugin.metrics import Metrics, MpsMetrics
from dra_driver.plugin.mps.watch import MpsHost, MpsWatch
from tests.builders import ref
from tests.fakes.mps_agent import FakeMpsAgent
from tests.fakes.pods import FakePods

GPU, OTHER = GpuUuid("GPU-0"), GpuUuid("GPU-1")
A, B, C = ref("a"), ref("b"), ref("c")
WEB, DB = Pod("web", PodUid("uid-web")), Pod("db", PodUid("uid-db"))
SECONDS = 60.0
INSTANCE = MigInstance(PartitionKey(9, 4, 4, 3), 1, 0, GpuUuid("MIG-0"))


def namespace(claim, gpu=GPU, percent=30):
    return MpsNamespace(MpsNamespaceName(f"c_{claim.name}"), claim.uid, (gpu,), percent)


class FailingPods(FakePods):
    """Pods of an API server that may not answer."""

    down = False
    now: float | None = None  # what its clock shows; None: it does not say

    def read(self, namespace, name):
        if self.down:
            self.read_names.append(name)
            raise Unreachable("the API server does not answer")
        spec = super().read(namespace, name)
        if spec.deletion is None or self.now is None:
            return spec
        seconds = max(0.0, spec.deletion.ends_at - self.now)
        return replace(spec, deletion=replace(spec.deletion, left_seconds=seconds))

    read_cached = read


def id_of(pod, container):
    return f"{container} of {pod.uid}"


class Bundles:
    """What the containers of pods were given."""

    def __init__(self):
        self.given = {}

    def give(self, pod, container, *claims):
        id_ = id_of(pod, container)
        before = self.given.get(id_, Container(id_, container, "default", pod))
        mine = before.claims | {claim.uid for claim in claims}
        self.given[id_] = replace(before, claims=mine)

    def find(self, id_):
        return self.given.get(id_, NoContainer.GONE)


class World:
    """A node with claims under MPS, and what looks after them."""

    def __init__(self, protocol=3):
        self.agent = FakeMpsAgent(protocol)
        self.listed: tuple[ClaimRecord, ...] = ()
        self.aside = ()
        self.running = {}  # Process by its number
        # numbers by GPU; None: it does not answer
        self.on_gpus: dict[GpuUuid, tuple[int, ...] | None] = {}
        self.instances = {}  # by the key of a partition of GPU; an error is raised
        self.pods = FailingPods()
        self.pods.now = 7_000.0
        self.containers = Bundles()
        self.sees = True
        self.newest = True
        self.refuses = {}  # by UID of a claim or name of a namespace: why it cannot be repaired
        self.repaired = []
        self.events = []
        self.steady = 500.0
        self.server_time = 7_000.0  # by the API server's clock; the node's is in the agent
        self.later = None  # a list: background tasks are not done, but put there
        self.metrics = Metrics()
        self.mps_metrics = MpsMetrics(self.metrics)
        self.watch = self.begin()

    def begin(self, metrics=None):
        """What a new process of the plugin has."""
        me: Any = self
        agent: Any = self.agent
        host = MpsHost(me, lambda: self.steady, lambda: self.agent.now, self.start)
        return MpsWatch(self.parts(), agent, metrics or self.mps_metrics, host)

    def parts(self) -> Any:
        """The plugin's parts: most of them are this node."""
        others = {"pods": self.pods, "metrics": Metrics()}
        return SimpleNamespace(
            **dict.fromkeys(("node", "ledger", "prepared_claims", "events"), self),
            **others,
            is_newest=lambda: self.newest,
            claim_listeners=[],
            mps_failures={},
            health_changed=lambda: None,
        )

    @property
    def mps(self):
        return self.agent

    # What the watch works with

    def records(self):
        return self.listed

    def record(self, uid):
        return next((record for record in self.listed if record.claim.uid == uid), None)

    def set_aside(self):
        return self.aside

    def serve_again(self, uid):
        self._refuse(uid)
        self.repaired.append(uid)
        for record in self.listed:
            for step in record.steps:
                if record.claim.uid == uid and isinstance(step, ServeMpsNamespace):
                    self.agent.serve(step.namespace)

    def end_unknown(self, namespace):
        self._refuse(namespace.name)
        self.repaired.append(namespace.name)
        self.agent.release(namespace.name)

    def _refuse(self, what):
        if what in self.refuses:
            raise NodeError(self.refuses[what])

    def processes(self, gpu):
        if (pids := self.on_gpus.get(gpu, ())) is None:
            raise NodeError(f"{gpu} is lost")
        return [GpuProcess(pid, 1 << 30) for pid in pids]

    def instance(self, gpu, key):
        instance = self.instances.get(
            key, MigInstanceNotFound(f"there is no instance of {key} on {gpu}")
        )
        if isinstance(instance, NodeError):
            raise instance
        return instance

    def sees_pods(self):
        return self.sees

    def now(self):
        return int(self.steady * 100)

    def find(self, pid):
        return self.running.get(pid)

    def emit(self, event):
        self.events.append(event)

    def start(self, work):
        if self.later is None:
            work()
        else:
            self.later.append(work)

    # What happens on the node

    def claim(self, claim, *pods, gpu=GPU, percent=30, served=True):
        """A claim under MPS is prepared for these pods."""
        made = namespace(claim, gpu, percent)
        holding = Holding(claim, DeviceName("gpu-0" if gpu == GPU else "gpu-1"), gpu=gpu)
        self._add(
            ClaimRecord(claim, (holding,), (ServeMpsNamespace(made),), prepared=(), pods=pods)
        )
        if served:
            self.agent.serve(made)
        return made

    def partition(self, claim, *pods, instance=INSTANCE, served=True):
        """As ``claim``, of a partition of GPU."""
        made = namespace(claim, instance.uuid)
        self.instances[instance.key] = instance
        holding = Holding(
            claim,
            DeviceName("gpu-0-mig-3g20gb-9-4"),
            gpu=GPU,
            partition=instance.key,
            created_for_claims=True,
            instance=instance,
        )
        self._add(
            ClaimRecord(claim, (holding,), (ServeMpsNamespace(made),), prepared=(), pods=pods)
        )
        if served:
            self.agent.serve(made)
        return made

    def other_claim(self, claim, *pods, gpu=GPU, **fields):
        """A claim without MPS."""
        holding = Holding(claim, DeviceName("gpu-0"), gpu=gpu, **fields)
        self._add(ClaimRecord(claim, (holding,), prepared=(), pods=pods))

    def _add(self, record):
        self.listed = (*self.listed, record)
        for pod in record.pods:
            self.pods.pods.setdefault(
                ("default", pod.name), PodSpec("default", pod.name, pod.uid, ())
            )
            self.containers.give(pod, "main", record.claim)

    def give_back(self, claim):
        self.listed = tuple(record for record in self.listed if record.claim != claim)

    def join(self, claim, pod):
        """It is noticed that another pod uses the claim."""
        self._pods(claim, lambda pods: (*pods, pod))

    def leave(self, claim, pod):
        self._pods(claim, lambda pods: tuple(each for each in pods if each != pod))

    def _pods(self, claim, change):
        self.listed = tuple(
            replace(record, pods=change(record.pods)) if record.claim == claim else record
            for record in self.listed
        )

    def process(self, pid, pod, *gpus, of=None, container="main"):
        """A process of a pod on GPUs; a client of the namespace *of* a claim."""
        self.running[pid] = ContainerProcess(pid, 7, pod.uid, id_of(pod, container))
        for gpu in gpus or (GPU,):
            self.on_gpus[gpu] = (*(self.on_gpus.get(gpu) or ()), pid)
        if of is not None:
            self.agent.connect(pid, of)

    def end(self, pid):
        self.running.pop(pid)
        self.agent.leave(pid)
        for gpu, pids in self.on_gpus.items():
            self.on_gpus[gpu] = tuple(each for each in pids or () if each != pid)

    def delete(self, pod, grace, uid=None):
        """Somebody deletes the pod."""
        deletion = PodDeletion(self.server_time + grace, grace)
        spec = PodSpec("default", pod.name, uid or pod.uid, (), deletion=deletion)
        self.pods.pods["default", pod.name] = spec

    def look(self, after=5.0):
        self.wait(after)
        return self.watch.look()

    def wait(self, seconds):
        self.steady += seconds
        self.agent.now += seconds
        self.server_time += seconds
        if self.pods.now is not None:
            self.pods.now = self.server_time

    def go_on(self, seconds):
        """Look as the loop does, for so long."""
        until = self.steady + seconds
        next_in = self.look(after=0)
        while self.steady + (step := min(next_in or 5.0, 5.0)) <= until:
            next_in = self.look(after=step)
        self.wait(until - self.steady)

    def metric(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"dra_driver_mps_{name}", labels)

    def of_claim(self, name, claim, gpu=GPU):
        return self.metric(name, namespace="default", claim=claim.name, uuid=gpu)

    def events_of(self, reason):
        return [event for event in self.events if event.reason == reason]
