"""What is read of one GPU: each reader is called on that GPU's thread of ``dra_driver.node.nvml``.

Boards, drivers and NVML libraries differ in what they can be asked; what cannot be is left out.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Final

from dra_driver.model.devices import GpuUuid, Version
from dra_driver.model.mig import Fixed, MigProfile
from dra_driver.node.mig.geometry import NO_FUNCTIONS, Geometries
from dra_driver.node.mig.instances import instances
from dra_driver.node.mig.virtual_machines import fixed
from dra_driver.node.nvlink import Links
from dra_driver.node.nvml_codes import (
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_SUPPORTED,
    code,
    unless_refused,
)
from dra_driver.node.nvml_functions import Functions
from dra_driver.node.nvml_values import (
    ADDRESSING_MODES,
    Facts,
    Glance,
    System,
    architecture,
    brand,
)
from dra_driver.node.topology import bus_id
from dra_driver.node.versions import cuda_version, driver_version

# nvml.h
MOST_LINKS: Final = 36  # NVML_NVLINK_MAX_LINKS
LINK_TO_SWITCH: Final = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
MIG_ENABLED: Final = 1  # NVML_DEVICE_MIG_ENABLE


def system(nvml: Functions, session: int) -> System:
    """What is not of one GPU."""
    return System(
        session=session,
        driver_version=driver_version(nvml.nvmlSystemGetDriverVersion()),
        cuda_driver_version=cuda_version(nvml.nvmlSystemGetCudaDriverVersion_v2()),
        gpus=nvml.nvmlDeviceGetCount(),
    )


def glance(nvml: Functions, handle: Any) -> Glance:
    """What can change, but for what is cut."""
    uuid = GpuUuid(nvml.nvmlDeviceGetUUID(handle))
    mode = mig_mode(nvml, handle)
    return Glance(uuid) if mode is None else Glance(uuid, *mode)


def with_instances(geometries: Geometries, glance: Glance, nvml: Functions, handle: Any) -> Glance:
    """With what is cut of a GPU in MIG mode, which takes longer."""
    uuid = glance.uuid
    profiles = geometries.of(nvml, handle, uuid, True)
    others = partial(geometries.unlisted, nvml, handle, uuid)
    found = unless_refused(
        lambda: instances(nvml, handle, profiles, geometries.asked(nvml, uuid), others),
        NO_PERMISSION,
    )
    if found is None:
        return replace(glance, mig_hidden=True)
    return replace(glance, instances=found[0], odd=found[1])


def facts(geometries: Geometries, nvml: Functions, handle: Any) -> Facts:
    """What stays."""
    place = nvml.nvmlDeviceGetPciInfo(handle)
    mode = mig_mode(nvml, handle)
    return Facts(
        minor=nvml.nvmlDeviceGetMinorNumber(handle),
        pci_bus_id=bus_id(place.busId),
        pci_id=f"0x{int(place.pciDeviceId):08X}",
        product_name=nvml.nvmlDeviceGetName(handle),
        brand=brand(nvml.nvmlDeviceGetBrand(handle)),
        architecture=architecture(nvml.nvmlDeviceGetArchitecture(handle)),
        compute_capability=Version(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory_bytes=_memory_bytes(nvml, handle),
        addressing_mode=_addressing_mode(nvml, handle),
        mig_profiles=_mig_profiles(nvml, handle, geometries, mode),
        mig_on=None if mode is None else mode[0],
        mig_fixed=Fixed.NOTHING if mode is None else fixed(nvml, handle),
        mig_problem=_mig_problem(nvml, handle, geometries, mode),
    )


def links(nvml: Functions, handle: Any) -> Links:
    """Where its active NVLinks lead."""
    switch, peers = False, set()
    for link in range(MOST_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == LINK_TO_SWITCH:
                switch = True
            else:
                peers.add(bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
        except Exception as error:
            if code(error) == NOT_SUPPORTED:
                continue  # this link, or NVLink at all
            if code(error) == INVALID_ARGUMENT:
                break  # beyond the last link of this board
            raise
    return Links(switch, frozenset(peers))


def mig_mode(nvml: Functions, handle: Any) -> tuple[bool, bool] | None:
    """Whether MIG mode is on, and will be after the next reset; None: it has no such mode."""
    mode = unless_refused(
        lambda: nvml.nvmlDeviceGetMigMode(handle), NOT_SUPPORTED, FUNCTION_NOT_FOUND
    )
    return None if mode is None else (mode[0] == MIG_ENABLED, mode[1] == MIG_ENABLED)


def _mig_profiles(
    nvml: Functions, handle: Any, geometries: Geometries, mode: tuple[bool, bool] | None
) -> tuple[MigProfile, ...]:
    if mode is None:
        return ()
    return geometries.of(nvml, handle, GpuUuid(nvml.nvmlDeviceGetUUID(handle)), mode[0])


def _mig_problem(
    nvml: Functions, handle: Any, geometries: Geometries, mode: tuple[bool, bool] | None
) -> str:
    """Why it is not known how the GPU can be cut; empty: it is known, or the board has no MIG."""
    if mode is not None:
        return geometries.problem(GpuUuid(nvml.nvmlDeviceGetUUID(handle)))
    try:
        nvml.nvmlDeviceGetMigMode(handle)
    except Exception as error:
        if code(error) == FUNCTION_NOT_FOUND:
            return NO_FUNCTIONS
        if code(error) != NOT_SUPPORTED:
            raise
    return ""


def _memory_bytes(nvml: Functions, handle: Any) -> int | None:
    """Of the GPU as a whole: the total is the same in MIG mode (nvidia-smi on A100 and H100 prints
    it so). None: it has no memory of its own, as a GB10."""
    memory = unless_refused(lambda: nvml.nvmlDeviceGetMemoryInfo(handle), NOT_SUPPORTED)
    return None if memory is None else int(memory.total)


def _addressing_mode(nvml: Functions, handle: Any) -> str | None:
    try:
        mode = unless_refused(
            lambda: nvml.nvmlDeviceGetAddressingMode(handle), NOT_SUPPORTED, FUNCTION_NOT_FOUND
        )
    except AttributeError:
        return None  # pynvml is older than the question
    return None if mode is None else ADDRESSING_MODES.get(mode)
