"""The device-plugin API as a capability of the plugin, before a kubelet's device manager."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.kubeletplugin.device_plugin.resources import DeviceId
from dra_driver.plan.node_api import ApiChoice
from dra_driver.plugin.device_plugin.start import start
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.parts import PluginParts
from tests.builders import POOL
from tests.fakes.allocations import DRAINING, GPU, OFF, ON, AllocationWorld, node_pod
from tests.fakes.device_manager import AdmissionError, Container, FakeDeviceManager
from tests.waiting import eventually


class Pods:
    """Of the API server."""

    def __init__(self, world: AllocationWorld) -> None:
        self.world = world

    def on_node(self, node: str) -> Any:
        assert node == POOL
        return tuple(self.world.node_pods.values())


class Plugin:
    """A process of the plugin, with a stack of its own; one of several on the node of *world*."""

    newest: "Plugin"

    def __init__(self, world: AllocationWorld, home: Path, pod_uid: str) -> None:
        settings: Any = SimpleNamespace(
            driver_name="gpu.nvidia.com",
            node_name=POOL,
            extended_resource_name="nvidia.com/gpu",
            shared_extended_resource_name="nvidia.com/gpu.shared",
            mig_extended_resource_prefix="nvidia.com/mig-",
            device_plugin_dir=home / "device-plugins",
            plugin_dir=home / "plugin",
            kubelet_dir=home / "kubelet",
            host_root=home / "host",
            pod_uid=pod_uid,
            kubelet_cdi="true",
            reconcile_interval=0.2,
            look_interval=0.2,
        )
        fake: Any = world
        self.metrics = Metrics()
        self.failures: list[object] = []
        Plugin.newest = self
        self.parts = PluginParts(
            settings=settings,
            api=fake,
            node=fake.node,
            ledger=world.ledger,
            is_newest=lambda: Plugin.newest is self,
            note_started=lambda: None,
            metrics=self.metrics,
            events=fake,
            in_use=world.users,
            node_api=world.choice,
        )
        self.parts.pods = Pods(world)  # type: ignore[assignment]
        self.parts.labels = SimpleNamespace(node=POOL, uid="", status=None)  # type: ignore[assignment]
        self.parts.offers = world.allocations._parts.offers
        self.parts.preparer = world.preparer
        self.parts.on_fatal = self.failures.append
        self.stack = ExitStack()
        start(self.parts, self.stack)
        for act in self.parts.after_publishing:
            act()

    def stop(self) -> None:
        self.stack.close()
        assert not self.failures


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path: names of sockets have to fit."""
    with tempfile.TemporaryDirectory(prefix="dp", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def kubelet(home: Path) -> Iterator[FakeDeviceManager]:
    with FakeDeviceManager(home / "device-plugins") as kubelet:
        yield kubelet


@pytest.fixture
def world(home: Path) -> AllocationWorld:
    return AllocationWorld(home / "node", gpus=3)


@pytest.fixture
def plugin(world: AllocationWorld, home: Path, kubelet: FakeDeviceManager) -> Iterator[Plugin]:
    plugin = Plugin(world, home, "first")
    yield plugin
    plugin.stop()


def run(world: AllocationWorld, kubelet: FakeDeviceManager, container: Container) -> None:
    """The pod is bound, and its container starts."""
    pod = node_pod(container.pod)
    uid = PodUid(container.pod)
    world.node_pods[uid] = SimpleNamespace(  # type: ignore[assignment]
        namespace=pod.namespace, pod=Pod("train", uid), ended=False, spec=pod.spec
    )
    kubelet.pre_start(container)


def switch(world: AllocationWorld, choice: ApiChoice) -> None:
    world.choice.set(choice)
    for listener in world.choice.listeners:
        listener()


def test_from_the_list_to_the_end_of_a_pod(
    world: AllocationWorld, kubelet: FakeDeviceManager, plugin: Plugin
) -> None:
    kubelet.wait_for_allocatable(GPU, 3)
    container = kubelet.allocate(GPU, 2)
    ids = tuple(DeviceId(id_) for id_ in container.ids)
    names = [device.name for device in container.answer.cdi_devices]
    assert set(names) <= world.cdi_names

    run(world, kubelet, container)
    assert world.pods_of(*ids) == ["train"]

    world.node_pods.clear()
    kubelet.free(container)
    eventually(lambda: world.nothing_left, "everything is taken back")
    assert kubelet.allocatable(GPU) == 3
    text = plugin.metrics.registry.get_sample_value
    for operation in ("allocate", "pre-start"):
        labels = {"operation": operation, "outcome": "ok"}
        assert text("dra_driver_request_duration_seconds_count", labels) == 1
    assert text("dra_driver_reconciled_claims_total") == 1


def test_a_kubelet_that_was_started_again_has_the_list_and_its_pods_their_devices(
    world: AllocationWorld, kubelet: FakeDeviceManager, plugin: Plugin
) -> None:
    kubelet.wait_for_allocatable(GPU, 3)
    container = kubelet.allocate(GPU, 1)
    run(world, kubelet, container)

    kubelet.restart()
    kubelet.wait_for_allocatable(GPU, 3)

    kubelet.pre_start(container)
    assert kubelet.allocate(GPU, 2)


def test_a_node_goes_to_dra_and_back(
    world: AllocationWorld, home: Path, kubelet: FakeDeviceManager, plugin: Plugin
) -> None:
    kubelet.wait_for_allocatable(GPU, 3)
    container = kubelet.allocate(GPU, 1)
    run(world, kubelet, container)
    switch(world, DRAINING)
    kubelet.wait_for_allocatable(GPU, 1)
    kubelet.pre_start(container)
    assert kubelet.capacity(GPU) == 3

    world.node_pods.clear()
    kubelet.free(container)
    eventually(lambda: world.nothing_left, "everything is taken back")
    switch(world, OFF)
    eventually(lambda: not kubelet.allocatable(GPU), "nothing is listed any more")
    with pytest.raises(AdmissionError):
        kubelet.allocate(GPU, 1)
    eventually(lambda: not any(home.glob("device-plugins/dra-*")), "nothing is served any more")
    kubelet.start_by_dra(GPU)

    switch(world, ON)
    kubelet.wait_for_allocatable(GPU, 3)
    run(world, kubelet, kubelet.allocate(GPU, 1))
    with pytest.raises(AdmissionError):
        kubelet.start_by_dra(GPU)


def test_in_an_update_the_newer_process_takes_over_and_no_list_is_lost(
    world: AllocationWorld, home: Path, kubelet: FakeDeviceManager, plugin: Plugin
) -> None:
    kubelet.wait_for_allocatable(GPU, 3)
    first = kubelet.endpoint(GPU)
    container = kubelet.allocate(GPU, 1)

    newer = Plugin(world, home, "second")
    eventually(lambda: kubelet.endpoint(GPU) not in (None, first), "the newer one is registered")
    kubelet.wait_for_allocatable(GPU, 3)
    assert {registration.streams for registration in kubelet.registrations_of(GPU)} == {0}
    run(world, kubelet, container)

    newer.stop()  # it fails, and the older one goes on
    Plugin.newest = plugin
    kubelet.wait_for_allocatable(GPU, 3)
    kubelet.pre_start(container)


def test_readiness_tells_while_the_kubelet_has_no_list(world: AllocationWorld, home: Path) -> None:
    plugin = Plugin(world, home, "first")
    check = plugin.parts.readiness["device-plugin"]
    try:
        eventually(check, "a kubelet that is away is told")
        with FakeDeviceManager(home / "device-plugins") as kubelet:
            kubelet.wait_for_allocatable(GPU, 3)
            eventually(lambda: check() is None, "the kubelet has the list")
        switch(world, OFF)
        assert check() is None
    finally:
        plugin.stop()
