"""Owns what is known of the health of GPUs. ``plan.health.state`` says how it changes.

One thread does what takes time, in ``step``: it looks at the GPUs, keeps the state on the disk, and
then has it published and reported. What is published is on the disk, so a restart publishes it
again, since the same moment. A GPU that was lost is the exception: the offer that is built of a
scan has it at once, and the next scan finds it again.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import ApiServerError, NodeError, SettingsError
from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import Gpu, GpuUuid, Inventory
from dra_driver.model.health import Faults, GpuEvent, HealthReading, HealthState, Problem
from dra_driver.model.profiles import Profile
from dra_driver.node.state.health_file import HealthFile
from dra_driver.plan.health.state import (
    RulesByGpu,
    after_events,
    after_reading,
    after_registration,
    after_scan,
    next_settlement,
    partition_of,
    settled,
    taken_over,
)
from dra_driver.plan.profiles.rules import rules_by_gpu
from dra_driver.plugin.health.energy import EnergyReads

log = logging.getLogger(__name__)

_FLOOD_SECONDS: Final = 0.5  # between two steps, however many events come
_AFTER_EVENT_SECONDS: Final = 1.0  # before the look that an event asks for
_BETWEEN_LOOKS_SECONDS: Final = 5.0  # at least
_TROUBLE_SECONDS: Final = 600.0  # at most between looks at GPUs of which none answers
_KEEP_SECONDS: Final = 10.0  # between writes of counts alone
_KEEP_LOOKS_SECONDS: Final = 600.0  # between writes of what the last look at a sick node said
_RETRY_WRITE_SECONDS: Final = 10.0
_MOST_PENDING: Final = 1024  # different events


class HealthReport(Protocol):
    """Is told what is wrong and what happened; ``report.HealthReporter`` is one."""

    def begin(self, faults: Faults) -> None:
        """*faults* were reported by an earlier process."""

    def update(
        self, faults: Faults, events: Sequence[GpuEvent], gpus: Sequence[Gpu], rules: RulesByGpu
    ) -> None:
        """*faults*: what is wrong now; *events*: what happened since the last time."""


class ClearRequests(Protocol):
    """What an administrator says is well; ``clear_requests.ClearAnnotation`` is one."""

    def apply(self, state: HealthState, gpus: Sequence[Gpu]) -> HealthState:
        """*state* once that is so. Asks nobody."""

    def done(self) -> float | None:
        """The state is kept: the request is not needed any more. The seconds until this has to be
        called again."""


@frozen
class HealthInputs:
    """What the monitor asks."""

    scan: Callable[[], Inventory]  # now
    # Of all GPUs; and of which of them the energy is asked for, too.
    readings: Callable[[Collection[GpuUuid]], Mapping[GpuUuid, HealthReading | NodeError]]
    unmonitored: Callable[[], Mapping[GpuUuid, str]]
    profile: Callable[[], Profile]
    is_newest: Callable[[], bool]
    look_seconds: float = 30.0
    epoch: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class _Rules:
    """The rules of the last profile and inventory that were known."""

    profile: Profile | None = None
    gpus: tuple[Gpu, ...] = ()
    by_gpu: RulesByGpu = field(default_factory=dict)


class HealthMonitor:
    """Any thread may call its methods, but for ``step``, which is of one thread."""

    def __init__(
        self,
        inputs: HealthInputs,
        file: HealthFile,
        report: HealthReport,
        requests: ClearRequests,
    ) -> None:
        """Begins with what *file* keeps. *report* and *requests* are called by ``step``."""
        self._inputs = inputs
        self._file = file
        self._report = report
        self._requests = requests
        self._lock = threading.Lock()  # of the state and the inventory
        self._scanned: Inventory | None = None
        self._state_of_scan: HealthState | None = None  # what it made of the state
        self._lost: dict[GpuUuid, str] = {}  # at the last scan, and why
        self._pending: dict[GpuEvent, tuple[int, float]] = {}  # how many, and when the last
        self._rules = _Rules()
        self._kept = HealthState()
        self._kept_at = float("-inf")
        self._is_kept = False
        self._write_trouble = ""
        # Whether a newer process writes the file, and whether none that is older does any more.
        self._follows = self._took_over = False
        self._was_newest = True
        self._look_at = self._looked_at = self._events_at = float("-inf")
        self._energy = EnergyReads(inputs.look_seconds)
        self._backoff = Backoff(inputs.look_seconds, max(inputs.look_seconds, _TROUBLE_SECONDS))
        self.wake: Callable[[], None] = lambda: None  # has ``step`` called soon
        self.on_change: list[Callable[[], None]] = []  # called by ``step`` when ``faults`` changed
        self._state = self._read()
        self._faults = self._notified = self._state.faults
        report.begin(self._faults)

    @property
    def faults(self) -> Faults:
        """What is published; the same object as long as nothing but counts changed."""
        return self._faults

    def faults_for(self, inventory: Inventory) -> Faults:
        """What is wrong with the GPUs of *inventory*: one that it has lost is among them. The same
        inventory again says that a GPU answers of which an event said that it does not."""
        with self._lock:
            if inventory is self._scanned and self._state is self._state_of_scan:
                return self._faults  # as every claim finds it
            last, self._scanned = self._scanned, inventory
            self._log_losses(inventory)
            if last is not None and last is not inventory:
                self._look_at_returned(last, inventory)
            before = self._state
            self._state = after_scan(before, inventory, self._inputs.epoch())
            self._state_of_scan = self._state
            if self._state.faults is not before.faults or last is None:
                self._publish_now()
                self.wake()
            return self._faults

    def _log_losses(self, inventory: Inventory) -> None:
        for gpu, reason in inventory.lost:
            if self._lost.get(gpu) != reason:
                log.warning("a GPU does not answer", extra={"gpu": gpu, "reason": reason})
        self._lost = dict(inventory.lost)

    def _look_at_returned(self, last: Inventory, inventory: Inventory) -> None:
        """A GPU that did not answer at the *last* scan may have been reset: look at it, although
        looks have become rare. The lock is held."""
        answered = {gpu.uuid for gpu in last.answering}
        if any(gpu.uuid not in answered for gpu in inventory.answering):
            soon = max(self._inputs.clock(), self._looked_at + _BETWEEN_LOOKS_SECONDS)
            self._look_at = min(self._look_at, soon)
            self.wake()

    def saw(self, events: Sequence[GpuEvent]) -> None:
        """Events of the driver; returns at once. Equal ones are counted."""
        with self._lock:
            for event in events:
                key = replace(event, count=0, at=0.0)
                if len(self._pending) >= _MOST_PENDING and key not in self._pending:
                    key = replace(key, pid=None)
                count, _ = self._pending.get(key, (0, 0.0))
                self._pending[key] = (count + event.count, event.at)
        self.wake()

    def change(self, edit: Callable[[HealthState, float], HealthState]) -> None:
        """Have the state be what *edit* makes of it and of this moment; kept and published by the
        next step, which begins soon."""
        with self._lock:
            self._state = edit(self._state, self._inputs.epoch())
        self.wake()

    def look_soon(self) -> None:
        """Look at the GPUs without waiting for the time to be over."""
        with self._lock:
            self._look_at = self._inputs.clock()
        self.wake()

    def step(self) -> float | None:
        """Take up what was seen and what is asked for. The seconds until the next time."""
        if not self._is_newest():
            self._follow()
            return None
        if self._follows:
            self._follow()  # the newer one has ended
            self._follows = False
        now, scanned = self._inputs.clock(), self._scanned
        if scanned is None:  # it is woken after the first scan
            return None
        if not self._took_over:
            self._take_over()
        if self._pending and now < self._events_at + _FLOOD_SECONDS:
            return self._events_at + _FLOOD_SECONDS - now
        events = self._take_events(now)
        gpus = self._gpus_of(events, scanned.gpus)
        rules = self._known_rules(gpus)
        with self._lock:
            self._state = self._told(self._state, events, gpus, rules)
        if events:  # now: a look takes long where a GPU hangs
            self._keep_and_publish(now)
        readings = self._readings(now)
        if readings and not self._is_newest():  # a newer one has begun to write meanwhile
            return _FLOOD_SECONDS
        with self._lock:
            self._state = self._seen(self._state, readings, rules)
        state = self._keep_and_publish(now)
        self._report.update(state.faults, events, gpus, rules)
        # What could not be kept is asked for again after a restart.
        seconds = self._requests.done() if self._is_kept else None
        return min(self._seconds_to_next(state, rules), seconds or math.inf)

    def _told(
        self, state: HealthState, events: Sequence[GpuEvent], gpus: Sequence[Gpu], rules: RulesByGpu
    ) -> HealthState:
        state = self._requests.apply(state, gpus)  # first: what comes now is not what was cleared
        return after_events(state, events, gpus, rules, self._inputs.epoch())

    def _seen(
        self, state: HealthState, readings: Sequence[HealthReading], rules: RulesByGpu
    ) -> HealthState:
        now = self._inputs.epoch()
        for reading in readings:
            state = after_reading(state, reading, rules, now)
        lost = {fault.gpu for fault in state.faults if fault.problem is Problem.LOST}
        unmonitored = self._inputs.unmonitored().keys() - lost
        state = after_registration(state, unmonitored, now)
        return settled(state, rules, now)

    def _keep_and_publish(self, now: float) -> HealthState:
        state = self._state
        self._keep(state, now)
        self._publish()
        return state

    def _take_events(self, now: float) -> Sequence[GpuEvent]:
        with self._lock:
            pending, self._pending = self._pending, {}
            if not pending:
                return ()
            soon = max(now + _AFTER_EVENT_SECONDS, self._looked_at + _BETWEEN_LOOKS_SECONDS)
            self._look_at = min(self._look_at, soon)
        self._events_at = now
        return [replace(key, count=count, at=at) for key, (count, at) in pending.items()]

    def _gpus_of(self, events: Iterable[GpuEvent], gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        """*gpus* with the MIG instances that *events* are of: a claim may have got one since the
        last scan. Its problem is none of the whole GPU."""
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        concerned = [
            (by_uuid[e.gpu], e.gi) for e in events if e.gi is not None and e.gpu in by_uuid
        ]
        if all(partition_of(gpu, gi) is not None for gpu, gi in concerned):
            return gpus
        try:
            return self._inputs.scan().gpus
        except NodeError as error:
            log.warning("the instance of an event is not known", extra={"error": str(error)})
            return gpus

    def _readings(self, now: float) -> Sequence[HealthReading]:
        """A look at every GPU, if it is time. GPUs of which none answers are looked at less and
        less often."""
        if now < self._look_at:
            return ()
        self._looked_at, next_at = now, now + self._inputs.look_seconds
        with self._lock:
            self._look_at = next_at
        gpus = [gpu.uuid for gpu in self._scanned.gpus] if self._scanned else []
        energy_of = self._energy.due(gpus, {fault.gpu for fault in self._state.faults}, now)
        try:
            answers = self._inputs.readings(energy_of)
        except NodeError as error:
            log.debug("the health of the GPUs cannot be read", extra={"error": str(error)})
            answers = {}
        readings = [answer for answer in answers.values() if isinstance(answer, HealthReading)]
        for gpu, answer in answers.items():
            if isinstance(answer, NodeError):
                facts = {"gpu": gpu, "error": str(answer)}
                log.debug("the health of a GPU cannot be read", extra=facts)
        if readings:
            self._energy.answered([each for each in readings if each.gpu in energy_of], now)
            self._backoff.reset()
            return readings
        with self._lock:
            if self._look_at == next_at:  # else somebody asked for a look meanwhile
                self._look_at = now + self._backoff.next_seconds()
        return readings

    def _known_rules(self, gpus: tuple[Gpu, ...]) -> RulesByGpu:
        """Of the profile in force, or of the last one that was."""
        rules = self._rules
        try:
            profile = self._inputs.profile()
        except (SettingsError, ApiServerError):
            return rules.by_gpu
        if profile is not rules.profile or gpus is not rules.gpus:
            by_gpu, _ = rules_by_gpu(profile, gpus)
            health = {gpu: each.health for gpu, each in by_gpu.items()}
            self._rules = rules = _Rules(profile, gpus, health)
        return rules.by_gpu

    def _is_newest(self) -> bool:
        """As last known, while the disk does not tell."""
        try:
            self._was_newest = self._inputs.is_newest()
        except NodeError as error:
            log.debug("whether this process is the newest: %s", error)
        return self._was_newest

    def _take_over(self) -> None:
        """Know what an older process kept since this one began, and have it see a write."""
        self._took_over = True
        kept = self._read()
        with self._lock:
            self._state = taken_over(self._state, kept)
        self._is_kept, self._kept_at = False, float("-inf")

    def _follow(self) -> None:
        """Know what the newer process keeps, which sees the same events. Until it begins to, keep
        them for it."""
        before, kept = self._kept, self._read()
        scanned = self._scanned
        if kept == before and not self._follows and scanned is not None:
            now = self._inputs.clock()
            events = self._take_events(now)
            gpus = self._gpus_of(events, scanned.gpus)
            rules = self._known_rules(gpus)
            with self._lock:
                epoch = self._inputs.epoch()
                self._state = after_events(self._state, events, gpus, rules, epoch)
                state = self._state
            if events:
                self._keep(state, now)
            return
        self._follows = True
        with self._lock:
            self._pending.clear()
            if kept.faults != self._state.faults:
                self._state = kept
        self._publish()

    def _read(self) -> HealthState:
        try:
            self._kept = self._file.read()
            self._is_kept = True
        except NodeError as error:
            self._note_trouble(str(error))
        return self._kept

    def _keep(self, state: HealthState, now: float) -> None:
        """Write *state*, if it is due. A disk that fails keeps nothing from being published."""
        if not self._is_due(state, now):
            return
        try:
            self._file.write(state)
        except NodeError as error:
            self._is_kept = False
            self._kept_at = now  # the next try is not at once
            self._note_trouble(str(error))
            return
        if self._write_trouble:
            log.info("the health of GPUs is kept again")
        self._write_trouble = ""
        self._kept, self._kept_at, self._is_kept = state, now, True

    def _is_due(self, state: HealthState, now: float) -> bool:
        passed = now - self._kept_at
        if not self._is_kept:
            return passed >= _RETRY_WRITE_SECONDS
        if _lasting(state.faults) != _lasting(self._kept.faults):
            return True
        if state.faults != self._kept.faults:
            return passed >= _KEEP_SECONDS
        if _lookable(state) != _lookable(self._kept):
            return True
        return bool(state.faults) and passed >= _KEEP_LOOKS_SECONDS

    def _note_trouble(self, trouble: str) -> None:
        if not self._write_trouble:
            log.error(
                "the health of GPUs is not kept for a restart; it is watched all the same: %s",
                trouble,
            )
        self._write_trouble = trouble

    def _publish(self) -> None:
        with self._lock:
            self._publish_now()
            changed, self._notified = self._faults is not self._notified, self._faults
        if changed:
            for listener in self.on_change:
                listener()

    def _publish_now(self) -> None:
        """The lock is held."""
        if _lasting(self._state.faults) != _lasting(self._faults):
            self._faults = self._state.faults

    def _seconds_to_next(self, state: HealthState, rules: RulesByGpu) -> float:
        now = self._inputs.clock()
        times = [self._look_at - now]
        if (settlement := next_settlement(state, rules)) is not None:
            times.append(settlement - self._inputs.epoch())
        if self._write_trouble or state.faults != self._kept.faults:
            times.append(self._kept_at + _RETRY_WRITE_SECONDS - now)
        return max(0.01, min(times))


def _lookable(state: HealthState) -> Set[tuple[GpuUuid, bool]]:
    """Of the looks what a reset is told by that happens before the next process looks."""
    return {(look.reading.gpu, look.faulty_since) for look in state.looks}


def _lasting(faults: Faults) -> Sequence[object]:
    """Of faults what is published: neither how often, nor whether one may be over soon."""
    return [replace(each, count=1, well_since=None) for each in faults]
