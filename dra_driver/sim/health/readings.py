"""pynvml's functions that tell the health of a GPU as it is now."""

# ruff: noqa: N802, N803, N815 - the functions and their parameters keep NVML's names
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pynvml

from dra_driver.base.frozen import frozen
from dra_driver.sim.health.resets import GpuResets
from dra_driver.sim.health.spec import recovery_action_number
from dra_driver.sim.node_spec import SimulatedGpu, SimulatedNode
from dra_driver.sim.nvml_handles import dereference, raise_nvml_error

RECOVERY_ACTION_FROM: Final = 570  # assumed: nvml.h has them since CUDA 12.8
_WATTS: Final = 100  # of every GPU, whatever it does
_ENERGY_FROM: Final = (7, 0)  # nvml.h: Volta or newer
_ROWS_FROM: Final = (8, 0)  # nvml.h: Ampere or newer
_FABRIC_FROM: Final = (9, 0)  # nvml.h: Hopper or newer
_CLOCKS: Final[Mapping[str, int]] = {
    "thermal": pynvml.nvmlClocksEventReasonHwThermalSlowdown
    | pynvml.nvmlClocksEventReasonHwSlowdown,
    "software-thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "power-brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
    | pynvml.nvmlClocksEventReasonHwSlowdown,
    "power-cap": pynvml.nvmlClocksEventReasonSwPowerCap,
}
_FABRIC_STATES: Final[Mapping[str, int]] = {
    "not-started": pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED,
    "in-progress": pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS,
}
# NVML_GPU_FABRIC_HEALTH_MASK_*: where its two bits are; 1 is true, 2 is false.
_FABRIC_FAULTS: Final[Mapping[str, int]] = {
    "degraded-bandwidth": pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW,
    "route-recovery": pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY,
    "unhealthy-route": pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY,
    "access-timeout-recovery": pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY,
}
_RIGHT_CONFIGURATION: Final[int] = pynvml.NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE
_NO_PARTITION: Final[int] = pynvml.NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NO_PARTITION
_CONFIGURATION_SHIFT: Final[int] = pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION


@frozen
class _Field:
    """A field of ``nvmlDeviceGetFieldValues``. *value*: None where the GPU does not have it."""

    name: str
    kind: int
    value: Callable[["ReadingFunctions", SimulatedGpu], int | None]


class ReadingFunctions(ABC):
    """What one look tells."""

    c_nvmlGpuFabricInfoV_t = pynvml.c_nvmlGpuFabricInfoV_t

    _resets: GpuResets

    @abstractmethod
    def _node(self) -> SimulatedNode: ...

    @abstractmethod
    def _gpu(self, handle: Any, function: str) -> SimulatedGpu: ...

    def nvmlDeviceGetRemappedRows(self, device: Any) -> tuple[int, int, int, int]:
        gpu = self._health(device, "nvmlDeviceGetRemappedRows")
        if gpu.board.compute_capability < _ROWS_FROM:
            raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 0, int(gpu.remap != "none"), int(gpu.remap == "pending"), int(gpu.remap == "failed")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        gpu = self._health(handle, "nvmlDeviceGetCurrentClocksEventReasons")
        reasons = 0
        for name in gpu.clocks:
            reasons |= _CLOCKS[name]
        return reasons or int(pynvml.nvmlClocksEventReasonGpuIdle)

    def nvmlDeviceGetGpuFabricInfoV(self, device: Any, gpuFabricInfo: Any) -> int:
        gpu = self._health(device, "nvmlDeviceGetGpuFabricInfoV")
        info = dereference(gpuFabricInfo)
        if info is None:
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if gpu.board.compute_capability < _FABRIC_FROM:
            raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if info.version != pynvml.nvmlGpuFabricInfo_v2:
            raise_nvml_error(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        info.status, info.cliqueId, info.healthMask = pynvml.NVML_SUCCESS, 0, 0
        info.state = pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
        if self._node().nvlink == "nvswitch":
            info.state = _FABRIC_STATES.get(gpu.fabric, pynvml.NVML_GPU_FABRIC_STATE_COMPLETED)
            info.status = pynvml.NVML_ERROR_UNKNOWN if gpu.fabric == "failed" else info.status
            info.healthMask = _fabric_mask(gpu.fabric)
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetFieldValues(self, handle: Any, fieldIds: Sequence[Any]) -> Any:
        gpu = self._health(handle, "nvmlDeviceGetFieldValues")
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        for value, asked in zip(values, fieldIds, strict=True):
            value.fieldId, value.scopeId = asked if isinstance(asked, tuple) else (asked, 0)
            value.timestamp = int(time.time() * 1e6)
            self._fill(value, gpu)
        return values

    def _fill(self, value: Any, gpu: SimulatedGpu) -> None:
        field = _FIELDS.get(value.fieldId)
        if field is None:
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
            return
        number, error = field.value(self, gpu), gpu.error(field.name)
        if error is None and number is None:
            error = pynvml.NVML_ERROR_NOT_SUPPORTED
        value.valueType, value.nvmlReturn = field.kind, error or pynvml.NVML_SUCCESS
        if not error:
            value.value.ullVal = number

    def _health(self, handle: Any, function: str) -> SimulatedGpu:
        """The GPU without the faults that a reset cured."""
        gpu = self._gpu(handle, function)
        return self._resets.after(self._node(), gpu)

    def _energy_mj(self, gpu: SimulatedGpu) -> int | None:
        """Since the driver was loaded, or the GPU was reset."""
        if gpu.board.compute_capability < _ENERGY_FROM:
            return None
        return int(self._resets.seconds_up(self._node(), gpu) * _WATTS * 1000)

    def _ecc_errors(self, gpu: SimulatedGpu, kind: str) -> int:
        events = self._resets.events_since(self._node(), gpu)
        return sum(event.times for event in events if event.ecc == kind)

    def _recovery_action(self, gpu: SimulatedGpu) -> int | None:
        known = self._node().major_version >= RECOVERY_ACTION_FROM
        return recovery_action_number(gpu.recovery_action) if known else None


def _rows(state: str) -> Callable[[ReadingFunctions, SimulatedGpu], int | None]:
    def value(functions: ReadingFunctions, gpu: SimulatedGpu) -> int | None:
        return int(gpu.remap == state) if gpu.board.compute_capability >= _ROWS_FROM else None

    return value


_INT: Final = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
_LONG: Final = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
_FIELDS: Final[Mapping[int, _Field]] = {
    getattr(pynvml, field.name): field
    for field in (
        _Field(
            "NVML_FI_DEV_ECC_SBE_VOL_TOTAL", _LONG, lambda f, gpu: f._ecc_errors(gpu, "correctable")
        ),
        _Field(
            "NVML_FI_DEV_ECC_DBE_VOL_TOTAL",
            _LONG,
            lambda f, gpu: f._ecc_errors(gpu, "uncorrectable"),
        ),
        _Field("NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION", _LONG, lambda f, gpu: f._energy_mj(gpu)),
        _Field("NVML_FI_DEV_PCIE_REPLAY_COUNTER", _INT, lambda f, gpu: gpu.pcie_replays),
        _Field("NVML_FI_DEV_REMAPPED_PENDING", _INT, _rows("pending")),
        _Field("NVML_FI_DEV_REMAPPED_FAILURE", _INT, _rows("failed")),
        _Field("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", _INT, lambda f, gpu: f._recovery_action(gpu)),
    )
}


def _fabric_mask(fault: str) -> int:
    mask = 0
    for name, shift in _FABRIC_FAULTS.items():
        mask |= (1 if name == fault else 2) << shift
    configuration = _NO_PARTITION if fault == "no-partition" else _RIGHT_CONFIGURATION
    return mask | configuration << _CONFIGURATION_SHIFT
