"""The partitions of claims, as the GPUs have them: nobody else's is there, and ours still are."""

import logging
from collections.abc import Sequence
from typing import Protocol

from dra_driver.errors import NodeError, Vanished
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.mig import Instance, PartitionKey
from dra_driver.model.offer import Device
from dra_driver.plan.mig.claims import Instances, in_the_way, new_cuts
from dra_driver.plan.prepare import Plan
from dra_driver.plugin.side_by_side import side_by_side

log = logging.getLogger(__name__)


class Node(Protocol):
    """What GPUs tell; ``dra_driver.node.node``."""

    def partitions(self, gpu: GpuUuid) -> tuple[PartitionKey, ...]: ...
    def instance(self, gpu: GpuUuid, key: PartitionKey) -> Instance: ...


class ClaimPartitions:
    """Asks the GPUs of *node*, each time anew."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def are_taken(self, plan: Plan, others: Sequence[Record]) -> bool:
        """Whether a partition has to be cut where somebody else's instance is: once the claim is
        recorded, that could not be told from ours."""
        return any(
            in_the_way(cut, self._node.partitions(cut.gpu), others)
            for cut in new_cuts(plan.steps, others)
        )

    def of(self, plan: Plan) -> Instances:
        """What the partitions of *plan* are now. Vanished: one is not there."""
        devices = [grant.device for grant in plan.grants if grant.device.partition is not None]

        def find(device: Device) -> Instance:
            assert device.partition is not None
            return self._node.instance(device.gpu.uuid, device.partition.key)

        found = side_by_side(find, devices)
        return {device.name: one for device, one in zip(devices, found, strict=True)}

    def vanished(self, record: Record) -> bool:
        """Whether an instance of a prepared claim is gone, or there is another one in its place.

        What cannot be asked now is taken to be there.
        """
        for holding in record.holdings:
            if holding.gpu is None or holding.partition is None or holding.instance is None:
                continue
            try:
                found = self._node.instance(holding.gpu, holding.partition)
            except Vanished:
                pass
            except NodeError:
                continue
            else:
                if found == holding.instance:
                    continue
            facts = {"claim": str(record.claim), "device": holding.device}
            log.error("the partition of a prepared claim is gone", extra=facts)
            return True
        return False
