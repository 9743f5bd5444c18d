"""pynvml's functions over a simulated node; they refuse what hardware refuses.

The compute modes are kept in the settings of the simulated host: they outlive the process that set
them, and go with the driver or the GPU.
"""

import os
import re

# ruff: noqa: N802, N815 - the functions keep NVML's names
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import pynvml

from dra_driver.sim.health.clients import OpenGpus
from dra_driver.sim.health.events import EventFunctions
from dra_driver.sim.health.readings import ReadingFunctions
from dra_driver.sim.health.resets import GpuResets
from dra_driver.sim.host.tools import COMPUTE_MODE_SUFFIX, SETTINGS_DIRECTORY
from dra_driver.sim.live_node import LiveNode
from dra_driver.sim.memory_limits import SimulatedMemoryLimits
from dra_driver.sim.mig.compute_instances import ComputeInstanceFunctions
from dra_driver.sim.mig.devices import ListedMigDevices, MigDevice, find_mig_device
from dra_driver.sim.mig.gpu_instances import BoardSnapshot
from dra_driver.sim.mig.identifiers import MIG_PREFIX
from dra_driver.sim.mig.nvml_structures import device_name
from dra_driver.sim.mig.state import MigStateStore
from dra_driver.sim.node_spec import KILLED, SimulatedGpu, SimulatedNode, SimulatedProcess, serial
from dra_driver.sim.nvml_handles import GpuHandle, InstancePointers, MigHandle, kill_process
from dra_driver.sim.nvml_handles import raise_nvml_error as _fail

DEFAULT_MODE: Final = int(pynvml.NVML_COMPUTEMODE_DEFAULT)
_CAN_BE_SET: Final = frozenset(
    {
        DEFAULT_MODE,
        pynvml.NVML_COMPUTEMODE_PROHIBITED,
        pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
    }
)


class SimulatedComputeModes:
    """What the driver of the simulated host in *host* keeps."""

    def __init__(self, host: Path, is_root: Callable[[], bool] = lambda: os.geteuid() == 0) -> None:
        self._host = host
        self._is_root = is_root

    def get(self, node: SimulatedNode, gpu: SimulatedGpu) -> int:
        """``nvmlDeviceGetComputeMode``."""
        try:
            return int(self._file(node, gpu).read_text())
        except FileNotFoundError:
            return DEFAULT_MODE

    def set(self, node: SimulatedNode, gpu: SimulatedGpu, mode: int) -> None:
        """``nvmlDeviceSetComputeMode``."""
        if mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD:  # CUDA 8 took it away
            _raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if mode not in _CAN_BE_SET:
            _raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if not self._is_root():
            _raise_nvml_error(pynvml.NVML_ERROR_NO_PERMISSION)
        file = self._file(node, gpu)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{mode}\n")

    def _file(self, node: SimulatedNode, gpu: SimulatedGpu) -> Path:
        return (
            self._host
            / SETTINGS_DIRECTORY
            / node.driver_version
            / f"{gpu.uuid}{COMPUTE_MODE_SUFFIX}"
        )


def _raise_nvml_error(error: int) -> NoReturn:
    raise pynvml.NVMLError(error)


VIRTUALIZATION_MODES: Final = {
    "none": int(pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE),
    "passthrough": int(pynvml.NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH),
    "vgpu": int(pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU),
}
_STILL_ANSWERED: Final = frozenset(
    f"nvmlDevice{name}"
    for name in (
        "GetHandleByIndex",
        "GetHandleByUUID",
        "GetUUID",
        "GetMinorNumber",
        "GetName",
        "GetPciInfo",
        "GetMigMode",
        "SetMigMode",
        "GetVirtualizationMode",
    )
)


def refused_until_reset(
    mig: MigStateStore, node: SimulatedNode, gpu: SimulatedGpu, function: str
) -> bool:
    """Whether *function* is refused, since the board was told to change a mode that takes a reset,
    for which its machine has no means."""
    if gpu.virtualization != "passthrough" or gpu.geometry is None or function in _STILL_ANSWERED:
        return False
    return mig.read(node, gpu).needs_reset


_HANG_LOOKS_AGAIN_SECONDS = 0.02
_NO_INSTANCE = 0xFFFFFFFF  # NVML's gpuInstanceId of a process outside MIG


class SimulatedNvml(ComputeInstanceFunctions, ReadingFunctions, EventFunctions):
    """Stands where the module pynvml stands.

    As NVML does, it lists the GPUs that the driver had when it was initialised: one that leaves is
    lost, one that comes is seen after the next nvmlInit. Everything else follows the node file at
    once.
    """

    c_nvmlSetMemoryLimits_v1_t = pynvml.c_nvmlSetMemoryLimits_v1_t
    c_nvmlGetMemoryLimits_v1_t = pynvml.c_nvmlGetMemoryLimits_v1_t
    c_nvmlGpuInstance_t = pynvml.c_nvmlGpuInstance_t
    c_nvmlComputeInstance_t = pynvml.c_nvmlComputeInstance_t
    c_nvmlGpuInstancePlacement_t = pynvml.c_nvmlGpuInstancePlacement_t

    def __init__(
        self,
        live: LiveNode,
        limits: SimulatedMemoryLimits | None = None,
        modes: SimulatedComputeModes | None = None,
        mig: MigStateStore | None = None,
    ) -> None:
        super().__init__()
        self._live = live
        self._mig = mig or MigStateStore()
        self._mig.follow(live.current())
        live.on_change(self._mig.follow)
        self._resets = GpuResets(self._mig.host)
        live.on_change(self._resets.follow)
        self._open = OpenGpus(self._mig.host)
        self._pointers = InstancePointers()
        self._listed_devices = ListedMigDevices()
        self._modes = modes  # None: without a host that could keep them, nothing can be set
        self._limits = limits or SimulatedMemoryLimits(Path("/nonexistent"))  # without cgroups
        self._limits.follow(live.current())
        live.on_change(self._limits.follow)
        self._lock = threading.Lock()
        self._users = 0  # as NVML counts nvmlInit and nvmlShutdown
        self._session = 0
        self._listed: tuple[str, ...] = ()  # bus ids, in the order of NVML's indices
        self._loaded_version = ""

    def nvmlInit(self) -> None:
        node = self._live.current()
        if node.driver == "no-library":
            _fail(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        if node.driver == "not-loaded":
            _fail(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._session += 1
                self._listed = tuple(sorted(gpu.bus_id for gpu in node.gpus if gpu.listed))
                self._open.open(str(gpu.uuid) for gpu in node.gpus if gpu.listed)
                self._loaded_version = node.driver_version

    def nvmlShutdown(self) -> None:
        with self._lock:
            if self._users == 0:
                _fail(pynvml.NVML_ERROR_UNINITIALIZED)
            self._users -= 1
            if self._users == 0:
                self._free_event_sets()
                self._open.close()

    def nvmlSystemGetDriverVersion(self) -> str:
        return self._node().driver_version

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        major, minor = self._node().cuda_version.split(".")
        return int(major) * 1000 + int(minor) * 10

    def nvmlDeviceGetCount(self) -> int:
        self._node()
        return len(self._listed)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> GpuHandle:
        self._node()
        if not 0 <= index < len(self._listed):
            _fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        handle = GpuHandle(self._session, self._listed[index])
        self._gpu(handle, "nvmlDeviceGetHandleByIndex")
        return handle

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> GpuHandle | MigHandle:
        node = self._node()
        for bus_id in self._listed:
            gpu, handle = node.on_bus(bus_id), GpuHandle(self._session, bus_id)
            if gpu and uuid.startswith(MIG_PREFIX) and gpu.geometry:
                snapshot = BoardSnapshot(handle, gpu, gpu.geometry, self._mig.read(node, gpu))
                if (device := find_mig_device(snapshot, uuid)) is not None:
                    self._gpu(handle, "nvmlDeviceGetHandleByUUID")
                    return device.handle
            if gpu and gpu.uuid == uuid:
                self._gpu(handle, "nvmlDeviceGetHandleByUUID")
                return handle
        _fail(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        if isinstance(handle, MigHandle):
            return self._named(handle, "nvmlDeviceGetUUID").uuid
        return str(self._gpu(handle, "nvmlDeviceGetUUID").uuid)

    def nvmlDeviceGetSerial(self, handle: Any) -> str:
        return serial(self._gpu(handle, "nvmlDeviceGetSerial"))

    def nvmlDeviceGetMinorNumber(self, handle: Any) -> int:
        return int(self._gpu(handle, "nvmlDeviceGetMinorNumber").minor or 0)

    def nvmlDeviceGetPciInfo(self, handle: Any) -> pynvml.nvmlPciInfo_t:
        gpu = self._gpu(handle, "nvmlDeviceGetPciInfo")
        place = _pci_info(gpu.bus_id)
        place.pciDeviceId = int(gpu.board.pci_device, 16) << 16 | 0x10DE
        place.pciSubSystemId = int(gpu.board.pci_subsystem, 16) << 16 | 0x10DE
        return place

    def nvmlDeviceGetName(self, handle: Any) -> str:
        gpu, mig = self._device(handle, "nvmlDeviceGetName")
        inside = f" {device_name(mig.profile, mig.compute.slices)}" if mig else ""
        return f"{gpu.board.name}{inside}"

    def nvmlDeviceGetBrand(self, handle: Any) -> int:
        return self._gpu(handle, "nvmlDeviceGetBrand").board.brand

    def nvmlDeviceGetArchitecture(self, device: Any) -> int:
        return self._gpu(device, "nvmlDeviceGetArchitecture").board.architecture

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        return self._gpu(handle, "nvmlDeviceGetCudaComputeCapability").board.compute_capability

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Any = None) -> pynvml.c_nvmlMemory_t:
        gpu, mig = self._device(handle, "nvmlDeviceGetMemoryInfo")
        memory = pynvml.c_nvmlMemory_v2_t() if version else pynvml.c_nvmlMemory_t()
        memory.total = mig.profile.memory_bytes if mig else gpu.board.memory_bytes
        memory.used = sum(process.memory_bytes or 0 for process in _users(gpu, mig))
        memory.free = memory.total - memory.used
        return memory

    def nvmlDeviceGetAddressingMode(self, device: Any) -> int:
        return self._gpu(device, "nvmlDeviceGetAddressingMode").board.addressing_mode

    def nvmlDeviceGetComputeMode(self, handle: Any) -> int:
        gpu = self._gpu(handle, "nvmlDeviceGetComputeMode")
        return self._modes.get(self._node(), gpu) if self._modes else DEFAULT_MODE

    def nvmlDeviceSetComputeMode(self, handle: Any, mode: int) -> None:
        gpu = self._gpu(handle, "nvmlDeviceSetComputeMode")
        if self._modes is None:
            _fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self._modes.set(self._node(), gpu, mode)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        gpu, mig = self._device(handle, "nvmlDeviceGetComputeRunningProcesses")
        return _processes(gpu, mig, "compute")

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:
        gpu, mig = self._device(handle, "nvmlDeviceGetGraphicsRunningProcesses")
        return _processes(gpu, mig, "graphics")

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Any) -> list[Any]:
        gpu, mig = self._device(handle, "nvmlDeviceGetMPSComputeRunningProcesses")
        return _processes(gpu, mig, "mps")

    nvmlDeviceGetComputeRunningProcesses_v2 = nvmlDeviceGetComputeRunningProcesses
    nvmlDeviceGetGraphicsRunningProcesses_v2 = nvmlDeviceGetGraphicsRunningProcesses
    nvmlDeviceGetMPSComputeRunningProcesses_v2 = nvmlDeviceGetMPSComputeRunningProcesses

    def nvmlDeviceSetMemoryLimits_v1(self, device: Any, limits: Any) -> None:
        gpu = self._gpu(device, "nvmlDeviceSetMemoryLimits_v1")
        self._limits.set(self._node(), self._in_its_mode(gpu), limits)

    def nvmlDeviceGetMemoryLimits_v1(self, device: Any, limits: Any) -> None:
        gpu = self._gpu(device, "nvmlDeviceGetMemoryLimits_v1")
        self._limits.get(self._node(), self._in_its_mode(gpu), limits)

    def nvmlDeviceGetVirtualizationMode(self, handle: Any) -> int:
        gpu = self._gpu(handle, "nvmlDeviceGetVirtualizationMode")
        return VIRTUALIZATION_MODES[gpu.virtualization]

    def nvmlDeviceGetPersistenceMode(self, handle: Any) -> int:
        return int(self._gpu(handle, "nvmlDeviceGetPersistenceMode").persistence)

    def nvmlDeviceGetNvLinkState(self, device: Any, link: int) -> int:
        return int(self._link(device, link, "nvmlDeviceGetNvLinkState") is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int) -> int:
        end = self._link(handle, link, "nvmlDeviceGetNvLinkRemoteDeviceType")
        if end is None:
            _fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        switch, gpu = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
        return int(switch if end == "" else gpu)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: Any, link: int) -> pynvml.nvmlPciInfo_t:
        end = self._link(device, link, "nvmlDeviceGetNvLinkRemotePciInfo")
        if not end:  # inactive, or a switch, whose address the simulation does not have
            _fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return _pci_info(end)

    def _in_its_mode(self, gpu: SimulatedGpu) -> SimulatedGpu:
        """With the MIG mode that it has now."""
        on = gpu.geometry is not None and self._mig.read(self._node(), gpu).on
        return gpu.model_copy(update={"mig": on})

    def _link(self, handle: Any, link: int, function: str) -> str | None:
        """Where *link* leads: a bus id, "" for an NVSwitch, None where it is inactive."""
        gpu = self._health(handle, function)
        if not gpu.board.nvlinks:
            _fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if not 0 <= link < gpu.board.nvlinks:
            _fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if link >= gpu.board.nvlinks - gpu.nvlinks_down:
            return None
        node = self._node()
        if node.nvlink == "nvswitch":
            return ""
        peers = node.nvlink_peers(gpu.bus_id)
        return peers[link * len(peers) // gpu.board.nvlinks] if peers else None

    def _node(self) -> SimulatedNode:
        node = self._live.current()
        if self._users == 0:
            _fail(pynvml.NVML_ERROR_UNINITIALIZED)
        if node.driver != "ready":
            _fail(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if node.driver_version != self._loaded_version:
            _fail(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        return node

    def _gpu(self, handle: Any, function: str) -> SimulatedGpu:
        node, handle = self._node(), self._pointers.device(handle)
        if not isinstance(handle, GpuHandle) or handle.session != self._session:
            _fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        gpu = node.on_bus(handle.bus_id)
        while gpu is not None and gpu.hangs:
            time.sleep(_HANG_LOOKS_AGAIN_SECONDS)
            gpu = self._live.current().on_bus(handle.bus_id)
        if gpu is None or not gpu.listed:
            _fail(pynvml.NVML_ERROR_GPU_IS_LOST)
        if gpu.kills(function, KILLED):
            kill_process()
        if (error := gpu.error(function)) is not None:
            _fail(error)
        if refused_until_reset(self._mig, node, gpu, function):
            _fail(pynvml.NVML_ERROR_RESET_REQUIRED)
        return gpu


def _users(gpu: SimulatedGpu, mig: MigDevice | None) -> list[SimulatedProcess]:
    """Those of the GPU, or of an instance of it."""
    return [process for process in gpu.processes if mig is None or process.gi == mig.instance.gi]


def _processes(gpu: SimulatedGpu, mig: MigDevice | None, kind: str) -> list[Any]:
    return [
        pynvml.nvmlFriendlyObject(
            {
                "pid": process.pid,
                "usedGpuMemory": process.memory_bytes,
                "gpuInstanceId": _NO_INSTANCE if process.gi is None else process.gi,
                "computeInstanceId": _NO_INSTANCE if process.gi is None else 0,
            }
        )
        for process in _users(gpu, mig)
        if kind in process.kinds
    ]


def _pci_info(bus_id: str) -> pynvml.nvmlPciInfo_t:
    domain, bus, device = re.split("[:.]", bus_id)[:3]
    place = pynvml.nvmlPciInfo_t()
    place.domain, place.bus, place.device = int(domain, 16), int(bus, 16), int(device, 16)
    place.busId = f"{place.domain:08X}:{place.bus:02X}:{place.device:02X}.0"
    place.busIdLegacy = f"{place.domain:04X}:{place.bus:02X}:{place.device:02X}.0"
    return place
