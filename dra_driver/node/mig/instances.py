"""What is cut of a GPU now: GPU instances, compute instances, and the MIG devices that these are.

Each function is called on the GPU's thread of ``dra_driver.node.nvml``. Between two of its calls
somebody else may remove an instance: what is gone is left out.
"""

import ctypes
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from dra_driver.model.devices import GpuUuid
from dra_driver.model.mig import Instance, MigProfile, OddInstance, PartitionKey
from dra_driver.node.mig.geometry import geometry
from dra_driver.node.nvml_codes import INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, unless_refused
from dra_driver.node.nvml_functions import Functions

_MOST_INSTANCES: Final = 32  # of one profile; NVML fills a list that has to be long enough
_COMPUTE_PROFILES: Final = range(12)  # NVML_COMPUTE_INSTANCE_PROFILE_*: 9 in driver 615
_SHARED_ENGINES: Final = 0  # NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
# NVML_COMPUTE_INSTANCE_PROFILE_n_SLICE, by n: where the profile that fills an instance is likely.
_LIKELY: Final = {1: 0, 2: 1, 3: 2, 4: 3, 6: 6, 7: 4, 8: 5}
_GONE: Final = (NOT_FOUND, INVALID_ARGUMENT)
_NO_SUCH_PROFILE: Final = (NOT_SUPPORTED, INVALID_ARGUMENT, NOT_FOUND)


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A compute instance as CUDA and NVML's other functions know it."""

    gi: int
    ci: int
    uuid: GpuUuid


@dataclass(frozen=True, slots=True)
class GpuInstance:
    """A GPU instance and what stands for it in NVML."""

    handle: Any
    id: int
    key: PartitionKey


@dataclass(frozen=True, slots=True)
class Cut:
    """A GPU instance in words, for messages."""

    profile: str
    gi: int
    key: PartitionKey

    def __str__(self) -> str:
        return f"{self.profile} at {self.key.start} (GPU instance {self.gi})"


def everything_cut(functions: Functions, handle: Any) -> tuple[Cut, ...]:
    """Every GPU instance, half made or not, by key."""
    profiles = geometry(functions, handle)
    names = {one.id: one.name for one in profiles}
    found = _all(functions, handle, profiles, mig_devices(functions, handle))
    return tuple(
        Cut(names.get(one.key.profile_id, f"profile {one.key.profile_id}"), one.id, one.key)
        for one in sorted(found, key=lambda one: one.key)
    )


def instances(
    functions: Functions, handle: Any, profiles: Collection[MigProfile]
) -> tuple[tuple[Instance, ...], tuple[OddInstance, ...]]:
    """What is cut of a GPU in MIG mode, by key: what can be given to somebody, and what cannot."""
    devices = mig_devices(functions, handle)
    found: list[Instance] = []
    odd: list[OddInstance] = []
    for one in _all(functions, handle, profiles, devices):
        its = [device for device in devices if device.gi == one.id]
        whole = len(its) == 1 and _fills(functions, one, its[0].ci)
        if whole:
            found.append(Instance(one.key, one.id, its[0].ci, its[0].uuid))
        else:
            odd.append(OddInstance(one.key, one.id, len(its)))
    found.sort(key=lambda one: one.key)
    odd.sort(key=lambda one: one.key)
    return tuple(found), tuple(odd)


def instance(functions: Functions, handle: Any, key: PartitionKey) -> Instance | None:
    """The instance that is exactly this partition. None: there is none, or it is not whole."""
    one = gpu_instance(functions, handle, key)
    if one is None:
        return None
    its = [device for device in mig_devices(functions, handle) if device.gi == one.id]
    if len(its) != 1 or not _fills(functions, one, its[0].ci):
        return None
    return Instance(key, one.id, its[0].ci, its[0].uuid)


def gpu_instance(functions: Functions, handle: Any, key: PartitionKey) -> GpuInstance | None:
    """The GPU instance of exactly this profile at exactly this placement, half made or not."""
    found = gpu_instances(functions, handle, key.profile_id, key.slices)
    return next((one for one in found if one.key == key), None)


def gpu_instances(
    functions: Functions, handle: Any, profile_id: int, slices: int
) -> tuple[GpuInstance, ...]:
    """The GPU instances of one profile."""
    count = ctypes.c_uint(_MOST_INSTANCES)
    array = (functions.c_nvmlGpuInstance_t * _MOST_INSTANCES)()
    asked = unless_refused(
        lambda: functions.nvmlDeviceGetGpuInstances(
            handle, profile_id, ctypes.byref(array), ctypes.byref(count)
        ),
        *_NO_SUCH_PROFILE,
    )
    if asked is None:
        return ()
    found = (_described(functions, one, slices) for one in array[: count.value])
    return tuple(one for one in found if one is not None)


def compute_instances(
    functions: Functions, gi: GpuInstance, profiles: Iterable[Any]
) -> Iterator[Any]:
    """What stands in NVML for the compute instances of *gi* that are of these profiles."""
    for profile in profiles:
        count = ctypes.c_uint(_MOST_INSTANCES)
        array = (functions.c_nvmlComputeInstance_t * _MOST_INSTANCES)()
        functions.nvmlGpuInstanceGetComputeInstances(
            gi.handle, profile.id, ctypes.byref(array), ctypes.byref(count)
        )
        yield from array[: count.value]


def compute_profiles(functions: Functions, gi: GpuInstance) -> Iterator[Any]:
    """How *gi* can be cut further; the profile that is likely to fill it comes first."""
    ask = functions.nvmlGpuInstanceGetComputeInstanceProfileInfo
    likely = _LIKELY.get(gi.key.slices, 0)
    for number in sorted(_COMPUTE_PROFILES, key=lambda number: (number != likely, number)):
        profile = unless_refused(
            partial(ask, gi.handle, number, _SHARED_ENGINES, 1),
            *_NO_SUCH_PROFILE,
        )
        if profile is not None:
            yield profile


def fills(functions: Functions, gi: GpuInstance, ci: Any, profiles: Iterable[Any]) -> bool:
    """Whether a compute instance, of one of these profiles, is all of *gi*."""
    told = unless_refused(partial(functions.nvmlComputeInstanceGetInfo_v2, ci), *_GONE)
    if told is None:
        return False
    its = next((one for one in profiles if one.id == told.profileId), None)
    return its is not None and int(its.sliceCount) == gi.key.slices


def mig_devices(functions: Functions, handle: Any) -> tuple[MigDevice, ...]:
    """The MIG devices of a GPU in MIG mode."""
    most = unless_refused(
        lambda: functions.nvmlDeviceGetMaxMigDeviceCount(handle), *_NO_SUCH_PROFILE
    )
    found = (
        unless_refused(partial(_mig_device, functions, handle, index), *_GONE)
        for index in range(most or 0)
    )
    return tuple(one for one in found if one is not None)


def _mig_device(functions: Functions, handle: Any, index: int) -> MigDevice:
    device = functions.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
    return MigDevice(
        int(functions.nvmlDeviceGetGpuInstanceId(device)),
        int(functions.nvmlDeviceGetComputeInstanceId(device)),
        GpuUuid(functions.nvmlDeviceGetUUID(device)),
    )


def _all(
    functions: Functions,
    handle: Any,
    profiles: Collection[MigProfile],
    devices: Collection[MigDevice],
) -> list[GpuInstance]:
    """The GPU instances of *profiles*, and those of *devices* that are of none of them."""
    found = [
        one for its in profiles for one in gpu_instances(functions, handle, its.id, its.slices)
    ]
    for gi in sorted({device.gi for device in devices} - {one.id for one in found}):
        by_id = unless_refused(partial(functions.nvmlDeviceGetGpuInstanceById, handle, gi), *_GONE)
        one = None if by_id is None else _described(functions, by_id, 0)
        found += [one] if one else []
    return found


def _described(functions: Functions, gi: Any, slices: int) -> GpuInstance | None:
    told = unless_refused(lambda: functions.nvmlGpuInstanceGetInfo(gi), *_GONE)
    if told is None:
        return None
    place = told.placement
    key = PartitionKey(int(told.profileId), int(place.start), int(place.size), slices)
    return GpuInstance(gi, int(told.id), key)


def _fills(functions: Functions, gi: GpuInstance, ci: int) -> bool:
    by_id = functions.nvmlGpuInstanceGetComputeInstanceById
    found = unless_refused(partial(by_id, gi.handle, ci), *_GONE)
    return found is not None and fills(functions, gi, found, compute_profiles(functions, gi))
