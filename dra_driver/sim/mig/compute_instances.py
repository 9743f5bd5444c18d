"""pynvml's functions for compute instances and MIG devices over a simulated node."""

# ruff: noqa: N802, N803 - the functions and their parameters keep NVML's names

import ctypes
from dataclasses import replace
from typing import Any, Final

import pynvml

from dra_driver.model.gpus import Placement
from dra_driver.sim.mig import nvml_structures
from dra_driver.sim.mig.devices import ListedMigDevices, MigDevice, mig_devices
from dra_driver.sim.mig.geometry import (
    ComputeInstanceKind,
    compute_instance_kinds,
    compute_instance_placements,
)
from dra_driver.sim.mig.gpu_instances import BoardSnapshot, GpuInstanceFunctions
from dra_driver.sim.mig.state import BoardState, ComputeInstanceState, GpuInstanceState
from dra_driver.sim.node_spec import SimulatedGpu
from dra_driver.sim.nvml_handles import (
    GpuHandle,
    InstanceHandle,
    MigHandle,
    dereference,
    fill_list,
    raise_nvml_error,
)

_CI: Final = pynvml.c_nvmlComputeInstance_t


class ComputeInstanceFunctions(GpuInstanceFunctions):
    """Compute instances, and MIG devices."""

    _listed_devices: ListedMigDevices

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, device: Any, profile: int, engProfile: int, version: int = 2
    ) -> Any:
        """*device*: the GPU instance; pynvml calls it so."""
        suffix = "V" if version == 2 else ""
        name = f"nvmlGpuInstanceGetComputeInstanceProfileInfo{suffix}"
        seen, cut = self._instance(device, name)
        in_range = 0 <= profile < pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT
        if not in_range or engProfile != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        whole = cut.partition(seen.board).profile
        kind = _kind(seen, cut, profile)
        return nvml_structures.compute_instance_profile(whole, kind, version)

    def nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
        self, gpuInstance: Any, profileId: int
    ) -> int:
        name = "nvmlGpuInstanceGetComputeInstanceRemainingCapacity"
        seen, cut = self._instance(gpuInstance, name)
        return len(_free(cut, _places(seen, cut, profileId)))

    def nvmlGpuInstanceGetComputeInstancePossiblePlacements(
        self, gpuInstance: Any, profileId: int, placementsRef: Any, countRef: Any
    ) -> int:
        name = "nvmlGpuInstanceGetComputeInstancePossiblePlacements"
        seen, cut = self._instance(gpuInstance, name)
        places = _places(seen, cut, profileId)
        kind = pynvml.c_nvmlComputeInstancePlacement_t
        fill_list(
            [nvml_structures.placement(place, kind) for place in places], placementsRef, countRef
        )
        return int(pynvml.NVML_SUCCESS)

    def nvmlGpuInstanceCreateComputeInstance(self, gpuInstance: Any, profileId: int) -> Any:
        seen, cut = self._instance(gpuInstance, "nvmlGpuInstanceCreateComputeInstance")
        return self._compute(seen, cut, profileId, _places(seen, cut, profileId))

    def nvmlGpuInstanceCreateComputeInstanceWithPlacement(
        self, gpuInstance: Any, profileId: int, placement: Any
    ) -> Any:
        name = "nvmlGpuInstanceCreateComputeInstanceWithPlacement"
        seen, cut = self._instance(gpuInstance, name)
        said = dereference(placement)
        place = None if said is None else Placement(int(said.start), int(said.size))
        if place is None or place not in _places(seen, cut, profileId):
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._compute(seen, cut, profileId, (place,))

    def nvmlComputeInstanceDestroy(self, computeInstance: Any) -> int:
        seen, cut, compute = self._computing(computeInstance, "nvmlComputeInstanceDestroy")
        self._refuse_cutting()
        if any(process.gi == cut.gi for process in seen.gpu.processes):
            raise_nvml_error(pynvml.NVML_ERROR_IN_USE)

        def destroy(state: BoardState) -> BoardState:
            found = state.cut(cut.gi)
            if found is None or compute not in found.computes:
                raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            rest = tuple(one for one in found.computes if one != compute)
            return state.with_cut(replace(found, computes=rest))

        self._change(seen, destroy)
        self._listed_devices.forget(compute)
        return int(pynvml.NVML_SUCCESS)

    def nvmlGpuInstanceGetComputeInstances(
        self, gpuInstance: Any, profileId: int, computeInstancesRef: Any, countRef: Any
    ) -> int:
        seen, cut = self._instance(gpuInstance, "nvmlGpuInstanceGetComputeInstances")
        self._refuse_user()
        _kind(seen, cut, profileId)
        if dereference(computeInstancesRef) is None:
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        found = [
            self._compute_pointer(seen, cut, compute)
            for compute in cut.computes
            if compute.number == profileId
        ]
        fill_list(found, computeInstancesRef, countRef)
        return int(pynvml.NVML_SUCCESS)

    def nvmlGpuInstanceGetComputeInstanceById(
        self, gpuInstance: Any, computeInstanceId: int
    ) -> Any:
        seen, cut = self._instance(gpuInstance, "nvmlGpuInstanceGetComputeInstanceById")
        self._refuse_user()
        for compute in cut.computes:
            if compute.ci == computeInstanceId:
                return self._compute_pointer(seen, cut, compute)
        raise_nvml_error(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlComputeInstanceGetInfo_v2(self, computeInstance: Any) -> Any:
        """Its *device* is the GPU, as nvml.h says."""
        seen, cut, compute = self._computing(computeInstance, "nvmlComputeInstanceGetInfo_v2")
        info = pynvml.c_nvmlComputeInstanceInfo_t()
        info.device = self._pointers.to(seen.handle, pynvml.c_nvmlDevice_t)
        info.gpuInstance = self._pointer(seen, cut)
        info.id, info.profileId = compute.ci, compute.number
        kind = pynvml.c_nvmlComputeInstancePlacement_t
        info.placement = nvml_structures.placement(compute.placement, kind)
        return info

    def nvmlComputeInstanceGetInfo(self, computeInstance: Any) -> Any:
        return self.nvmlComputeInstanceGetInfo_v2(computeInstance)

    def nvmlDeviceIsMigDeviceHandle(self, device: Any) -> ctypes.c_uint:
        self._device(device, "nvmlDeviceIsMigDeviceHandle")
        return ctypes.c_uint(isinstance(device, MigHandle))

    def nvmlDeviceGetGpuInstanceId(self, device: Any) -> int:
        return self._named(device, "nvmlDeviceGetGpuInstanceId").cut.gi

    def nvmlDeviceGetComputeInstanceId(self, device: Any) -> int:
        return self._named(device, "nvmlDeviceGetComputeInstanceId").compute.ci

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        gpu = self._gpu(device, "nvmlDeviceGetMaxMigDeviceCount")
        on = gpu.geometry is not None and self._mig.read(self._node(), gpu).on
        return gpu.geometry.slices if gpu.geometry and on else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> MigHandle:
        seen = self._in_mig_mode(device, "nvmlDeviceGetMigDeviceHandleByIndex")
        if not 0 <= index < seen.board.slices:
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        found = self._listed_devices.at(seen, index)
        if found is None:
            raise_nvml_error(pynvml.NVML_ERROR_NOT_FOUND)
        return found.handle

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: Any) -> GpuHandle:
        name = "nvmlDeviceGetDeviceHandleFromMigDeviceHandle"
        return self._mig_device(migDevice, name).seen.handle

    def nvmlDeviceGetAttributes_v2(self, device: Any) -> Any:
        found = self._mig_device(device, "nvmlDeviceGetAttributes_v2")
        kind = _kind(found.seen, found.cut, found.compute.number)
        return nvml_structures.device_attributes(found.profile, kind)

    def nvmlDeviceGetAttributes(self, device: Any) -> Any:
        return self.nvmlDeviceGetAttributes_v2(device)

    def _device(self, handle: Any, function: str) -> tuple[SimulatedGpu, MigDevice | None]:
        """What a handle leads to that may be of a MIG device."""
        if isinstance(handle, MigHandle):
            found = self._mig_device(handle, function)
            return found.seen.gpu, found
        return self._gpu(handle, function), None

    def _mig_device(self, handle: Any, function: str) -> MigDevice:
        if not isinstance(handle, MigHandle):
            self._gpu(handle, function)
            raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        seen = self._cuttable(GpuHandle(handle.session, handle.bus_id), function)
        for found in mig_devices(seen).values():
            if found.handle == handle:
                return found
        raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _named(self, handle: Any, function: str) -> MigDevice:
        """What NVML can say of a MIG device without the driver, and so of one that is gone."""
        stale = self._listed_devices.by_handle(handle) if isinstance(handle, MigHandle) else None
        if stale is None:
            return self._mig_device(handle, function)
        self._gpu(GpuHandle(handle.session, handle.bus_id), function)
        return stale

    def _compute(
        self, seen: BoardSnapshot, cut: GpuInstanceState, number: int, places: tuple[Placement, ...]
    ) -> Any:
        """At the first of *places* that is free."""
        made: ComputeInstanceState | None = None

        def create(state: BoardState) -> BoardState:
            nonlocal made
            found = state.cut(cut.gi)
            if found is None or found.born != cut.born:
                raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            free = _free(found, places)
            if not free:
                raise_nvml_error(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
            used = {compute.ci for compute in found.computes}
            ci = next(number for number in range(len(used) + 1) if number not in used)
            slot = next(state.free_slots())
            made = ComputeInstanceState(
                ci, free[0].start, free[0].size, state.born + 1, number, slot
            )
            computes = tuple(sorted([*found.computes, made], key=lambda compute: compute.ci))
            return state.with_cut(replace(found, computes=computes))

        self._refuse_cutting()
        if not self._mig.may_enter(seen.gpu, cut):
            raise_nvml_error(pynvml.NVML_ERROR_NO_PERMISSION)
        self._change(seen, create)
        assert made is not None
        return self._compute_pointer(seen, cut, made)

    def _compute_pointer(
        self, seen: BoardSnapshot, cut: GpuInstanceState, compute: ComputeInstanceState
    ) -> Any:
        parent = seen.handle
        handle = InstanceHandle(parent.session, parent.bus_id, cut.gi, compute.born, compute.ci)
        return self._pointers.to(handle, _CI)

    def _computing(
        self, pointer: Any, function: str
    ) -> tuple[BoardSnapshot, GpuInstanceState, ComputeInstanceState]:
        """What a pointer to a compute instance leads to, as long as it is there."""
        handle = self._pointers.read(pointer, _CI)
        seen, cut = self._there(handle, function)
        for compute in cut.computes:
            if (compute.ci, compute.born) == (handle.ci, handle.born):
                return seen, cut, compute
        raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)


def _kind(seen: BoardSnapshot, cut: GpuInstanceState, number: int) -> ComputeInstanceKind:
    """The compute instances of a profile; NOT_SUPPORTED: *cut* can have none such."""
    for kind in compute_instance_kinds(seen.board, cut.partition(seen.board).profile):
        if kind.number == number:
            return kind
    raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _places(seen: BoardSnapshot, cut: GpuInstanceState, number: int) -> tuple[Placement, ...]:
    whole = cut.partition(seen.board).profile
    return compute_instance_placements(whole.slices, _kind(seen, cut, number).slices)


def _free(cut: GpuInstanceState, places: tuple[Placement, ...]) -> list[Placement]:
    return [
        place
        for place in places
        if not any(place.overlaps(compute.placement) for compute in cut.computes)
    ]
