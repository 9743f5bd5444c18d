"""The calls of NVML that cut a GPU and remove what was cut.

Each function is called on the GPU's thread of ``dra_driver.node.nvml`` and is one step: whatever
was done before it, and wherever that ended, doing it again is right.
"""

import ctypes
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from dra_driver.errors import NodeError, Taken
from dra_driver.model.devices import GpuUuid
from dra_driver.model.mig import Instance, PartitionKey
from dra_driver.node.mig.instances import (
    ProfilesOf,
    compute_instances,
    filling,
    gpu_instance,
    instance_of,
    names_of,
)
from dra_driver.node.mig.uuids import Uuids
from dra_driver.node.nvml_functions import Functions


class Again(NodeError):
    """What NVML does not do, or not tell, at this moment: it is tried again."""


class StillThere(Again):
    """NVML says that an instance was removed, and lists it all the same."""


class Nameless(Again):
    """NVML does not say how an instance is called, so it cannot be told from another's."""


@dataclass(frozen=True, slots=True)
class Meant:
    """Which instance is to be removed from its place, by what is known of it."""

    uuid: GpuUuid | None = None  # its name; None: that is not known
    unless: frozenset[GpuUuid] = frozenset()  # names of others', which it has none of

    def is_other(self, names: Collection[GpuUuid], complete: bool) -> bool | None:
        """Whether what is called by these *names* is another one. None: they are not *complete*,
        and do not tell."""
        if not self.unless.isdisjoint(names):
            return True
        if self.uuid in names or (self.uuid is None and not self.unless):
            return False
        return self.uuid is not None if complete else None


_WHATEVER: Final = Meant()


def create(functions: Functions, handle: Any, key: PartitionKey, ask: ProfilesOf) -> str:
    """The GPU instance is there; the answer is its capability ("gpu0/mig/gi1")."""
    there = gpu_instance(functions, handle, key)
    return _home(functions, handle, _create(functions, handle, key) if there is None else there.id)


def create_new(functions: Functions, handle: Any, key: PartitionKey, ask: ProfilesOf) -> str:
    """Like :func:`create`; and it was not there before. Taken: there is one already."""
    if (there := gpu_instance(functions, handle, key)) is not None:
        its = compute_instances(functions, there, ask(there))
        names = names_of(Uuids(functions, handle), there, its)
        named = ", ".join([f"GPU instance {there.id}", *names])
        raise Taken(
            f"{key} is cut already, as {named}: it is left as it is; once it is removed, or "
            "published as it is, a claim can have it"
        )
    return _home(functions, handle, _create(functions, handle, key))


def fill(functions: Functions, handle: Any, key: PartitionKey, ask: ProfilesOf) -> Instance | None:
    """The GPU instance has its compute instance; both are the answer. None: it is not listed yet
    under a name."""
    gi = gpu_instance(functions, handle, key)
    if gi is None:
        raise NodeError(f"{key}: its GPU instance vanished: somebody else removed it")
    profiles = ask(gi)
    there = compute_instances(functions, gi, profiles)
    if not there:
        whole = filling(gi, profiles)
        if whole is None:
            raise NodeError(f"{key}: the driver has no compute instance that is all of it")
        functions.nvmlGpuInstanceCreateComputeInstance(gi.handle, int(whole.id))
    elif len(there) > 1 or not there[0].fills:
        raise NodeError(
            f"{key}: somebody else divided GPU instance {gi.id}: destroy its compute instances "
            f"with nvidia-smi mig -dci -gi {gi.id}"
        )
    return instance_of(functions, handle, gi, profiles)


def destroy(
    functions: Functions,
    handle: Any,
    key: PartitionKey,
    ask: ProfilesOf,
    meant: Meant = _WHATEVER,
) -> tuple[GpuUuid, ...]:
    """The GPU instance is gone, its compute instances before it.

    One that is there and is not the one that is *meant* stays: the answer is how it is called. A
    GPU instance without compute instances has no name, and is taken for it. Nameless: that cannot
    be told now. StillThere: NVML did not do what it says it did.
    """
    gi = gpu_instance(functions, handle, key)
    if gi is None:
        return ()
    its = compute_instances(functions, gi, ask(gi))
    names = names_of(Uuids(functions, handle), gi, its) if meant != _WHATEVER else ()
    if its:
        other = meant.is_other(names, len(names) == len(its))
        if other is None:
            raise Nameless(
                f"{key}: NVML does not say now how GPU instance {gi.id} is called, so it cannot be "
                "told from another's"
            )
        if other:
            return names
    for one in its:
        functions.nvmlComputeInstanceDestroy(one.handle)
    functions.nvmlGpuInstanceDestroy(gi.handle)
    left = gpu_instance(functions, handle, key)
    if left is not None and left.id == gi.id:
        raise StillThere(f"{key}: NVML says that GPU instance {gi.id} is removed, and lists it")
    return ()


def _home(functions: Functions, handle: Any, gi: int) -> str:
    return f"gpu{functions.nvmlDeviceGetMinorNumber(handle)}/mig/gi{gi}"


def _create(functions: Functions, handle: Any, key: PartitionKey) -> int:
    place = functions.c_nvmlGpuInstancePlacement_t(key.start, key.size)
    made = functions.nvmlDeviceCreateGpuInstanceWithPlacement(
        handle, key.profile_id, ctypes.byref(place)
    )
    return int(functions.nvmlGpuInstanceGetInfo(made).id)
