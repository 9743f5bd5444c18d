"""The GPU instances and compute instances of a GPU, and the MIG devices that these are.

All of it is called on the GPU's thread (``dra_driver.node.nvml.client``). Between two calls of NVML
somebody else may remove an instance: an instance that is gone is left out. Instances are not read
from NVML's list of MIG devices: that list still has instances that another process removed, and
reading it takes seconds on a busy node.
"""

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import (
    GpuUuid,
    MigInstance,
    MigProfile,
    PartitionKey,
    UnusableGpuInstance,
    is_mig_uuid,
)
from dra_driver.node.nvml.api import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    NvmlFunctions,
    none_if_refused,
)

_NO_ANSWER: Final = (NOT_FOUND, INVALID_ARGUMENT, NOT_SUPPORTED)
_Ids = tuple[int, int]  # of a GPU instance, and of a compute instance in it


class MigUuidReader:
    """Reads the UUIDs of the compute instances of one GPU, at one look.

    A compute instance says on which device it is. By nvml.h that is the GPU; NVIDIA's own driver
    was also seen to name the MIG device. Where it is the GPU, the MIG device is found by its place,
    "MIG-GPU-<uuid>/<gi>/<ci>", which ``nvmlDeviceGetHandleByUUID`` takes as well. Only where that
    is refused, NVML's list of MIG devices is read, which can take ten seconds.

    With a wrong UUID a claim would compute on an instance of another, or have it removed. So a
    device is believed only if it says itself that it is this instance, and no two have one UUID.
    """

    def __init__(self, functions: NvmlFunctions, handle: Any) -> None:
        self._functions = functions
        self._handle = handle
        self._gpu: str | None = None
        self._says_gpu_only = False  # it is known that compute instances name no MIG device
        self._list: Mapping[_Ids, GpuUuid] | None = None  # once it was read
        self._given: dict[GpuUuid, _Ids] = {}

    def of(self, gi: int, ci: int, device: Any) -> GpuUuid | None:
        """The UUID of a compute instance that exists, on *device*. None: NVML does not tell it."""
        ids = gi, ci
        for find in (partial(self._on, device), self._by_place, self._listed):
            uuid = find(ids)
            if uuid is not None and self._given.setdefault(uuid, ids) == ids:
                return uuid
        return None

    def _on(self, device: Any, ids: _Ids) -> GpuUuid | None:
        if self._says_gpu_only:
            return None
        uuid = self._uuid(device)
        if uuid is not None and is_mig_uuid(uuid):
            return uuid if self._ids(device) == ids else None
        self._says_gpu_only, self._gpu = True, uuid
        return None

    def _by_place(self, ids: _Ids) -> GpuUuid | None:
        gpu = self._gpu = self._gpu or self._functions.nvmlDeviceGetUUID(self._handle)
        gi, ci = ids
        get_device = partial(self._functions.nvmlDeviceGetHandleByUUID, f"MIG-{gpu}/{gi}/{ci}")
        device = none_if_refused(get_device, *_NO_ANSWER)
        return self._uuid(device) if device is not None and self._ids(device) == ids else None

    def _listed(self, ids: _Ids) -> GpuUuid | None:
        if self._list is None:
            self._list = self._read_list()
        return self._list.get(ids)

    def _read_list(self) -> Mapping[_Ids, GpuUuid]:
        """The list may have devices that were removed: of two UUIDs for the same instance neither
        is believed."""
        uuids_by_ids: dict[_Ids, set[GpuUuid]] = {}
        for device in self._devices():
            ids, uuid = self._ids(device), self._uuid(device)
            if ids is not None and uuid is not None:
                uuids_by_ids.setdefault(ids, set()).add(uuid)
        return {ids: min(uuids) for ids, uuids in uuids_by_ids.items() if len(uuids) == 1}

    def _devices(self) -> Iterator[Any]:
        functions, handle = self._functions, self._handle
        max_devices = none_if_refused(
            lambda: functions.nvmlDeviceGetMaxMigDeviceCount(handle), *_NO_ANSWER
        )
        for index in range(max_devices or 0):
            get_device = partial(functions.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            if (device := none_if_refused(get_device, *_NO_ANSWER)) is not None:
                yield device

    def _ids(self, device: Any) -> _Ids | None:
        """The instance that this MIG device says it is."""

        def ask() -> _Ids:
            gi = self._functions.nvmlDeviceGetGpuInstanceId(device)
            return gi, self._functions.nvmlDeviceGetComputeInstanceId(device)

        return none_if_refused(ask, *_NO_ANSWER)

    def _uuid(self, device: Any) -> GpuUuid | None:
        uuid = none_if_refused(lambda: self._functions.nvmlDeviceGetUUID(device), *_NO_ANSWER)
        return GpuUuid(uuid) if uuid else None


_MOST_INSTANCES: Final = 32  # of one profile; NVML fills a list that has to be long enough
_COMPUTE_PROFILES: Final = range(12)  # NVML_COMPUTE_INSTANCE_PROFILE_*: 9 in driver 615
_GPU_INSTANCES: Final = range(15)  # their ids, as /proc/driver/nvidia-caps/mig-minors lists them
_SHARED_ENGINES: Final = 0  # NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
_GONE: Final = (NOT_FOUND, INVALID_ARGUMENT)


@frozen
class GpuInstance:
    """A GPU instance and what stands for it in NVML."""

    handle: Any
    id: int
    key: PartitionKey


@frozen
class ComputeInstance:
    """A compute instance and what stands for it in NVML."""

    handle: Any
    id: int
    fills: bool  # it is all of its GPU instance
    device: Any  # what NVML says that it is on


@frozen
class GpuInstanceDescription:
    """A GPU instance in words, for messages."""

    profile: str
    gi: int
    key: PartitionKey
    uuids: tuple[GpuUuid, ...] = ()  # of its compute instances

    def __str__(self) -> str:
        names = "".join(f", {uuid}" for uuid in self.uuids)
        return f"{self.profile} at {self.key.start} (GPU instance {self.gi}{names})"


ComputeProfilesOf = Callable[[GpuInstance], Sequence[Any]]
"""How a GPU instance can be divided."""
Unlisted = Callable[[Collection[int]], Sequence[GpuInstance]]
"""The GPU instances besides those with these ids, which are of no profile that is known."""


class GpuInstances:
    """The GPU instances of the GPU behind *handle*, whole or not, at one look."""

    def __init__(
        self, functions: NvmlFunctions, handle: Any, compute_profiles_of: ComputeProfilesOf
    ) -> None:
        self.functions = functions
        self.handle = handle
        self.compute_profiles_of = compute_profiles_of
        self._uuids = MigUuidReader(functions, handle)

    def read(
        self, profiles: Collection[MigProfile], unlisted: Unlisted
    ) -> tuple[tuple[MigInstance, ...], tuple[UnusableGpuInstance, ...]]:
        """The instances of *profiles*, and those that *unlisted* finds, by key: those that claims
        can have, and the rest."""
        whole: list[MigInstance] = []
        unusable: list[UnusableGpuInstance] = []
        for gi in self._all(profiles, unlisted):
            computes = self.compute_instances(gi)
            if (instance := self._whole(gi, computes)) is not None:
                whole.append(instance)
            else:
                unusable.append(UnusableGpuInstance(gi.key, gi.id, len(computes)))
        return (
            tuple(sorted(whole, key=lambda instance: instance.key)),
            tuple(sorted(unusable, key=lambda instance: instance.key)),
        )

    def describe(self, profiles: Collection[MigProfile]) -> tuple[GpuInstanceDescription, ...]:
        """Every GPU instance, by key."""
        names = {profile.id: profile.name for profile in profiles}
        return tuple(
            GpuInstanceDescription(
                names.get(gi.key.profile_id, f"profile {gi.key.profile_id}"),
                gi.id,
                gi.key,
                self.uuids(gi, self.compute_instances(gi)),
            )
            for gi in sorted(self._all(profiles, self.unlisted), key=lambda gi: gi.key)
        )

    def find(self, key: PartitionKey) -> GpuInstance | None:
        """The GPU instance of exactly this profile at exactly this placement."""
        candidates = self._of_profile(key.profile_id, key.slices)
        return next((candidate for candidate in candidates if candidate.key == key), None)

    def whole(self, gi: GpuInstance) -> MigInstance | None:
        """*gi* as an instance. None: it is not whole."""
        return self._whole(gi, self.compute_instances(gi))

    def compute_instances(self, gi: GpuInstance) -> tuple[ComputeInstance, ...]:
        """The compute instances of *gi*, by id."""
        functions, profiles = self.functions, self.compute_profiles_of(gi)
        whole = whole_compute_profile(gi, profiles)
        by_id: dict[int, ComputeInstance] = {}
        for profile in profiles:
            read = partial(functions.nvmlGpuInstanceGetComputeInstances, gi.handle, profile.id)
            for handle in _handles(functions.c_nvmlComputeInstance_t, read):
                get_info = partial(functions.nvmlComputeInstanceGetInfo_v2, handle)
                if (info := none_if_refused(get_info, *_GONE)) is not None:
                    fills = whole is not None and info.profileId == whole.id
                    by_id[int(info.id)] = ComputeInstance(handle, int(info.id), fills, info.device)
        return tuple(compute for _, compute in sorted(by_id.items()))

    def uuids(self, gi: GpuInstance, computes: Iterable[ComputeInstance]) -> tuple[GpuUuid, ...]:
        """The UUIDs of these compute instances of *gi*, as far as NVML says."""
        uuids = (self._uuids.of(gi.id, compute.id, compute.device) for compute in computes)
        return tuple(uuid for uuid in uuids if uuid is not None)

    def unlisted(
        self, listed: Collection[int], ids: Iterable[int] = _GPU_INSTANCES
    ) -> tuple[GpuInstance, ...]:
        """The GPU instances with these ids, of whatever profile, without those that are
        *listed*."""
        get_instance = partial(self.functions.nvmlDeviceGetGpuInstanceById, self.handle)
        answers = (
            none_if_refused(partial(get_instance, gi), *_NO_ANSWER)
            for gi in ids
            if gi not in listed
        )
        return tuple(self._described((handle for handle in answers if handle is not None), 0))

    def _all(self, profiles: Collection[MigProfile], unlisted: Unlisted) -> list[GpuInstance]:
        listed = [gi for profile in profiles for gi in self._of_profile(profile.id, profile.slices)]
        return [*listed, *unlisted({gi.id for gi in listed})]

    def _of_profile(self, profile_id: int, slices: int) -> Iterator[GpuInstance]:
        read = partial(self.functions.nvmlDeviceGetGpuInstances, self.handle, profile_id)
        return self._described(_handles(self.functions.c_nvmlGpuInstance_t, read), slices)

    def _described(self, handles: Iterable[Any], slices: int) -> Iterator[GpuInstance]:
        for handle in handles:
            if (gi := _gpu_instance(self.functions, handle, slices)) is not None:
                yield gi

    def _whole(self, gi: GpuInstance, computes: Sequence[ComputeInstance]) -> MigInstance | None:
        """*gi* as an instance; None: it has not one compute instance that is all of it."""
        if len(computes) != 1 or not computes[0].fills:
            return None
        uuids = self.uuids(gi, computes)
        return MigInstance(gi.key, gi.id, computes[0].id, uuids[0]) if uuids else None


def instance_exists(functions: NvmlFunctions, gi: GpuInstance) -> bool:
    """Whether *gi* still exists."""
    return _gpu_instance(functions, gi.handle, gi.key.slices) == gi


def compute_profiles(functions: NvmlFunctions, gi: GpuInstance) -> tuple[Any, ...]:
    """How *gi* can be divided, by number."""
    get_profile = functions.nvmlGpuInstanceGetComputeInstanceProfileInfo
    answers = (
        none_if_refused(partial(get_profile, gi.handle, number, _SHARED_ENGINES, 1), *_NO_ANSWER)
        for number in _COMPUTE_PROFILES
    )
    return tuple(profile for profile in answers if profile is not None)


def whole_compute_profile(gi: GpuInstance, profiles: Iterable[Any]) -> Any:
    """Which of these profiles of compute instances is all of *gi*: it has as many slices, and of
    several such it is the one with the most multiprocessors. None: there is none."""
    whole = [profile for profile in profiles if int(profile.sliceCount) == gi.key.slices]
    return max(whole, key=lambda profile: int(profile.multiprocessorCount), default=None)


def _gpu_instance(functions: NvmlFunctions, handle: Any, slices: int) -> GpuInstance | None:
    info = none_if_refused(partial(functions.nvmlGpuInstanceGetInfo, handle), *_GONE)
    if info is None:
        return None
    placement = info.placement
    key = PartitionKey(int(info.profileId), int(placement.start), int(placement.size), slices)
    return GpuInstance(handle, int(info.id), key)


def _handles(handle_type: Any, read: Callable[[Any, Any], int]) -> list[Any]:
    """What *read* lists; nothing where NVML knows no such profile."""
    count = ctypes.c_uint(_MOST_INSTANCES)
    array = (handle_type * _MOST_INSTANCES)()
    answer = none_if_refused(partial(read, ctypes.byref(array), ctypes.byref(count)), *_NO_ANSWER)
    return [] if answer is None else array[: count.value]
