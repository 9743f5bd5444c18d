"""The health of GPUs: what was seen of them, what is wrong with them, and what follows."""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import GpuUuid, PartitionKey


class Problem(StrEnum):
    """What can be wrong with a GPU. The word is part of the key of its taint:
    ``gpu.nvidia.com/xid``."""

    LOST = "gpu-lost"  # it does not answer any more
    XID = "xid"  # the driver reported an error by this number
    UNCORRECTABLE_ECC = "uncorrectable-ecc"
    CORRECTABLE_ECC = "correctable-ecc"
    REMAP_FAILED = "row-remap-failed"
    REMAP_PENDING = "row-remap-pending"
    RECOVERY_ACTION = "recovery-action"  # the driver says that it needs one
    THERMAL = "thermal-slowdown"
    POWER_BRAKE = "power-brake"
    NVLINK = "nvlink-down"
    FABRIC = "fabric"
    PCIE_REPLAYS = "pcie-replays"
    UNMONITORED = "unmonitored"  # its events are not told to us
    RELEASED = "released"  # an administrator has us let go of it


class Effect(StrEnum):
    """What follows from a problem; the words of ``DeviceTaint.effect`` (KEP-5055)."""

    NONE = "None"  # no taint: a metric and an event
    NO_SCHEDULE = "NoSchedule"
    NO_EXECUTE = "NoExecute"  # pods that do not tolerate it are evicted


@frozen
class GpuEvent:
    """An event that NVML reported of a GPU, or the same one several times."""

    gpu: GpuUuid
    problem: Problem
    value: str = ""  # of an Xid its number, of a recovery action its name
    gi: int | None = None  # the GPU instance; None: it is of the GPU
    count: int = 1
    at: float = 0.0  # the last one, seconds since the epoch
    pid: int | None = None  # the process that caused it, by the host's number, where that is known


@frozen
class HealthReading:
    """What one look at a GPU says of its health. None: the GPU or its driver does not tell."""

    gpu: GpuUuid
    remap_pending: bool | None = None  # nvmlDeviceGetRemappedRows
    remap_failed: bool | None = None
    recovery_action: str | None = None  # "NONE", "GPU_RESET", … (NVML_GPU_RECOVERY_ACTION_*)
    thermal_slowdown: bool | None = None  # nvmlDeviceGetCurrentClocksEventReasons
    power_brake: bool | None = None
    nvlinks: int | None = None  # active links
    fabric: str | None = None  # empty: well; else what nvmlDeviceGetGpuFabricInfoV says is wrong
    # These only grow until the GPU is reset or its driver loaded anew.
    pcie_replays: int | None = None
    energy_mj: int | None = None
    uncorrectable_ecc: int | None = None
    correctable_ecc: int | None = None


@frozen
class Fault:
    """Something that is wrong with a GPU, or with a part of it. Times in seconds since the epoch.

    *well_since*: since when looks say that it is over; it counts until that was so for a while.
    """

    gpu: GpuUuid
    problem: Problem
    value: str = ""
    partition: PartitionKey | None = None  # None: the GPU as a whole
    since: float = 0.0
    count: int = 1
    well_since: float | None = None
    until: float | None = None  # for how long a GPU is released; None: no time is known


Faults = tuple[Fault, ...]
"""Of a node, by GPU, problem, value and partition."""


@frozen
class Look:
    """The last look at a GPU, for the next one to be compared with."""

    reading: HealthReading
    at: float  # seconds since the epoch
    most_nvlinks: int = 0  # that were active at one look
    faulty_since: bool = False
    """Whether a lasting fault was seen after it. What the next look says of a reset may then have
    been before that fault."""


@frozen
class HealthState:
    """What is known of the health of a node's GPUs."""

    faults: Faults = ()
    looks: tuple[Look, ...] = ()  # the last one at each GPU, by UUID


@frozen
class HealthRules:
    """What a profile says about health. What it does not name has its default effect."""

    effects: tuple[tuple[Problem, Effect], ...] = ()
    xids: tuple[tuple[int, Effect], ...] = ()  # before *effects*
    recovery_seconds: float = 60.0  # a problem has to be over for so long


DEFAULT_HEALTH_RULES = HealthRules()


@frozen
class DeviceTaint:
    """A taint of a published device (KEP-5055), and in words why it has it."""

    key: str  # "gpu.nvidia.com/xid"
    effect: Effect  # never NONE
    value: str = ""
    since: float = 0.0  # seconds since the epoch
    reason: str = ""


def faults_by_gpu(faults: Iterable[Fault]) -> Mapping[GpuUuid, Faults]:
    """What is wrong with each GPU."""
    by_gpu: dict[GpuUuid, Faults] = {}
    for fault in faults:
        by_gpu[fault.gpu] = (*by_gpu.get(fault.gpu, ()), fault)
    return by_gpu
