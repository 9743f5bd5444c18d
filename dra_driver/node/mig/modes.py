"""Switches the MIG mode of GPUs."""

import logging
from typing import Any, Final

from dra_driver.errors import NodeError, TimedOut
from dra_driver.model.devices import GpuUuid
from dra_driver.model.mig import Fixed
from dra_driver.model.resets import by_hand, outside
from dra_driver.node.mig.boards import Boards
from dra_driver.node.mig.turns import Held, Turn, Turns
from dra_driver.node.nvml import Nvml
from dra_driver.node.nvml_codes import IN_USE, code
from dra_driver.node.nvml_functions import Functions

log = logging.getLogger(__name__)

_RESET_SECONDS: Final = 30.0  # no claim waits for one


class Modes:
    """Of the GPUs of *nvml*; a change waits for its turn."""

    def __init__(self, nvml: Nvml, boards: Boards, turns: Turns) -> None:
        self._nvml = nvml
        self._boards = boards
        self._turns = turns

    def set(self, gpu: GpuUuid, on: bool, patience: float | None) -> None:
        """Have MIG mode on or off, now. TimedOut: it can be either, or pending. Any other
        NodeError: it is what it was."""
        with self._turns.of(gpu, patience) as turn:
            self._switch(turn, gpu, on)

    def reset(self, gpu: GpuUuid, on: bool, patience: float | None) -> None:
        """Like :meth:`set`, where it takes a reset. A change that waits for one and is not wanted
        is taken back."""
        with self._turns.of(gpu, patience, _RESET_SECONDS) as turn:
            if self._boards.mode(gpu) == (on, not on):
                self._ask_for(turn, gpu, on)
            self._switch(turn, gpu, on)

    def _switch(self, turn: Turn, gpu: GpuUuid, on: bool) -> None:
        before = self._boards.mode(gpu)
        if before is None:
            raise NodeError(f"GPU {gpu} has no MIG mode: select a GPU that can be cut")
        if before[0] == on:
            return
        if (fixed := self._boards.fixed(gpu)) is not Fixed.NOTHING:
            raise Held(f"{_cannot(gpu, on)}: {outside(fixed, gpu, on)}")
        if not on and (cut := self._boards.cut(gpu)):
            names = ", ".join(map(str, cut))
            raise Held(f"{_cannot(gpu, on)}, since it has {names}")
        while (said := self._ask_for(turn, gpu, on)) == IN_USE and turn.again():
            pass
        now = self._boards.mode(gpu)
        if now is not None and now[0] == on:
            log.info("MIG mode switched", extra={"gpu": gpu, "on": on})
            return
        held, more = self._boards.who(gpu), ""
        if self._boards.persists(gpu):
            more = f"; persistence mode is on, which can hold it too (nvidia-smi -i {gpu} -pm 0)"
        self._put_back(turn, gpu, before[1])
        raise Held(*(_why_not_switched(gpu, on, said, words + more) for words in held))

    def _ask_for(self, turn: Turn, gpu: GpuUuid, on: bool) -> int:
        """What NVML says about the change taking effect: 0, IN_USE, RESET_REQUIRED, …"""

        def call(functions: Functions, handle: Any) -> int:
            return functions.nvmlDeviceSetMigMode(handle, int(on))

        try:
            doing = f"turning MIG mode {'on' if on else 'off'}"
            return self._nvml.on_gpu(gpu, doing, call, turn.seconds)
        except TimedOut:
            raise
        except NodeError as error:
            if code(error) != IN_USE:
                raise
            return IN_USE

    def _put_back(self, turn: Turn, gpu: GpuUuid, pending: bool) -> None:
        """No reset that comes for another reason is to change the mode."""
        try:
            found = self._boards.mode(gpu)
            if found is not None and found[1] != pending:
                self._ask_for(turn, gpu, pending)
        except TimedOut:
            raise
        except NodeError as error:
            log.warning("a change of MIG mode stays pending: %s", error, extra={"gpu": gpu})


def _why_not_switched(gpu: GpuUuid, on: bool, said: int, held: str) -> str:
    wanted = _cannot(gpu, on)
    if said == IN_USE:
        return f"{wanted}: in use, {held}; end what uses it, monitoring agents such as DCGM too"
    return (
        f"{wanted} without a reset, and it was not reset (NVML's code {said}), {held}; "
        f"nvidia-smi -i {gpu} -mig {int(on)}, then: {by_hand(gpu)}"
    )


def _cannot(gpu: GpuUuid, on: bool) -> str:
    return f"GPU {gpu}: MIG mode cannot be turned {'on' if on else 'off'}"
