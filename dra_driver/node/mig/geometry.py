"""How a GPU can be partitioned, as its driver says: profiles and where they can be placed."""

import ctypes
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from dra_driver.model.gpus import (
    Engines,
    GpuUuid,
    MigInstance,
    MigProfile,
    Placement,
    UnusableGpuInstance,
)
from dra_driver.node.mig.instances import (
    GpuInstance,
    GpuInstances,
    compute_profiles,
    instance_exists,
    whole_compute_profile,
)
from dra_driver.node.nvml.api import (
    ARGUMENT_VERSION_MISMATCH,
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    MIG_FUNCTIONS_MISSING,
    NOT_FOUND,
    NOT_SUPPORTED,
    SESSION_ENDED,
    NvmlFunctions,
    none_if_refused,
    nvml_error_code,
)

log = logging.getLogger(__name__)

# nvml.h knows the profiles below NVML_GPU_INSTANCE_PROFILE_COUNT, 18 in driver 615; a driver may
# know more of them than the pynvml it is read with, and refuses what it does not know.
PROFILE_NUMBERS: Final = range(24)
_NOT_ON_THIS_BOARD: Final = (NOT_SUPPORTED, INVALID_ARGUMENT, NOT_FOUND)
_NOT_IN_THIS_LIBRARY: Final = (FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH)
_SEARCH_AGAIN_SECONDS: Final = 60.0
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_EIGHTHS: Final = 8  # a name counts a board's memory in eighths, rounded up
_SUFFIXES: Final = {
    **dict.fromkeys((7, 8), "+me"),  # NVML_GPU_INSTANCE_PROFILE_n_SLICE_REV1: media engines
    **dict.fromkeys((10, 11, 12, 17), "+gfx"),
    **dict.fromkeys((13, 14), "-me"),
    **dict.fromkeys((15, 16), "+me.all"),
}


def read_geometry(functions: NvmlFunctions, handle: Any) -> tuple[MigProfile, ...]:
    """The profiles of the GPU behind *handle*, by number. They do not change while its driver is
    loaded and its MIG mode stays.

    Drivers make mistakes here (NVIDIA's own tool for layouts trusts none of what they say of an
    A30). So a profile without a placement or without an instance is left out, and so is one with
    the id of an earlier one, since it is created by its id. A name that an earlier profile has gets
    the suffix of its number. A profile has no more instances than there is room for.
    """
    by_id: dict[int, MigProfile] = {}
    for number in PROFILE_NUMBERS:
        if (profile := _profile(functions, handle, number)) is not None:
            by_id.setdefault(profile.id, profile)
    return tuple(_with_unique_names(by_id.values()))


class GeometryCache:
    """The geometry of each GPU in one session of NVML, read once as long as its MIG mode stays.
    Used by the threads of several GPUs, each for its own GPU."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._profiles: dict[tuple[GpuUuid, bool], tuple[MigProfile, ...]] = {}
        self._problems: dict[GpuUuid, str] = {}
        self._compute_profiles: dict[tuple[GpuUuid, int], tuple[Any, ...]] = {}
        # of profiles that the driver does not list: when to search again, and the ids
        self._unlisted: dict[GpuUuid, tuple[float, tuple[int, ...]]] = {}

    def profiles(
        self, functions: NvmlFunctions, handle: Any, gpu: GpuUuid, mig_on: bool
    ) -> tuple[MigProfile, ...]:
        """Empty: they cannot be read, which is logged; :meth:`profiles_problem` says why."""
        if (gpu, mig_on) not in self._profiles:
            self._profiles.pop((gpu, not mig_on), None)
            self._profiles[gpu, mig_on] = self._read_profiles(functions, handle, gpu)
        return self._profiles[gpu, mig_on]

    def profiles_problem(self, gpu: GpuUuid) -> str:
        """Why the profiles of *gpu* could not be read; empty: they could."""
        return self._problems.get(gpu, "")

    def gpu_instances(self, functions: NvmlFunctions, handle: Any, gpu: GpuUuid) -> GpuInstances:
        """A look at *gpu*; how its GPU instances can be divided is read once for all that are
        alike."""
        return GpuInstances(functions, handle, partial(self._compute_profiles_of, functions, gpu))

    def instances(
        self, functions: NvmlFunctions, handle: Any, gpu: GpuUuid
    ) -> tuple[tuple[MigInstance, ...], tuple[UnusableGpuInstance, ...]]:
        """The instances of a GPU in MIG mode: those that claims can have, and the rest."""
        gpu_instances = self.gpu_instances(functions, handle, gpu)
        return gpu_instances.read(
            self.profiles(functions, handle, gpu, True),
            partial(self._unlisted_instances, gpu_instances, gpu),
        )

    def _compute_profiles_of(
        self, functions: NvmlFunctions, gpu: GpuUuid, gi: GpuInstance
    ) -> tuple[Any, ...]:
        key = gpu, gi.key.profile_id
        if (known := self._compute_profiles.get(key)) is not None:
            return known
        profiles = compute_profiles(functions, gi)
        # Of a GPU instance that is being removed NVML lists only some profiles, if any.
        complete = whole_compute_profile(gi, profiles) is not None or not gi.key.slices
        if complete and instance_exists(functions, gi):
            self._compute_profiles[key] = profiles
        return profiles

    def _unlisted_instances(
        self, gpu_instances: GpuInstances, gpu: GpuUuid, listed: Collection[int]
    ) -> tuple[GpuInstance, ...]:
        """The GPU instances besides those that are *listed* by profile. There is hardly ever one,
        so they are searched for now and then; those that were found are read each time."""
        now = self._clock()
        search_again_at, ids = self._unlisted.get(gpu, (now, ()))
        if now < search_again_at:
            return gpu_instances.unlisted(listed, ids)
        unlisted = gpu_instances.unlisted(listed)
        ids = tuple(instance.id for instance in unlisted)
        self._unlisted[gpu] = now + _SEARCH_AGAIN_SECONDS, ids
        return unlisted

    def _read_profiles(
        self, functions: NvmlFunctions, handle: Any, gpu: GpuUuid
    ) -> tuple[MigProfile, ...]:
        self._problems.pop(gpu, None)
        try:
            return read_geometry(functions, handle)
        except Exception as error:
            if nvml_error_code(error) is None or nvml_error_code(error) in SESSION_ENDED:
                raise
            old = nvml_error_code(error) in _NOT_IN_THIS_LIBRARY
            self._problems[gpu] = (
                MIG_FUNCTIONS_MISSING if old else f"NVML does not tell its MIG profiles: {error}"
            )
            log.warning("MIG profiles not read: %s", error, extra={"gpu": gpu})
            return ()


class MigGeometries:
    """The geometry of all GPUs in the present session of NVML."""

    def __init__(self) -> None:
        self.current = GeometryCache()

    def start_session(self) -> GeometryCache:
        """NVML was started: what was read before does not count."""
        self.current = GeometryCache()
        return self.current


def _profile(functions: NvmlFunctions, handle: Any, number: int) -> MigProfile | None:
    """None: the board has no such profile."""
    info = none_if_refused(lambda: _info(functions, handle, number), *_NOT_ON_THIS_BOARD)
    if info is None or not info.instanceCount:
        return None
    placements = none_if_refused(
        lambda: _placements(functions, handle, int(info.id)), *_NOT_ON_THIS_BOARD
    )
    if not placements:
        return None
    memory_bytes = int(info.memorySizeMB) * _MIB  # "MB" there, MiB in fact
    return MigProfile(
        name=_name(functions, handle, number, info),
        id=int(info.id),
        number=number,
        slices=int(info.sliceCount),
        most=min(int(info.instanceCount), _capacity(placements)),
        memory_bytes=memory_bytes,
        engines=_engines(info),
        placements=placements,
    )


def _info(functions: NvmlFunctions, handle: Any, number: int) -> Any:
    """With the name, unless the library is older than that (driver 515)."""
    try:
        return functions.nvmlDeviceGetGpuInstanceProfileInfo(handle, number, 2)
    except Exception as error:
        if nvml_error_code(error) not in _NOT_IN_THIS_LIBRARY:
            raise
        return functions.nvmlDeviceGetGpuInstanceProfileInfo(handle, number, 1)


def _placements(functions: NvmlFunctions, handle: Any, profile_id: int) -> tuple[Placement, ...]:
    """By start. NVML says how many there are before it says which."""
    count = ctypes.c_uint(0)
    functions.nvmlDeviceGetGpuInstancePossiblePlacements(
        handle, profile_id, None, ctypes.byref(count)
    )
    if not count.value:
        return ()
    array = (functions.c_nvmlGpuInstancePlacement_t * count.value)()
    functions.nvmlDeviceGetGpuInstancePossiblePlacements(
        handle, profile_id, ctypes.byref(array), ctypes.byref(count)
    )
    placements = {
        Placement(int(placement.start), int(placement.size)) for placement in array[: count.value]
    }
    return tuple(sorted(placement for placement in placements if placement.size))


def _capacity(placements: tuple[Placement, ...]) -> int:
    """How many of *placements* can be taken at once."""
    taken, end = 0, 0
    for placement in sorted(placements, key=lambda placement: placement.end):
        if placement.start >= end:
            taken, end = taken + 1, placement.end
    return taken


def _engines(info: Any) -> Engines:
    return Engines(
        multiprocessors=int(info.multiprocessorCount),
        copy=int(info.copyEngineCount),
        decoders=int(info.decoderCount),
        encoders=int(info.encoderCount),
        jpeg=int(info.jpegCount),
        ofa=int(info.ofaCount),
    )


def _name(functions: NvmlFunctions, handle: Any, number: int, info: Any) -> str:
    """As nvidia-smi prints it. Where the library does not tell it, it is composed as the driver
    composes it: slices, then the part of the board's memory in whole eighths."""
    name_field = getattr(info, "name", "")
    name_field = name_field.decode() if isinstance(name_field, bytes) else name_field
    if name := name_field.strip().removeprefix("MIG ").strip():
        return str(name)
    board_bytes = int(functions.nvmlDeviceGetMemoryInfo(handle).total)
    part = int(info.memorySizeMB) * _MIB / board_bytes
    eighths = min(math.ceil(part * _EIGHTHS), _EIGHTHS)
    gigabytes = math.floor(math.ceil(board_bytes / _GIB) * eighths / _EIGHTHS + 0.5)
    return f"{int(info.sliceCount)}g.{gigabytes}gb{_SUFFIXES.get(number, '')}"


def _with_unique_names(profiles: Iterable[MigProfile]) -> list[MigProfile]:
    """Each with a name of its own; of those with the same name and number suffix, the first."""
    by_name: dict[str, MigProfile] = {}
    for profile in profiles:
        suffix = _SUFFIXES.get(profile.number, "")
        name = profile.name + suffix if profile.name in by_name else profile.name
        if name not in by_name:
            by_name[name] = replace(profile, name=name)
    return list(by_name.values())
