"""What was learned of GPUs since NVML was started, and holds until it is started again."""

import time
from typing import Any

from dra_driver.errors import NodeError, Vanished
from dra_driver.model.uuids import GpuUuid, is_instance
from dra_driver.node.mig.geometry import Geometries
from dra_driver.node.nvml_values import Glance
from dra_driver.node.worker import Pending


class Listing:
    """Where NVML lists GPUs and their MIG instances, as far as they were looked at, and which of
    them is being changed. Only for whoever holds NVML's gate."""

    def __init__(self) -> None:
        self.geometries = Geometries()
        self._indices: dict[GpuUuid, int] = {}
        self._changes: dict[int, Pending[Any]] = {}  # by index: what takes longer than reading

    def index(self, uuid: GpuUuid) -> int | None:
        """Where NVML lists this GPU, or the GPU of this instance."""
        return self._indices.get(uuid)

    def seen(self, index: int, glance: Glance) -> None:
        """What is there no more is forgotten."""
        for uuid in [uuid for uuid, known in self._indices.items() if known == index]:
            del self._indices[uuid]
        self._indices[glance.uuid] = index
        self._indices |= {one.uuid: index for one in glance.instances}

    def changes(self, index: int, change: Pending[Any]) -> None:
        """A change of the GPU at *index* is under way."""
        self._changes[index] = change

    def busy_seconds(self, index: int) -> float:
        """How much longer a change of the GPU at *index* may take: so long, what comes behind it
        has to wait without being late."""
        change = self._changes.get(index)
        if change is None or change.future.done():
            return 0.0
        return max(0.0, change.until - time.monotonic())


def named(gpu: GpuUuid) -> str:
    """How a GPU, or an instance of one, is called in messages."""
    return gpu if is_instance(gpu) else f"GPU {gpu}"


def not_listed(gpu: GpuUuid, doing: str) -> NodeError:
    """What is raised where NVML does not list it."""
    error = Vanished if is_instance(gpu) else NodeError
    return error(f"{named(gpu)}, {doing}: NVML does not list it")
