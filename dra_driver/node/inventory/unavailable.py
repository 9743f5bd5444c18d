"""GPUs that are not offered at all: why, in words that say what to do about it.

A GPU that is offered and sick does not belong here.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.gpus import ALL_GPUS, Gpu, GpuUuid, Inventory, UnavailableGpu
from dra_driver.model.steps import TimeSliceInterval
from dra_driver.node.driver.pci import PciGpu
from dra_driver.node.nvml.values import GpuReading


def describe_pci_gpu(bus_id: str, uuid: str | None = None) -> str:
    """How a GPU is called in messages: ``GPU 0000:65:00.0 (GPU-…)``."""
    return f"GPU {bus_id} ({uuid})" if uuid else f"GPU {bus_id}"


def unusable_gpus(readings: Mapping[int, GpuReading]) -> Mapping[int, str]:
    """Those of *readings* that answer but cannot be offered as they are, with the reason."""
    minors = Counter(reading.static.minor for reading in readings.values())
    uuids = Counter(reading.dynamic.uuid for reading in readings.values())
    reasons = {
        index: _unusable_reason(reading, minors, uuids) for index, reading in readings.items()
    }
    return {index: reason for index, reason in reasons.items() if reason}


def _unusable_reason(
    reading: GpuReading, minors: Mapping[int, int], uuids: Mapping[GpuUuid, int]
) -> str | None:
    static = reading.static
    if minors[static.minor] > 1:
        return (
            f"NVML gives minor number {static.minor} to {minors[static.minor]} GPUs, so which one "
            f"/dev/nvidia{static.minor} is cannot be told; reload the NVIDIA kernel modules or "
            f"reboot"
        )
    if uuids[reading.dynamic.uuid] > 1:
        return (
            f"NVML gives this UUID to {uuids[reading.dynamic.uuid]} GPUs, so a container could get "
            f"another one; "
            "reload the NVIDIA kernel modules or reboot"
        )
    return None


def unreadable_reason(error: NodeError) -> str:
    """Why a GPU is not offered that NVML could not be asked about."""
    if isinstance(error, TimedOut):
        return (
            f"{error}: it may hang; look for Xid and NVRM in the kernel log, and if it stays so, "
            "drain and reboot the node"
        )
    return str(error)


def with_lost_gpus(
    inventory: Inventory, answered: Mapping[str, Gpu], reasons: Mapping[str, str]
) -> Inventory:
    """*inventory* with those of *answered* that are in *reasons*: lost, not unavailable. Both are
    by bus id."""
    there = {gpu.pci_bus_id for gpu in inventory.gpus}
    lost = {
        gpu: reasons[bus_id]
        for bus_id, gpu in answered.items()
        if bus_id in reasons and bus_id not in there
    }
    if not lost:
        return inventory
    names = {describe_pci_gpu(gpu.pci_bus_id, gpu.uuid) for gpu in lost}
    names |= {describe_pci_gpu(gpu.pci_bus_id) for gpu in lost}
    return Inventory(
        tuple(sorted((*inventory.gpus, *lost), key=lambda gpu: gpu.minor)),
        tuple(gpu for gpu in inventory.unavailable if gpu.what not in names),
        inventory.stale,
        tuple(sorted((gpu.uuid, reason) for gpu, reason in lost.items())),
    )


def without_unrestored_time_slices(
    inventory: Inventory, unrestored: Mapping[GpuUuid, TimeSliceInterval]
) -> Inventory:
    """*inventory*, without the GPUs whose interval is still to be restored."""
    restored = tuple(gpu for gpu in inventory.gpus if gpu.uuid not in unrestored)
    if restored == inventory.gpus:
        return inventory
    unavailable = [
        UnavailableGpu(
            describe_pci_gpu(gpu.pci_bus_id, gpu.uuid),
            f"its time-slice interval is still to be restored to {unrestored[gpu.uuid]} after a "
            "claim, since nvidia-smi did not end in time; that is tried again. If it stays so, "
            "look for Xid and NVRM in the kernel log, drain and reboot the node",
        )
        for gpu in inventory.gpus
        if gpu.uuid in unrestored
    ]
    everything = sorted(
        (*inventory.unavailable, *unavailable), key=lambda gpu: (gpu.what, gpu.reason)
    )
    return Inventory(
        restored,
        tuple(everything),
        inventory.stale - unrestored.keys(),
        tuple(each for each in inventory.lost if each[0] not in unrestored),
    )


def not_listed_by_nvml(gpus: Iterable[PciGpu]) -> tuple[UnavailableGpu, ...]:
    """GPUs of the PCI bus that NVML does not list."""
    return tuple(
        UnavailableGpu(describe_pci_gpu(gpu.bus_id), _not_listed_reason(gpu)) for gpu in gpus
    )


def _not_listed_reason(gpu: PciGpu) -> str:
    match gpu.driver:
        case "nvidia":
            return (
                "the nvidia driver has it, but NVML does not list it: it is excluded "
                "(NVreg_ExcludedGpus) or failed to start; look for NVRM in the kernel log"
            )
        case "vfio-pci":
            return (
                "it is bound to vfio-pci for a virtual machine; to offer it here, unbind it from "
                "vfio-pci and bind it to nvidia"
            )
        case None:
            return (
                "no driver is bound to it: load the nvidia module; if that is loaded, look for "
                "NVRM in the kernel log"
            )
        case driver:
            return f"it is bound to {driver}; to offer it here, bind it to nvidia instead"


def waiting_for_nvml(gpus: Iterable[PciGpu], reason: str) -> tuple[UnavailableGpu, ...]:
    """While NVML is not ready: those that wait for it as one, and those it would not list."""
    waiting = [gpu for gpu in gpus if gpu.driver in (None, "nvidia")]
    others = [gpu for gpu in gpus if gpu.driver not in (None, "nvidia")]
    return (*not_listed_by_nvml(others), *((UnavailableGpu(ALL_GPUS, reason),) if waiting else ()))
