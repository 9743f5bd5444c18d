"""pynvml's functions for MIG over a simulated node; they refuse what hardware refuses.

One difference is on purpose: where a partition could go, a real driver tells root alone, and here
everybody, so that whoever tries a simulated node sees what it would offer.
"""

# ruff: noqa: N802, N803 - the functions and their parameters keep NVML's names

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import pynvml

from dra_driver.model.mig import MigProfile, Partition, Placement
from dra_driver.node.sim.handles import (
    Handle,
    InstanceHandle,
    Pointers,
    die,
    fail,
    fill,
    pointed,
)
from dra_driver.node.sim.mig import profile_info
from dra_driver.node.sim.mig.geometry import Geometry
from dra_driver.node.sim.mig.mode import switched
from dra_driver.node.sim.mig.rules import fits, instance_id, room
from dra_driver.node.sim.mig.state import BoardState, Cut, MigStates
from dra_driver.node.sim.node import KILLED_AFTER, Node, SimulatedGpu

_GI: Final = pynvml.c_nvmlGpuInstance_t


@dataclass(frozen=True, slots=True)
class Seen:
    """A board at one call."""

    handle: Handle
    gpu: SimulatedGpu
    board: Geometry
    state: BoardState
    function: str = ""  # that looks


class MigFunctions(ABC):
    """The mode, and GPU instances."""

    _mig: MigStates
    _pointers: Pointers

    @abstractmethod
    def _node(self) -> Node: ...

    @abstractmethod
    def _gpu(self, handle: Any, function: str) -> SimulatedGpu: ...

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        state = self._cuttable(device, "nvmlDeviceGetMigMode").state
        return [int(state.on), int(state.pending)]

    def nvmlDeviceSetMigMode(self, device: Any, mode: int) -> int:
        seen = self._cuttable(device, "nvmlDeviceSetMigMode")
        if mode not in (pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_ENABLE):
            fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        status = int(pynvml.NVML_SUCCESS)

        def switch(state: BoardState) -> BoardState:
            nonlocal status
            now, status = switched(state, seen.gpu, mode == pynvml.NVML_DEVICE_MIG_ENABLE)
            return now

        self._refuse_user()
        self._change(seen, switch)
        return status

    def nvmlDeviceGetGpuInstanceProfileInfo(
        self, device: Any, profile: int, version: int = 2
    ) -> Any:
        suffix = "V" if version == 2 else ""
        seen = self._cuttable(device, f"nvmlDeviceGetGpuInstanceProfileInfo{suffix}")
        if not 0 <= profile < pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT:
            fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        found = seen.board.numbered(profile)
        if found is None:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return profile_info.gpu_instance_profile(found, version)

    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, device: Any, profileId: int, placementsRef: Any, countRef: Any
    ) -> int:
        seen = self._cuttable(device, "nvmlDeviceGetGpuInstancePossiblePlacements")
        places = _profile(seen, profileId).placements
        kind = pynvml.c_nvmlGpuInstancePlacement_t
        fill([profile_info.placement(one, kind) for one in places], placementsRef, countRef)
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstanceRemainingCapacity(self, device: Any, profileId: int) -> int:
        seen = self._in_mig_mode(device, "nvmlDeviceGetGpuInstanceRemainingCapacity")
        self._refuse_user()
        profile = _profile(seen, profileId)
        return room(seen.board, seen.state.partitions(seen.board), profile)

    def nvmlDeviceCreateGpuInstance(self, device: Any, profileId: int) -> Any:
        seen = self._in_mig_mode(device, "nvmlDeviceCreateGpuInstance")
        profile = _profile(seen, profileId, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._cut(seen, profile, profile.placements)

    def nvmlDeviceCreateGpuInstanceWithPlacement(
        self, device: Any, profileId: int, placement: Any
    ) -> Any:
        seen = self._in_mig_mode(device, "nvmlDeviceCreateGpuInstanceWithPlacement")
        profile = _profile(seen, profileId, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        said = pointed(placement)
        place = None if said is None else Placement(int(said.start), int(said.size))
        if place not in profile.placements:
            fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._cut(seen, profile, (place,))

    def nvmlGpuInstanceDestroy(self, gpuInstance: Any) -> int:
        seen, cut = self._instance(gpuInstance, "nvmlGpuInstanceDestroy")
        self._refuse_cutting()
        _refuse_vgpu(seen)

        def destroy(state: BoardState) -> BoardState:
            found = _same(state, cut)
            if found.computes or any(one.gi == cut.gi for one in seen.gpu.processes):
                fail(pynvml.NVML_ERROR_IN_USE)
            name = (cut.partition(seen.board).profile.name, cut.start)
            ended = (*state.ended, name) if found.foreign else state.ended
            return replace(
                state, cuts=tuple(one for one in state.cuts if one != found), ended=ended
            )

        self._change(seen, destroy)
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstances(
        self, device: Any, profileId: int, gpuInstancesRef: Any, countRef: Any
    ) -> int:
        seen = self._in_mig_mode(device, "nvmlDeviceGetGpuInstances")
        self._refuse_user()
        profile = _profile(seen, profileId, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        cuts = [one for one in seen.state.cuts if one.profile_id == profile.id]
        if pointed(gpuInstancesRef) is None:
            fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        fill([self._pointer(seen, one) for one in cuts], gpuInstancesRef, countRef)
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstanceById(self, device: Any, gpuInstanceId: int) -> Any:
        seen = self._in_mig_mode(device, "nvmlDeviceGetGpuInstanceById")
        self._refuse_user()
        cut = seen.state.cut(gpuInstanceId)
        if cut is None:
            fail(pynvml.NVML_ERROR_NOT_FOUND)
        return self._pointer(seen, cut)

    def nvmlGpuInstanceGetInfo(self, gpuInstance: Any) -> Any:
        seen, cut = self._instance(gpuInstance, "nvmlGpuInstanceGetInfo")
        info = pynvml.c_nvmlGpuInstanceInfo_t()
        info.device = self._pointers.to(seen.handle, pynvml.c_nvmlDevice_t)
        info.id, info.profileId = cut.gi, cut.profile_id
        place = cut.partition(seen.board).placement
        info.placement = profile_info.placement(place, pynvml.c_nvmlGpuInstancePlacement_t)
        return info

    def _cuttable(self, device: Any, function: str) -> Seen:
        """A board that has a MIG mode."""
        gpu, device = self._gpu(device, function), self._pointers.device(device)
        if gpu.geometry is None:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        state = self._mig.read(self._node(), gpu)
        return Seen(device, gpu, gpu.geometry, state, function)

    def _in_mig_mode(self, device: Any, function: str) -> Seen:
        seen = self._cuttable(device, function)
        if not seen.state.on:
            fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return seen

    def _instance(self, pointer: Any, function: str) -> tuple[Seen, Cut]:
        """What a pointer to a GPU instance leads to, as long as it is there."""
        return self._there(self._pointers.read(pointer, _GI), function)

    def _there(self, handle: InstanceHandle, function: str) -> tuple[Seen, Cut]:
        seen = self._cuttable(Handle(handle.session, handle.bus_id), function)
        cut = seen.state.cut(handle.gi)
        if cut is None or (handle.ci is None and cut.born != handle.born):
            fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return seen, cut

    def _pointer(self, seen: Seen, cut: Cut) -> Any:
        handle = InstanceHandle(seen.handle.session, seen.handle.bus_id, cut.gi, cut.born)
        return self._pointers.to(handle, _GI)

    def _cut(self, seen: Seen, profile: MigProfile, places: tuple[Placement, ...]) -> Any:
        """At the first of *places* that is free."""
        made: Cut | None = None

        def create(state: BoardState) -> BoardState:
            nonlocal made
            there = state.partitions(seen.board)
            free = (one for one in places if fits(seen.board, there, Partition(profile, one)))
            place = next(free, None)
            if not state.on or place is None:
                fail(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
            gi = instance_id(seen.board, profile, {one.gi for one in state.cuts})
            made = Cut(profile.id, place.start, gi, state.born + 1)
            return state.with_cut(made)

        self._refuse_cutting()
        _refuse_vgpu(seen)
        self._change(seen, create)
        assert made is not None
        return self._pointer(seen, made)

    def _change(self, seen: Seen, by: Callable[[BoardState], BoardState]) -> None:
        """NVMLError, and nothing is changed."""
        self._mig.change(self._node(), seen.gpu, by)
        if seen.gpu.kills(seen.function, KILLED_AFTER):
            die()

    def _refuse_user(self) -> None:
        if not self._mig.is_root():
            fail(pynvml.NVML_ERROR_NO_PERMISSION)

    def _refuse_cutting(self) -> None:
        if not self._mig.may_cut():
            fail(pynvml.NVML_ERROR_NO_PERMISSION)


def _profile(
    seen: Seen, profile_id: int, otherwise: int = pynvml.NVML_ERROR_NOT_SUPPORTED
) -> MigProfile:
    found = seen.board.profile(profile_id)
    if found is None:
        fail(otherwise)
    return found


def _refuse_vgpu(seen: Seen) -> None:
    """Its guest divides GPU instances, and neither makes nor removes them."""
    if seen.gpu.virtualization == "vgpu":
        fail(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _same(state: BoardState, cut: Cut) -> Cut:
    """*cut* as it is now; whoever was quicker may have destroyed it."""
    found = state.cut(cut.gi)
    if found is None or found.born != cut.born:
        fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return found
