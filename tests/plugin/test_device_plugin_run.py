"""The whole plugin as a process that serves the device-plugin API, before a fake kubelet."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cdi.registry import load_registry
from tests.builders import POOL
from tests.driver_process import Process
from tests.e2e.other_device_plugin import OtherDevicePlugin
from tests.fakes.api_server import ApiServer
from tests.fakes.device_manager import Container, FakeDeviceManager
from tests.fakes.kubelet import FakeKubelet
from tests.waiting import eventually

GPU = "nvidia.com/gpu"
SECONDS = 60.0


@pytest.fixture
def manager(home: Path) -> Iterator[FakeDeviceManager]:
    with FakeDeviceManager(home / "device-plugins") as manager:
        yield manager


@pytest.fixture
def plugin(start: Callable[..., Process], home: Path) -> Callable[..., Process]:
    profile = home / "by-name.yaml"
    profile.write_text(
        "apiVersion: resource.nvidia.com/v1beta1\nkind: NodeProfile\n"
        "spec: {api: DevicePlugin, gpus: [{fractions: Never}]}\n"
    )

    def run(**flags: str) -> Process:
        usual = {
            "profiles": str(profile),
            "profile": "by-name",
            "kubelet_cdi": "true",
            "reconcile_interval": "0.3",
        }
        return start(**usual | flags)

    return run


def bind(server: ApiServer, container: Container, phase: str = "Running") -> dict[str, Any]:
    return server.put(
        {
            "kind": "Pod",
            "metadata": {"namespace": "ml", "name": "train", "uid": container.pod},
            "spec": {"nodeName": POOL, "containers": [{"name": "main", "image": "x"}]},
            "status": {"phase": phase},
        }
    )


def told(server: ApiServer) -> str:
    """What the Node says of the API."""
    (node,) = server.objects("nodes")
    conditions = node["status"].get("conditions") or ()
    return str([each["message"] for each in conditions if each["type"] == "GPUsAllocatedBy"])


def test_a_pod_from_its_admission_to_its_end(
    server: ApiServer,
    kubelet: FakeKubelet,
    manager: FakeDeviceManager,
    plugin: Callable[..., Process],
    home: Path,
) -> None:
    process = plugin()
    manager.wait_for_allocatable(GPU, 8)
    assert not server.objects("resourceslices")

    container = manager.allocate(GPU, 2)
    bind(server, container)
    manager.pre_start(container)
    names = {device.name for device in container.answer.cdi_devices}
    assert names == load_registry([home / "cdi"]).devices.keys()

    bind(server, container, "Succeeded")
    manager.free(container)
    eventually(lambda: len(list((home / "cdi").iterdir())) == 1, "what it had is taken back")

    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0
    assert not [
        path for path in (home / "device-plugins").iterdir() if path.name.startswith("dra-")
    ]


def test_it_starts_and_names_the_pods_that_another_device_plugin_has_left(
    server: ApiServer,
    kubelet: FakeKubelet,
    manager: FakeDeviceManager,
    plugin: Callable[..., Process],
    home: Path,
) -> None:
    with OtherDevicePlugin(home / "device-plugins", GPU, ["nvidia0"]):
        manager.wait_for_allocatable(GPU, 1)
        bind(server, manager.allocate(GPU, 1))

    plugin()

    eventually(lambda: "have ended: pod ml/train" in told(server), "the pod to be named")
    eventually(lambda: not manager.allocatable(GPU), "nothing to be offered")


def test_what_the_kubelet_is_not_told_is_said_with_the_profile_in_force(
    server: ApiServer, kubelet: FakeKubelet, plugin: Callable[..., Process]
) -> None:
    plugin(extended_resource_name="", revision_namespace="gpus")

    def said() -> list[str]:
        conditions = server.objects("nodes")[0].get("status", {}).get("conditions") or ()
        return [each["message"] for each in conditions if each["type"] == "GPUsConfigured"]

    names = ", ".join(f"gpu-{minor}" for minor in range(8))
    expected = (
        f"profile by-name of the files: in force; not possible: {names}: "
        "nobody can ask for it, because --extended-resource-name is empty"
    )
    assert server.wait(lambda: said() == [expected])


def test_killed_and_started_again_it_gives_pods_what_they_had(
    server: ApiServer,
    kubelet: FakeKubelet,
    manager: FakeDeviceManager,
    plugin: Callable[..., Process],
    home: Path,
) -> None:
    process = plugin()
    manager.wait_for_allocatable(GPU, 8)
    container = manager.allocate(GPU, 1)
    bind(server, container)
    manager.pre_start(container)
    process.kill()
    process.wait()
    for path in (home / "cdi").iterdir():
        path.unlink()

    plugin()
    eventually(lambda: manager.allocatable(GPU) == 8, "the list is back")

    names = {device.name for device in container.answer.cdi_devices}
    eventually(lambda: names == load_registry([home / "cdi"]).devices.keys(), "the files are back")
    manager.pre_start(container)


def test_on_a_new_node_nothing_is_given_out_by_dra_that_pods_have_of_another_device_plugin(
    server: ApiServer,
    kubelet: FakeKubelet,
    manager: FakeDeviceManager,
    plugin: Callable[..., Process],
    start: Callable[..., Process],
    home: Path,
) -> None:
    """Or of this one, where its files are lost."""
    process = plugin()
    manager.wait_for_allocatable(GPU, 8)
    container = manager.allocate(GPU, 2)
    bind(server, container)
    process.kill()
    process.wait(SECONDS)
    shutil.rmtree(home / "kubelet/plugins/gpu.nvidia.com")

    start(reconcile_interval="0.3")

    eventually(lambda: "waits for pod ml/train" in told(server), "the pod to be named")
    assert not server.objects("resourceslices")

    bind(server, container, "Succeeded")
    manager.free(container)
    assert server.wait(lambda: bool(server.objects("resourceslices")))
