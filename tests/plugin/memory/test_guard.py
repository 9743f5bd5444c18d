"""The memory guard with real processes: it ends the one that is too large, and only it.

The GPU is simulated, and says that these processes use it; /proc is theirs, but for the containers
that they are in; the container runtime's files are as on a node.
"""

import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.k8s.events import PodRef
from dra_driver.model.gpus import DeviceName, GpuUuid, MigInstance, PartitionKey
from dra_driver.model.processes import GpuProcess
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimMemoryLimit, ClaimRecord, Holding
from dra_driver.node.cgroups.containers import ContainerBundles
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.node.nvml.processes import gpu_processes
from dra_driver.plugin.memory.guard import MemoryEnforcer, MemoryGuardDependencies
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.process_owners import ProcessOwners
from tests.builders import ref
from tests.fakes import bundles
from tests.fakes.processes import Proc
from tests.fakes.simulated import Node, h100

GPU = GpuUuid("GPU-11111111-0000-0000-0000-000000000000")
GIB = 1024**3
KILL = GuardRules(GuardPolicy.KILL, 10.0)
A, B, M = ref("a"), ref("b"), ref("m")
WEB = Pod("web", PodUid("5b6ffb0e-5d6a-4a3b-9e0b-9c1e8d7a0001"))
DB = Pod("db", PodUid("5b6ffb0e-5d6a-4a3b-9e0b-9c1e8d7a0002"))

PROGRAM = "import signal, time; {before}print('ready', flush=True); time.sleep(60)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def container_id(name):
    return name.encode().hex().ljust(64, "0")


class World:
    """A node on which a test starts processes, and the guard of its one GPU."""

    def __init__(self, directory: Path) -> None:
        self.node = Node(directory, {"gpus": [h100("1b", uuid=str(GPU)), h100("43")]})
        self.proc = Proc(directory / "proc")
        self.host_root = directory / "host"
        self.records = []
        self.listed = ()
        self.events = []
        self.metrics = Metrics()
        self.now = 1000.0
        self.signals = []
        self.children = {}
        self.stubborn = set()
        self.processes = ContainerProcesses(self.proc.path)
        self.on_instances = {}  # what each lists
        containers = ContainerBundles(self.host_root)
        owners = ProcessOwners(self.listed_on, self.processes, containers.find)
        me: Any = self
        self.dependencies = MemoryGuardDependencies(owners, me, me, self.metrics, lambda: self.now)
        self.rewire()

    def rewire(self, **changed):
        """A guard that signals, or counts, in another way."""
        self.guard = MemoryEnforcer(self.ledger, replace(self.dependencies, **changed))

    def listed_on(self, gpu):
        if gpu in self.on_instances:
            return self.on_instances[gpu]
        return gpu_processes(self.node.nvml, gpu)

    def ledger(self):
        """Another object only where something changed, as the ledger does it."""
        if self.listed != tuple(self.records):
            self.listed = tuple(self.records)
        return self.listed

    def signal(self, process, number):
        self.signals.append((process.pid, number))
        return self.processes.signal(process, number)

    def emit(self, event):
        self.events.append(event)

    def claim(self, claim, *pods, gib=10, guard=KILL, **fields):
        """A claim that holds part of the GPU."""
        limit = ClaimMemoryLimit(gib * GIB, guard) if gib is not None else None
        holding = Holding(claim, DeviceName("gpu-0"), gpu=GPU, limit=limit, **fields)
        self.records.append(ClaimRecord(claim, (holding,), pods=pods))

    def partition(self, claim, pod, instance, name, gib=10):
        """A claim that holds part of the memory of a MIG instance."""
        limit = ClaimMemoryLimit(gib * GIB, KILL)
        device, key = DeviceName(name), instance.key
        part = Holding(claim, device, gpu=GPU, limit=limit, partition=key, instance=instance)
        self.records.append(ClaimRecord(claim, (part,), pods=(pod,)))

    def outlier(self, gib=12, guard=KILL, **fields):
        """The only process of a claim of 10 GiB."""
        self.claim(A, WEB, guard=guard)
        return self.start(WEB, "main", gib, **fields)

    def start(self, pod, container, gib, claims=(A,), *, stubborn=False, version=2):
        """A process in a container that was given *claims*; it uses so much of the GPU."""
        program = PROGRAM.format(before=STUBBORN if stubborn else "")
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        self.proc.put(child.pid, pod.uid, container_id(container), version)
        pod_identity = ("default", pod.name, str(pod.uid))
        given = [claim.uid for claim in claims]
        bundles.containerd(
            self.host_root, container_id(container), container, given, pod=pod_identity
        )
        self.children[child.pid] = child
        if stubborn:
            self.stubborn.add(child.pid)
        self.set(child, gib)
        return child

    def set(self, child, gib):
        """What *child* uses of the GPU from now on. NVML lists nobody who is gone."""
        processes = self.node.document["gpus"][0].get("processes", ())
        listed = {process["pid"]: process for process in processes}
        used = None if gib is None else int(gib * GIB)
        listed[child.pid] = {"pid": child.pid, "memory_bytes": used}
        self.node.change(gpu=0, processes=list(listed.values()))

    def hide_bundles(self):
        """The container runtime is one whose files are somewhere else."""
        shutil.rmtree(self.host_root)

    def look(self, *after):
        """A look after each of so many seconds; whoever is ended by one does not take long."""
        for seconds in after or (1.0,):
            self.now += seconds
            before = len(self.signals)
            self.guard.check()
            for pid, number in self.signals[before:]:
                if number == signal.SIGKILL or pid not in self.stubborn:
                    self.children[pid].wait(10)

    def metric(self, name, **labels):
        """Its value; None: there is none with these labels."""
        return self.metrics.registry.get_sample_value(f"dra_driver_{name}", labels)


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    for child in world.children.values():
        child.kill()
        child.communicate()


def alive(*children):
    return [child.poll() is None for child in children]


@pytest.mark.parametrize("version", [1, 2], ids=["cgroup v1", "cgroup v2"])
def test_the_outlier_is_ended_and_only_it(world, version):
    world.claim(A, WEB)
    world.claim(B, DB)
    small = world.start(WEB, "main", 2, version=version)
    outlier = world.start(WEB, "main", 9, version=version)
    neighbour = world.start(DB, "store", 10, [B], version=version)
    stranger = subprocess.Popen(["sleep", "60"])  # a process of the host, larger than all
    world.set(stranger, 50)
    try:
        world.look(1, 9)
        assert world.signals == []
        world.look()

        assert world.signals == [(outlier.pid, signal.SIGTERM)]
        assert outlier.wait(10) == -signal.SIGTERM
        world.look(1, 20)
        assert len(world.signals) == 1
        assert alive(small, neighbour, stranger) == [True, True, True]
    finally:
        stranger.kill()
        stranger.wait(10)


def test_a_process_that_does_not_care_is_killed(world):
    stubborn = world.outlier(11, stubborn=True)
    world.look(1, 10, 4)
    assert alive(stubborn) == [True]
    world.look()

    assert [number for _, number in world.signals] == [signal.SIGTERM, signal.SIGKILL]
    assert stubborn.wait(10) == -signal.SIGKILL


def test_the_containers_and_pods_of_a_shared_claim_count_together(world):
    world.claim(A, WEB, DB)
    children = [
        world.start(WEB, "main", 3),
        world.start(WEB, "side", 3),
        world.start(DB, "store", 5),
    ]
    world.look(1, 10)

    assert [pid for pid, _ in world.signals] == [children[2].pid]
    events = {(event.regarding.name, event.reason) for event in world.events}
    assert events == {
        ("web", "GPUMemoryAboveShare"),
        ("db", "GPUMemoryAboveShare"),
        ("db", "GPUMemoryProcessEnded"),
    }


def test_a_monitor_and_a_container_that_does_not_use_the_claim_are_left_alone(world):
    world.claim(A, WEB)
    world.claim(M, WEB, gib=None, admin=True)
    for container, gib, claims in (("main", 5, [A]), ("other", 40, []), ("monitor", 40, [M])):
        world.start(WEB, container, gib, claims)
    world.look(1, 10)

    assert world.signals == []


def test_where_claims_cannot_be_told_apart_those_of_the_pod_count_together(world):
    world.claim(A, WEB, gib=4)
    world.claim(B, WEB, gib=20)
    first = world.start(WEB, "first", 5)
    second = world.start(WEB, "second", 10, [B])
    world.hide_bundles()
    world.look(1, 10)
    assert world.signals == []

    world.set(second, 20)
    world.look(1, 10)
    assert [pid for pid, _ in world.signals] == [second.pid]
    assert alive(first) == [True]
    message = f"claims default/a, default/b together use 25.00 GiB of {GPU}, but have a share of 24"
    assert message in world.events[0].message


def test_a_container_is_read_once(world):
    world.claim(A, WEB, gib=4)
    world.claim(B, WEB, gib=20)
    above = world.start(WEB, "main", 5)
    world.look()
    world.hide_bundles()
    world.look(10)

    assert [pid for pid, _ in world.signals] == [above.pid], "what it was given stays known"


def test_a_container_that_cannot_be_read_now_is_read_at_the_next_look(world, caplog):
    world.claim(A, WEB, gib=4)
    world.claim(B, WEB, gib=20)
    above = world.start(WEB, "main", 5)
    bundle = world.host_root / bundles.CONTAINERD / container_id("main") / "config.json"
    text = bundle.read_text()
    bundle.write_text(text[:100])
    world.look()
    world.look()
    assert world.signals == []
    assert caplog.text.count("which container uses which claim is not known") == 1

    bundle.write_text(text)
    world.look(1, 10)
    assert [pid for pid, _ in world.signals] == [above.pid]


@pytest.mark.parametrize("recorded", [[WEB], []], ids=["template", "PodGroup"])
def test_a_pod_that_joined_a_claim_unseen_is_guarded_and_told(world, recorded):
    """It names a template's claim by resourceClaimName, or the claim is reserved for a PodGroup."""
    world.claim(A, *recorded)
    other = world.start(WEB, "main", 5)
    joined = world.start(DB, "setup", 9)

    world.look(1, 10)

    assert [pid for pid, _ in world.signals] == [joined.pid]
    assert alive(other) == [True]
    about_joined = PodRef("default", "db", DB.uid)
    reasons = {event.reason for event in world.events if event.regarding == about_joined}
    assert reasons == {"GPUMemoryAboveShare", "GPUMemoryProcessEnded"}


def test_a_pod_of_another_namespace_is_never_taken_for_one_of_the_claim(world):
    world.claim(A, WEB)
    world.start(DB, "store", 50, [])
    id_, pod_identity = container_id("store"), ("other", "db", str(DB.uid))
    bundles.containerd(world.host_root, id_, "store", [A.uid], pod=pod_identity)

    world.look(1, 10)

    assert world.signals == []


def test_where_no_claim_is_guarded_nothing_is_looked_at(world):
    world.outlier(50, GuardRules(GuardPolicy.OFF))
    world.node.change(gpu=0, fails="GPU_IS_LOST")
    world.look(1, 10)

    assert world.signals == []
    assert world.events == []
    assert world.metric("memory_guard_unreadable_gpus") == 0.0


def test_a_guard_that_warns_tells_and_ends_nobody(world, caplog):
    world.outlier(12.5, GuardRules(GuardPolicy.WARN))
    world.look(1, 20)

    (event,) = world.events
    assert event.message == (
        f"claim default/a uses 12.50 GiB of {GPU}, but has a share of 10.00 GiB"
    )
    assert world.signals == []
    assert [entry.message for entry in caplog.records if entry.levelname == "WARNING"] == [
        "a claim uses more GPU memory than its share"
    ]
    assert caplog.records[-1].claim == "default/a"


def test_a_claim_is_kept_to_its_part_of_a_mig_instance_which_is_named_by_its_partition(world):
    instance = MigInstance(PartitionKey(9, 4, 4, 3), 2, 0, GpuUuid("MIG-1"))
    for claim, pod in ((A, WEB), (B, DB)):
        world.partition(claim, pod, instance, "gpu-0-mig-3g40gb-9-4")
    above, within = world.start(WEB, "main", 0), world.start(DB, "store", 0, [B])
    world.on_instances[instance.uuid] = [
        GpuProcess(above.pid, 11 * GIB),
        GpuProcess(within.pid, 10 * GIB),
    ]
    world.look(1, 10)

    assert world.signals == [(above.pid, signal.SIGTERM)]
    assert "uses 11.00 GiB of gpu-0-mig-3g40gb-9-4 (MIG-1), but" in world.events[0].message
    labels = {"namespace": "default", "uuid": instance.uuid}
    assert world.metric("claim_memory_used_bytes", claim="a", **labels) == 11 * GIB
    assert world.metric("claim_memory_share_bytes", claim="b", **labels) == 10 * GIB
    assert world.metric("claim_memory_used_bytes", claim="a", namespace="default", uuid=GPU) is None


def test_an_instance_that_does_not_answer_leaves_the_guard_blind_for_it_alone(world, caplog):
    instance = MigInstance(PartitionKey(19, 0, 1, 1), 2, 0, GpuUuid("MIG-9"))  # nobody lists it
    world.partition(B, DB, instance, "gpu-0-mig-1g10gb-19-0", gib=1)
    above = world.outlier()
    world.look(1, 10)

    assert world.signals == [(above.pid, signal.SIGTERM)]
    assert world.metric("memory_guard_unreadable_gpus") == 1.0
    assert [entry.gpu for entry in caplog.records if "not guarded" in entry.message] == ["MIG-9"]


def test_whoever_is_ended_and_has_to_be_killed_is_told_why(world, caplog):
    child = world.outlier(stubborn=True)
    world.look(1, 10, 5)

    warned, asked, killed = world.events
    above = f"claim default/a uses 12.00 GiB of {GPU}, but has a share of 10.00 GiB"
    assert warned.message == f"{above}; if it stays so for 10 s, its largest process is ended"
    ended = f"process {child.pid} of the host, which used 12.00 GiB of it, was"
    assert asked.message == f"{ended} asked to end (SIGTERM): {above}"
    assert killed.message == f"{ended} killed (SIGKILL): {above}"
    assert asked.regarding == killed.regarding == PodRef("default", "web", WEB.uid)
    assert (asked.reason, killed.reason) == ("GPUMemoryProcessEnded",) * 2
    assert asked.about != killed.about  # else the second would only be counted
    assert caplog.messages[-2:] == [
        "asked a process of a claim above its share to end",
        "killed a process of a claim above its share",
    ]
    assert world.metric("memory_guard_kills_total") == 1.0


def test_a_process_that_ended_before_it_was_killed_is_not_told_of_as_killed(world):
    world.outlier(stubborn=True)
    asked = []

    class Slow:
        """It ends between the look and the second signal."""

        def signal(self, process, number):
            asked.append(number)
            return number is signal.SIGTERM

    world.rewire(processes=Slow())
    world.look(1, 10, 5)

    assert asked == [signal.SIGTERM, signal.SIGKILL]
    assert [event.message for event in world.events if "SIGKILL" in event.message] == []


def test_a_look_that_found_the_same_is_not_told_again(world):
    class Counting:
        reports = 0

        def memory_used(self, uses, blind):
            self.reports += 1

    counting = Counting()
    child = world.outlier(2)
    world.rewire(metrics=counting)
    for _ in range(3):
        world.look()
    assert counting.reports == 1

    world.set(child, 3)
    world.look()
    assert counting.reports == 2


def test_a_process_whose_number_is_anothers_by_now_is_not_signalled(world, caplog):
    """Between the look and the signal it ended, and its number was given away."""
    caplog.set_level("INFO")
    child = world.outlier()
    world.look()

    class Late:
        def signal(self, process, number):
            world.proc.write(child.pid, WEB.uid, started=7)
            return world.processes.signal(process, number)

    world.rewire(processes=Late())
    world.look(1, 10)

    assert alive(child) == [True]
    assert world.metric("memory_guard_kills_total") == 0.0
    assert [event.reason for event in world.events if "Ended" in event.reason] == []
    assert caplog.messages[-1] == "a process of a claim above its share is gone already"


def test_a_process_that_cannot_be_signalled_does_not_keep_the_guard_from_looking(world, caplog):
    world.outlier()

    class Forbidden:
        def signal(self, process, number):
            raise NodeError("process 1 cannot be signalled: it is not permitted")

    world.rewire(processes=Forbidden())
    world.look(1, 10, 10)

    assert "a process of a claim above its share cannot be ended" in caplog.messages
    assert world.metric("memory_excursions_total") == 1.0


def test_a_process_that_is_younger_than_what_nvml_said_is_not_meant_by_it(world):
    child = world.outlier()
    world.proc.write(child.pid, WEB.uid, started=world.processes.now() + 100)
    world.look()

    assert world.events == []


def test_memory_that_nvml_does_not_tell_is_said_once_and_nobody_is_ended(world, caplog):
    world.outlier(None)
    world.look(1, 20)

    assert caplog.messages.count("memory shares are not guarded") == 1
    assert world.metric("memory_guard_unreadable_gpus") == 1.0
    assert world.signals == []


def test_where_other_pods_cannot_be_seen_it_says_what_to_change(world, caplog):
    world.outlier()
    world.proc.write(1, WEB.uid, name="pause")  # the first process of a pod, not of the host
    world.look()

    assert "hostPID: true" in caplog.records[-1].error
    assert world.metric("memory_guard_unreadable_gpus") == 1.0
    assert world.events == []


def test_a_gpu_that_does_not_answer_does_not_hide_the_others(world, caplog):
    lost = GpuUuid("GPU-22222222-0000-0000-0000-000000000000")
    world.node.change(gpu=1, uuid=str(lost), fails="GPU_IS_LOST")
    world.claim(A, WEB)
    holding = Holding(B, DeviceName("gpu-1"), gpu=lost, limit=ClaimMemoryLimit(GIB, KILL))
    world.records.append(ClaimRecord(B, (holding,), pods=(DB,)))
    child = world.start(WEB, "main", 12)
    world.look(1, 10)

    assert [pid for pid, _ in world.signals] == [child.pid]
    assert world.metric("memory_guard_unreadable_gpus") == 1.0


def test_metrics_say_what_each_claim_uses_of_its_share_until_it_is_gone(world):
    world.claim(A, WEB)
    world.claim(B, DB, gib=4)
    world.start(WEB, "main", 12)
    world.look()
    labels_a = {"namespace": "default", "claim": "a", "uuid": str(GPU)}
    labels_b = labels_a | {"claim": "b"}

    assert world.metric("claim_memory_used_bytes", **labels_a) == 12 * GIB
    assert world.metric("claim_memory_share_bytes", **labels_a) == 10 * GIB
    assert world.metric("claim_memory_used_bytes", **labels_b) == 0
    assert world.metric("claim_memory_share_bytes", **labels_b) == 4 * GIB

    del world.records[1]
    world.look()
    assert world.metric("claim_memory_used_bytes", **labels_a) == 12 * GIB
    assert world.metric("claim_memory_used_bytes", **labels_b) is None

    world.records.clear()
    world.look()
    assert world.metric("claim_memory_used_bytes", **labels_a) is None
    assert world.metric("claim_memory_share_bytes", **labels_a) is None


def test_without_names_there_is_one_sum_for_each_gpu(world):
    world.metrics = Metrics(claim_names=False)
    world.rewire(metrics=world.metrics)
    world.claim(A, WEB)
    world.claim(B, DB)
    world.start(WEB, "main", 6)
    world.start(DB, "store", 5)
    world.look()

    unnamed = {"namespace": "", "claim": "", "uuid": GPU}
    assert world.metric("claim_memory_used_bytes", **unnamed) == 11 * GIB
    assert world.metric("claim_memory_share_bytes", **unnamed) == 20 * GIB
    told = generate_latest(world.metrics.registry).decode()
    assert 'namespace="default"' not in told
    assert 'claim="a"' not in told
