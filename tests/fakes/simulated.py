"""A simulated node in a temporary directory: file, host, and what our code sees of it."""

import os
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import Inventory, MigInfo, MigProfile
from dra_driver.node.driver.config import NodeConfig
from dra_driver.node.driver.pci import PciBus
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.inventory.gpus import GpuDiscovery, MakeDeviceFiles
from dra_driver.node.mig.geometry import MigGeometries
from dra_driver.node.nvml.client import Nvml
from dra_driver.sim.host.directory import SimulatedHost
from dra_driver.sim.live_node import LiveNode
from dra_driver.sim.mig.state import MigStateStore
from dra_driver.sim.nvml import SimulatedNvml
from dra_driver.sim.parts import open_simulated_node

Document = dict[str, Any]


def h100(bus: str, **more: Any) -> Document:
    """One GPU of a node file."""
    return {"product": "H100-80-SXM", "bus_id": f"0000:{bus}:00.0", **more}


def two_gpus() -> Document:
    """A node file with two H100 on NVSwitches."""
    return {"nvlink": "nvswitch", "gpus": [h100("1b", numa_node=0), h100("43", numa_node=0)]}


def open_simulated(name: str | Path, state: Path) -> AbstractContextManager[GpuNode]:
    """The simulated node *name* as the plugin opens it; its host is in *state*, in sim."""
    return open_simulated_node(str(name), NodeConfig(), state)


def no_nvidia_modprobe(minors: tuple[int, ...]) -> None:
    raise NodeError("there is no nvidia-modprobe")


class Node:
    """A node that a test can change while it runs."""

    def __init__(self, directory: Path, document: Document, deadline_seconds: float = 5.0) -> None:
        self.document = document
        self.file = directory / "node.yaml"
        self.write()
        self.root = directory / "root"
        self.live = LiveNode(self.file)
        self.mig = MigStateStore(is_root=lambda: True)  # without a host: kept as long as this
        self.functions = SimulatedNvml(self.live, mig=self.mig)
        self.geometries = MigGeometries()
        self.nvml = Nvml(lambda: self.functions, self.geometries.start_session, deadline_seconds)

    @cached_property
    def host(self) -> SimulatedHost:
        return SimulatedHost(self.live, self.root)

    def gpus(self, make_nodes: MakeDeviceFiles | None = None) -> GpuDiscovery:
        assert self.host  # its files are there
        sysfs, devices = PciBus(self.root / "sys"), self.root / "dev"
        return GpuDiscovery(self.nvml, sysfs, devices, make_nodes or no_nvidia_modprobe)

    def write(self) -> None:
        """Put the document into the file at once, so that nobody reads half of it."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(self.document))
        os.replace(fresh, self.file)

    def change(self, gpu: int | None = None, **fields: Any) -> None:
        """Set *fields* of the node, or of one of its GPUs."""
        (self.document if gpu is None else self.document["gpus"][gpu]).update(fields)
        self.write()


def as_yaml(inventory: Inventory) -> str:
    """An inventory as a reviewer reads it: a version is one string, what is absent is left out."""

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shown(item) for key, item in value.items() if item is not None}
        return value

    devices = []
    for device in inventory.gpus:
        fields = asdict(device)
        for key in ("compute_capability", "driver_version", "cuda_driver_version"):
            fields[key] = str(getattr(device, key))
        fields["mig"] = _mig(device.mig) if device.mig else None
        devices.append({"name": str(device.name), **shown(fields)})
    unavailable = [f"{missing.what}: {missing.reason}" for missing in inventory.unavailable]
    document = {"devices": devices, "unavailable": unavailable}
    return yaml.safe_dump(document, sort_keys=False, width=1000)


def _mig(mig: MigInfo) -> dict[str, Any]:
    """How a GPU can be partitioned, a line for each profile."""
    instances = [f"{instance.key} as GPU instance {instance.gi}" for instance in mig.instances]
    modes = {"on": mig.on, "pending": mig.pending, "switches": mig.switches}
    return {
        **modes,
        "profiles": [_profile(instance) for instance in mig.profiles],
        "instances": instances,
    }


def _profile(profile: MigProfile) -> str:
    starts = ", ".join(str(place.start) for place in profile.placements)
    engines = ", ".join(f"{count} {name}" for name, count in asdict(profile.engines).items())
    most, mebibytes = profile.most, profile.memory_bytes >> 20
    return (
        f"{profile.name}: id {profile.id}, {most} at most, {mebibytes} MiB, "
        f"{profile.size} from {starts}; {engines}"
    )
