"""This machine as the plugin sees it: its inventory, its driver files, and the steps done to it."""

import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import assert_never

from dra_driver.base.errors import DriverUnusable, MpsAgentUnreachable, NodeError, TimedOut
from dra_driver.model.driver_files import DeviceFile, DeviceFiles, DriverFiles
from dra_driver.model.gpus import Gpu, GpuUuid, Inventory, MigInstance, PartitionKey
from dra_driver.model.health import HealthReading
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName, ServedNamespace
from dra_driver.model.processes import GpuProcess
from dra_driver.model.steps import (
    ComputeMode,
    CreatePartition,
    GpuSetting,
    RemoveMpsNamespace,
    RemovePartition,
    ServeMpsNamespace,
    SetComputeMode,
    SetMemoryLimits,
    SetMigMode,
    SetTimeSlice,
    SettingValue,
    Step,
    TimeSliceInterval,
)
from dra_driver.node.cgroups.containers import ContainerBundles
from dra_driver.node.driver.device_nodes import DeviceNodes
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.driver.time_slices import TimeSlices
from dra_driver.node.inventory.gpus import GpuDiscovery
from dra_driver.node.inventory.unavailable import without_unrestored_time_slices
from dra_driver.node.memory.limits import NodeMemoryLimits
from dra_driver.node.mig import gpu_holders
from dra_driver.node.mig.partitions import MigPartitions
from dra_driver.node.mps.agent_client import MpsAgentClient
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.compute_modes import ComputeModes
from dra_driver.node.nvml.events import GpuEvents
from dra_driver.node.nvml.health import health_readings
from dra_driver.node.nvml.processes import gpu_processes

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class GpuNode:
    """Looks at GPUs one thread at a time; steps of different claims go side by side."""

    root: Path  # with its sys and dev
    gpus: GpuDiscovery
    nvml: Nvml
    driver: DriverRoot
    nodes: DeviceNodes
    time_slices: TimeSlices
    limits: NodeMemoryLimits  # what the driver itself enforces of memory
    modes: ComputeModes
    mig: MigPartitions
    containers: ContainerBundles
    events: GpuEvents
    mps: MpsAgentClient | None = None  # None: this node serves nothing by MPS
    _scan_lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _inventory: Inventory | None = field(default=None, init=False)
    _unrestored: Mapping[GpuUuid, TimeSliceInterval] = field(default_factory=dict, init=False)

    def inventory(self) -> Inventory:
        """The inventory of the last scan; the first call scans."""
        return self._inventory if self._inventory is not None else self.refresh()

    def remember(self, gpus: Iterable[Gpu]) -> None:
        """An earlier process knew these GPUs; before the first scan."""
        self.gpus.remember(gpus)

    def known_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of the last scan, and those that have answered and are away, also those of an
        earlier process. NVML is not opened for it."""
        last = self._inventory
        known = {gpu.uuid: gpu for gpu in self.gpus.answered}
        known |= {gpu.uuid: gpu for gpu in last.gpus} if last is not None else {}
        return tuple(known.values())

    def refresh(self) -> Inventory:
        """Scan the GPUs again; the same value where nothing changed. Bounded, also where a GPU
        hangs (see ``GpuDiscovery.scan``). While NVML is released: the last one, all of it stale."""
        with self._scan_lock:
            if self.nvml.released and (last := self._inventory) is not None:
                stale = frozenset(gpu.uuid for gpu in last.gpus)
                if stale != last.stale:
                    last = self._inventory = replace(last, stale=stale)
                return last
            inventory = without_unrestored_time_slices(self.gpus.scan(), self._read_unrestored())
            lost = dict(inventory.lost)
            self.events.watch(gpu.uuid for gpu in inventory.gpus if gpu.uuid not in lost)
            if inventory != self._inventory:
                self._inventory = inventory
            return self._inventory or inventory

    def _read_unrestored(self) -> Mapping[GpuUuid, TimeSliceInterval]:
        try:
            self._unrestored = self.time_slices.unrestored()
        except NodeError as e:
            log.info("GPUs are unavailable as before: %s", e)
        return self._unrestored

    def retry_setting_restores(self) -> bool:
        """Try again to restore time slices that could not be when their claims were unprepared.
        Whether some were."""
        return self.time_slices.retry_setting_restores()

    def driver_files(self) -> DriverFiles:
        return self.driver.files()

    def device_files(
        self,
        minors: tuple[int, ...],
        capabilities: tuple[str, ...] = (),
        driver: DriverFiles | None = None,
    ) -> DeviceFiles:
        """The device files of these GPUs, and of these capabilities of MIG ("gpu0/mig/gi1");
        missing ones are made. *driver*: its files, where they were just looked for."""
        return self.nodes.files(minors, capabilities, driver)

    def capability_files(self, names: tuple[str, ...]) -> Mapping[str, DeviceFile | None]:
        """What is there of the device files of these capabilities of MIG; nothing is made."""
        return self.nodes.existing(names)

    def partitions(self, gpu: GpuUuid) -> tuple[PartitionKey, ...]:
        """The partitions that *gpu* has now, half made instances included."""
        return self.mig.keys(gpu)

    def instance(self, gpu: GpuUuid, key: PartitionKey) -> MigInstance:
        """What this partition of *gpu* is now. MigInstanceNotFound: it is not there."""
        return self.mig.find(gpu, key)

    def in_mig_mode(self, gpus: Iterable[GpuUuid]) -> frozenset[GpuUuid]:
        """Those of *gpus* whose MIG mode is on, as far as they answer."""
        return self.mig.in_mig_mode(gpus)

    def current_setting(self, setting: GpuSetting) -> SettingValue | None:
        """What the GPU has now of what *setting* sets; None: it does not say."""
        match setting:
            case SetTimeSlice(gpu=gpu):
                return self.time_slices.read(gpu)
            case SetComputeMode(gpu=gpu):
                return self.compute_mode(gpu)
            case SetMigMode(gpu=gpu):
                return self.mig.mode(gpu)
            case _:
                assert_never(setting)

    def health_readings(
        self, energy_of: Collection[GpuUuid] = ()
    ) -> Mapping[GpuUuid, HealthReading | NodeError]:
        """What each GPU of the last scan says of its health, or why it says nothing. Bounded.

        *energy_of*: the GPUs whose energy is read, too, which takes long.
        """
        return health_readings(self.nvml, [gpu.uuid for gpu in self.inventory().gpus], energy_of)

    def release(self, why: str) -> None:
        """Let go of all GPUs, until ``resume``: what needs NVML is a NodeError that says *why*.
        TimedOut: a call of NVML is under way; no other begins, so do it again."""
        with self._scan_lock:  # a scan that is cut short would take every GPU for gone
            self.nvml.release(why)

    def resume(self) -> None:
        """Open NVML again, at the next ``refresh``."""
        self.nvml.resume()

    def processes(self, gpu: GpuUuid) -> tuple[GpuProcess, ...]:
        """What computes on *gpu*, by the host's process numbers. NodeError: it does not say."""
        return gpu_processes(self.nvml, gpu)

    def command(self, pid: int) -> str:
        """What the process of this number calls itself; empty: it is not seen from here."""
        return gpu_holders.process_command(pid)

    def carry_out(self, step: Step) -> None:
        """Do it; doing it twice is doing it once."""
        match step:
            case SetTimeSlice() | SetComputeMode() | SetMigMode():
                self._set(step)
            case SetMemoryLimits():
                self.limits.carry_out(step)
            case CreatePartition() | RemovePartition():
                self._partition(step)
            case ServeMpsNamespace(namespace=namespace):
                self.serve(namespace)
            case RemoveMpsNamespace(namespace=name):
                self._release(name)
            case _:
                assert_never(step)

    def restore(self, step: Step) -> None:
        """Do it as part of giving a claim back: what is gone needs nothing any more.

        DriverUnusable: it cannot be done now, whatever the claim is.
        """
        try:
            self._restore(step)
        except NodeError as e:
            if (problem := self._driver_problem()) is not None:
                raise DriverUnusable(f"NVIDIA's driver cannot be used: {problem}") from e
            raise

    def _driver_problem(self) -> str | None:
        try:
            self.driver.files()
            self.nvml.system()
        except NodeError as e:
            return str(e)
        return None

    def _restore(self, step: Step) -> None:
        match step:
            case SetTimeSlice(gpu=gpu, interval=interval):
                self.time_slices.restore(gpu, interval)
            case SetComputeMode(gpu=gpu, mode=mode):
                self.modes.restore(gpu, mode)
            case SetMigMode(gpu=gpu, on=on):
                self.mig.restore_mode(gpu, on)
            case _:
                self.carry_out(step)

    def _set(self, setting: GpuSetting) -> None:
        match setting:
            case SetTimeSlice(gpu=gpu, interval=interval):
                self.time_slices.set(gpu, interval)
            case SetComputeMode(gpu=gpu, mode=mode):
                self.modes.set(gpu, mode)
            case SetMigMode(gpu=gpu, on=on):
                self.mig.set_mode(gpu, on)
            case _:
                assert_never(setting)

    def _partition(self, step: CreatePartition | RemovePartition) -> None:
        match step:
            case CreatePartition(gpu=gpu, key=key, new=new):
                self.mig.create(gpu, key, new)
            case RemovePartition(gpu=gpu, key=key, uuid=uuid, unless=unless):
                self.mig.remove(gpu, key, uuid, unless=unless)
            case _:
                assert_never(step)

    def compute_mode(self, gpu: GpuUuid) -> ComputeMode | None:
        """Who may compute on *gpu*; None: it does not say."""
        return self.modes.read(gpu)

    def serve(self, namespace: MpsNamespace) -> ServedNamespace:
        """What clients of *namespace* can use; asking again changes nothing."""
        if self.mps is None:
            raise NodeError("this node serves nothing by MPS: set --mps-socket, and run an agent")
        return self.mps.serve(namespace)

    def _release(self, namespace: MpsNamespaceName) -> None:
        """An agent that does not answer has it ended later (``plugin.mps.watch``): a pod must be
        able to end without it."""
        if self.mps is None:
            log.warning(
                "a namespace stays, since MPS was switched off", extra={"namespace": namespace}
            )
            return
        try:
            self.mps.release(namespace)
        except (MpsAgentUnreachable, TimedOut) as e:
            log.warning(
                "a namespace is ended later", extra={"namespace": namespace, "error": str(e)}
            )
