"""The calls of NVML that cut a GPU and remove what was cut.

Each function is called on the GPU's thread of ``dra_driver.node.nvml`` and is one step: whatever
was done before it, and wherever that ended, doing it again is right.
"""

import ctypes
from typing import Any

from dra_driver.errors import NodeError
from dra_driver.model.mig import PartitionKey
from dra_driver.node.mig.instances import (
    GpuInstance,
    compute_instances,
    compute_profiles,
    fills,
    gpu_instance,
)
from dra_driver.node.nvml_functions import Functions


def create(functions: Functions, handle: Any, key: PartitionKey) -> None:
    """The GPU instance is there."""
    if gpu_instance(functions, handle, key) is None:
        place = functions.c_nvmlGpuInstancePlacement_t(key.start, key.size)
        functions.nvmlDeviceCreateGpuInstanceWithPlacement(
            handle, key.profile_id, ctypes.byref(place)
        )


def fill(functions: Functions, handle: Any, key: PartitionKey) -> None:
    """The GPU instance has its compute instance."""
    gi = gpu_instance(functions, handle, key)
    if gi is None:
        raise NodeError(f"{key}: its GPU instance vanished: somebody else removed it")
    profiles = list(compute_profiles(functions, gi))
    there = list(compute_instances(functions, gi, profiles))
    if not there:
        functions.nvmlGpuInstanceCreateComputeInstance(gi.handle, _filling(gi, profiles))
    elif len(there) > 1 or not fills(functions, gi, there[0], profiles):
        raise NodeError(
            f"{key}: somebody else divided GPU instance {gi.id}: destroy its compute instances "
            f"with nvidia-smi mig -dci -gi {gi.id}"
        )


def destroy(functions: Functions, handle: Any, key: PartitionKey) -> None:
    """The GPU instance is gone, its compute instances before it."""
    gi = gpu_instance(functions, handle, key)
    if gi is None:
        return
    for ci in list(compute_instances(functions, gi, compute_profiles(functions, gi))):
        functions.nvmlComputeInstanceDestroy(ci)
    functions.nvmlGpuInstanceDestroy(gi.handle)


def _filling(gi: GpuInstance, profiles: list[Any]) -> int:
    """Which profile of compute instances is all of *gi*: it has as many slices, and of several such
    it is the one with the most multiprocessors."""
    slices = gi.key.slices
    whole = [one for one in profiles if int(one.sliceCount) == slices]
    if not whole:
        raise NodeError(f"{gi.key}: the driver has no compute instance of {slices} slices for it")
    return int(max(whole, key=lambda one: int(one.multiprocessorCount)).id)
