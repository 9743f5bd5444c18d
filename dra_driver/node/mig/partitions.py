"""Cuts GPUs and removes what was cut, and switches their MIG mode."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from dra_driver.errors import NodeError, TimedOut, Vanished
from dra_driver.model.devices import GpuUuid
from dra_driver.model.mig import Instance, PartitionKey
from dra_driver.node.mig import cutting
from dra_driver.node.mig.holders import Holders, in_words
from dra_driver.node.mig.instances import Cut, everything_cut, gpu_instance, instance
from dra_driver.node.nvml import Nvml
from dra_driver.node.nvml_codes import IN_USE, INSUFFICIENT_RESOURCES, NOTHING_IS_KEPT, code
from dra_driver.node.nvml_functions import Functions
from dra_driver.node.nvml_readers import mig_mode

log = logging.getLogger(__name__)

Change = Callable[[Functions, Any, PartitionKey], None]

_CHANGE_SECONDS: Final = 20.0  # cutting takes tenths of a second, a mode with a reset some seconds
_TURN_SECONDS: Final = 20.0
_AGAIN_SECONDS: Final = 0.2


class _Held(NodeError):
    """Somebody uses what was to be changed, so it is as it was."""


class Partitions:
    """The partitions of the GPUs of *nvml*. Safe to use from several threads; changes of one GPU go
    one after the other.

    *loaded*: whether the driver is. *patience*: for how many seconds it is tried again where
    something is in use.
    """

    def __init__(
        self, nvml: Nvml, holders: Holders, loaded: Callable[[], bool], patience: float = 10.0
    ) -> None:
        self._nvml = nvml
        self._holders = holders
        self._loaded = loaded
        self._patience = patience
        self._turns: dict[GpuUuid, threading.Lock] = {}
        self._lock = threading.Lock()

    def mode(self, gpu: GpuUuid) -> bool | None:
        """Whether MIG mode is on; None: it has no such mode. NodeError: it does not answer."""
        found = self._mode(gpu)
        return None if found is None else found[0]

    def set_mode(self, gpu: GpuUuid, on: bool) -> None:
        """Have MIG mode on or off, now. NodeError: somebody uses the GPU, it has instances, or it
        takes a reset that did not happen; then the mode is what it was."""
        with self._turn(gpu):
            self._switch(gpu, on)

    def reset_mode(self, gpu: GpuUuid, on: bool) -> None:
        """Like :meth:`set_mode`, for a GPU that changes its mode by a reset (before Hopper): NVML
        resets it, where it can. A change that waits for one and is not wanted is taken back."""
        with self._turn(gpu):
            if self._mode(gpu) == (on, not on):
                self._ask_for_mode(gpu, on)
            self._switch(gpu, on)

    def restore_mode(self, gpu: GpuUuid, on: bool) -> None:
        """Like :meth:`set_mode`, for what a claim leaves behind.

        A GPU that somebody uses, or that has instances, stays in the mode that it has, since a pod
        has to be able to end. One that is gone, and a driver that is not loaded, have none.
        """
        try:
            self.set_mode(gpu, on)
        except TimedOut:
            raise
        except _Held as error:
            log.warning("a GPU stays in its MIG mode: %s", error, extra={"gpu": gpu, "wanted": on})
        except NodeError as error:
            if self._is_kept(gpu, error):
                raise
            log.warning("no MIG mode to restore", extra={"gpu": gpu, "error": str(error)})

    def cut(self, gpu: GpuUuid, key: PartitionKey) -> Instance:
        """Have this partition. What is there of it already is completed and stays.

        NodeError: something is in its way, MIG mode is off, or NVML refuses it.
        """
        with self._turn(gpu):
            if not self.mode(gpu):
                raise NodeError(
                    f"GPU {gpu}: {key} cannot be cut, since MIG mode is off: somebody turned it "
                    f"off, or the GPU was reset; nvidia-smi -i {gpu} -mig 1 turns it on"
                )
            self._create(gpu, key)
            self._patiently(gpu, f"making the compute instance of {key}", cutting.fill, key)
            made = self._appears(gpu, key)
        log.info("partition cut", extra={"gpu": gpu, "partition": str(key), "uuid": made.uuid})
        return made

    def remove(self, gpu: GpuUuid, key: PartitionKey) -> None:
        """Have this partition no more, nor half of it. NodeError: somebody uses it, or NVML
        refuses. With a GPU or a driver, what was cut goes, too."""
        try:
            with self._turn(gpu):
                if self.mode(gpu):  # else nothing is cut
                    self._patiently(gpu, f"removing {key}", cutting.destroy, key)
        except (TimedOut, _Held):
            raise
        except NodeError as error:
            if self._is_kept(gpu, error):
                raise
            log.warning("no partition to remove", extra={"gpu": gpu, "error": str(error)})
        else:
            log.info("partition removed", extra={"gpu": gpu, "partition": str(key)})

    def taken(self, gpu: GpuUuid) -> tuple[PartitionKey, ...]:
        """Where it is cut now, half made instances included."""
        return tuple(one.key for one in self._cut(gpu)) if self.mode(gpu) else ()

    def find(self, gpu: GpuUuid, key: PartitionKey) -> Instance:
        """The instance that this partition is. Vanished: it is not there, or not whole."""

        def call(functions: Functions, handle: Any) -> Instance | None:
            on = mig_mode(functions, handle)
            return instance(functions, handle, key) if on and on[0] else None

        found = self._nvml.on_gpu(gpu, f"looking for {key}", call)
        if found is None:
            raise Vanished(
                f"GPU {gpu}: the instance of {key} vanished: nvidia-smi, a MIG manager or a reset "
                "removed it; delete the pods of its claim, so that it is cut anew"
            )
        return found

    def _create(self, gpu: GpuUuid, key: PartitionKey) -> None:
        try:
            self._patiently(gpu, f"cutting {key}", cutting.create, key)
        except NodeError as error:
            if code(error) != INSUFFICIENT_RESOURCES:
                raise
            raise NodeError(
                f"GPU {gpu} has no room for {key}: {self._in_the_way(gpu, key)}"
            ) from error.__cause__

    def _in_the_way(self, gpu: GpuUuid, key: PartitionKey) -> str:
        cut = self._cut(gpu)
        over = [one for one in cut if one.key.placement.overlaps(key.placement)]
        if over:
            names = ", ".join(map(str, over))
            return (
                f"{names} lies there and was not made for a claim; remove it with nvidia-smi mig, "
                "or wait until whoever made it does"
            )
        beside = ", ".join(map(str, cut)) or "nothing"
        return f"its engines or its memory are used up ({beside} is cut of it)"

    def _appears(self, gpu: GpuUuid, key: PartitionKey) -> Instance:
        """What was made, once NVML lists it as a device."""
        until = time.monotonic() + self._patience
        while True:
            try:
                return self.find(gpu, key)
            except Vanished:
                if time.monotonic() >= until:
                    raise
            time.sleep(_AGAIN_SECONDS)

    def _patiently(self, gpu: GpuUuid, doing: str, change: Change, key: PartitionKey) -> None:
        """Do it, again and again while it is refused since something is in use."""

        def call(functions: Functions, handle: Any) -> None:
            change(functions, handle, key)

        until = time.monotonic() + self._patience
        while True:
            try:
                return self._nvml.on_gpu(gpu, doing, call, _CHANGE_SECONDS)
            except TimedOut:
                raise
            except NodeError as error:
                if code(error) != IN_USE:
                    raise
                if time.monotonic() >= until:
                    raise _Held(
                        f"GPU {gpu}, {doing}: in use, {self._who(gpu, key)}; end what uses it"
                    ) from error.__cause__
            time.sleep(_AGAIN_SECONDS)

    def _who(self, gpu: GpuUuid, key: PartitionKey) -> str:
        """Who uses the instance; where there is none yet, the GPU."""

        def call(functions: Functions, handle: Any) -> int | None:
            found = gpu_instance(functions, handle, key)
            return None if found is None else found.id

        try:
            gi = self._nvml.on_gpu(gpu, f"looking for {key}", call)
        except NodeError:
            gi = None
        return in_words(self._holders.of(gpu, gi) or self._holders.of(gpu))

    def _mode(self, gpu: GpuUuid) -> tuple[bool, bool] | None:
        return self._nvml.on_gpu(gpu, "reading its MIG mode", mig_mode)

    def _switch(self, gpu: GpuUuid, on: bool) -> None:
        before = self._mode(gpu)
        if before is None:
            raise NodeError(f"GPU {gpu} has no MIG mode: select a GPU that can be cut")
        if before[0] == on:
            return
        if not on and (cut := self._cut(gpu)):
            names = ", ".join(map(str, cut))
            raise _Held(f"GPU {gpu}: MIG mode cannot be turned off, since it has {names}")
        until = time.monotonic() + self._patience
        while (said := self._ask_for_mode(gpu, on)) == IN_USE and time.monotonic() < until:
            time.sleep(_AGAIN_SECONDS)
        if self.mode(gpu) == on:
            log.info("MIG mode switched", extra={"gpu": gpu, "on": on})
            return
        held = in_words(self._holders.of(gpu))
        self._put_back(gpu, before[1])
        raise _Held(_why_not_switched(gpu, on, said, held))

    def _ask_for_mode(self, gpu: GpuUuid, on: bool) -> int:
        """What NVML says about the change taking effect: 0, IN_USE, RESET_REQUIRED, …"""

        def call(functions: Functions, handle: Any) -> int:
            return functions.nvmlDeviceSetMigMode(handle, int(on))

        try:
            doing = f"turning MIG mode {'on' if on else 'off'}"
            return self._nvml.on_gpu(gpu, doing, call, _CHANGE_SECONDS)
        except TimedOut:
            raise
        except NodeError as error:
            if code(error) != IN_USE:
                raise
            return IN_USE

    def _put_back(self, gpu: GpuUuid, pending: bool) -> None:
        """No reset that comes for another reason is to change the mode."""
        try:
            found = self._mode(gpu)
            if found is not None and found[1] != pending:
                self._ask_for_mode(gpu, pending)
        except NodeError as error:
            log.warning("a change of MIG mode stays pending: %s", error, extra={"gpu": gpu})

    def _cut(self, gpu: GpuUuid) -> tuple[Cut, ...]:
        return self._nvml.on_gpu(gpu, "reading what is cut of it", everything_cut)

    def _is_kept(self, gpu: GpuUuid, error: NodeError) -> bool:
        """Whether there is a GPU, and a driver, that has what *error* says could not be changed."""
        if code(error) in NOTHING_IS_KEPT or not self._loaded():
            return False
        listed = self._nvml.glances(range(self._nvml.system().gpus)).values()
        return any(
            code(one) not in NOTHING_IS_KEPT if isinstance(one, NodeError) else one.uuid == gpu
            for one in listed
        )

    @contextmanager
    def _turn(self, gpu: GpuUuid) -> Iterator[None]:
        with self._lock:
            turn = self._turns.setdefault(gpu, threading.Lock())
        if not turn.acquire(timeout=_TURN_SECONDS):
            raise TimedOut(
                f"GPU {gpu}: another change of its partitions is not done after "
                f"{_TURN_SECONDS:g} s; look for Xid and NVRM in the kernel log"
            )
        try:
            yield
        finally:
            turn.release()


def _why_not_switched(gpu: GpuUuid, on: bool, said: int, held: str) -> str:
    wanted = f"GPU {gpu}: MIG mode cannot be turned {'on' if on else 'off'}"
    if said == IN_USE:
        return f"{wanted}: in use, {held}; end what uses it, monitoring agents such as DCGM too"
    return (
        f"{wanted} without a reset, and it was not reset (NVML's code {said}), {held}; once "
        f"nothing uses it: nvidia-smi -i {gpu} -mig {int(on)} and nvidia-smi -i {gpu} --gpu-reset, "
        "or reboot"
    )
