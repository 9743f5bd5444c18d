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
    placement_of,
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
        snapshot, instance = self._instance(device, name)
        in_range = 0 <= profile < pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT
        if not in_range or engProfile != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        whole = instance.partition(snapshot.board).profile
        kind = _kind(snapshot, instance, profile)
        return nvml_structures.compute_instance_profile(whole, kind, version)

    def nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
        self, gpuInstance: Any, profileId: int
    ) -> int:
        name = "nvmlGpuInstanceGetComputeInstanceRemainingCapacity"
        snapshot, instance = self._instance(gpuInstance, name)
        return len(_free(instance, _places(snapshot, instance, profileId)))

    def nvmlGpuInstanceGetComputeInstancePossiblePlacements(
        self, gpuInstance: Any, profileId: int, placementsRef: Any, countRef: Any
    ) -> int:
        name = "nvmlGpuInstanceGetComputeInstancePossiblePlacements"
        snapshot, instance = self._instance(gpuInstance, name)
        places = _places(snapshot, instance, profileId)
        kind = pynvml.c_nvmlComputeInstancePlacement_t
        fill_list(
            [nvml_structures.placement(place, kind) for place in places], placementsRef, countRef
        )
        return int(pynvml.NVML_SUCCESS)

    def nvmlGpuInstanceCreateComputeInstance(self, gpuInstance: Any, profileId: int) -> Any:
        snapshot, instance = self._instance(gpuInstance, "nvmlGpuInstanceCreateComputeInstance")
        return self._create_compute(
            snapshot, instance, profileId, _places(snapshot, instance, profileId)
        )

    def nvmlGpuInstanceCreateComputeInstanceWithPlacement(
        self, gpuInstance: Any, profileId: int, placement: Any
    ) -> Any:
        name = "nvmlGpuInstanceCreateComputeInstanceWithPlacement"
        snapshot, instance = self._instance(gpuInstance, name)
        place = placement_of(placement)
        if place is None or place not in _places(snapshot, instance, profileId):
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._create_compute(snapshot, instance, profileId, (place,))

    def nvmlComputeInstanceDestroy(self, computeInstance: Any) -> int:
        snapshot, instance, compute = self._computing(computeInstance, "nvmlComputeInstanceDestroy")
        self._refuse_user()
        if any(process.gi == instance.gi for process in snapshot.gpu.processes):
            raise_nvml_error(pynvml.NVML_ERROR_IN_USE)

        def destroy(state: BoardState) -> BoardState:
            current = state.instance(instance.gi)
            if current is None or compute not in current.computes:
                raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            others = tuple(ci for ci in current.computes if ci != compute)
            return state.with_instance(replace(current, computes=others))

        self._change(snapshot, destroy)
        self._listed_devices.forget(compute)
        return int(pynvml.NVML_SUCCESS)

    def nvmlGpuInstanceGetComputeInstances(
        self, gpuInstance: Any, profileId: int, computeInstancesRef: Any, countRef: Any
    ) -> int:
        snapshot, instance = self._instance(gpuInstance, "nvmlGpuInstanceGetComputeInstances")
        self._refuse_user()
        _kind(snapshot, instance, profileId)
        if dereference(computeInstancesRef) is None:
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        pointers = [
            self._compute_pointer(snapshot, instance, compute)
            for compute in instance.computes
            if compute.number == profileId
        ]
        fill_list(pointers, computeInstancesRef, countRef)
        return int(pynvml.NVML_SUCCESS)

    def nvmlGpuInstanceGetComputeInstanceById(
        self, gpuInstance: Any, computeInstanceId: int
    ) -> Any:
        snapshot, instance = self._instance(gpuInstance, "nvmlGpuInstanceGetComputeInstanceById")
        self._refuse_user()
        for compute in instance.computes:
            if compute.ci == computeInstanceId:
                return self._compute_pointer(snapshot, instance, compute)
        raise_nvml_error(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlComputeInstanceGetInfo_v2(self, computeInstance: Any) -> Any:
        """Its *device* is the GPU, as nvml.h says."""
        snapshot, instance, compute = self._computing(
            computeInstance, "nvmlComputeInstanceGetInfo_v2"
        )
        info = pynvml.c_nvmlComputeInstanceInfo_t()
        info.device = self._pointers.to(snapshot.handle, pynvml.c_nvmlDevice_t)
        info.gpuInstance = self._pointer(snapshot, instance)
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
        return self._named(device, "nvmlDeviceGetGpuInstanceId").instance.gi

    def nvmlDeviceGetComputeInstanceId(self, device: Any) -> int:
        return self._named(device, "nvmlDeviceGetComputeInstanceId").compute.ci

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        gpu = self._gpu(device, "nvmlDeviceGetMaxMigDeviceCount")
        on = gpu.geometry is not None and self._mig.read(self._node(), gpu).on
        return gpu.geometry.slices if gpu.geometry and on else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> MigHandle:
        snapshot = self._in_mig_mode(device, "nvmlDeviceGetMigDeviceHandleByIndex")
        if not 0 <= index < snapshot.board.slices:
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        listed = self._listed_devices.at(snapshot, index)
        if listed is None:
            raise_nvml_error(pynvml.NVML_ERROR_NOT_FOUND)
        return listed.handle

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: Any) -> GpuHandle:
        name = "nvmlDeviceGetDeviceHandleFromMigDeviceHandle"
        return self._mig_device(migDevice, name).snapshot.handle

    def nvmlDeviceGetAttributes_v2(self, device: Any) -> Any:
        mig = self._mig_device(device, "nvmlDeviceGetAttributes_v2")
        kind = _kind(mig.snapshot, mig.instance, mig.compute.number)
        return nvml_structures.device_attributes(mig.profile, kind)

    def nvmlDeviceGetAttributes(self, device: Any) -> Any:
        return self.nvmlDeviceGetAttributes_v2(device)

    def _device(self, handle: Any, function: str) -> tuple[SimulatedGpu, MigDevice | None]:
        """What a handle leads to that may be of a MIG device."""
        if isinstance(handle, MigHandle):
            mig = self._mig_device(handle, function)
            return mig.snapshot.gpu, mig
        return self._gpu(handle, function), None

    def _mig_device(self, handle: Any, function: str) -> MigDevice:
        if not isinstance(handle, MigHandle):
            self._gpu(handle, function)
            raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        snapshot = self._snapshot(GpuHandle(handle.session, handle.bus_id), function)
        for device in mig_devices(snapshot).values():
            if device.handle == handle:
                return device
        raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _named(self, handle: Any, function: str) -> MigDevice:
        """What NVML can say of a MIG device without the driver, and so of one that is gone."""
        stale = self._listed_devices.by_handle(handle) if isinstance(handle, MigHandle) else None
        if stale is None:
            return self._mig_device(handle, function)
        self._gpu(GpuHandle(handle.session, handle.bus_id), function)
        return stale

    def _create_compute(
        self,
        snapshot: BoardSnapshot,
        instance: GpuInstanceState,
        number: int,
        places: tuple[Placement, ...],
    ) -> Any:
        """At the first of *places* that is free."""
        made: ComputeInstanceState | None = None

        def create(state: BoardState) -> BoardState:
            nonlocal made
            current = state.instance(instance.gi)
            if current is None or current.born != instance.born:
                raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            free = _free(current, places)
            if not free:
                raise_nvml_error(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
            used = {compute.ci for compute in current.computes}
            ci = next(number for number in range(len(used) + 1) if number not in used)
            slot = next(state.free_slots())
            made = ComputeInstanceState(
                ci, free[0].start, free[0].size, state.born + 1, number, slot
            )
            computes = tuple(sorted([*current.computes, made], key=lambda compute: compute.ci))
            return state.with_instance(replace(current, computes=computes))

        self._refuse_user()
        if not self._mig.may_enter(snapshot.gpu, instance):
            raise_nvml_error(pynvml.NVML_ERROR_NO_PERMISSION)
        self._change(snapshot, create)
        assert made is not None
        return self._compute_pointer(snapshot, instance, made)

    def _compute_pointer(
        self, snapshot: BoardSnapshot, instance: GpuInstanceState, compute: ComputeInstanceState
    ) -> Any:
        parent = snapshot.handle
        handle = InstanceHandle(
            parent.session, parent.bus_id, instance.gi, compute.born, compute.ci
        )
        return self._pointers.to(handle, _CI)

    def _computing(
        self, pointer: Any, function: str
    ) -> tuple[BoardSnapshot, GpuInstanceState, ComputeInstanceState]:
        """What a pointer to a compute instance leads to, as long as it is there."""
        handle = self._pointers.read(pointer, _CI)
        snapshot, instance = self._resolve(handle, function)
        for compute in instance.computes:
            if (compute.ci, compute.born) == (handle.ci, handle.born):
                return snapshot, instance, compute
        raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)


def _kind(snapshot: BoardSnapshot, instance: GpuInstanceState, number: int) -> ComputeInstanceKind:
    """The compute instances of a profile; NOT_SUPPORTED: *instance* can have none such."""
    for kind in compute_instance_kinds(snapshot.board, instance.partition(snapshot.board).profile):
        if kind.number == number:
            return kind
    raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _places(
    snapshot: BoardSnapshot, instance: GpuInstanceState, number: int
) -> tuple[Placement, ...]:
    whole = instance.partition(snapshot.board).profile
    return compute_instance_placements(whole.slices, _kind(snapshot, instance, number).slices)


def _free(instance: GpuInstanceState, places: tuple[Placement, ...]) -> list[Placement]:
    return [
        place
        for place in places
        if not any(place.overlaps(compute.placement) for compute in instance.computes)
    ]
