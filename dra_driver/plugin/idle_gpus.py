"""GPUs that nothing uses, for as long as something is done to them."""

from collections.abc import Callable, Collection
from typing import Protocol

from dra_driver.errors import NodeError, TimedOut
from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.inventory import Inventory
from dra_driver.model.processes import GpuProcess

WhileFree = Callable[[Collection[str], Callable[[], None]], bool]
"""Has something done to GPUs while no claim can come to them; ``plugin.upkeep.Upkeep``."""


class Node(Protocol):
    """What can be looked at."""

    def refresh(self) -> Inventory: ...
    def processes(self, gpu: GpuUuid) -> tuple[GpuProcess, ...]: ...


class IdleGpus:
    """Keeps claims away from a GPU that no claim holds and no process uses."""

    def __init__(self, node: Node, while_free: WhileFree) -> None:
        self._node = node
        self._while_free = while_free

    def change(self, gpu: Gpu, act: Callable[[Gpu], None]) -> str:
        """Have *act* done to *gpu*, which is looked at again before.

        Answers with what has to end first; empty: it was done. NodeError: it cannot be looked at,
        or what *act* raises.
        """
        waits, alone = "a claim holds it", False

        def look_and_act() -> None:
            nonlocal waits, alone
            alone = True
            now = self._now(gpu)
            waits = self._users(now)
            if not waits:
                act(now)

        try:
            self._while_free({gpu.name, gpu.uuid}, look_and_act)
        except TimedOut as e:
            if alone:
                raise
            return str(e)
        return waits

    def _now(self, gpu: Gpu) -> Gpu:
        for one in self._node.refresh().gpus:
            if one.uuid == gpu.uuid:
                return one
        raise NodeError(f"{gpu.name} ({gpu.uuid}) cannot be seen any more")

    def _users(self, gpu: Gpu) -> str:
        """The processes on it, also in its partitions."""
        parts = gpu.mig.instances if gpu.mig else ()
        uuids = (gpu.uuid, *(instance.uuid for instance in parts))
        pids = sorted({one.pid for uuid in uuids for one in self._node.processes(uuid)})
        return f"processes use it: {', '.join(map(str, pids))}" if pids else ""
