"""The turns of the processes on a GPU: which interval holds.

A GPU has one interval. A claim that names none has no opinion; claims that name the same share it;
two different ones clash.
"""

from collections.abc import Iterable, Iterator, Mapping

from dra_driver.kubeletplugin.claims import ClaimRef
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.steps import SetTimeSlice


def clashing(
    wanted: Mapping[GpuUuid, SetTimeSlice], others: Iterable[Record]
) -> Iterator[tuple[ClaimRef, SetTimeSlice]]:
    """What other claims set that differs from what is *wanted* of the same GPU, by claim."""
    return (
        (record.claim, step)
        for record in sorted(others, key=lambda record: record.claim)
        for step in record.steps
        if isinstance(step, SetTimeSlice)
        and step.gpu in wanted
        and step.interval != wanted[step.gpu].interval
    )
