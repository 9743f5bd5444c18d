"""What happens to a GPU of the whole plugin as a process: the way to events, file and slices."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders import POOL
from tests.driver_process import Process
from tests.fakes.api_server import ApiServer
from tests.fakes.kubelet import FakeKubelet
from tests.fakes.simulated import h100
from tests.plugin.conftest import put, put_node
from tests.waiting import eventually

DRIVER = "gpu.nvidia.com"
CLEAR = "gpu.nvidia.com/clear-faults"


class Scene:
    """A plugin whose two GPUs a test makes sick."""

    def __init__(self, server: ApiServer, start: Callable[..., Process], home: Path) -> None:
        self.server = server
        self.home = home
        self.gpus: list[dict[str, Any]] = [h100("1b"), h100("43")]
        self.change()
        self._start = start

    def start(self) -> Process:
        return self._start(sim=str(self.home / "node.yaml"), look_interval="0.3")

    def change(self, gpu: int = 0, **fields: Any) -> None:
        self.gpus[gpu].update(fields)
        new = self.home / "new.yaml"
        new.write_text(yaml.safe_dump({"gpus": self.gpus}))
        os.replace(new, self.home / "node.yaml")

    def happen(self, event: dict[str, Any], gpu: int = 0) -> None:
        self.change(gpu, events=[*self.gpus[gpu].get("events", []), event])

    def is_told(self, reason: str, about: str = POOL) -> bool:
        return self.server.wait(
            lambda: any(
                (event["reason"], event["involvedObject"]["name"]) == (reason, about)
                for event in self.server.objects("events")
            )
        )

    def kept(self) -> list[tuple[str, str, float]]:
        """What is wrong by the state on the disk: problem, value, and since when."""
        path = self.home / "kubelet/plugins/gpu.nvidia.com/state/health.json"
        if not path.exists():
            return []
        faults = json.loads(path.read_text())["HealthOfBoot"]["state"]["faults"]
        return [(fault["problem"], fault["value"], fault["since"]) for fault in faults]

    def kept_well(self) -> set[str]:
        """The problems that will be over if they do not come back."""
        path = self.home / "kubelet/plugins/gpu.nvidia.com/state/health.json"
        faults = json.loads(path.read_text())["HealthOfBoot"]["state"]["faults"]
        return {fault["problem"] for fault in faults if fault["well_since"] is not None}

    def offered(self) -> list[str]:
        slices = self.server.objects("resourceslices")
        return [device["name"] for each in slices for device in each["spec"].get("devices", ())]

    def taints(self) -> dict[str, list[tuple[str, str, str]]]:
        """Of the devices that have any: key, value and effect."""
        devices = [
            device
            for each in self.server.objects("resourceslices")
            for device in each["spec"].get("devices", ())
        ]
        return {
            device["name"]: [(t["key"], t.get("value", ""), t["effect"]) for t in device["taints"]]
            for device in devices
            if device.get("taints") and not device["name"].endswith("-mon")
        }

    def annotate(self, value: str) -> None:
        put_node(self.server, annotations={CLEAR: value})

    def annotations(self) -> dict[str, str]:
        (node,) = self.server.objects("nodes")
        return node["metadata"].get("annotations") or {}


@pytest.fixture
def scene(server: ApiServer, start: Callable[..., Process], home: Path) -> Scene:
    return Scene(server, start, home)


SICK = {"gpu-0": [("gpu.nvidia.com/xid", "79", "NoSchedule")]}


def sick_until_registered(scene: Scene) -> None:
    """Have an Xid happen until the plugin, which registers for events, has seen it."""
    for _ in range(20):
        scene.happen({"xid": 79})
        if scene.server.wait(lambda: bool(scene.kept()), 1):
            return


def test_a_sick_gpu_is_tainted_and_told_until_an_administrator_says_that_it_is_well(
    scene: Scene, kubelet: FakeKubelet
) -> None:
    process = scene.start()
    kubelet.wait_for_plugin(DRIVER)
    claim = put(scene.server, "gpu-0")
    kubelet.prepare([claim])

    sick_until_registered(scene)
    assert scene.is_told("GPUUnhealthy")
    assert scene.is_told("GPUUnhealthy", claim.name)
    assert scene.server.wait(lambda: scene.taints() == SICK)
    before = scene.kept()
    assert [fault[:2] for fault in before] == [("xid", "79")]

    process.kill()
    process.wait()
    (scene.home / "kubelet/plugins_registry/gpu.nvidia.com-reg.sock").unlink()
    scene.server.remove(
        "resourceslices", scene.server.objects("resourceslices")[0]["metadata"]["name"]
    )
    scene.start()
    kubelet.wait_for_plugin(DRIVER)
    assert scene.server.wait(lambda: scene.taints() == SICK)
    assert scene.kept() == before

    scene.annotate("gpu-0")
    assert scene.is_told("GPURecovered", claim.name)
    assert scene.server.wait(lambda: scene.annotations() == {} and not scene.taints())
    assert scene.kept() == []


def test_a_gpu_that_is_lost_stays_published_with_a_taint_until_it_answers(
    scene: Scene, kubelet: FakeKubelet
) -> None:
    scene.start()
    kubelet.wait_for_plugin(DRIVER)
    assert scene.server.wait(lambda: bool(scene.server.objects("resourceslices")))

    scene.change(1, fails="GPU_IS_LOST")

    lost = {"gpu-1": [("gpu.nvidia.com/gpu-lost", "", "NoSchedule")]}
    assert scene.server.wait(lambda: scene.taints() == lost)
    scene.change(1, fails={})
    eventually(lambda: scene.kept_well() == {"gpu-lost"}, "the lost GPU to answer")


def test_a_gpu_that_is_lost_is_known_to_the_next_process(
    scene: Scene, kubelet: FakeKubelet
) -> None:
    process = scene.start()
    kubelet.wait_for_plugin(DRIVER)
    assert scene.server.wait(lambda: bool(scene.server.objects("resourceslices")))
    before = scene.offered()
    scene.change(fails="GPU_IS_LOST")
    lost = {"gpu-0": [("gpu.nvidia.com/gpu-lost", "", "NoSchedule")]}
    assert scene.server.wait(lambda: scene.taints() == lost)

    def kept() -> list[tuple[str, str, float]]:
        """Beside it, that the events of the GPU are not told may be kept, too, and sooner."""
        return [fault for fault in scene.kept() if fault[0] == "gpu-lost"]

    assert scene.server.wait(lambda: bool(kept()))
    (since,) = kept()

    process.kill()
    process.wait()
    (scene.home / "kubelet/plugins_registry/gpu.nvidia.com-reg.sock").unlink()
    for each in scene.server.objects("resourceslices"):
        scene.server.remove("resourceslices", each["metadata"]["name"])
    scene.start()
    kubelet.wait_for_plugin(DRIVER)

    assert scene.server.wait(lambda: scene.taints() == lost)
    assert (scene.offered(), since in scene.kept()) == (before, True)


def test_where_taints_are_not_kept_a_sick_gpu_is_withdrawn(
    scene: Scene, kubelet: FakeKubelet
) -> None:
    scene.server.disable("DRADeviceTaints")
    scene.start()
    kubelet.wait_for_plugin(DRIVER)
    sick_until_registered(scene)

    assert scene.server.wait(lambda: scene.offered() == ["gpu-1"])
