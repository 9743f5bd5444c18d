"""What is cut of a GPU now: GPU instances, compute instances, and the MIG devices that these are.

Each function is called on the GPU's thread of ``dra_driver.node.nvml``. Between two of its calls
somebody else may remove an instance: what is gone is left out. NVML's list of MIG devices is not
believed for what there is, since it goes on listing those that another process removed: it only
says how an instance is called.
"""

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from dra_driver.model.devices import GpuUuid
from dra_driver.model.mig import Instance, MigProfile, OddInstance, PartitionKey
from dra_driver.node.nvml_codes import INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, unless_refused
from dra_driver.node.nvml_functions import Functions

_MOST_INSTANCES: Final = 32  # of one profile; NVML fills a list that has to be long enough
_COMPUTE_PROFILES: Final = range(12)  # NVML_COMPUTE_INSTANCE_PROFILE_*: 9 in driver 615
_SHARED_ENGINES: Final = 0  # NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
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
class ComputeInstance:
    """A compute instance and what stands for it in NVML."""

    handle: Any
    id: int
    fills: bool  # it is all of its GPU instance


@dataclass(frozen=True, slots=True)
class Cut:
    """A GPU instance in words, for messages."""

    profile: str
    gi: int
    key: PartitionKey
    uuids: tuple[GpuUuid, ...] = ()  # of its compute instances

    def __str__(self) -> str:
        names = "".join(f", {uuid}" for uuid in self.uuids)
        return f"{self.profile} at {self.key.start} (GPU instance {self.gi}{names})"


ProfilesOf = Callable[[GpuInstance], Sequence[Any]]
"""How a GPU instance can be divided."""


def everything_cut(
    functions: Functions, handle: Any, profiles: Collection[MigProfile]
) -> tuple[Cut, ...]:
    """Every GPU instance, half made or not, by key."""
    names = {one.id: one.name for one in profiles}
    devices = mig_devices(functions, handle)
    found = _all(functions, handle, profiles, devices)
    return tuple(
        Cut(
            names.get(one.key.profile_id, f"profile {one.key.profile_id}"),
            one.id,
            one.key,
            tuple(device.uuid for device in devices if device.gi == one.id),
        )
        for one in sorted(found, key=lambda one: one.key)
    )


def instances(
    functions: Functions,
    handle: Any,
    profiles: Collection[MigProfile],
    profiles_of: ProfilesOf | None = None,
) -> tuple[tuple[Instance, ...], tuple[OddInstance, ...]]:
    """What is cut of a GPU in MIG mode, by key: what can be given to somebody, and what cannot."""
    ask = profiles_of or partial(compute_profiles, functions)
    devices = mig_devices(functions, handle)
    found: list[Instance] = []
    odd: list[OddInstance] = []
    for one in _all(functions, handle, profiles, devices):
        its = compute_instances(functions, one, ask(one))
        if (whole := _whole(one, its, devices)) is not None:
            found.append(whole)
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
    its = compute_instances(functions, one, compute_profiles(functions, one))
    return _whole(one, its, mig_devices(functions, handle))


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
    functions: Functions, gi: GpuInstance, profiles: Sequence[Any]
) -> tuple[ComputeInstance, ...]:
    """The compute instances of *gi* that are of these profiles, by id."""
    whole = filling(gi, profiles)
    found: dict[int, ComputeInstance] = {}
    for handle in _compute_handles(functions, gi, profiles):
        told = unless_refused(partial(functions.nvmlComputeInstanceGetInfo_v2, handle), *_GONE)
        if told is not None:
            fills = whole is not None and told.profileId == whole.id
            found[int(told.id)] = ComputeInstance(handle, int(told.id), fills)
    return tuple(one for _, one in sorted(found.items()))


def compute_profiles(functions: Functions, gi: GpuInstance) -> tuple[Any, ...]:
    """How *gi* can be divided, by number."""
    ask = functions.nvmlGpuInstanceGetComputeInstanceProfileInfo
    asked = (
        unless_refused(partial(ask, gi.handle, number, _SHARED_ENGINES, 1), *_NO_SUCH_PROFILE)
        for number in _COMPUTE_PROFILES
    )
    return tuple(profile for profile in asked if profile is not None)


def filling(gi: GpuInstance, profiles: Iterable[Any]) -> Any:
    """Which of these profiles of compute instances is all of *gi*: it has as many slices, and of
    several such it is the one with the most multiprocessors. None: there is none."""
    whole = [one for one in profiles if int(one.sliceCount) == gi.key.slices]
    return max(whole, key=lambda one: int(one.multiprocessorCount), default=None)


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


def _compute_handles(
    functions: Functions, gi: GpuInstance, profiles: Iterable[Any]
) -> Iterator[Any]:
    for profile in profiles:
        count = ctypes.c_uint(_MOST_INSTANCES)
        array = (functions.c_nvmlComputeInstance_t * _MOST_INSTANCES)()
        ask = functions.nvmlGpuInstanceGetComputeInstances
        references = ctypes.byref(array), ctypes.byref(count)
        asked = unless_refused(partial(ask, gi.handle, profile.id, *references), *_NO_SUCH_PROFILE)
        yield from array[: count.value] if asked is not None else ()


def _whole(
    gi: GpuInstance, computes: Sequence[ComputeInstance], devices: Iterable[MigDevice]
) -> Instance | None:
    """*gi* as an instance; None: it has not one compute instance that is all of it."""
    if len(computes) != 1 or not computes[0].fills:
        return None
    ci = computes[0].id
    names = (device.uuid for device in devices if (device.gi, device.ci) == (gi.id, ci))
    uuid = next(names, None)
    return None if uuid is None else Instance(gi.key, gi.id, ci, uuid)
