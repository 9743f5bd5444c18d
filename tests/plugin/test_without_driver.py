"""The plugin as a process on a node whose NVIDIA driver is missing, half there, late or gone."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dra_driver.k8s.claims import ClaimUid
from tests.builders import POOL, config, ref
from tests.driver_process import Process
from tests.fakes.api_server import ApiServer
from tests.fakes.driver import VERSION, install, relink
from tests.fakes.kubelet import FakeKubelet
from tests.fakes.simulated import h100
from tests.plugin.conftest import free_port, put, readiness
from tests.waiting import eventually

DRIVER = "gpu.nvidia.com"
GPUS = {"gpus": [h100("1b"), h100("43")], "driver_version": VERSION}
LONG = config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}})


class Plugin:
    """A plugin process, what it published and what it says."""

    def __init__(
        self, server: ApiServer, start: Callable[..., Process], home: Path, kubelet: FakeKubelet
    ) -> None:
        self.server, self.kubelet, self.home = server, kubelet, home
        self._start = start
        self.node_file = home / "node.yaml"

    def simulate(self, **fields: Any) -> None:
        """The node is so from now on."""
        fresh = self.node_file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(GPUS | fields))
        fresh.replace(self.node_file)

    def start(self, **flags: str) -> None:
        self.port = free_port()
        self._start(
            sim=str(self.node_file),
            look_interval="0.2",
            reconcile_interval="0.2",
            http_address=f"127.0.0.1:{self.port}",
            **flags,
        )
        self.kubelet.wait_for_plugin(DRIVER)

    def readiness(self) -> tuple[int, str]:
        return readiness(self.port)

    def devices(self) -> list[str]:
        (pool,) = self.server.objects("resourceslices")
        return [device["name"] for device in pool["spec"].get("devices", ())]

    def events(self, reason: str) -> list[Mapping[str, Any]]:
        return [event for event in self.server.objects("events") if event["reason"] == reason]

    def recorded(self) -> list[str]:
        """The claims that hold something, or are still to be given back."""
        directory = self.home / "kubelet/plugins/gpu.nvidia.com/state/claims"
        return [path.stem for path in directory.glob("*/*")]


@pytest.fixture
def plugin(
    server: ApiServer, start: Callable[..., Process], home: Path, kubelet: FakeKubelet
) -> Plugin:
    plugin = Plugin(server, start, home, kubelet)
    plugin.simulate()
    return plugin


def whole(root: Path) -> None:
    """A driver with its device files; links stand for these (``sim.parts``)."""
    install(root)
    (root / "dev").mkdir(exist_ok=True)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        relink(root / "dev" / name, "/dev/null")


def incomplete(root: Path) -> None:
    """An installation that is not finished: the libraries, without nvidia-smi."""
    install(root)
    (root / "usr/bin/nvidia-smi").unlink()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        pytest.param(lambda root: None, "does not exist", id="missing, or another root"),
        pytest.param(lambda root: root.mkdir(), "no libcuda.so.<version>", id="an empty directory"),
        pytest.param(incomplete, "is incomplete: no nvidia-smi", id="half there"),
    ],
)
def test_without_a_driver_the_node_publishes_nothing_says_why_and_serves_it_when_it_comes(
    plugin: Plugin, home: Path, prepare: Callable[[Path], None], reason: str
) -> None:
    root = home / "driver"
    prepare(root)
    plugin.start(driver_root=str(root))
    assert plugin.server.wait(lambda: len(plugin.server.objects("resourceslices")) == 1)
    assert plugin.devices() == []
    eventually(lambda: plugin.readiness()[0] == 503, "the page")
    _, page = plugin.readiness()
    assert "[-] gpus: no complete NVIDIA driver" in page
    assert reason in page
    assert "set --driver-root" in page
    assert plugin.server.wait(lambda: len(plugin.events("GPUNotOffered")) == 1)
    (event,) = plugin.events("GPUNotOffered")
    assert event["involvedObject"]["kind"] == "Node"
    assert event["involvedObject"]["name"] == POOL
    assert reason in event["message"]
    plugin.kubelet.unprepare([ref("of-an-earlier-plugin", ClaimUid("uid-earlier"))])

    whole(root)

    assert plugin.server.wait(lambda: {"gpu-0", "gpu-1"} <= set(plugin.devices()))
    eventually(lambda: plugin.readiness()[0] == 200, "it to be ready")
    plugin.kubelet.prepare([put(plugin.server, "gpu-0")])


def test_a_driver_that_goes_keeps_no_pod_from_ending_and_its_claims_are_given_back_later(
    plugin: Plugin, home: Path
) -> None:
    plugin.start()
    turns = put(plugin.server, "gpu-0", name="turns", configs=(LONG,))
    other = put(plugin.server, "gpu-1", name="other")
    eventually(lambda: plugin.readiness()[0] == 200, "it to be ready")
    plugin.kubelet.prepare([turns, other])
    host = home / "kubelet/plugins/gpu.nvidia.com/state/sim"
    smi, away = host / "usr/bin/nvidia-smi", home / "nvidia-smi"
    shutil.move(smi, away)  # as while the driver is upgraded: its kernel module is still loaded

    plugin.kubelet.unprepare([turns, other])

    assert plugin.recorded() == ["uid-turns"], "what could not be undone is remembered"
    for name in ("turns", "other"):
        plugin.server.remove("resourceclaims", name, "default")
    shutil.move(away, smi)
    eventually(lambda: not plugin.recorded(), "the claim to be given back")
    plugin.kubelet.prepare([put(plugin.server, "gpu-0", name="next", configs=(LONG,))])


def test_a_plugin_that_starts_while_the_driver_is_gone_gives_back_what_pods_held(
    plugin: Plugin, server: ApiServer, start: Callable[..., Process], home: Path
) -> None:
    root = home / "driver"
    whole(root)
    process = start(sim=str(plugin.node_file), driver_root=str(root))
    plugin.kubelet.wait_for_plugin(DRIVER)
    held = put(server, "gpu-0")
    plugin.kubelet.prepare([held])
    process.kill()
    process.wait()
    (home / "kubelet/plugins_registry/gpu.nvidia.com-reg.sock").unlink()
    plugin.kubelet.wait_until_gone(DRIVER)
    shutil.rmtree(root)

    plugin.start(driver_root=str(root))
    plugin.kubelet.unprepare([held])

    assert plugin.recorded() == []
