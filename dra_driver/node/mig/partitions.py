"""Cuts GPUs and removes what was cut, and switches their MIG mode.

The calls of NVML that cut a GPU and remove what was cut.

Each function is called on the GPU's thread of ``dra_driver.node.nvml.client.client`` and is one
step: whatever
was done before it, and wherever that ended, doing it again is right.
"""

import ctypes
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import MigInstanceNotFound, NodeError, PlacementTaken, TimedOut
from dra_driver.model.gpus import GpuUuid, MigInstance, PartitionKey
from dra_driver.node.mig.capabilities import CONFIG_CAPABILITY
from dra_driver.node.mig.gpu_locks import RETRY_SECONDS, DeviceBusy, GpuLock, GpuLocks
from dra_driver.node.mig.instances import (
    ComputeProfilesOf,
    MigUuidReader,
    compute_instances,
    gpu_instance,
    instance_of,
    uuids_of,
    whole_compute_profile,
    whole_instance,
)
from dra_driver.node.mig.modes import GpuMigReader, MigModeSwitch
from dra_driver.node.nvml.api import IN_USE, INSUFFICIENT_RESOURCES, NvmlFunctions, nvml_error_code
from dra_driver.node.nvml.readers import read_mig_mode


class RetryableMigError(NodeError):
    """What NVML does not do, or not tell, at this moment: it is tried again."""


class InstanceNotRemoved(RetryableMigError):
    """NVML says that an instance was removed, and lists it all the same."""


class InstanceWithoutUuid(RetryableMigError):
    """NVML does not say how an instance is called, so it cannot be told from another's."""


@dataclass(frozen=True, slots=True)
class RemovalTarget:
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


_ANY_INSTANCE: Final = RemovalTarget()


def create_gpu_instance(
    functions: NvmlFunctions, handle: Any, key: PartitionKey, ask: ComputeProfilesOf
) -> str:
    """The GPU instance is there; the answer is its capability ("gpu0/mig/gi1")."""
    there = gpu_instance(functions, handle, key)
    return _home(functions, handle, _create(functions, handle, key) if there is None else there.id)


def create_absent_gpu_instance(
    functions: NvmlFunctions, handle: Any, key: PartitionKey, ask: ComputeProfilesOf
) -> str:
    """Like :func:`create_gpu_instance`; refuses where there is one already."""
    if (there := gpu_instance(functions, handle, key)) is not None:
        its = compute_instances(functions, there, ask(there))
        names = uuids_of(MigUuidReader(functions, handle), there, its)
        named = ", ".join([f"GPU instance {there.id}", *names])
        raise PlacementTaken(
            f"{key} is cut already, as {named}: it is left as it is; once it is removed, or "
            "published as it is, a claim can have it"
        )
    return _home(functions, handle, _create(functions, handle, key))


def create_compute_instance(
    functions: NvmlFunctions, handle: Any, key: PartitionKey, ask: ComputeProfilesOf
) -> MigInstance | None:
    """The GPU instance has its compute instance; both are the answer. None: it is not listed yet
    under a name."""
    gi = gpu_instance(functions, handle, key)
    if gi is None:
        raise NodeError(f"{key}: its GPU instance vanished: somebody else removed it")
    profiles = ask(gi)
    there = compute_instances(functions, gi, profiles)
    if not there:
        whole = whole_compute_profile(gi, profiles)
        if whole is None:
            raise NodeError(f"{key}: the driver has no compute instance that is all of it")
        functions.nvmlGpuInstanceCreateComputeInstance(gi.handle, int(whole.id))
    elif len(there) > 1 or not there[0].fills:
        raise NodeError(
            f"{key}: somebody else divided GPU instance {gi.id}: destroy its compute instances "
            f"with nvidia-smi mig -dci -gi {gi.id}"
        )
    return instance_of(functions, handle, gi, profiles)


def destroy_gpu_instance(
    functions: NvmlFunctions,
    handle: Any,
    key: PartitionKey,
    ask: ComputeProfilesOf,
    meant: RemovalTarget = _ANY_INSTANCE,
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
    names = uuids_of(MigUuidReader(functions, handle), gi, its) if meant != _ANY_INSTANCE else ()
    if its:
        other = meant.is_other(names, len(names) == len(its))
        if other is None:
            raise InstanceWithoutUuid(
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
        raise InstanceNotRemoved(
            f"{key}: NVML says that GPU instance {gi.id} is removed, and lists it"
        )
    return ()


def _home(functions: NvmlFunctions, handle: Any, gi: int) -> str:
    return f"gpu{functions.nvmlDeviceGetMinorNumber(handle)}/mig/gi{gi}"


def _create(functions: NvmlFunctions, handle: Any, key: PartitionKey) -> int:
    place = functions.c_nvmlGpuInstancePlacement_t(key.start, key.size)
    made = functions.nvmlDeviceCreateGpuInstanceWithPlacement(
        handle, key.profile_id, ctypes.byref(place)
    )
    return int(functions.nvmlGpuInstanceGetInfo(made).id)


log = logging.getLogger(__name__)
T = TypeVar("T")

Change = Callable[[NvmlFunctions, Any, PartitionKey, ComputeProfilesOf], T]

_APPEARS_SECONDS: Final = 2.0  # NVML lists what it made at once, or hardly later
_AGAIN_SECONDS: Final = 0.1


def _allow_nothing(capability: str) -> None:
    """Whoever cuts may do so."""


class MigPartitions:
    """The partitions of these GPUs. Safe to use from several threads; changes of one GPU go
    one after the other.

    *patience*: for how many seconds it is tried again where
    something is in use; callers for whom nobody waits may say less. *allow*: sees to it, as well as
    it can, that this process has a capability of MIG ("mig/config", "gpu0/mig/gi1"). What it may do
    NVML says.
    """

    def __init__(
        self,
        gpus: GpuMigReader,
        patience: float = RETRY_SECONDS,
        *,
        allow: Callable[[str], None] = _allow_nothing,
    ) -> None:
        self._nvml = gpus.nvml
        self._geometries = gpus.geometries
        self._allow = allow
        self._boards = gpus
        self._turns = GpuLocks(patience)
        self._modes = MigModeSwitch(gpus, self._turns)

    def mode(self, gpu: GpuUuid) -> bool | None:
        """Whether MIG mode is on; None: it has no such mode. NodeError: it does not answer."""
        found = self._boards.mode(gpu)
        return None if found is None else found[0]

    def set_mode(self, gpu: GpuUuid, on: bool, patience: float | None = None) -> None:
        """Have MIG mode on or off, now. NodeError: somebody uses the GPU, it has instances, or it
        takes a reset that did not happen; then the mode is what it was."""
        self._modes.set(gpu, on, patience)

    def reset_mode(self, gpu: GpuUuid, on: bool, patience: float | None = None) -> None:
        """Like :meth:`set_mode`, for a GPU that changes its mode by a reset (before Hopper): NVML
        resets it, where it can. A change that waits for one and is not wanted is taken back."""
        self._modes.reset(gpu, on, patience)

    def restore_mode(self, gpu: GpuUuid, on: bool) -> None:
        """Like :meth:`set_mode`, for what a claim leaves behind.

        A GPU that somebody uses, or that has instances, stays in the mode that it has, since a pod
        has to be able to end. One that is gone, and a driver that is not loaded, have none.
        """
        try:
            self._modes.set(gpu, on, None)
        except TimedOut:
            raise
        except DeviceBusy as error:
            log.warning("a GPU stays in its MIG mode: %s", error, extra={"gpu": gpu, "wanted": on})
        except NodeError as error:
            if self._boards.is_kept(gpu, error):
                raise
            log.warning("no MIG mode to restore", extra={"gpu": gpu, "error": str(error)})

    def create(
        self, gpu: GpuUuid, key: PartitionKey, new: bool = False, patience: float | None = None
    ) -> MigInstance:
        """Have this partition. What is there of it already is completed and stays, unless it has to
        be *new*.

        Taken: something is in its way, so that nothing was cut. NodeError: MIG mode is off, or NVML
        refuses it.
        """
        with self._turns.of(gpu, patience) as turn:
            if not self.mode(gpu):
                raise NodeError(
                    f"GPU {gpu}: {key} cannot be cut, since MIG mode is off: somebody turned it "
                    f"off, or the GPU was reset; nvidia-smi -i {gpu} -mig 1 turns it on"
                )
            self._allow(CONFIG_CAPABILITY)
            # Whoever makes something in an instance needs its capability, and so does a server of
            # MPS, which comes before the files of a container are looked for.
            home = self._create(
                turn, gpu, key, create_absent_gpu_instance if new else create_gpu_instance
            )
            self._allow(home)
            doing = f"making the compute instance of {key}"
            made = self._patiently(turn, gpu, doing, create_compute_instance, key)
            made = made or self._appears(gpu, key)
            self._allow(f"{home}/ci{made.ci}")
        log.info("partition cut", extra={"gpu": gpu, "partition": str(key), "uuid": made.uuid})
        return made

    def remove(
        self,
        gpu: GpuUuid,
        key: PartitionKey,
        uuid: GpuUuid | None = None,
        patience: float | None = None,
        *,
        unless: frozenset[GpuUuid] = frozenset(),
    ) -> None:
        """Have this partition no more, nor half of it. What is there now and is not called *uuid*,
        or is called one of *unless*, is somebody else's, and stays. NodeError: somebody uses it,
        NVML refuses, or does not say whose it is. With a GPU or a driver, what was cut goes,
        too."""
        facts = {"gpu": gpu, "partition": str(key)}
        try:
            with self._turns.of(gpu, patience) as turn:
                others = self._remove(turn, gpu, key, RemovalTarget(uuid, unless))
        except (TimedOut, DeviceBusy):
            raise
        except NodeError as error:
            if self._boards.is_kept(gpu, error):
                raise
            log.warning("no partition to remove", extra={"gpu": gpu, "error": str(error)})
            return
        if others:
            left = facts | {"uuid": str(uuid), "there": ", ".join(others)}
            log.warning("there is another instance where ours was: it stays", extra=left)
        else:
            log.info("partition removed", extra=facts)

    def keys(self, gpu: GpuUuid) -> tuple[PartitionKey, ...]:
        """Where it is cut now, half made instances included."""
        return tuple(one.key for one in self._boards.instances(gpu)) if self.mode(gpu) else ()

    def find(self, gpu: GpuUuid, key: PartitionKey) -> MigInstance:
        """The instance that this partition is. Vanished: it is not there, or not whole."""

        def call(functions: NvmlFunctions, handle: Any) -> MigInstance | None:
            on = read_mig_mode(functions, handle)
            ask = self._geometries.current.compute_profiles(functions, gpu)
            return whole_instance(functions, handle, key, ask) if on and on[0] else None

        found = self._nvml.on_gpu(gpu, f"looking for {key}", call)
        if found is None:
            raise MigInstanceNotFound(
                f"GPU {gpu}: the instance of {key} vanished: nvidia-smi, a MIG manager or a reset "
                "removed it; delete the pods of its claim, so that it is cut anew"
            )
        return found

    def _create(self, turn: GpuLock, gpu: GpuUuid, key: PartitionKey, create: Change[str]) -> str:
        """The capability of its GPU instance."""
        try:
            return self._patiently(turn, gpu, f"cutting {key}", create, key)
        except PlacementTaken as error:
            raise PlacementTaken(f"GPU {gpu}: {error}") from error
        except NodeError as error:
            if nvml_error_code(error) != INSUFFICIENT_RESOURCES:
                raise
            raise PlacementTaken(
                f"GPU {gpu} has no room for {key}: {self._in_the_way(gpu, key)}"
            ) from error.__cause__

    def _remove(
        self, turn: GpuLock, gpu: GpuUuid, key: PartitionKey, meant: RemovalTarget
    ) -> tuple[GpuUuid, ...]:
        """How that is called which is there instead, and stays."""
        if not self.mode(gpu):  # nothing is cut
            return ()
        self._allow(CONFIG_CAPABILITY)
        change = partial(destroy_gpu_instance, meant=meant)
        return self._patiently(turn, gpu, f"removing {key}", change, key)

    def _in_the_way(self, gpu: GpuUuid, key: PartitionKey) -> str:
        cut = self._boards.instances(gpu)
        over = [one for one in cut if one.key.placement.overlaps(key.placement)]
        if over:
            names = ", ".join(map(str, over))
            return f"{names} lies there; it can be cut once that is removed"
        beside = ", ".join(map(str, cut)) or "nothing"
        return f"its engines or its memory are used up ({beside} is cut of it)"

    def _appears(self, gpu: GpuUuid, key: PartitionKey) -> MigInstance:
        """What was made, once NVML lists it as a device."""
        deadline = Deadline(_APPEARS_SECONDS)
        while True:
            try:
                return self.find(gpu, key)
            except MigInstanceNotFound:
                if deadline.expired:
                    raise
            time.sleep(_AGAIN_SECONDS)

    def _patiently(
        self, turn: GpuLock, gpu: GpuUuid, doing: str, change: Change[T], key: PartitionKey
    ) -> T:
        """Do it, again and again while it is refused since something is in use."""

        def call(functions: NvmlFunctions, handle: Any) -> T:
            compute_profiles = self._geometries.current.compute_profiles(functions, gpu)
            return change(functions, handle, key, compute_profiles)

        while True:
            try:
                return self._nvml.on_gpu(gpu, doing, call, turn.seconds)
            except TimedOut:
                raise
            except NodeError as error:
                if nvml_error_code(error) != IN_USE and not isinstance(error, RetryableMigError):
                    raise
                if not turn.again():
                    raise self._held(gpu, doing, key, error) from error.__cause__

    def _held(self, gpu: GpuUuid, doing: str, key: PartitionKey, error: NodeError) -> DeviceBusy:
        if isinstance(error, RetryableMigError):
            return DeviceBusy(f"GPU {gpu}, {error}: it is tried again")
        held = self._boards.who(gpu, key)
        return DeviceBusy(
            *(f"GPU {gpu}, {doing}: in use, {words}; end what uses it" for words in held)
        )
