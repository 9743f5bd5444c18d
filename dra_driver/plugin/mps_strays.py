"""Finds processes of claims under MPS that go past it, and tells their pods.

Such a process runs without an error and without a limit, so nobody else would notice.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dra_driver.cluster.events import Event, PodRef
from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.mps import MpsStatus
from dra_driver.plan.memory_shares import Holder, Share, holders
from dra_driver.plan.mps_watch import ClaimSpace, Stray, confirmed, gpu_shares, strays
from dra_driver.plan.mps_words import about, not_used
from dra_driver.plugin.gpu_users import Looked

log = logging.getLogger(__name__)


class Users(Protocol):
    """Who is on GPUs; ``dra_driver.plugin.gpu_users``."""

    def look(
        self, shares: Mapping[GpuUuid, Sequence[Share]], holders: Mapping[PodUid, Holder]
    ) -> Looked: ...


class Events(Protocol):
    """Tells of pods without waiting; ``dra_driver.cluster.events``."""

    def tell(self, event: Event) -> None: ...


class MpsStrays:
    """Remembers who was seen since when: a process may only be about to connect."""

    def __init__(
        self, users: Users, events: Events, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._users = users
        self._events = events
        self._clock = clock
        self._since: Mapping[Stray, float] = {}
        self._told: frozenset[Stray] = frozenset()
        self._failed: Mapping[GpuUuid, str] = {}

    def look(
        self, records: Sequence[Record], spaces: Sequence[ClaimSpace], status: MpsStatus
    ) -> frozenset[Stray]:
        """Those that had the time to connect and did not. One that is new is told of."""
        shares = gpu_shares(records, spaces)
        pods = holders(records)
        looked = self._users.look(shares, pods) if shares else Looked()
        pods = {**pods, **looked.joined}
        self._warn(looked.failed)
        now = self._clock()
        found = strays(looked.looks, spaces, status)
        # Of a GPU that does not answer this time, what was seen the last time stands.
        kept = {stray for stray in self._since if stray.gpu in looked.failed}
        self._since = {stray: self._since.get(stray, now) for stray in found | kept}
        sure = confirmed(self._since, now)
        known_as = {gpu: name for one in spaces for gpu, name in one.known_as.items()}
        for stray in sorted(sure - self._told, key=lambda one: (one.process, one.gpu)):
            self._tell(stray, pods, known_as.get(stray.gpu, stray.gpu))
        self._told = sure
        return sure

    def _tell(self, stray: Stray, pods: Mapping[PodUid, Holder], gpu: str) -> None:
        holder = pods.get(stray.process.pod)
        if holder is None:  # its claims are gone since; so will it be
            return
        claims = ", ".join(map(str, stray.claims))
        facts = {"pid": stray.process.pid, "gpu": stray.gpu, "claim": claims}
        log.warning("a process of a claim under MPS goes past it", extra=facts)
        pod = PodRef(holder.namespace, holder.name, stray.process.pod)
        self._events.tell(Event(pod, "MPSNotUsed", about(stray), not_used(stray, gpu)))

    def _warn(self, failed: Mapping[GpuUuid, str]) -> None:
        for gpu, why in failed.items():
            if self._failed.get(gpu) != why:
                facts = {"gpu": gpu, "error": why}
                log.warning("it cannot be seen who goes past MPS", extra=facts)
        self._failed = failed
