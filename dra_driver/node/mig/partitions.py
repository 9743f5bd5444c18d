"""Cuts GPUs and removes what was cut, and switches their MIG mode."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from dra_driver.errors import NodeError, Taken, TimedOut, Vanished
from dra_driver.model.devices import GpuUuid
from dra_driver.model.mig import Instance, PartitionKey
from dra_driver.node.mig import cutting
from dra_driver.node.mig.boards import Boards
from dra_driver.node.mig.capabilities import CONFIG
from dra_driver.node.mig.holders import Holders
from dra_driver.node.mig.instances import ProfilesOf, instance
from dra_driver.node.mig.modes import Modes
from dra_driver.node.mig.turns import PATIENCE_SECONDS, Held, Turn, Turns
from dra_driver.node.nvml import Nvml
from dra_driver.node.nvml_codes import IN_USE, INSUFFICIENT_RESOURCES, code
from dra_driver.node.nvml_functions import Functions
from dra_driver.node.nvml_readers import mig_mode

log = logging.getLogger(__name__)
T = TypeVar("T")

Change = Callable[[Functions, Any, PartitionKey, ProfilesOf], T]

_APPEARS_SECONDS: Final = 2.0  # NVML lists what it made at once, or hardly later
_AGAIN_SECONDS: Final = 0.1


def _nothing(capability: str) -> None:
    """Whoever cuts may do so."""


class Partitions:
    """The partitions of the GPUs of *nvml*. Safe to use from several threads; changes of one GPU go
    one after the other.

    *loaded*: whether the driver is. *patience*: for how many seconds it is tried again where
    something is in use; callers for whom nobody waits may say less. *allow*: sees to it, as well as
    it can, that this process has a capability of MIG ("mig/config", "gpu0/mig/gi1"). What it may do
    NVML says.
    """

    def __init__(
        self,
        nvml: Nvml,
        holders: Holders,
        loaded: Callable[[], bool],
        patience: float = PATIENCE_SECONDS,
        *,
        allow: Callable[[str], None] = _nothing,
    ) -> None:
        self._nvml = nvml
        self._allow = allow
        self._boards = Boards(nvml, holders, loaded)
        self._turns = Turns(patience)
        self._modes = Modes(nvml, self._boards, self._turns)

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
        except Held as error:
            log.warning("a GPU stays in its MIG mode: %s", error, extra={"gpu": gpu, "wanted": on})
        except NodeError as error:
            if self._boards.is_kept(gpu, error):
                raise
            log.warning("no MIG mode to restore", extra={"gpu": gpu, "error": str(error)})

    def cut(
        self, gpu: GpuUuid, key: PartitionKey, new: bool = False, patience: float | None = None
    ) -> Instance:
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
            self._allow(CONFIG)
            # Whoever makes something in an instance needs its capability, and so does a server of
            # MPS, which comes before the files of a container are looked for.
            home = self._create(turn, gpu, key, cutting.create_new if new else cutting.create)
            self._allow(home)
            doing = f"making the compute instance of {key}"
            made = self._patiently(turn, gpu, doing, cutting.fill, key)
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
                others = self._remove(turn, gpu, key, cutting.Meant(uuid, unless))
        except (TimedOut, Held):
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

    def taken(self, gpu: GpuUuid) -> tuple[PartitionKey, ...]:
        """Where it is cut now, half made instances included."""
        return tuple(one.key for one in self._boards.cut(gpu)) if self.mode(gpu) else ()

    def find(self, gpu: GpuUuid, key: PartitionKey) -> Instance:
        """The instance that this partition is. Vanished: it is not there, or not whole."""

        def call(functions: Functions, handle: Any) -> Instance | None:
            on = mig_mode(functions, handle)
            ask = self._nvml.geometries.asked(functions, gpu)
            return instance(functions, handle, key, ask) if on and on[0] else None

        found = self._nvml.on_gpu(gpu, f"looking for {key}", call)
        if found is None:
            raise Vanished(
                f"GPU {gpu}: the instance of {key} vanished: nvidia-smi, a MIG manager or a reset "
                "removed it; delete the pods of its claim, so that it is cut anew"
            )
        return found

    def _create(self, turn: Turn, gpu: GpuUuid, key: PartitionKey, create: Change[str]) -> str:
        """The capability of its GPU instance."""
        try:
            return self._patiently(turn, gpu, f"cutting {key}", create, key)
        except Taken as error:
            raise Taken(f"GPU {gpu}: {error}") from error
        except NodeError as error:
            if code(error) != INSUFFICIENT_RESOURCES:
                raise
            raise Taken(
                f"GPU {gpu} has no room for {key}: {self._in_the_way(gpu, key)}"
            ) from error.__cause__

    def _remove(
        self, turn: Turn, gpu: GpuUuid, key: PartitionKey, meant: cutting.Meant
    ) -> tuple[GpuUuid, ...]:
        """How that is called which is there instead, and stays."""
        if not self.mode(gpu):  # nothing is cut
            return ()
        self._allow(CONFIG)
        change = partial(cutting.destroy, meant=meant)
        return self._patiently(turn, gpu, f"removing {key}", change, key)

    def _in_the_way(self, gpu: GpuUuid, key: PartitionKey) -> str:
        cut = self._boards.cut(gpu)
        over = [one for one in cut if one.key.placement.overlaps(key.placement)]
        if over:
            names = ", ".join(map(str, over))
            return f"{names} lies there; it can be cut once that is removed"
        beside = ", ".join(map(str, cut)) or "nothing"
        return f"its engines or its memory are used up ({beside} is cut of it)"

    def _appears(self, gpu: GpuUuid, key: PartitionKey) -> Instance:
        """What was made, once NVML lists it as a device."""
        until = time.monotonic() + _APPEARS_SECONDS
        while True:
            try:
                return self.find(gpu, key)
            except Vanished:
                if time.monotonic() >= until:
                    raise
            time.sleep(_AGAIN_SECONDS)

    def _patiently(
        self, turn: Turn, gpu: GpuUuid, doing: str, change: Change[T], key: PartitionKey
    ) -> T:
        """Do it, again and again while it is refused since something is in use."""

        def call(functions: Functions, handle: Any) -> T:
            return change(functions, handle, key, self._nvml.geometries.asked(functions, gpu))

        while True:
            try:
                return self._nvml.on_gpu(gpu, doing, call, turn.seconds)
            except TimedOut:
                raise
            except NodeError as error:
                if code(error) != IN_USE and not isinstance(error, cutting.Again):
                    raise
                if not turn.again():
                    raise self._held(gpu, doing, key, error) from error.__cause__

    def _held(self, gpu: GpuUuid, doing: str, key: PartitionKey, error: NodeError) -> Held:
        if isinstance(error, cutting.Again):
            return Held(f"GPU {gpu}, {error}: it is tried again")
        held = self._boards.who(gpu, key)
        return Held(*(f"GPU {gpu}, {doing}: in use, {words}; end what uses it" for words in held))
