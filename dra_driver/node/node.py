"""This machine as the plugin sees it: its inventory, its driver files, and the steps done to it."""

import threading
from dataclasses import dataclass
from typing import Final, assert_never

from dra_driver.model.devices import GpuUuid
from dra_driver.model.driver_files import DeviceFiles, DriverFiles
from dra_driver.model.inventory import Inventory
from dra_driver.model.processes import GpuProcess
from dra_driver.model.steps import Interval, LimitMemory, MakeDeviceNodes, SetTimeSlice, Step
from dra_driver.node.device_nodes import DeviceNodes
from dra_driver.node.driver_root import DriverRoot
from dra_driver.node.gpu_processes import gpu_processes
from dra_driver.node.gpus import Gpus
from dra_driver.node.memory_limits import MemoryLimits
from dra_driver.node.nvml import Nvml
from dra_driver.node.time_slices import TimeSlices


@dataclass(frozen=True, slots=True)
class Parts:
    """What a node is made of."""

    gpus: Gpus
    nvml: Nvml
    driver: DriverRoot
    nodes: DeviceNodes
    time_slices: TimeSlices
    limits: MemoryLimits


class GpuNode:
    """Looks at GPUs one thread at a time; steps of different claims go side by side."""

    def __init__(self, parts: Parts) -> None:
        self._gpus = parts.gpus
        self._driver = parts.driver
        self._nodes = parts.nodes
        self._time_slices = parts.time_slices
        self._nvml = parts.nvml
        self._looking = threading.Lock()
        self._inventory: Inventory | None = None
        self.limits: Final = parts.limits  # what the driver itself enforces of memory

    def inventory(self) -> Inventory:
        """What the last look found; the first call looks."""
        return self._inventory if self._inventory is not None else self.refresh()

    def refresh(self) -> Inventory:
        """Look again; the same value where nothing changed. Bounded, also where a GPU hangs (see
        ``Gpus.look``)."""
        with self._looking:
            found = self._gpus.look()
            if found != self._inventory:
                self._inventory = found
            return self._inventory or found

    def driver_files(self) -> DriverFiles:
        return self._driver.files()

    def device_files(self, minors: tuple[int, ...]) -> DeviceFiles:
        """The device files of these GPUs; missing ones are made."""
        return self._nodes.files(minors)

    def interval(self, gpu: GpuUuid) -> Interval | None:
        """The interval at which the GPU's processes take turns; None: it does not say."""
        return self._time_slices.read(gpu)

    def processes(self, gpu: GpuUuid) -> tuple[GpuProcess, ...]:
        """What computes on *gpu*, by the host's process numbers. NodeError: it does not say."""
        return gpu_processes(self._nvml, gpu)

    def carry_out(self, step: Step) -> None:
        """Do it; doing it twice is doing it once."""
        match step:
            case MakeDeviceNodes(minors=minors):
                self._nodes.files(minors)
            case SetTimeSlice(gpu=gpu, interval=interval):
                self._time_slices.set(gpu, interval)
            case LimitMemory():
                self.limits.carry_out(step)
            case _:
                assert_never(step)

    def restore(self, step: Step) -> None:
        """Do it as part of giving a claim back: what is gone needs nothing any more."""
        match step:
            case SetTimeSlice(gpu=gpu, interval=interval):
                self._time_slices.restore(gpu, interval)
            case MakeDeviceNodes() | LimitMemory():
                self.carry_out(step)
            case _:
                assert_never(step)
