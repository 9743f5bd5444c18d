"""Creates and removes the partitions of GPUs, and switches their MIG mode.

Each function here is called on the GPU's thread (``dra_driver.node.nvml.client``) and is one step,
which can be repeated whatever was done before it, and wherever that ended.
"""

import ctypes
import logging
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Final, TypeVar

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import MigInstanceNotFound, NodeError, PlacementTaken, TimedOut
from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import GpuUuid, MigInstance, PartitionKey
from dra_driver.node.mig.capabilities import CONFIG_CAPABILITY
from dra_driver.node.mig.gpu_locks import RETRY_SECONDS, ChangeDeadline, DeviceBusy, GpuLocks
from dra_driver.node.mig.instances import GpuInstances, whole_compute_profile
from dra_driver.node.mig.modes import GpuMigReader, MigModeSwitch
from dra_driver.node.nvml.api import IN_USE, INSUFFICIENT_RESOURCES, NvmlFunctions, nvml_error_code
from dra_driver.node.nvml.readers import read_mig_mode


class RetryableMigError(NodeError):
    """NVML did not remove an instance, or does not tell its UUID, at this moment: it is tried
    again."""


@frozen
class RemovalTarget:
    """Which instance is to be removed from its placement, by what is known of it."""

    uuid: GpuUuid | None = None  # None: it is not known
    unless: frozenset[GpuUuid] = frozenset()  # UUIDs of instances of others, which stay

    def is_other(self, uuids: Collection[GpuUuid], complete: bool) -> bool | None:
        """Whether the instance with these *uuids* is another one. None: that cannot be told, since
        *uuids* are not *complete*."""
        if not self.unless.isdisjoint(uuids):
            return True
        if self.uuid in uuids or (self.uuid is None and not self.unless):
            return False
        return self.uuid is not None if complete else None


_ANY_INSTANCE: Final = RemovalTarget()


def create_gpu_instance(gpu_instances: GpuInstances, key: PartitionKey) -> str:
    """The GPU instance is there; the answer is its capability ("gpu0/mig/gi1")."""
    existing = gpu_instances.find(key)
    gi = _create_gpu_instance(gpu_instances, key) if existing is None else existing.id
    return _gpu_instance_capability(gpu_instances, gi)


def create_absent_gpu_instance(gpu_instances: GpuInstances, key: PartitionKey) -> str:
    """Like :func:`create_gpu_instance`; refuses where there is one already."""
    if (existing := gpu_instances.find(key)) is not None:
        uuids = gpu_instances.uuids(existing, gpu_instances.compute_instances(existing))
        description = ", ".join([f"GPU instance {existing.id}", *uuids])
        raise PlacementTaken(
            f"{key} exists already, as {description}: it is left as it is; once it is removed, or "
            "published as it is, a claim can have it"
        )
    return _gpu_instance_capability(gpu_instances, _create_gpu_instance(gpu_instances, key))


def create_compute_instance(gpu_instances: GpuInstances, key: PartitionKey) -> MigInstance | None:
    """The GPU instance has its compute instance; both are the answer. None: it is not listed yet
    under a name."""
    gi = gpu_instances.find(key)
    if gi is None:
        raise NodeError(f"{key}: its GPU instance vanished: somebody else removed it")
    computes = gpu_instances.compute_instances(gi)
    if not computes:
        whole_profile = whole_compute_profile(gi, gpu_instances.compute_profiles_of(gi))
        if whole_profile is None:
            raise NodeError(f"{key}: the driver has no compute instance that is all of it")
        create = gpu_instances.functions.nvmlGpuInstanceCreateComputeInstance
        create(gi.handle, int(whole_profile.id))
    elif len(computes) > 1 or not computes[0].fills:
        raise NodeError(
            f"{key}: somebody else divided GPU instance {gi.id}: destroy its compute instances "
            f"with nvidia-smi mig -dci -gi {gi.id}"
        )
    return gpu_instances.whole(gi)


def destroy_gpu_instance(
    gpu_instances: GpuInstances, key: PartitionKey, target: RemovalTarget = _ANY_INSTANCE
) -> tuple[GpuUuid, ...]:
    """The GPU instance is gone, its compute instances before it.

    An instance that is not the *target* stays: the answer is its UUIDs. A GPU instance without
    compute instances has no UUID, and is taken for the target. RetryableMigError: NVML does not
    tell its UUID now, or lists it after it was removed.
    """
    gi = gpu_instances.find(key)
    if gi is None:
        return ()
    computes = gpu_instances.compute_instances(gi)
    uuids = gpu_instances.uuids(gi, computes) if target != _ANY_INSTANCE else ()
    if computes:
        is_other = target.is_other(uuids, len(uuids) == len(computes))
        if is_other is None:
            raise RetryableMigError(
                f"{key}: NVML does not say now how GPU instance {gi.id} is called, so it cannot be "
                "told from another's"
            )
        if is_other:
            return uuids
    for compute in computes:
        gpu_instances.functions.nvmlComputeInstanceDestroy(compute.handle)
    gpu_instances.functions.nvmlGpuInstanceDestroy(gi.handle)
    remaining = gpu_instances.find(key)
    if remaining is not None and remaining.id == gi.id:
        raise RetryableMigError(
            f"{key}: NVML says that GPU instance {gi.id} is removed, and lists it"
        )
    return ()


def _gpu_instance_capability(gpu_instances: GpuInstances, gi: int) -> str:
    minor = gpu_instances.functions.nvmlDeviceGetMinorNumber(gpu_instances.handle)
    return f"gpu{minor}/mig/gi{gi}"


def _create_gpu_instance(gpu_instances: GpuInstances, key: PartitionKey) -> int:
    functions = gpu_instances.functions
    placement = functions.c_nvmlGpuInstancePlacement_t(key.start, key.size)
    handle = functions.nvmlDeviceCreateGpuInstanceWithPlacement(
        gpu_instances.handle, key.profile_id, ctypes.byref(placement)
    )
    return int(functions.nvmlGpuInstanceGetInfo(handle).id)


log = logging.getLogger(__name__)
T = TypeVar("T")

Change = Callable[[GpuInstances, PartitionKey], T]

_APPEARS_SECONDS: Final = 2.0  # NVML lists a new instance at once, or hardly later
_AGAIN_SECONDS: Final = 0.1


def _allow_nothing(capability: str) -> None:
    """This process may change partitions."""


class MigPartitions:
    """The partitions of these GPUs. Safe to use from several threads; changes of one GPU go one
    after the other.

    *patience*: for how many seconds a change is tried again where something is in use; a caller for
    whom nobody waits may say less. *allow*: gives this process a capability of MIG ("mig/config",
    "gpu0/mig/gi1"), as far as that can be done; NVML refuses what it may not do.
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
        self._gpus = gpus
        self._locks = GpuLocks(patience)
        self._modes = MigModeSwitch(gpus, self._locks)

    def mode(self, gpu: GpuUuid) -> bool | None:
        """Whether MIG mode is on; None: it has no such mode. NodeError: it does not answer."""
        mode = self._gpus.mode(gpu)
        return None if mode is None else mode[0]

    def in_mig_mode(self, gpus: Iterable[GpuUuid]) -> frozenset[GpuUuid]:
        """Those of *gpus* whose MIG mode is on, as far as they answer."""
        modes = self._gpus.modes(gpus)
        return frozenset(gpu for gpu, mode in modes.items() if isinstance(mode, tuple) and mode[0])

    def set_mode(self, gpu: GpuUuid, on: bool, patience: float | None = None) -> None:
        """Switch MIG mode now. NodeError: somebody uses the GPU, it has instances, or it takes a
        reset that did not happen; then the mode is what it was."""
        self._modes.set(gpu, on, patience)

    def reset_mode(self, gpu: GpuUuid, on: bool, patience: float | None = None) -> None:
        """Like :meth:`set_mode`, for a GPU that changes its mode by a reset (before Hopper): NVML
        resets it, where it can. A change that waits for one and is not wanted is taken back."""
        self._modes.reset(gpu, on, patience)

    def restore_mode(self, gpu: GpuUuid, on: bool) -> None:
        """Like :meth:`set_mode`, when a claim ends.

        A GPU that somebody uses, or that has instances, stays in its mode, since a pod has to be
        able to end. A GPU that is gone, or whose driver is not loaded, has no mode.
        """
        try:
            self._modes.set(gpu, on, None)
        except TimedOut:
            raise
        except DeviceBusy as error:
            log.warning("a GPU stays in its MIG mode: %s", error, extra={"gpu": gpu, "wanted": on})
        except NodeError as error:
            if self._gpus.is_kept(gpu, error):
                raise
            log.warning("no MIG mode to restore", extra={"gpu": gpu, "error": str(error)})

    def create(
        self, gpu: GpuUuid, key: PartitionKey, new: bool = False, patience: float | None = None
    ) -> MigInstance:
        """Create this partition. A partition that exists in part is completed, unless it has to be
        *new*.

        PlacementTaken: something is in its way, and nothing was created. NodeError: MIG mode is
        off, or NVML refuses it.
        """
        with self._locks.hold(gpu, patience) as deadline:
            if not self.mode(gpu):
                raise NodeError(
                    f"GPU {gpu}: {key} cannot be created, since MIG mode is off: somebody turned "
                    f"it off, or the GPU was reset; nvidia-smi -i {gpu} -mig 1 turns it on"
                )
            self._allow(CONFIG_CAPABILITY)
            # A compute instance is created with the capability of its GPU instance. A server of
            # MPS needs that of both, and starts before the files of a container are made.
            capability = self._create(
                deadline, gpu, key, create_absent_gpu_instance if new else create_gpu_instance
            )
            self._allow(capability)
            doing = f"creating the compute instance of {key}"
            instance = self._patiently(deadline, gpu, doing, create_compute_instance, key)
            instance = instance or self._appears(gpu, key)
            self._allow(f"{capability}/ci{instance.ci}")
        log.info(
            "partition created", extra={"gpu": gpu, "partition": str(key), "uuid": instance.uuid}
        )
        return instance

    def remove(
        self,
        gpu: GpuUuid,
        key: PartitionKey,
        uuid: GpuUuid | None = None,
        patience: float | None = None,
        *,
        unless: frozenset[GpuUuid] = frozenset(),
    ) -> None:
        """Remove this partition, whole or not. An instance in its place that does not have this
        *uuid*, or has one of *unless*, is somebody else's, and stays. NodeError: somebody uses it,
        NVML refuses, or does not tell its UUID. A GPU that is gone has no partitions."""
        facts = {"gpu": gpu, "partition": str(key)}
        try:
            with self._locks.hold(gpu, patience) as deadline:
                unmanaged = self._remove(deadline, gpu, key, RemovalTarget(uuid, unless))
        except (TimedOut, DeviceBusy):
            raise
        except NodeError as error:
            if self._gpus.is_kept(gpu, error):
                raise
            log.warning("no partition to remove", extra={"gpu": gpu, "error": str(error)})
            return
        if unmanaged:
            details = facts | {"uuid": str(uuid), "existing": ", ".join(unmanaged)}
            log.warning("there is another instance where ours was: it stays", extra=details)
        else:
            log.info("partition removed", extra=facts)

    def keys(self, gpu: GpuUuid) -> tuple[PartitionKey, ...]:
        """Its partitions now, half created ones included."""
        return (
            tuple(instance.key for instance in self._gpus.instances(gpu)) if self.mode(gpu) else ()
        )

    def find(self, gpu: GpuUuid, key: PartitionKey) -> MigInstance:
        """The instance of this partition. MigInstanceNotFound: it is not there, or not whole."""

        def call(functions: NvmlFunctions, handle: Any) -> MigInstance | None:
            mode = read_mig_mode(functions, handle)
            gpu_instances = self._geometries.current.gpu_instances(functions, handle, gpu)
            gi = gpu_instances.find(key) if mode and mode[0] else None
            return None if gi is None else gpu_instances.whole(gi)

        instance = self._nvml.on_gpu(gpu, f"looking for {key}", call)
        if instance is None:
            raise MigInstanceNotFound(
                f"GPU {gpu}: the instance of {key} vanished: nvidia-smi, a MIG manager or a reset "
                "removed it; delete the pods of its claim, so that it is created anew"
            )
        return instance

    def _create(
        self, deadline: ChangeDeadline, gpu: GpuUuid, key: PartitionKey, create: Change[str]
    ) -> str:
        """The capability of its GPU instance."""
        try:
            return self._patiently(deadline, gpu, f"creating {key}", create, key)
        except PlacementTaken as error:
            raise PlacementTaken(f"GPU {gpu}: {error}") from error
        except NodeError as error:
            if nvml_error_code(error) != INSUFFICIENT_RESOURCES:
                raise
            raise PlacementTaken(
                f"GPU {gpu} has no room for {key}: {self._in_the_way(gpu, key)}"
            ) from error.__cause__

    def _remove(
        self, deadline: ChangeDeadline, gpu: GpuUuid, key: PartitionKey, target: RemovalTarget
    ) -> tuple[GpuUuid, ...]:
        """The UUIDs of an instance of somebody else, which stays."""
        if not self.mode(gpu):  # it has no instances
            return ()
        self._allow(CONFIG_CAPABILITY)
        change = partial(destroy_gpu_instance, target=target)
        return self._patiently(deadline, gpu, f"removing {key}", change, key)

    def _in_the_way(self, gpu: GpuUuid, key: PartitionKey) -> str:
        instances = self._gpus.instances(gpu)
        overlapping = [
            instance for instance in instances if instance.key.placement.overlaps(key.placement)
        ]
        if overlapping:
            names = ", ".join(map(str, overlapping))
            return f"{names} lies there; it can be created once that is removed"
        beside = ", ".join(map(str, instances)) or "nothing"
        return f"its engines or its memory are used up ({beside} is there)"

    def _appears(self, gpu: GpuUuid, key: PartitionKey) -> MigInstance:
        """The new instance, once NVML lists it as a device."""
        deadline = Deadline(_APPEARS_SECONDS)
        while True:
            try:
                return self.find(gpu, key)
            except MigInstanceNotFound:
                if deadline.expired:
                    raise
            time.sleep(_AGAIN_SECONDS)

    def _patiently(
        self,
        deadline: ChangeDeadline,
        gpu: GpuUuid,
        doing: str,
        change: Change[T],
        key: PartitionKey,
    ) -> T:
        """Make this change, again and again while something is in use."""

        def call(functions: NvmlFunctions, handle: Any) -> T:
            return change(self._geometries.current.gpu_instances(functions, handle, gpu), key)

        while True:
            try:
                return self._nvml.on_gpu(gpu, doing, call, deadline.seconds)
            except TimedOut:
                raise
            except NodeError as error:
                if nvml_error_code(error) != IN_USE and not isinstance(error, RetryableMigError):
                    raise
                if not deadline.retry():
                    raise self._busy(gpu, doing, key, error) from error.__cause__

    def _busy(self, gpu: GpuUuid, doing: str, key: PartitionKey, error: NodeError) -> DeviceBusy:
        if isinstance(error, RetryableMigError):
            return DeviceBusy(f"GPU {gpu}, {error}: it is tried again")
        holders = self._gpus.describe_holders(gpu, key)
        return DeviceBusy(
            *(f"GPU {gpu}, {doing}: in use, {holder}; end what uses it" for holder in holders)
        )
