"""What NVML says of MIG, call by call, beside what our code makes of it; nothing is changed.

The functions are pynvml's, of this machine's library or of a simulated node.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pynvml

from dra_driver.model.gpus import Gpu, GpuUuid, MigProfile
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.mig.geometry import read_geometry
from dra_driver.node.nvml.api import NvmlFunctions
from dra_driver.sim.mig.geometry import board_geometry as simulated
from dra_driver.sim.mig.geometry import geometry_documents
from dra_driver.sim.node_spec import board_specs

SUCCESS = int(pynvml.NVML_SUCCESS)
NOT_THERE = (int(pynvml.NVML_ERROR_INVALID_ARGUMENT), int(pynvml.NVML_ERROR_NOT_SUPPORTED))
"""What NVML answers where there is nothing to ask about, and our code takes for an answer."""

_LONG_ENOUGH = 32
_HAS_TO_BE = ("id", "slices", "most", "size", "starts")
_ENGINES = ("multiprocessors", "copy", "decoders", "encoders", "jpeg", "ofa")


@dataclass(frozen=True)
class Machine:
    """A node, and NVML beside it."""

    node: GpuNode
    functions: NvmlFunctions
    handles: Mapping[GpuUuid, Any]  # of the GPUs that have a MIG mode

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Those that our code finds a MIG mode on."""
        return tuple(gpu for gpu in self.node.refresh().gpus if gpu.mig is not None)


@contextmanager
def machine(node: GpuNode, functions: NvmlFunctions) -> Iterator[Machine]:
    """While NVML is started a second time, which is counted."""
    functions.nvmlInit()
    try:
        every = map(functions.nvmlDeviceGetHandleByIndex, range(functions.nvmlDeviceGetCount()))
        having = [handle for handle in every if has_mode(functions, handle)]
        uuids = [GpuUuid(functions.nvmlDeviceGetUUID(handle)) for handle in having]
        yield Machine(node, functions, dict(zip(uuids, having, strict=True)))
    finally:
        functions.nvmlShutdown()


def has_mode(functions: NvmlFunctions, handle: Any) -> bool:
    """Whether a GPU has a MIG mode. NVMLError: that cannot be told, which is no answer."""
    try:
        functions.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        return False
    return True


def unread(probed: Machine) -> dict[str, str]:
    """The GPUs that have a MIG mode and whose profiles our code does not know, and why."""
    known = {gpu.uuid for gpu in probed.gpus if gpu.mig is not None and gpu.mig.profiles}
    return {
        uuid: _why(probed.functions, handle)
        for uuid, handle in probed.handles.items()
        if uuid not in known
    }


def _why(functions: NvmlFunctions, handle: Any) -> str:
    try:
        geometry = read_geometry(functions, handle)
    except pynvml.NVMLError as e:
        return f"NVML refuses to list its profiles: {e}"
    if not geometry:
        return "NVML says of every kind of partition that the board has none"
    return "it is not among what the node offers: see its log"


@dataclass(frozen=True)
class Differences:
    """Between a board and what the simulation has for it."""

    wrong: list[str] = field(default_factory=list)  # of what was seen on such a board
    # of what was assumed, and what depends on drivers
    rest: list[str] = field(default_factory=list)


def differences(product_name: str, profiles: Iterable[MigProfile]) -> Differences | None:
    """None: the simulation has no such board."""
    product = next(
        (key for key, board in board_specs().items() if board.name == product_name), None
    )
    ours = simulated(product) if product else None
    if product is None or ours is None:
        return None
    assumed = _assumed(product)
    result = Differences()
    theirs = {profile.name: profile for profile in profiles}
    for name in sorted(theirs.keys() - {profile.name for profile in ours.profiles}):
        result.rest.append(f"{name}: the simulation has none: {theirs[name]}")
    for profile in ours.profiles:
        if profile.name not in theirs:
            where = result.wrong if profile.is_plain else result.rest
            where.append(f"{profile.name}: the board has none")
            continue
        their_columns, our_columns = _columns(theirs[profile.name]), _columns(profile)
        for column in our_columns:
            if their_columns[column] != our_columns[column]:
                sure = column in (*_HAS_TO_BE, *_ENGINES) and (column, profile.name) not in assumed
                theirs_and_ours = (
                    f"{their_columns[column]}, in the simulation {our_columns[column]}"
                )
                line = f"{profile.name}, {column}: {theirs_and_ours}"
                (result.wrong if sure else result.rest).append(line)
    return result


def _columns(profile: MigProfile) -> dict[str, Any]:
    return {
        "id": profile.id,
        "number": profile.number,
        "slices": profile.slices,
        "most": profile.most,
        "size": profile.size,
        "starts": [place.start for place in profile.placements],
        "memory_mib": profile.memory_bytes >> 20,
        **{name: getattr(profile.engines, name) for name in _ENGINES},
    }


def _assumed(product: str) -> set[tuple[str, str]]:
    """The columns of the table that no such board was seen to have, with the profile."""
    entry = next(board for board in geometry_documents().values() if product in board["products"])
    return {
        (column, name)
        for how in ("assumed", "guessed")
        for column, profiles in entry.get(how, {}).items()
        for name in (entry["profiles"] if profiles == "all" else profiles)
    }


def answers(functions: NvmlFunctions, handle: Any, profile_ids: Sequence[int]) -> dict[str, int]:
    """NVML's code for each call that lists instances; of an instance, with a pointer to none.

    Whatever else is raised (``ctypes.ArgumentError``: our arguments are not what the library's
    function takes) is the caller's.
    """
    gi, ci = functions.c_nvmlGpuInstance_t(), functions.c_nvmlComputeInstance_t()
    of_gpu: dict[str, Callable[[], Any]] = {
        f"nvmlDeviceGetGpuInstances {id_}": partial(_list_gpu_instances, functions, handle, id_)
        for id_ in profile_ids
    }
    of_none: dict[str, Callable[[], Any]] = {
        "nvmlGpuInstanceGetInfo": partial(functions.nvmlGpuInstanceGetInfo, gi),
        "nvmlGpuInstanceGetComputeInstanceProfileInfo": partial(
            functions.nvmlGpuInstanceGetComputeInstanceProfileInfo, gi, 0, 0, 1
        ),
        "nvmlGpuInstanceGetComputeInstances": partial(_list_compute_instances, functions, gi),
        "nvmlComputeInstanceGetInfo_v2": partial(functions.nvmlComputeInstanceGetInfo_v2, ci),
    }
    return {name: _code(call) for name, call in {**of_gpu, **of_none}.items()}


def _list_gpu_instances(functions: NvmlFunctions, handle: Any, profile_id: int) -> None:
    instances, count = (functions.c_nvmlGpuInstance_t * _LONG_ENOUGH)(), ctypes.c_uint(_LONG_ENOUGH)
    functions.nvmlDeviceGetGpuInstances(
        handle, profile_id, ctypes.byref(instances), ctypes.byref(count)
    )


def _list_compute_instances(functions: NvmlFunctions, gi: Any) -> None:
    instances = (functions.c_nvmlComputeInstance_t * _LONG_ENOUGH)()
    count = ctypes.c_uint(_LONG_ENOUGH)
    functions.nvmlGpuInstanceGetComputeInstances(
        gi, 0, ctypes.byref(instances), ctypes.byref(count)
    )


def _code(call: Callable[[], Any]) -> int:
    try:
        call()
    except pynvml.NVMLError as e:
        return int(e.value)
    return SUCCESS
