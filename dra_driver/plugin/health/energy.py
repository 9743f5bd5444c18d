"""When a GPU is asked for its energy, for which NVML takes longer than for all else of its health.

What it used since its driver was loaded tells of a reset: then it is less than before. Of a GPU
that is well it is enough to know about how much that was, in case it falls silent before the next
look.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from dra_driver.base.backoff import Backoff
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.health import HealthReading

_MOST_SECONDS: Final = 600.0  # between two times


@dataclass(frozen=True, slots=True)
class _Asked:
    """A GPU that has answered."""

    waits: Backoff
    again_at: float
    energy_mj: int | None


class EnergyReads:
    """A GPU is asked again after *first_seconds*, then after twice as long each time: what is known
    is at least about half of what it is. For one thread."""

    def __init__(self, first_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._asked: dict[GpuUuid, _Asked] = {}

    def due(
        self, gpus: Iterable[GpuUuid], sick: Collection[GpuUuid], now: float
    ) -> frozenset[GpuUuid]:
        """Whom of *gpus* to ask now; *sick* ones always."""
        return frozenset(
            gpu
            for gpu in gpus
            if gpu in sick or (asked := self._asked.get(gpu)) is None or now >= asked.again_at
        )

    def answered(self, readings: Iterable[HealthReading], now: float) -> None:
        """What those said that were asked. One that was reset begins anew."""
        for reading in readings:
            asked, energy = self._asked.get(reading.gpu), reading.energy_mj
            was_reset = asked is not None and (energy or 0) < (asked.energy_mj or 0)
            if asked is None or was_reset:
                waits = Backoff(self._first_seconds, _MOST_SECONDS)
            else:
                waits = asked.waits
            again_at = now + waits.next_seconds()
            self._asked[reading.gpu] = _Asked(waits, again_at, energy)
