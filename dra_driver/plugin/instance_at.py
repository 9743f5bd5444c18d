"""What a partition of a GPU is now, asked of the GPU."""

from typing import Protocol

from dra_driver.errors import Vanished
from dra_driver.model.devices import GpuUuid
from dra_driver.model.mig import Instance, PartitionKey


class Node(Protocol):
    """What GPUs tell; ``dra_driver.node.node``. Vanished: it has no such instance."""

    def instance(self, gpu: GpuUuid, key: PartitionKey) -> Instance: ...


def instance_at(node: Node, gpu: GpuUuid, key: PartitionKey) -> Instance | None:
    """None: nothing is cut there. NodeError: the GPU does not answer."""
    try:
        return node.instance(gpu, key)
    except Vanished:
        return None
