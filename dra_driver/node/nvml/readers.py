"""What is read of one GPU; each reader is called on the thread of that GPU (``node.nvml.client``).

Boards, drivers and NVML libraries differ in what they can be asked; what they cannot be asked is
left out.
"""

from dataclasses import replace
from typing import Any, Final

from dra_driver.model.gpus import GpuUuid, GuestRestriction, MigProfile, Version
from dra_driver.node.driver.pci import canonical_bus_id
from dra_driver.node.nvml.api import (
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    MIG_FUNCTIONS_MISSING,
    NO_PERMISSION,
    NOT_SUPPORTED,
    SESSION_ENDED,
    MigReader,
    NvmlFunctions,
    none_if_refused,
    nvml_error_code,
)
from dra_driver.node.nvml.values import (
    ADDRESSING_MODES,
    DynamicState,
    NvLinks,
    NvmlSystem,
    StaticInfo,
    architecture,
    brand,
    cuda_version,
    driver_version,
)

# nvml.h, NVML_GPU_VIRTUALIZATION_MODE_*
PASSTHROUGH: Final = 1
VGPU: Final = 2
_SWITCHES_FROM: Final = 9  # Hopper (NVIDIA's MIG user guide)


def switches_without_reset(major: int) -> bool:
    """Whether boards of this compute capability change their MIG mode without a reset."""
    return major >= _SWITCHES_FROM


def guest_restriction(functions: NvmlFunctions, handle: Any) -> GuestRestriction:
    """What the virtual machine that has the GPU cannot change of its MIG mode and partitions. A
    driver that cannot tell is taken to run on the machine itself; a change may then fail.

    A GPU that is passed through and needs a reset for its mode is not even asked for it: it says
    that it changed the mode, and computes no more until the machine is rebooted (seen on A100
    of clouds). In the guest of a vGPU, NVML supports neither the mode nor GPU instances.
    """
    try:
        mode = int(functions.nvmlDeviceGetVirtualizationMode(handle))
    except Exception as error:
        if nvml_error_code(error) is None or nvml_error_code(error) in SESSION_ENDED:
            raise
        return GuestRestriction.NOTHING
    if mode == VGPU:
        return GuestRestriction.ALL
    if mode != PASSTHROUGH:
        return GuestRestriction.NOTHING
    major, _ = functions.nvmlDeviceGetCudaComputeCapability(handle)
    return GuestRestriction.NOTHING if switches_without_reset(major) else GuestRestriction.MODE


# nvml.h
MAX_NVLINKS: Final = 36  # NVML_NVLINK_MAX_LINKS
NVLINK_TO_SWITCH: Final = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
MIG_ENABLED: Final = 1  # NVML_DEVICE_MIG_ENABLE


def read_system(nvml: NvmlFunctions, session: int) -> NvmlSystem:
    """What is not of one GPU."""
    return NvmlSystem(
        session=session,
        driver_version=driver_version(nvml.nvmlSystemGetDriverVersion()),
        # Its version 2 fails where the loader finds no libcuda, as in the plugin's container; this
        # one then says which CUDA the library was made for.
        cuda_driver_version=cuda_version(nvml.nvmlSystemGetCudaDriverVersion()),
        gpus=nvml.nvmlDeviceGetCount(),
    )


def read_dynamic_state(nvml: NvmlFunctions, handle: Any) -> DynamicState:
    """What can change, but for the MIG instances."""
    uuid = GpuUuid(nvml.nvmlDeviceGetUUID(handle))
    mode = read_mig_mode(nvml, handle)
    return DynamicState(uuid) if mode is None else DynamicState(uuid, *mode)


def with_mig_instances(
    mig: MigReader, state: DynamicState, nvml: NvmlFunctions, handle: Any
) -> DynamicState:
    """*state* with the MIG instances of a GPU in MIG mode, which takes longer to read."""
    instances = none_if_refused(lambda: mig.instances(nvml, handle, state.uuid), NO_PERMISSION)
    if instances is None:
        return replace(state, mig_hidden=True)
    return replace(state, instances=instances[0], unusable=instances[1])


def read_static_info(mig: MigReader, nvml: NvmlFunctions, handle: Any) -> StaticInfo:
    """What stays."""
    place = nvml.nvmlDeviceGetPciInfo(handle)
    mode = read_mig_mode(nvml, handle)
    profiles, problem = _mig_profiles(nvml, handle, mig, mode)
    return StaticInfo(
        minor=nvml.nvmlDeviceGetMinorNumber(handle),
        pci_bus_id=canonical_bus_id(place.busId),
        pci_id=f"0x{int(place.pciDeviceId):08X}",
        product_name=nvml.nvmlDeviceGetName(handle),
        brand=brand(nvml.nvmlDeviceGetBrand(handle)),
        architecture=architecture(nvml.nvmlDeviceGetArchitecture(handle)),
        compute_capability=Version(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory_bytes=_memory_bytes(nvml, handle),
        addressing_mode=_addressing_mode(nvml, handle),
        mig_profiles=profiles,
        mig_on=None if mode is None else mode[0],
        mig_fixed=GuestRestriction.NOTHING if mode is None else guest_restriction(nvml, handle),
        mig_problem=problem,
    )


def read_nvlinks(nvml: NvmlFunctions, handle: Any) -> NvLinks:
    """Where its active NVLinks lead."""
    switch, peers = False, set()
    for link in range(MAX_NVLINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == NVLINK_TO_SWITCH:
                switch = True
            else:
                peers.add(
                    canonical_bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
                )
        except Exception as error:
            if nvml_error_code(error) == NOT_SUPPORTED:
                continue  # this link, or NVLink at all
            if nvml_error_code(error) == INVALID_ARGUMENT:
                break  # beyond the last link of this board
            raise
    return NvLinks(switch, frozenset(peers))


def read_mig_mode(nvml: NvmlFunctions, handle: Any) -> tuple[bool, bool] | None:
    """Whether MIG mode is on, and will be after the next reset; None: it has no such mode."""
    mode = none_if_refused(
        lambda: nvml.nvmlDeviceGetMigMode(handle), NOT_SUPPORTED, FUNCTION_NOT_FOUND
    )
    return None if mode is None else (mode[0] == MIG_ENABLED, mode[1] == MIG_ENABLED)


def _mig_profiles(
    nvml: NvmlFunctions, handle: Any, mig: MigReader, mode: tuple[bool, bool] | None
) -> tuple[tuple[MigProfile, ...], str]:
    """The profiles, and why they are not known; empty: they are, or the board has no MIG."""
    if mode is not None:
        gpu = GpuUuid(nvml.nvmlDeviceGetUUID(handle))
        return mig.profiles(nvml, handle, gpu, mode[0]), mig.profiles_problem(gpu)
    try:
        nvml.nvmlDeviceGetMigMode(handle)
    except Exception as error:
        if nvml_error_code(error) == FUNCTION_NOT_FOUND:
            return (), MIG_FUNCTIONS_MISSING
        if nvml_error_code(error) != NOT_SUPPORTED:
            raise
    return (), ""


def _memory_bytes(nvml: NvmlFunctions, handle: Any) -> int | None:
    """Of the GPU as a whole: the total is the same in MIG mode (nvidia-smi on A100 and H100 prints
    it so). None: it has no memory of its own, as a GB10."""
    memory = none_if_refused(lambda: nvml.nvmlDeviceGetMemoryInfo(handle), NOT_SUPPORTED)
    return None if memory is None else int(memory.total)


def _addressing_mode(nvml: NvmlFunctions, handle: Any) -> str | None:
    try:
        mode = none_if_refused(
            lambda: nvml.nvmlDeviceGetAddressingMode(handle), NOT_SUPPORTED, FUNCTION_NOT_FOUND
        )
    except AttributeError:
        return None  # pynvml is older than the question
    return None if mode is None else ADDRESSING_MODES.get(mode)
