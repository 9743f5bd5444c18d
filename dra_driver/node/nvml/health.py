"""What one look at a GPU says of its health.

Each value is missing where the GPU, its driver or pynvml cannot tell it.
"""

import ctypes
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.health import HealthReading
from dra_driver.node.nvml.api import (
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    SESSION_ENDED,
    NvmlFunctions,
    nvml_error_code,
)
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.readers import MAX_NVLINKS

T = TypeVar("T")

# nvml.h, NVML_FI_DEV_*
CORRECTABLE_ECC: Final = 3  # ECC_SBE_VOL_TOTAL
UNCORRECTABLE_ECC: Final = 4  # ECC_DBE_VOL_TOTAL
ENERGY: Final = 83  # TOTAL_ENERGY_CONSUMPTION, mJ since the driver was loaded
PCIE_REPLAYS: Final = 94  # PCIE_REPLAY_COUNTER
RECOVERY_ACTION: Final = 230  # GET_GPU_RECOVERY_ACTION
_FIELDS: Final = (CORRECTABLE_ECC, UNCORRECTABLE_ECC, PCIE_REPLAYS, RECOVERY_ACTION)

# nvml.h, NVML_GPU_RECOVERY_ACTION_*
RECOVERY_ACTIONS: Final[Mapping[int, str]] = {
    0: "NONE",
    1: "GPU_RESET",
    2: "NODE_REBOOT",
    3: "DRAIN_P2P",
    4: "DRAIN_AND_RESET",
    5: "RECOVER_IMEX_DOMAIN",
    6: "BUS_RESET",
    7: "SYSTEM_REBOOT",
}

# nvml.h, nvmlClocksEventReason*: by software and by hardware
THERMAL_SLOWDOWN: Final = 0x20 | 0x40
POWER_BRAKE: Final = 0x80

# nvml.h, which member of c_nvmlValue_t holds a value of NVML_VALUE_TYPE_*
_VALUE_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

# nvml.h, NVML_GPU_FABRIC_STATE_*
_FABRIC_STATES: Final[Mapping[int, str]] = {1: "not started", 2: "in progress"}
FABRIC_COMPLETED: Final = 3
# nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*: where each two bits begin; 1 is true, 2 is false
_FABRIC_PROBLEMS: Final[Mapping[int, str]] = {
    0: "degraded bandwidth",
    2: "route recovery in progress",
    4: "unhealthy route",
    6: "access timeout recovery in progress",
}
_FABRIC_CONFIGURATION: Final = 8  # four bits; 0 is unknown, 1 is none
# The words of nvml.h, without their prefix.
_WRONG_CONFIGURATIONS: Final[Mapping[int, str]] = {
    2: "incorrect system GUID",
    3: "incorrect chassis serial number",
    4: "no partition",
    5: "insufficient NVLinks",
    6: "incompatible GPU firmware",
    7: "invalid location",
    8: "invalid state of the GPU",
}


def read_health(
    functions: NvmlFunctions, handle: Any, gpu: GpuUuid, energy: bool = True
) -> HealthReading:
    """What *gpu* says now. Raises what NVML says if the GPU or its driver is gone.

    *energy*: also its energy, for which an H100 keeps a core of the node busy for 4.5 ms, while all
    the rest takes 0.8.
    """
    ids = (*_FIELDS, ENERGY) if energy else _FIELDS
    fields = _if_told(lambda: _field_values(functions, handle, ids)) or {}
    rows = _if_told(lambda: functions.nvmlDeviceGetRemappedRows(handle))
    clocks = _if_told(lambda: functions.nvmlDeviceGetCurrentClocksEventReasons(handle))
    action = fields.get(RECOVERY_ACTION)
    return HealthReading(
        gpu,
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        recovery_action=None if action is None else recovery_action(action),
        thermal_slowdown=None if clocks is None else bool(clocks & THERMAL_SLOWDOWN),
        power_brake=None if clocks is None else bool(clocks & POWER_BRAKE),
        nvlinks=_active_nvlinks(functions, handle),
        fabric=_if_told(lambda: _fabric(functions, handle)),
        pcie_replays=fields.get(PCIE_REPLAYS),
        energy_mj=fields.get(ENERGY),
        uncorrectable_ecc=fields.get(UNCORRECTABLE_ECC),
        correctable_ecc=fields.get(CORRECTABLE_ECC),
    )


def health_readings(
    nvml: Nvml, gpus: Iterable[GpuUuid], energy_of: Collection[GpuUuid]
) -> Mapping[GpuUuid, HealthReading | NodeError]:
    """What each of *gpus* says of its health, or why it says nothing; its energy, if it is one of
    *energy_of*."""

    def read(functions: NvmlFunctions, handle: Any) -> HealthReading:
        gpu = GpuUuid(functions.nvmlDeviceGetUUID(handle))
        return read_health(functions, handle, gpu, gpu in energy_of)

    return nvml.on_gpus(gpus, "reading its health", read)


def recovery_action(number: int) -> str:
    """``NVML_GPU_RECOVERY_ACTION_*`` without the prefix; a newer one has its number as a name."""
    return RECOVERY_ACTIONS.get(number, f"ACTION_{number}")


def _if_told(read: Callable[[], T]) -> T | None:
    """What *read* answers; None: this board, driver or pynvml does not tell it."""
    try:
        return read()
    except AttributeError:
        return None  # pynvml is older than the question
    except Exception as error:
        if nvml_error_code(error) is None or nvml_error_code(error) in SESSION_ENDED:
            raise
        return None


def _field_values(functions: NvmlFunctions, handle: Any, ids: Sequence[int]) -> Mapping[int, int]:
    """By their ids, those that the driver knows."""
    return {
        field.fieldId: int(getattr(field.value, _VALUE_MEMBERS[field.valueType]))
        for field in functions.nvmlDeviceGetFieldValues(handle, ids)
        if field.nvmlReturn == 0 and field.valueType < len(_VALUE_MEMBERS)
    }


def _active_nvlinks(functions: NvmlFunctions, handle: Any) -> int | None:
    """None: it has no NVLinks."""
    states = []
    for link in range(MAX_NVLINKS):
        try:
            states.append(bool(functions.nvmlDeviceGetNvLinkState(handle, link)))
        except Exception as error:
            if nvml_error_code(error) == NOT_SUPPORTED:
                continue  # this link, or NVLink at all
            if nvml_error_code(error) == INVALID_ARGUMENT:
                break  # beyond the last link of this board
            if nvml_error_code(error) is None or nvml_error_code(error) in SESSION_ENDED:
                raise
            return None
    return sum(states) if states else None


def _fabric(functions: NvmlFunctions, handle: Any) -> str | None:
    """What is wrong with the GPU's place in the NVLink fabric; None: it is in none."""
    info = functions.c_nvmlGpuFabricInfoV_t()
    functions.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    if info.state in _FABRIC_STATES:
        return f"registration {_FABRIC_STATES[info.state]}"
    if info.state != FABRIC_COMPLETED:
        return None
    if info.status:
        return f"registration failed with NVML's error {info.status}"
    return ", ".join(_fabric_problems(info.healthMask))


def _fabric_problems(mask: int) -> Iterable[str]:
    for shift, problem in _FABRIC_PROBLEMS.items():
        if mask >> shift & 0x3 == 1:
            yield problem
    configuration = mask >> _FABRIC_CONFIGURATION & 0xF
    if configuration > 1:
        yield _WRONG_CONFIGURATIONS.get(configuration, f"wrong configuration {configuration}")
