"""Switches the MIG mode of GPUs, and reads what decides whether that can be done."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.gpus import (
    GpuUuid,
    GuestRestriction,
    PartitionKey,
    guest_mode_problem,
    reset_instructions,
)
from dra_driver.node.mig.geometry import MigGeometries
from dra_driver.node.mig.gpu_holders import GpuHolders
from dra_driver.node.mig.gpu_locks import ChangeDeadline, DeviceBusy, GpuLocks
from dra_driver.node.mig.instances import GpuInstanceDescription
from dra_driver.node.nvml.api import DRIVER_STATE_LOST, IN_USE, NvmlFunctions, nvml_error_code
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.readers import guest_restriction, read_mig_mode


class GpuMigReader:
    """The GPUs of *nvml*. *loaded*: whether the driver is."""

    def __init__(
        self, nvml: Nvml, geometries: MigGeometries, holders: GpuHolders, loaded: Callable[[], bool]
    ) -> None:
        self.nvml = nvml
        self.geometries = geometries
        self._holders = holders
        self._loaded = loaded

    def mode(self, gpu: GpuUuid) -> tuple[bool, bool] | None:
        """MIG mode now, and after the next reset. None: it has no such mode."""
        return self.nvml.on_gpu(gpu, "reading its MIG mode", read_mig_mode)

    def modes(
        self, gpus: Iterable[GpuUuid]
    ) -> Mapping[GpuUuid, tuple[bool, bool] | NodeError | None]:
        """Like :meth:`mode` for each of *gpus*, or why it cannot be told."""
        return self.nvml.on_gpus(gpus, "reading its MIG mode", read_mig_mode)

    def fixed(self, gpu: GpuUuid) -> GuestRestriction:
        """What of its MIG mode and partitions nobody can change on this machine."""
        return self.nvml.on_gpu(gpu, "reading whether it is a virtual machine's", guest_restriction)

    def persists(self, gpu: GpuUuid) -> bool:
        """Whether persistence mode is on, as far as that is told."""

        def call(functions: NvmlFunctions, handle: Any) -> bool:
            return bool(functions.nvmlDeviceGetPersistenceMode(handle))

        try:
            return self.nvml.on_gpu(gpu, "reading its persistence mode", call)
        except NodeError:
            return False

    def instances(self, gpu: GpuUuid) -> tuple[GpuInstanceDescription, ...]:
        """Its GPU instances, while MIG mode is on."""

        def call(functions: NvmlFunctions, handle: Any) -> tuple[GpuInstanceDescription, ...]:
            geometry = self.geometries.current
            profiles = geometry.profiles(functions, handle, gpu, True)
            return geometry.gpu_instances(functions, handle, gpu).describe(profiles)

        return self.nvml.on_gpu(gpu, "reading its GPU instances", call)

    def describe_holders(self, gpu: GpuUuid, key: PartitionKey | None = None) -> tuple[str, str]:
        """Which processes use the instance of this partition, or else the GPU: for the log, and for
        tenants, who are not told of processes of others."""
        gi = None if key is None else self._instance(gpu, key)
        holders = (() if gi is None else self._holders.of(gpu, gi)) or self._holders.of(gpu)
        description = self._holders.in_words(holders)
        if not holders:
            return description, description
        return description, "held by processes that the log of this node's plugin names"

    def is_kept(self, gpu: GpuUuid, error: NodeError) -> bool:
        """Whether the GPU and its driver are there, so that what could not be changed (*error*)
        still exists."""
        if nvml_error_code(error) in DRIVER_STATE_LOST or not self._loaded():
            return False
        states = self.nvml.dynamic_states(range(self.nvml.system().gpus)).values()
        return any(
            nvml_error_code(state) not in DRIVER_STATE_LOST
            if isinstance(state, NodeError)
            else state.uuid == gpu
            for state in states
        )

    def _instance(self, gpu: GpuUuid, key: PartitionKey) -> int | None:
        def call(functions: NvmlFunctions, handle: Any) -> int | None:
            instance = self.geometries.current.gpu_instances(functions, handle, gpu).find(key)
            return None if instance is None else instance.id

        try:
            return self.nvml.on_gpu(gpu, f"looking for {key}", call)
        except NodeError:
            return None


log = logging.getLogger(__name__)

_RESET_SECONDS: Final = 30.0  # no claim waits for one


class MigModeSwitch:
    """Switches the MIG mode of these GPUs; changes of one GPU go one after the other."""

    def __init__(self, gpus: GpuMigReader, locks: GpuLocks) -> None:
        self._nvml = gpus.nvml
        self._gpus = gpus
        self._locks = locks

    def set(self, gpu: GpuUuid, on: bool, patience: float | None) -> None:
        """Switch MIG mode now. TimedOut: it can be on, off or pending. Any other NodeError: it is
        what it was."""
        with self._locks.hold(gpu, patience) as deadline:
            self._switch(deadline, gpu, on)

    def reset(self, gpu: GpuUuid, on: bool, patience: float | None) -> None:
        """Like :meth:`set`, where it takes a reset. A change that waits for one and is not wanted
        is taken back."""
        with self._locks.hold(gpu, patience, _RESET_SECONDS) as deadline:
            if self._gpus.mode(gpu) == (on, not on):
                self._ask_for(deadline, gpu, on)
            self._switch(deadline, gpu, on)

    def _switch(self, deadline: ChangeDeadline, gpu: GpuUuid, on: bool) -> None:
        before = self._gpus.mode(gpu)
        if before is None:
            raise NodeError(f"GPU {gpu} has no MIG mode: select a GPU that can be partitioned")
        if before[0] == on:
            return
        if (fixed := self._gpus.fixed(gpu)) is not GuestRestriction.NOTHING:
            raise DeviceBusy(f"{_cannot(gpu, on)}: {guest_mode_problem(fixed, gpu, on)}")
        if not on and (instances := self._gpus.instances(gpu)):
            names = ", ".join(map(str, instances))
            raise DeviceBusy(f"{_cannot(gpu, on)}, since it has {names}")
        while (answer := self._ask_for(deadline, gpu, on)) == IN_USE and deadline.retry():
            pass
        mode = self._gpus.mode(gpu)
        if mode is not None and mode[0] == on:
            log.info("MIG mode switched", extra={"gpu": gpu, "on": on})
            return
        holders, remark = self._gpus.describe_holders(gpu), ""
        if self._gpus.persists(gpu):
            remark = f"; persistence mode is on, which can hold it too (nvidia-smi -i {gpu} -pm 0)"
        self._restore_pending(deadline, gpu, before[1])
        raise DeviceBusy(
            *(_why_not_switched(gpu, on, answer, holder + remark) for holder in holders)
        )

    def _ask_for(self, deadline: ChangeDeadline, gpu: GpuUuid, on: bool) -> int:
        """NVML's code for whether the change has taken effect: 0, IN_USE, RESET_REQUIRED, …"""

        def call(functions: NvmlFunctions, handle: Any) -> int:
            return functions.nvmlDeviceSetMigMode(handle, int(on))

        try:
            doing = f"turning MIG mode {'on' if on else 'off'}"
            return self._nvml.on_gpu(gpu, doing, call, deadline.seconds)
        except TimedOut:
            raise
        except NodeError as error:
            if nvml_error_code(error) != IN_USE:
                raise
            return IN_USE

    def _restore_pending(self, deadline: ChangeDeadline, gpu: GpuUuid, pending: bool) -> None:
        """Take the change back: a reset for another reason must not change the mode later."""
        try:
            mode = self._gpus.mode(gpu)
            if mode is not None and mode[1] != pending:
                self._ask_for(deadline, gpu, pending)
        except TimedOut:
            raise
        except NodeError as error:
            log.warning("a change of MIG mode stays pending: %s", error, extra={"gpu": gpu})


def _why_not_switched(gpu: GpuUuid, on: bool, answer: int, holder: str) -> str:
    problem = _cannot(gpu, on)
    if answer == IN_USE:
        return f"{problem}: in use, {holder}; end what uses it, monitoring agents such as DCGM too"
    return (
        f"{problem} without a reset, and it was not reset (NVML's code {answer}), {holder}; "
        f"nvidia-smi -i {gpu} -mig {int(on)}, then: {reset_instructions(gpu)}"
    )


def _cannot(gpu: GpuUuid, on: bool) -> str:
    return f"GPU {gpu}: MIG mode cannot be turned {'on' if on else 'off'}"
