"""What is cut of a GPU now: GPU instances, compute instances, and the MIG devices that these are.

Each function is called on the GPU's thread of ``dra_driver.node.nvml``. Between two of its calls
somebody else may remove an instance: what is gone is left out. NVML's list of MIG devices is not
asked for what there is: it goes on listing those that another process removed, and to read it takes
seconds on a busy node.
"""

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from dra_driver.model.devices import GpuUuid
from dra_driver.model.mig import Instance, MigProfile, OddInstance, PartitionKey
from dra_driver.node.mig.uuids import Uuids
from dra_driver.node.nvml_codes import INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, unless_refused
from dra_driver.node.nvml_functions import Functions

_MOST_INSTANCES: Final = 32  # of one profile; NVML fills a list that has to be long enough
_COMPUTE_PROFILES: Final = range(12)  # NVML_COMPUTE_INSTANCE_PROFILE_*: 9 in driver 615
_GPU_INSTANCES: Final = range(15)  # their ids, as /proc/driver/nvidia-caps/mig-minors lists them
_SHARED_ENGINES: Final = 0  # NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
_GONE: Final = (NOT_FOUND, INVALID_ARGUMENT)
_NO_SUCH_PROFILE: Final = (NOT_SUPPORTED, INVALID_ARGUMENT, NOT_FOUND)


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
    device: Any  # what NVML says that it is on


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
Unlisted = Callable[[Collection[int]], Sequence[GpuInstance]]
"""The GPU instances besides those with these ids, which are of no profile that is known."""


def everything_cut(
    functions: Functions, handle: Any, profiles: Collection[MigProfile], ask: ProfilesOf
) -> tuple[Cut, ...]:
    """Every GPU instance, half made or not, by key."""
    names = {one.id: one.name for one in profiles}
    uuids = Uuids(functions, handle)
    found = _all(functions, handle, profiles, partial(unlisted, functions, handle))
    return tuple(
        Cut(
            names.get(one.key.profile_id, f"profile {one.key.profile_id}"),
            one.id,
            one.key,
            names_of(uuids, one, compute_instances(functions, one, ask(one))),
        )
        for one in sorted(found, key=lambda one: one.key)
    )


def instances(
    functions: Functions,
    handle: Any,
    profiles: Collection[MigProfile],
    ask: ProfilesOf,
    others: Unlisted,
) -> tuple[tuple[Instance, ...], tuple[OddInstance, ...]]:
    """What is cut of a GPU in MIG mode, by key: what can be given to somebody, and what cannot."""
    uuids = Uuids(functions, handle)
    found: list[Instance] = []
    odd: list[OddInstance] = []
    for one in _all(functions, handle, profiles, others):
        its = compute_instances(functions, one, ask(one))
        if (whole := _whole(one, its, uuids)) is not None:
            found.append(whole)
        else:
            odd.append(OddInstance(one.key, one.id, len(its)))
    found.sort(key=lambda one: one.key)
    odd.sort(key=lambda one: one.key)
    return tuple(found), tuple(odd)


def instance(
    functions: Functions, handle: Any, key: PartitionKey, ask: ProfilesOf
) -> Instance | None:
    """The instance that is exactly this partition. None: there is none, or it is not whole."""
    one = gpu_instance(functions, handle, key)
    return None if one is None else instance_of(functions, handle, one, ask(one))


def instance_of(
    functions: Functions, handle: Any, gi: GpuInstance, profiles: Sequence[Any]
) -> Instance | None:
    """What *gi* is, which can be divided like this. None: it is not whole."""
    return _whole(gi, compute_instances(functions, gi, profiles), Uuids(functions, handle))


def names_of(
    uuids: Uuids, gi: GpuInstance, computes: Iterable[ComputeInstance]
) -> tuple[GpuUuid, ...]:
    """How these compute instances of *gi* are called, as far as NVML says."""
    found = (uuids.of(gi.id, one.id, one.device) for one in computes)
    return tuple(one for one in found if one is not None)


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


def is_there(functions: Functions, gi: GpuInstance) -> bool:
    """Whether it still is."""
    return _described(functions, gi.handle, gi.key.slices) == gi


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
            found[int(told.id)] = ComputeInstance(handle, int(told.id), fills, told.device)
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


def unlisted(
    functions: Functions, handle: Any, listed: Collection[int], ids: Iterable[int] = _GPU_INSTANCES
) -> tuple[GpuInstance, ...]:
    """The GPU instances with these ids, without those that are *listed*."""
    found = (described(functions, handle, gi) for gi in ids if gi not in listed)
    return tuple(one for one in found if one is not None)


def described(functions: Functions, handle: Any, gi: int) -> GpuInstance | None:
    """The GPU instance with this id, of whatever profile."""
    ask = functions.nvmlDeviceGetGpuInstanceById
    by_id = unless_refused(partial(ask, handle, gi), *_NO_SUCH_PROFILE)
    return None if by_id is None else _described(functions, by_id, 0)


def _all(
    functions: Functions, handle: Any, profiles: Collection[MigProfile], others: Unlisted
) -> list[GpuInstance]:
    """The GPU instances of *profiles*, and the *others*."""
    found = [
        one for its in profiles for one in gpu_instances(functions, handle, its.id, its.slices)
    ]
    return [*found, *others({one.id for one in found})]


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


def _whole(gi: GpuInstance, computes: Sequence[ComputeInstance], uuids: Uuids) -> Instance | None:
    """*gi* as an instance; None: it has not one compute instance that is all of it."""
    if len(computes) != 1 or not computes[0].fills:
        return None
    ci = computes[0]
    uuid = uuids.of(gi.id, ci.id, ci.device)
    return None if uuid is None else Instance(gi.key, gi.id, ci.id, uuid)
