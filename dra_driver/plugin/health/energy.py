"""When a GPU is asked for its energy, for which NVML takes longer than for all else of its health.

What it used since its driver was loaded tells of a reset: then it is less than before. Of a GPU
that is well it is enough to know about how much that was, in case it falls silent before the next
look.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from dra_driver.base.backoff import Backoff
from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.health import HealthReading

_MOST_SECONDS: Final = 600.0  # between two times


@frozen
class _EnergyRead:
    """The newest answer of a GPU."""

    backoff: Backoff
    again_at: float
    energy_mj: int | None


class EnergyReads:
    """A GPU is asked again after *first_seconds*, then after twice as long each time: what is known
    is at least about half of what it is. For one thread."""

    def __init__(self, first_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._reads: dict[GpuUuid, _EnergyRead] = {}

    def due(
        self, gpus: Iterable[GpuUuid], sick: Collection[GpuUuid], now: float
    ) -> frozenset[GpuUuid]:
        """Whom of *gpus* to ask now; *sick* ones always."""
        return frozenset(
            gpu
            for gpu in gpus
            if gpu in sick or (read := self._reads.get(gpu)) is None or now >= read.again_at
        )

    def answered(self, readings: Iterable[HealthReading], now: float) -> None:
        """What those answered that were asked. One that was reset begins anew; that a sick one was
        asked more often does not make the next wait longer."""
        for reading in readings:
            read, energy = self._reads.get(reading.gpu), reading.energy_mj
            if read is None or (energy or 0) < (read.energy_mj or 0):
                backoff = Backoff(self._first_seconds, _MOST_SECONDS)
                read = _EnergyRead(backoff, now + backoff.next_seconds(), energy)
            elif now >= read.again_at:
                read = replace(read, again_at=now + read.backoff.next_seconds(), energy_mj=energy)
            else:
                read = replace(read, energy_mj=energy)
            self._reads[reading.gpu] = read
