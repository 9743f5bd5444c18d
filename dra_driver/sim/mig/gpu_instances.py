"""pynvml's functions for MIG over a simulated node; they refuse what hardware refuses.

One difference is on purpose: where a partition could go, a real driver tells root alone, and here
everybody, so that whoever tries a simulated node sees what it would offer.

MIG mode is here, too: when it changes, waits for a reset, or is refused.
"""

# ruff: noqa: N802, N803 - the functions and their parameters keep NVML's names
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import pynvml

from dra_driver.model.gpus import MigProfile, Partition, Placement
from dra_driver.sim.mig import nvml_structures
from dra_driver.sim.mig.geometry import (
    BoardGeometry,
    fits_on_board,
    instance_id,
    remaining_instances,
)
from dra_driver.sim.mig.state import BoardState, GpuInstanceState, MigStateStore, keeps_mode
from dra_driver.sim.node_spec import KILLED_AFTER, SimulatedGpu, SimulatedNode
from dra_driver.sim.nvml_handles import (
    GpuHandle,
    InstanceHandle,
    InstancePointers,
    dereference,
    fill_list,
    kill_process,
    raise_nvml_error,
)

_DONE: Final = int(pynvml.NVML_SUCCESS)


def switch_mig_mode(state: BoardState, gpu: SimulatedGpu, on: bool) -> tuple[BoardState, int]:
    """The board after ``nvmlDeviceSetMigMode``, and the activation status.

    Since Hopper the mode changes at once, or not at all: a board that is used is IN_USE. Before,
    what is wanted is pending from then on (nvml.h), and comes with the reset: the call's own, which
    a board that is used refuses and some machines have no means for, or that of the driver when it
    is loaded anew. A board that is passed through to a virtual machine does nothing else until then
    (seen on A100 of clouds), also where what was wanted is taken back. A vGPU has no mode to set.
    """
    if gpu.virtualization == "vgpu":
        raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
    in_use = bool(gpu.processes) or bool(state.cuts)
    if state.on == on:
        return replace(state, pending=on), _DONE
    if not keeps_mode(gpu):
        if in_use:
            raise_nvml_error(pynvml.NVML_ERROR_IN_USE)
        return replace(state, on=on, pending=on), _DONE
    if gpu.virtualization == "passthrough":
        state = replace(state, pending=on, needs_reset=True)
        return state, int(pynvml.NVML_ERROR_RESET_REQUIRED)
    if gpu.mig_reset == "impossible":
        return replace(state, pending=on), int(pynvml.NVML_ERROR_RESET_REQUIRED)
    if in_use:
        return replace(state, pending=on), int(pynvml.NVML_ERROR_IN_USE)
    return replace(state, on=on, pending=on), _DONE


_GI: Final = pynvml.c_nvmlGpuInstance_t


@dataclass(frozen=True, slots=True)
class BoardSnapshot:
    """A board at one call."""

    handle: GpuHandle
    gpu: SimulatedGpu
    board: BoardGeometry
    state: BoardState
    function: str = ""  # that looks


class GpuInstanceFunctions(ABC):
    """The mode, and GPU instances."""

    _mig: MigStateStore
    _pointers: InstancePointers

    @abstractmethod
    def _node(self) -> SimulatedNode: ...

    @abstractmethod
    def _gpu(self, handle: Any, function: str) -> SimulatedGpu: ...

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        state = self._cuttable(device, "nvmlDeviceGetMigMode").state
        return [int(state.on), int(state.pending)]

    def nvmlDeviceSetMigMode(self, device: Any, mode: int) -> int:
        seen = self._cuttable(device, "nvmlDeviceSetMigMode")
        if mode not in (pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_ENABLE):
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        status = int(pynvml.NVML_SUCCESS)

        def switch(state: BoardState) -> BoardState:
            nonlocal status
            now, status = switch_mig_mode(state, seen.gpu, mode == pynvml.NVML_DEVICE_MIG_ENABLE)
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
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        found = seen.board.numbered(profile)
        if found is None:
            raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return nvml_structures.gpu_instance_profile(found, version)

    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, device: Any, profileId: int, placementsRef: Any, countRef: Any
    ) -> int:
        seen = self._cuttable(device, "nvmlDeviceGetGpuInstancePossiblePlacements")
        places = _profile(seen, profileId).placements
        kind = pynvml.c_nvmlGpuInstancePlacement_t
        fill_list(
            [nvml_structures.placement(place, kind) for place in places], placementsRef, countRef
        )
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstanceRemainingCapacity(self, device: Any, profileId: int) -> int:
        seen = self._in_mig_mode(device, "nvmlDeviceGetGpuInstanceRemainingCapacity")
        self._refuse_user()
        profile = _profile(seen, profileId)
        return remaining_instances(seen.board, seen.state.partitions(seen.board), profile)

    def nvmlDeviceCreateGpuInstance(self, device: Any, profileId: int) -> Any:
        seen = self._in_mig_mode(device, "nvmlDeviceCreateGpuInstance")
        profile = _profile(seen, profileId, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._cut(seen, profile, profile.placements)

    def nvmlDeviceCreateGpuInstanceWithPlacement(
        self, device: Any, profileId: int, placement: Any
    ) -> Any:
        seen = self._in_mig_mode(device, "nvmlDeviceCreateGpuInstanceWithPlacement")
        profile = _profile(seen, profileId, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        said = dereference(placement)
        place = None if said is None else Placement(int(said.start), int(said.size))
        if place not in profile.placements:
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._cut(seen, profile, (place,))

    def nvmlGpuInstanceDestroy(self, gpuInstance: Any) -> int:
        seen, cut = self._instance(gpuInstance, "nvmlGpuInstanceDestroy")
        self._refuse_cutting()
        _refuse_vgpu(seen)

        def destroy(state: BoardState) -> BoardState:
            found = _current_instance(state, cut)
            if found.computes or any(process.gi == cut.gi for process in seen.gpu.processes):
                raise_nvml_error(pynvml.NVML_ERROR_IN_USE)
            name = (cut.partition(seen.board).profile.name, cut.start)
            ended = (*state.ended, name) if found.unmanaged else state.ended
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
        if dereference(gpuInstancesRef) is None:
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        fill_list([self._pointer(seen, one) for one in cuts], gpuInstancesRef, countRef)
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstanceById(self, device: Any, gpuInstanceId: int) -> Any:
        seen = self._in_mig_mode(device, "nvmlDeviceGetGpuInstanceById")
        self._refuse_user()
        cut = seen.state.cut(gpuInstanceId)
        if cut is None:
            raise_nvml_error(pynvml.NVML_ERROR_NOT_FOUND)
        return self._pointer(seen, cut)

    def nvmlGpuInstanceGetInfo(self, gpuInstance: Any) -> Any:
        seen, cut = self._instance(gpuInstance, "nvmlGpuInstanceGetInfo")
        info = pynvml.c_nvmlGpuInstanceInfo_t()
        info.device = self._pointers.to(seen.handle, pynvml.c_nvmlDevice_t)
        info.id, info.profileId = cut.gi, cut.profile_id
        place = cut.partition(seen.board).placement
        info.placement = nvml_structures.placement(place, pynvml.c_nvmlGpuInstancePlacement_t)
        return info

    def _cuttable(self, device: Any, function: str) -> BoardSnapshot:
        """A board that has a MIG mode."""
        gpu, device = self._gpu(device, function), self._pointers.device(device)
        if gpu.geometry is None:
            raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        state = self._mig.read(self._node(), gpu)
        return BoardSnapshot(device, gpu, gpu.geometry, state, function)

    def _in_mig_mode(self, device: Any, function: str) -> BoardSnapshot:
        seen = self._cuttable(device, function)
        if not seen.state.on:
            raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return seen

    def _instance(self, pointer: Any, function: str) -> tuple[BoardSnapshot, GpuInstanceState]:
        """What a pointer to a GPU instance leads to, as long as it is there."""
        return self._there(self._pointers.read(pointer, _GI), function)

    def _there(
        self, handle: InstanceHandle, function: str
    ) -> tuple[BoardSnapshot, GpuInstanceState]:
        seen = self._cuttable(GpuHandle(handle.session, handle.bus_id), function)
        cut = seen.state.cut(handle.gi)
        if cut is None or (handle.ci is None and cut.born != handle.born):
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return seen, cut

    def _pointer(self, seen: BoardSnapshot, cut: GpuInstanceState) -> Any:
        handle = InstanceHandle(seen.handle.session, seen.handle.bus_id, cut.gi, cut.born)
        return self._pointers.to(handle, _GI)

    def _cut(self, seen: BoardSnapshot, profile: MigProfile, places: tuple[Placement, ...]) -> Any:
        """At the first of *places* that is free."""
        made: GpuInstanceState | None = None

        def create(state: BoardState) -> BoardState:
            nonlocal made
            there = state.partitions(seen.board)
            free = (
                place
                for place in places
                if fits_on_board(seen.board, there, Partition(profile, place))
            )
            place = next(free, None)
            if not state.on or place is None:
                raise_nvml_error(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
            gi = instance_id(seen.board, profile, {one.gi for one in state.cuts})
            made = GpuInstanceState(profile.id, place.start, gi, state.born + 1)
            return state.with_cut(made)

        self._refuse_cutting()
        _refuse_vgpu(seen)
        self._change(seen, create)
        assert made is not None
        return self._pointer(seen, made)

    def _change(self, seen: BoardSnapshot, by: Callable[[BoardState], BoardState]) -> None:
        """NVMLError, and nothing is changed."""
        self._mig.change(self._node(), seen.gpu, by)
        if seen.gpu.kills(seen.function, KILLED_AFTER):
            kill_process()

    def _refuse_user(self) -> None:
        if not self._mig.is_root():
            raise_nvml_error(pynvml.NVML_ERROR_NO_PERMISSION)

    def _refuse_cutting(self) -> None:
        if not self._mig.may_cut():
            raise_nvml_error(pynvml.NVML_ERROR_NO_PERMISSION)


def _profile(
    seen: BoardSnapshot, profile_id: int, otherwise: int = pynvml.NVML_ERROR_NOT_SUPPORTED
) -> MigProfile:
    found = seen.board.profile(profile_id)
    if found is None:
        raise_nvml_error(otherwise)
    return found


def _refuse_vgpu(seen: BoardSnapshot) -> None:
    """Its guest divides GPU instances, and neither makes nor removes them."""
    if seen.gpu.virtualization == "vgpu":
        raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _current_instance(state: BoardState, cut: GpuInstanceState) -> GpuInstanceState:
    """*cut* as it is now; whoever was quicker may have destroyed it."""
    found = state.cut(cut.gi)
    if found is None or found.born != cut.born:
        raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return found
