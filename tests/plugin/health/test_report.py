"""What is wrong with a GPU is told to the Node, and to claims and pods that have part of it."""

from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from dra_driver.k8s.events import NodeRef
from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.gpus import GpuUuid, MigInfo, MigInstance
from dra_driver.model.health import Fault, GpuEvent, Problem
from dra_driver.model.processes import ContainerProcess
from dra_driver.model.records import DeviceAllocation
from dra_driver.plugin.health.report import HealthReporter
from dra_driver.plugin.metrics import HealthMetrics, Metrics
from tests.builders import gpu, gpu_uuid, holding, pod, record
from tests.fakes.mig import ONE, partition
from tests.plugin.health.world import xid

FIRST, SECOND = partition(ONE, 0).key, partition(ONE, 1).key
LOST = Fault(gpu_uuid(), Problem.LOST, since=5.0)


class Scene:
    def __init__(self):
        self.events = []
        self.records = (
            record("training", holding("training", "gpu-0"), pods=("trainer",)),
            record("other", holding("other", "gpu-1", gpu=gpu_uuid(1)), pods=("neighbour",)),
        )
        self.processes = {}
        self.gpus = (gpu(0), gpu(1))
        self.metrics = Metrics()
        self.start()

    def start(self):
        self.reporter = HealthReporter(
            self,
            HealthMetrics(self.metrics),
            lambda: NodeRef("node-1", "uid-node"),
            lambda: self.records,
            self.processes.get,
        )

    def emit(self, event):
        self.events.append(event)

    def update(self, *faults, events=()):
        """What is told of it: to whom, and as what."""
        before = len(self.events)
        self.reporter.update(faults, events, self.gpus, {})
        return [(event.regarding.name, event.reason) for event in self.events[before:]]


@pytest.fixture
def scene():
    return Scene()


def test_node_claim_and_pod_are_told_what_is_wrong_and_what_to_do(scene):
    told = scene.update(LOST)

    assert told == [
        ("node-1", "GPUUnhealthy"),
        ("training", "GPUUnhealthy"),
        ("trainer", "GPUUnhealthy"),
    ]
    event = scene.events[-1]
    assert event.is_warning
    assert event.message == (
        f"gpu-0 ({gpu_uuid()}): the GPU does not answer, since 1970-01-01T00:00:05Z; reboot the "
        "node; if it happens again, have the GPU examined"
    )


def test_what_was_told_is_told_once(scene):
    scene.update(LOST)

    assert scene.update(replace(LOST, count=7, well_since=9.0)) == []


def test_when_it_is_over_that_is_told_as_good_news(scene):
    scene.update(LOST)

    assert scene.update() == [
        ("node-1", "GPURecovered"),
        ("training", "GPURecovered"),
        ("trainer", "GPURecovered"),
    ]
    assert not scene.events[-1].is_warning


def test_another_recovery_action_is_told_and_is_no_recovery(scene):
    action = Fault(gpu_uuid(), Problem.RECOVERY_ACTION, "GPU_RESET")
    scene.update(action)

    told = scene.update(replace(action, value="NODE_REBOOT"))

    assert {reason for _, reason in told} == {"GPUUnhealthy"}


def test_each_xid_is_told_and_recovers_by_itself(scene):
    first, second = (Fault(gpu_uuid(), Problem.XID, number) for number in ("79", "48"))
    scene.update(first, second)
    assert len({event.about for event in scene.events}) == 2

    assert ("node-1", "GPURecovered") in scene.update(second)


def test_what_has_no_effect_is_a_health_event(scene):
    hot = Fault(gpu_uuid(), Problem.THERMAL)

    assert {reason for _, reason in scene.update(hot)} == {"GPUHealthEvent"}
    assert scene.update() == []  # that it is cool again is no news


def test_a_fault_of_a_partition_is_told_to_who_has_part_of_it(scene):
    scene.records = tuple(
        record(name, holding(name, device, partition=key), pods=(f"{name}-pod",))
        for name, device, key in (
            ("sick", "gpu-0-mig-a", FIRST),
            ("well", "gpu-0-mig-b", SECOND),
        )
    )

    told = scene.update(Fault(gpu_uuid(), Problem.XID, "94", FIRST))

    assert [name for name, _ in told] == ["node-1", "sick", "sick-pod"]


def test_an_event_in_an_instance_is_told_to_who_has_that_instance(scene):
    info = MigInfo(True, True, True, (ONE,), (MigInstance(FIRST, 7, 0, GpuUuid("MIG-1")),))
    scene.gpus = (gpu(0, mig=info),)
    scene.records = (
        record("sick", holding("sick", "gpu-0-mig-a", partition=FIRST), pods=()),
        record("well", holding("well", "gpu-0-mig-b", partition=SECOND), pods=()),
    )

    told = scene.update(events=[xid(31, gi=7)])

    assert told == [("node-1", "GPUHealthEvent"), ("sick", "GPUHealthEvent")]


def test_an_error_of_a_process_is_told_to_its_pod_alone(scene):
    scene.records = (
        record("a", holding("a"), pods=("a-1", "a-2")),
        record("b", holding("b"), pods=("b-1",)),
    )
    scene.processes[4321] = ContainerProcess(4321, 1, pod("a-2").uid, "c")

    told = scene.update(events=[xid(31, pid=4321)])

    assert [name for name, _ in told] == ["node-1", "a", "a-2"]


@pytest.mark.parametrize("pid", [None, 99])
def test_an_error_of_a_process_that_is_not_known_is_told_to_all_on_the_gpu(scene, pid):
    told = scene.update(events=[xid(31, pid=pid)])

    assert [name for name, _ in told] == ["node-1", "training", "trainer"]


def test_errors_of_thousands_of_processes_are_told_each_pod_once(scene):
    scene.records = (
        record("a", holding("a"), pods=("a-1", "a-2")),
        record("b", holding("b"), pods=("b-1",)),
    )
    for pid in range(3000):
        user = ("a-1", "b-1", "elsewhere")[pid % 3]
        scene.processes[pid] = ContainerProcess(pid, 1, pod(user).uid, "c")

    told = scene.update(events=[xid(31, pid=pid) for pid in range(3000)])

    assert {name for name, _ in told} == {"node-1", "a", "a-1", "a-2", "b", "b-1"}
    assert len(told) == 3 + 3 + 6  # those of nobody who has the GPU: to all
    messages = {event.message for event in scene.events}
    assert len(messages) == 1
    assert ", 1000 times;" in messages.pop()


def test_that_no_recovery_action_is_needed_any_more_is_no_event(scene):
    assert scene.update(events=[GpuEvent(gpu_uuid(), Problem.RECOVERY_ACTION, "NONE")]) == []
    [told, *_] = scene.update(
        events=[GpuEvent(gpu_uuid(), Problem.RECOVERY_ACTION, "RECOVER_IMEX_DOMAIN")]
    )
    assert told == ("node-1", "GPUHealthEvent")


def test_a_pod_without_a_claim_is_told_and_no_claim_is(scene):
    """It has the GPU by the device-plugin API."""
    made = record("dp-1", holding("dp-1", "gpu-0"), pods=("user",))
    allocated = DeviceAllocation(ResourceName("nvidia.com/gpu"), (DeviceId("gpu-0"),))
    scene.records = (replace(made, allocation=allocated),)

    assert [name for name, _ in scene.update(LOST)] == ["node-1", "user"]


def test_who_only_looks_at_a_gpu_is_told_nothing(scene):
    scene.records = (record("monitor", holding("monitor", "gpu-0-mon", admin=True), pods=("m",)),)

    assert scene.update(LOST) == [("node-1", "GPUUnhealthy")]


def test_that_a_gpu_has_no_events_is_told_to_the_node_alone(scene):
    told = scene.update(Fault(gpu_uuid(), Problem.UNMONITORED))

    assert told == [("node-1", "GPUHealthEvent")]


def test_metrics_show_what_is_wrong_while_it_is_and_count_what_was_reported(scene):
    ecc = GpuEvent(gpu_uuid(1), Problem.CORRECTABLE_ECC, count=1000)
    scene.update(LOST, events=[xid(31, count=3), ecc])
    of_gpu = f'gpu="{gpu_uuid()}"'
    text = generate_latest(scene.metrics.registry).decode()
    assert f'dra_driver_gpu_fault{{{of_gpu},problem="gpu-lost"}} 1.0' in text
    assert f'dra_driver_gpu_xid_total{{{of_gpu},xid="31"}} 3.0' in text
    assert 'problem="correctable-ecc"} 1000.0' in text

    scene.update()

    assert "dra_driver_gpu_fault{" not in generate_latest(scene.metrics.registry).decode()


def test_a_restart_shows_what_was_wrong_before(scene):
    scene.reporter.begin((LOST,))

    assert "dra_driver_gpu_fault{" in generate_latest(scene.metrics.registry).decode()
    assert scene.update(LOST) == []
