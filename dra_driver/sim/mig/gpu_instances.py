"""pynvml's functions for MIG over a simulated node; they refuse what hardware refuses.

One difference is on purpose: where a partition could go, a real driver tells root alone, and here
everybody, so that whoever tries a simulated node sees what it would offer.

MIG mode is here, too: when it changes, waits for a reset, or is refused.
"""

# ruff: noqa: N802, N803 - the functions and their parameters keep NVML's names
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pynvml

from dra_driver.base.frozen import frozen
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
    placement_of,
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
    in_use = bool(gpu.processes) or bool(state.instances)
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


@frozen
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
        state = self._snapshot(device, "nvmlDeviceGetMigMode").state
        return [int(state.on), int(state.pending)]

    def nvmlDeviceSetMigMode(self, device: Any, mode: int) -> int:
        snapshot = self._snapshot(device, "nvmlDeviceSetMigMode")
        if mode not in (pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_ENABLE):
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        status = int(pynvml.NVML_SUCCESS)

        def switch(state: BoardState) -> BoardState:
            nonlocal status
            now, status = switch_mig_mode(
                state, snapshot.gpu, mode == pynvml.NVML_DEVICE_MIG_ENABLE
            )
            return now

        self._refuse_user()
        self._change(snapshot, switch)
        return status

    def nvmlDeviceGetGpuInstanceProfileInfo(
        self, device: Any, profile: int, version: int = 2
    ) -> Any:
        suffix = "V" if version == 2 else ""
        snapshot = self._snapshot(device, f"nvmlDeviceGetGpuInstanceProfileInfo{suffix}")
        if not 0 <= profile < pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT:
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        named = snapshot.board.numbered(profile)
        if named is None:
            raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return nvml_structures.gpu_instance_profile(named, version)

    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, device: Any, profileId: int, placementsRef: Any, countRef: Any
    ) -> int:
        snapshot = self._snapshot(device, "nvmlDeviceGetGpuInstancePossiblePlacements")
        places = _profile(snapshot, profileId).placements
        kind = pynvml.c_nvmlGpuInstancePlacement_t
        fill_list(
            [nvml_structures.placement(place, kind) for place in places], placementsRef, countRef
        )
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstanceRemainingCapacity(self, device: Any, profileId: int) -> int:
        snapshot = self._in_mig_mode(device, "nvmlDeviceGetGpuInstanceRemainingCapacity")
        self._refuse_user()
        profile = _profile(snapshot, profileId)
        return remaining_instances(
            snapshot.board, snapshot.state.partitions(snapshot.board), profile
        )

    def nvmlDeviceCreateGpuInstance(self, device: Any, profileId: int) -> Any:
        snapshot = self._in_mig_mode(device, "nvmlDeviceCreateGpuInstance")
        profile = _profile(snapshot, profileId, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._create(snapshot, profile, profile.placements)

    def nvmlDeviceCreateGpuInstanceWithPlacement(
        self, device: Any, profileId: int, placement: Any
    ) -> Any:
        snapshot = self._in_mig_mode(device, "nvmlDeviceCreateGpuInstanceWithPlacement")
        profile = _profile(snapshot, profileId, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        place = placement_of(placement)
        if place not in profile.placements:
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._create(snapshot, profile, (place,))

    def nvmlGpuInstanceDestroy(self, gpuInstance: Any) -> int:
        snapshot, instance = self._instance(gpuInstance, "nvmlGpuInstanceDestroy")
        self._refuse_user()
        _refuse_vgpu(snapshot)

        def destroy(state: BoardState) -> BoardState:
            current = _current_instance(state, instance)
            if current.computes or any(
                process.gi == instance.gi for process in snapshot.gpu.processes
            ):
                raise_nvml_error(pynvml.NVML_ERROR_IN_USE)
            name = (instance.partition(snapshot.board).profile.name, instance.start)
            ended = (*state.ended, name) if current.unmanaged else state.ended
            return replace(
                state,
                instances=tuple(gi for gi in state.instances if gi != current),
                ended=ended,
            )

        self._change(snapshot, destroy)
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstances(
        self, device: Any, profileId: int, gpuInstancesRef: Any, countRef: Any
    ) -> int:
        snapshot = self._in_mig_mode(device, "nvmlDeviceGetGpuInstances")
        self._refuse_user()
        profile = _profile(snapshot, profileId, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        instances = [each for each in snapshot.state.instances if each.profile_id == profile.id]
        if dereference(gpuInstancesRef) is None:
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        fill_list(
            [self._pointer(snapshot, instance) for instance in instances], gpuInstancesRef, countRef
        )
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstanceById(self, device: Any, gpuInstanceId: int) -> Any:
        snapshot = self._in_mig_mode(device, "nvmlDeviceGetGpuInstanceById")
        self._refuse_user()
        instance = snapshot.state.instance(gpuInstanceId)
        if instance is None:
            raise_nvml_error(pynvml.NVML_ERROR_NOT_FOUND)
        return self._pointer(snapshot, instance)

    def nvmlGpuInstanceGetInfo(self, gpuInstance: Any) -> Any:
        snapshot, instance = self._instance(gpuInstance, "nvmlGpuInstanceGetInfo")
        info = pynvml.c_nvmlGpuInstanceInfo_t()
        info.device = self._pointers.to(snapshot.handle, pynvml.c_nvmlDevice_t)
        info.id, info.profileId = instance.gi, instance.profile_id
        place = instance.partition(snapshot.board).placement
        info.placement = nvml_structures.placement(place, pynvml.c_nvmlGpuInstancePlacement_t)
        return info

    def _snapshot(self, device: Any, function: str) -> BoardSnapshot:
        """A board that has a MIG mode."""
        gpu, device = self._gpu(device, function), self._pointers.device(device)
        if gpu.geometry is None:
            raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        state = self._mig.read(self._node(), gpu)
        return BoardSnapshot(device, gpu, gpu.geometry, state, function)

    def _in_mig_mode(self, device: Any, function: str) -> BoardSnapshot:
        snapshot = self._snapshot(device, function)
        if not snapshot.state.on:
            raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return snapshot

    def _instance(self, pointer: Any, function: str) -> tuple[BoardSnapshot, GpuInstanceState]:
        """What a pointer to a GPU instance leads to, as long as it is there."""
        return self._resolve(self._pointers.read(pointer, _GI), function)

    def _resolve(
        self, handle: InstanceHandle, function: str
    ) -> tuple[BoardSnapshot, GpuInstanceState]:
        snapshot = self._snapshot(GpuHandle(handle.session, handle.bus_id), function)
        instance = snapshot.state.instance(handle.gi)
        if instance is None or (handle.ci is None and instance.born != handle.born):
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return snapshot, instance

    def _pointer(self, snapshot: BoardSnapshot, instance: GpuInstanceState) -> Any:
        handle = InstanceHandle(
            snapshot.handle.session, snapshot.handle.bus_id, instance.gi, instance.born
        )
        return self._pointers.to(handle, _GI)

    def _create(
        self, snapshot: BoardSnapshot, profile: MigProfile, places: tuple[Placement, ...]
    ) -> Any:
        """At the first of *places* that is free."""
        made: GpuInstanceState | None = None

        def create(state: BoardState) -> BoardState:
            nonlocal made
            existing = state.partitions(snapshot.board)
            free = (
                place
                for place in places
                if fits_on_board(snapshot.board, existing, Partition(profile, place))
            )
            place = next(free, None)
            if not state.on or place is None:
                raise_nvml_error(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
            gi = instance_id(snapshot.board, profile, {instance.gi for instance in state.instances})
            made = GpuInstanceState(profile.id, place.start, gi, state.born + 1)
            return state.with_instance(made)

        self._refuse_user()
        _refuse_vgpu(snapshot)
        self._change(snapshot, create)
        assert made is not None
        return self._pointer(snapshot, made)

    def _change(self, snapshot: BoardSnapshot, by: Callable[[BoardState], BoardState]) -> None:
        """NVMLError, and nothing is changed."""
        self._mig.change(self._node(), snapshot.gpu, by)
        if snapshot.gpu.kills(snapshot.function, KILLED_AFTER):
            kill_process()

    def _refuse_user(self) -> None:
        """Root may, with the device node of mig/config or without it."""
        if not self._mig.is_root():
            raise_nvml_error(pynvml.NVML_ERROR_NO_PERMISSION)


def _profile(
    snapshot: BoardSnapshot, profile_id: int, otherwise: int = pynvml.NVML_ERROR_NOT_SUPPORTED
) -> MigProfile:
    profile = snapshot.board.profile(profile_id)
    if profile is None:
        raise_nvml_error(otherwise)
    return profile


def _refuse_vgpu(snapshot: BoardSnapshot) -> None:
    """Its guest divides GPU instances, and neither makes nor removes them."""
    if snapshot.gpu.virtualization == "vgpu":
        raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _current_instance(state: BoardState, instance: GpuInstanceState) -> GpuInstanceState:
    """*instance* as it is now; whoever was quicker may have destroyed it."""
    current = state.instance(instance.gi)
    if current is None or current.born != instance.born:
        raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return current
