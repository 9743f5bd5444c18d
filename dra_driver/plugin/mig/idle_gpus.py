"""Changes GPUs while nothing uses them, and keeps claims away meanwhile."""

import threading
import time
from collections.abc import Callable, Collection

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import ApiServerError, NodeError, TimedOut
from dra_driver.model.gpus import Gpu
from dra_driver.model.offer import gpu_name_of
from dra_driver.model.records import HoldingsByGpu
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.mig.gpu_holders import GpuHolder, name_holders

WhileUnclaimed = Callable[[Gpu, Callable[[], None]], bool]
"""Has something done to a GPU while no claim can come to it;
``plugin.claims.prepared_claims.PreparedClaims.while_free``."""

AllocatedDevices = Callable[[], Collection[str]]
"""The devices of this node that are allocated, whether their claims were prepared or not.
ApiServerError: it cannot be told."""

_MAX_NAMED = 3  # claims in a message
_READ_SECONDS = 20.0  # until a GPU that is being changed can be read; a mode takes less
_RETRY_SECONDS = 0.2
_MOMENT_SECONDS = 2.0  # how old the answer may be by which a GPU is changed
_UNREADABLE = "it cannot be looked at now, since a GPU is being changed or does not answer"


class IdleGpus:
    """Changes only GPUs that no claim holds and no process uses. For many threads."""

    def __init__(
        self,
        node: GpuNode,
        while_free: WhileUnclaimed,
        holdings: Callable[[], HoldingsByGpu],
        allocated: AllocatedDevices,
        patience: float = _READ_SECONDS,
    ) -> None:
        """*patience*: seconds that a GPU is waited for which cannot be read."""
        self._node = node
        self._patience = patience
        self._while_free = while_free
        self._holdings = holdings
        self._read_allocated = allocated
        self._allocated_first: Collection[str] | None = None  # first answer of this look
        self._allocated_last: Collection[str] = ()
        self._allocated_at = float("-inf")  # when that was asked
        self._lock = threading.Lock()
        self.acted = False  # whether anything was done during this look

    def start_look(self) -> None:
        """A new look begins: the answers of the last one are old."""
        self._allocated_first = None
        self.acted = False

    def change(self, gpu: Gpu, act: Callable[[Gpu], None]) -> str:
        """Have *act* done to *gpu*, which is read again before.

        The answer is what the GPU waits for; empty: it was done. NodeError: the GPU cannot be read,
        or what *act* raises.
        """
        waits_for = (
            claims_holding(gpu, self._holdings())
            or self._processes_at_last_look(gpu)
            or self._allocation(gpu)
        )
        return waits_for or self._change_while_free(gpu, act)

    def _change_while_free(self, gpu: Gpu, act: Callable[[Gpu], None]) -> str:
        waits_for, is_free = "a claim holds it", False

        def read_and_act() -> None:
            nonlocal waits_for, is_free
            is_free = True
            now = self._read(gpu)
            if now is None:
                waits_for = _UNREADABLE
                return
            waits_for = self._processes(now) or self._allocation(now)
            if not waits_for:
                self.acted = True
                self._allocated_at = float("-inf")
                act(now)

        try:
            self._while_free(gpu, read_and_act)
        except TimedOut as e:
            if is_free:
                raise
            return str(e)
        return waits_for

    def _allocation(self, gpu: Gpu) -> str:
        """The scheduler gave it to a claim that the kubelet has not asked for yet.

        The first answer in this look is a reason to wait. To act it takes an answer of this moment:
        other GPUs may have taken half a minute since.
        """
        try:
            devices = _devices_of(gpu, self._allocated_in_this_look()) or _devices_of(
                gpu, self._allocated_now()
            )
        except ApiServerError as e:
            return f"it is not known whether a claim was allocated a part of it: {e}"
        return f"a claim was allocated {', '.join(devices)}" if devices else ""

    def _allocated_in_this_look(self) -> Collection[str]:
        with self._lock:
            if self._allocated_first is None:
                self._allocated_first = self._ask()
            return self._allocated_first

    def _allocated_now(self) -> Collection[str]:
        """This lists all claims of the cluster, so the answer of a moment ago will do where no GPU
        was changed since."""
        with self._lock:
            is_new = time.monotonic() - self._allocated_at < _MOMENT_SECONDS
            return self._allocated_last if is_new else self._ask()

    def _ask(self) -> Collection[str]:
        began = time.monotonic()  # what is allocated during the answer may be missing in it
        self._allocated_last, self._allocated_at = self._read_allocated(), began
        return self._allocated_last

    def _processes_at_last_look(self, gpu: Gpu) -> str:
        """An instance that is gone since the last look has no processes."""
        try:
            return self._processes(gpu)
        except NodeError:
            return ""

    def _read(self, gpu: Gpu) -> Gpu | None:
        """None: it cannot be read; an old look does not show what was created since."""
        deadline = Deadline(self._patience)
        while True:
            inventory = self._node.refresh()
            now = next((current for current in inventory.gpus if current.uuid == gpu.uuid), None)
            if now is None:
                raise NodeError(f"{gpu.name} ({gpu.uuid}) cannot be seen any more")
            if gpu.uuid not in inventory.stale:
                return now
            if deadline.expired:
                return None
            time.sleep(_RETRY_SECONDS)

    def _processes(self, gpu: Gpu) -> str:
        """The processes on it, also in its partitions, as a reason to wait."""
        pids = sorted({process.pid for uuid in gpu.uuids for process in self._node.processes(uuid)})
        holders = [GpuHolder(pid, self._node.command(pid)) for pid in pids]
        return f"processes use it: {name_holders(holders)}" if holders else ""


def _devices_of(gpu: Gpu, devices: Collection[str]) -> list[str]:
    return sorted(device for device in devices if gpu_name_of(device) == gpu.name)


def claims_holding(gpu: Gpu, holdings: HoldingsByGpu) -> str:
    """The claims that *gpu* waits for; empty: none. Admin access is no reason to wait."""
    claims = sorted(
        {
            f"{holding.claim} ({holding.device})"
            for holding in holdings.get(gpu.uuid, ())
            if not holding.admin
        }
    )
    if not claims:
        return ""
    more = f" and {len(claims) - _MAX_NAMED} more" if len(claims) > _MAX_NAMED else ""
    return f"claims hold it until their pods end: {', '.join(claims[:_MAX_NAMED])}{more}"
