"""Profiles in the structures of NVML."""

from typing import Any, Final

import pynvml

from dra_driver.model.gpus import MigProfile, Placement
from dra_driver.sim.mig.geometry import ComputeInstanceKind
from dra_driver.sim.nvml_handles import raise_nvml_error

_ENGINES: Final = (
    ("multiprocessorCount", "multiprocessors"),
    ("copyEngineCount", "copy"),
    ("decoderCount", "decoders"),
    ("encoderCount", "encoders"),
    ("jpegCount", "jpeg"),
    ("ofaCount", "ofa"),
)
_SHARED: Final = (
    ("sharedCopyEngineCount", "copy"),
    ("sharedDecoderCount", "decoders"),
    ("sharedEncoderCount", "encoders"),
    ("sharedJpegCount", "jpeg"),
    ("sharedOfaCount", "ofa"),
)


def gpu_instance_profile(profile: MigProfile, version: int) -> Any:
    """``nvmlGpuInstanceProfileInfo_t``, of the first or the second version."""
    if version not in (1, 2):
        raise_nvml_error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    first = version == 1
    info = (
        pynvml.c_nvmlGpuInstanceProfileInfo_t()
        if first
        else pynvml.c_nvmlGpuInstanceProfileInfo_v2_t()
    )
    info.id, info.sliceCount, info.instanceCount = profile.id, profile.slices, profile.most
    info.memorySizeMB = profile.memory_bytes >> 20
    for field, name in _ENGINES:
        setattr(info, field, getattr(profile.engines, name))
    if not first:
        info.name = f"MIG {profile.name}"
    return info


def compute_instance_profile(profile: MigProfile, kind: ComputeInstanceKind, version: int) -> Any:
    """``nvmlComputeInstanceProfileInfo_t``: of *kind*, in a GPU instance of *profile*."""
    if version not in (1, 2):
        raise_nvml_error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    first = version == 1
    info = (
        pynvml.c_nvmlComputeInstanceProfileInfo_t()
        if first
        else pynvml.c_nvmlComputeInstanceProfileInfo_v2_t()
    )
    info.id, info.sliceCount = kind.number, kind.slices
    info.instanceCount = profile.slices // kind.slices
    info.multiprocessorCount = kind.multiprocessors
    for field, name in _SHARED:
        setattr(info, field, getattr(profile.engines, name))
    if not first:
        info.name = device_name(profile, kind.slices)
    return info


def device_attributes(profile: MigProfile, kind: ComputeInstanceKind) -> Any:
    """``nvmlDeviceAttributes_t`` of a MIG device."""
    attributes = pynvml.c_nvmlDeviceAttributes()
    attributes.multiprocessorCount = kind.multiprocessors
    for field, name in _SHARED:
        setattr(attributes, field, getattr(profile.engines, name))
    attributes.gpuInstanceSliceCount = profile.slices
    attributes.computeInstanceSliceCount = kind.slices
    attributes.memorySizeMB = profile.memory_bytes >> 20
    return attributes


def device_name(profile: MigProfile, slices: int) -> str:
    """As nvidia-smi lists a MIG device: with its compute slices, where it has not all of them."""
    return f"MIG {'' if slices == profile.slices else f'{slices}c.'}{profile.name}"


def placement(place: Placement, kind: Any) -> Any:
    """In a structure of *kind*."""
    structure = kind()
    structure.start, structure.size = place.start, place.size
    return structure
