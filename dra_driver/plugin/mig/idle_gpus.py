"""GPUs that nothing uses, for as long as something is done to them."""

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import ApiServerError, NodeError, TimedOut
from dra_driver.model.gpus import Gpu, GpuUuid, Inventory
from dra_driver.model.offer import gpu_name_of
from dra_driver.model.processes import GpuProcess
from dra_driver.model.records import HoldingsByDevice
from dra_driver.node.mig.gpu_holders import GpuHolder, name_holders

WhileUnclaimed = Callable[[Collection[str], Callable[[], None]], bool]
"""Has something done to GPUs while no claim can come to them;
``plugin.claims.prepared_claims.Upkeep``.
"""

AllocatedDevices = Callable[[], Collection[str]]
"""The devices of this node that are allocated, whether their claims were prepared or not.
ClusterError: it cannot be told."""

_SHOWN = 3  # claims
_READ_SECONDS = (
    20.0  # a GPU is waited for that others keep from being read; longer than a mode takes
)
_AGAIN_SECONDS = 0.2
_MOMENT_SECONDS = 2.0  # so old an answer may be by which something is done
_UNREADABLE = "it cannot be looked at now, since a GPU is being changed or does not answer"


class IdleNode(Protocol):
    """What can be looked at."""

    def refresh(self) -> Inventory: ...
    def processes(self, gpu: GpuUuid) -> tuple[GpuProcess, ...]: ...
    def command(self, pid: int) -> str: ...  # empty: it is not seen from here


@dataclass(frozen=True, slots=True)
class _AllocatedAnswer:
    """Which devices are allocated, and when that was asked."""

    devices: Collection[str] = ()
    at: float = float("-inf")


class IdleGpus:
    """Keeps claims away from a GPU that no claim has and no process uses. For many threads."""

    def __init__(
        self,
        node: IdleNode,
        while_free: WhileUnclaimed,
        held: Callable[[], HoldingsByDevice],
        allocated: AllocatedDevices,
        patience: float = _READ_SECONDS,
    ) -> None:
        """*patience*: seconds that a GPU is waited for which cannot be read."""
        self._node = node
        self._patience = patience
        self._while_free = while_free
        self._held = held
        self._allocated = allocated
        self._first: Collection[str] | None = None  # answer of this look
        self._last = _AllocatedAnswer()
        self._lock = threading.Lock()
        self.acted = False  # whether anything was done since ``forget``

    def forget(self) -> None:
        """A new look begins: what was asked for the last one is old."""
        self._first = None
        self.acted = False

    def change(self, gpu: Gpu, act: Callable[[Gpu], None]) -> str:
        """Have *act* done to *gpu*, which is looked at again before.

        Answers with what has to end first; empty: it was done. Who has to wait keeps nobody else
        waiting. NodeError: it cannot be looked at, or what *act* raises.
        """
        waits = claims_holding(gpu, self._held()) or self._glanced(gpu) or self._promised(gpu)
        return waits or self._alone(gpu, act)

    def _alone(self, gpu: Gpu, act: Callable[[Gpu], None]) -> str:
        waits, alone = "a claim holds it", False

        def look_and_act() -> None:
            nonlocal waits, alone
            alone = True
            now = self._now(gpu)
            if now is None:
                waits = _UNREADABLE
                return
            waits = self._users(now) or self._promised(gpu)
            if not waits:
                self.acted = True
                self._last = _AllocatedAnswer()
                act(now)

        try:
            self._while_free({gpu.name, gpu.uuid}, look_and_act)
        except TimedOut as e:
            if alone:
                raise
            return str(e)
        return waits

    def _promised(self, gpu: Gpu) -> str:
        """The scheduler gave it to a claim that the kubelet has not asked for yet.

        What was answered first in this look is a reason to wait. To act it takes an answer of this
        moment: other GPUs may have taken half a minute since.
        """
        try:
            devices = _devices_of(gpu, self._asked_first()) or _devices_of(gpu, self._asked_now())
        except ApiServerError as e:
            return f"it is not known whether a claim was allocated a part of it: {e}"
        return f"a claim was allocated {', '.join(devices)}" if devices else ""

    def _asked_first(self) -> Collection[str]:
        with self._lock:
            if self._first is None:
                self._first = self._ask()
            return self._first

    def _asked_now(self) -> Collection[str]:
        """It is a list of all claims of the cluster: what was answered a moment ago will do, where
        nothing was done to a GPU since."""
        with self._lock:
            is_new = time.monotonic() - self._last.at < _MOMENT_SECONDS
            return self._last.devices if is_new else self._ask()

    def _ask(self) -> Collection[str]:
        at = time.monotonic()  # before: what was allocated while it was answered may lack
        self._last = _AllocatedAnswer(self._allocated(), at)
        return self._last.devices

    def _glanced(self, gpu: Gpu) -> str:
        """An instance that is gone since the last look has no processes."""
        try:
            return self._users(gpu)
        except NodeError:
            return ""

    def _now(self, gpu: Gpu) -> Gpu | None:
        """None: it cannot be read. What it was before says nothing of what was cut since."""
        deadline = Deadline(self._patience)
        while True:
            seen = self._node.refresh()
            found = next((one for one in seen.gpus if one.uuid == gpu.uuid), None)
            if found is None:
                raise NodeError(f"{gpu.name} ({gpu.uuid}) cannot be seen any more")
            if gpu.uuid not in seen.stale:
                return found
            if deadline.expired:
                return None
            time.sleep(_AGAIN_SECONDS)

    def _users(self, gpu: Gpu) -> str:
        """The processes on it, also in its partitions."""
        parts = gpu.mig.instances if gpu.mig else ()
        uuids = (gpu.uuid, *(instance.uuid for instance in parts))
        pids = sorted({one.pid for uuid in uuids for one in self._node.processes(uuid)})
        users = [GpuHolder(pid, self._node.command(pid)) for pid in pids]
        return f"processes use it: {name_holders(users)}" if users else ""


def _devices_of(gpu: Gpu, devices: Collection[str]) -> list[str]:
    return sorted(one for one in devices if gpu_name_of(one) == gpu.name)


def claims_holding(gpu: Gpu, held: HoldingsByDevice) -> str:
    """What *gpu* waits for; empty: for no claim. Who only looks on is no reason to wait."""
    found = sorted(
        {
            f"{one.claim} ({one.device})"
            for holdings in held.values()
            for one in holdings
            if not one.admin and {one.of_gpu, gpu_name_of(one.device)} & {gpu.name, gpu.uuid}
        }
    )
    if not found:
        return ""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"claims hold it until their pods end: {', '.join(found[:_SHOWN])}{more}"
