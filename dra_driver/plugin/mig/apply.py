"""Switches boards that need a reset for it to MIG mode, as long as their profile cuts them.

Those that change their mode without a reset do so with the first claim and the last; what a claim
could not switch back is switched back here.

Cuts GPUs as their layouts say, each when nothing uses it.
"""

import logging
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace

from dra_driver.base.backoff import FailedAttempts
from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.base.threads import in_parallel
from dra_driver.model.gpus import Gpu, GpuUuid, Inventory, PartitionKey
from dra_driver.model.mig_layouts import (
    DesiredLayout,
    LayoutChange,
    LayoutOutcome,
    LayoutState,
    MigState,
)
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import Profile
from dra_driver.model.records import HoldingsByDevice
from dra_driver.plan.mig.dynamic import gpus_to_switch
from dra_driver.plan.mig.manager.changes import LayoutError, plan_layout_change
from dra_driver.plan.mig.manager.state import layout_instance, partition_keys, still_present
from dra_driver.plan.profiles.rules import rules_by_gpu
from dra_driver.plugin.mig.idle_gpus import IdleGpus
from dra_driver.plugin.mig.repartition import GpuRepartitioner, RepartitionJournal

log = logging.getLogger(__name__)

PartitionKeys = Collection[PartitionKey]


class LayoutApplier:
    """For many threads, each GPU one thread's at a time."""

    def __init__(
        self,
        idle: IdleGpus,
        work: GpuRepartitioner,
        book: RepartitionJournal,
        failures: FailedAttempts,
        begin: Callable[[], None],
    ) -> None:
        """*begin* is called before anything is changed that did not fail the last time."""
        self._begin = begin
        self._idle = idle
        self._work = work
        self._book = book
        self._failures = failures

    def settle(self, gpu: Gpu, wanted: DesiredLayout, claimed: PartitionKeys) -> LayoutOutcome:
        """Have *gpu* look as *wanted*, or what it looks like stay. *claimed*: what was cut for
        claims when *gpu* was looked at."""
        book = self._book.read()
        found = plan_layout_change(gpu, wanted, _made(gpu, book), claimed)
        if _is_settled(gpu, found, book):
            self._failures.succeeded(gpu.uuid)
            return LayoutOutcome(wanted.layout, LayoutState.SUCCESS)
        if isinstance(found, LayoutError) and found.always and gpu.uuid not in book.before:
            return LayoutOutcome(wanted.layout, LayoutState.FAILED, found.reason)
        facts = _retry_key(gpu, wanted)
        if why := self._failures.reason_to_wait(gpu.uuid, facts):
            return LayoutOutcome(wanted.layout, LayoutState.FAILED, why)
        try:
            waits = self._idle.change(gpu, lambda now: self._apply(now, wanted))
        except NodeError as e:
            self._failures.failed(gpu.uuid, facts, str(e))
            return LayoutOutcome(wanted.layout, LayoutState.FAILED, str(e))
        return _outcome(wanted, found, waits)

    def abandon(self, gpu: Gpu) -> str:
        """Put back what a change that nobody wants any more has begun; why not, or what it waits
        for."""
        try:
            return self._idle.change(gpu, self._work.put_back)
        except NodeError as e:
            return str(e)

    def _apply(self, gpu: Gpu, wanted: DesiredLayout) -> None:
        """*gpu* is as it is now, and nothing on it is for claims."""
        book = self._book.read()
        found = plan_layout_change(gpu, wanted, _made(gpu, book))
        if isinstance(found, LayoutError):
            self._work.put_back(gpu)
            raise NodeError(found.reason)
        last = book.outcomes.get(gpu.uuid)
        if not found.is_nothing and not _is_failure(last, wanted):
            self._begin()
        self._work.change(gpu, found)
        if not found.is_nothing:
            facts = {"device": gpu.name, "gpu": gpu.uuid, "layout": wanted.layout}
            log.info("a GPU was cut as its layout says", extra=facts)


def _made(gpu: Gpu, book: MigState) -> frozenset[PartitionKey]:
    return partition_keys(still_present(gpu, book.made.get(gpu.uuid, ())))


def _is_failure(last: LayoutOutcome | None, wanted: DesiredLayout) -> bool:
    return last is not None and (last.layout, last.state) == (wanted.layout, LayoutState.FAILED)


def _is_settled(gpu: Gpu, found: LayoutChange | LayoutError, book: MigState) -> bool:
    if isinstance(found, LayoutError) or not found.is_nothing or gpu.uuid in book.before:
        return False
    there = {layout_instance(one) for one in gpu.mig.instances} if gpu.mig else set()
    made = book.made.get(gpu.uuid, ())
    return set(made) <= there and found.made == tuple(one.key for one in made)


def _is_nothing(found: LayoutChange | LayoutError) -> bool:
    return isinstance(found, LayoutChange) and found.is_nothing


def _outcome(wanted: DesiredLayout, found: LayoutChange | LayoutError, waits: str) -> LayoutOutcome:
    if not waits or _is_nothing(found):
        return LayoutOutcome(wanted.layout, LayoutState.SUCCESS)
    if isinstance(found, LayoutError):
        waits = f"{waits}; then: {found.reason}"
    return LayoutOutcome(wanted.layout, LayoutState.PENDING, waits)


def _retry_key(gpu: Gpu, wanted: DesiredLayout) -> Hashable:
    """What a try depends on."""
    return (wanted, gpu.mig.on, gpu.mig.pending, gpu.mig.taken) if gpu.mig else wanted


@dataclass(frozen=True, slots=True)
class MigModeInputs:
    """What it follows from how boards should be."""

    inventory: Inventory
    profile: Profile
    features: ApiFeatures
    held: HoldingsByDevice


class MigModeSwitcher:
    """Its looks are one thread's."""

    def __init__(
        self,
        idle: IdleGpus,
        work: GpuRepartitioner,
        book: RepartitionJournal,
        failures: FailedAttempts,
    ) -> None:
        self._idle = idle
        self._work = work
        self._book = book
        self._failures = failures

    def switch(self, basis: MigModeInputs, others: Collection[GpuUuid]) -> dict[GpuUuid, str]:
        """Switch what has to be switched, and tell why the rest was not. *others* are what layouts
        say they are."""
        on = set(gpus_to_switch(basis.inventory, basis.profile, basis.features, basis.held)) - set(
            others
        )
        off = self._to_leave(basis) - set(others)
        gpus = [gpu for gpu in basis.inventory.gpus if gpu.uuid in on | off]
        found = in_parallel(lambda gpu: self._one(gpu, gpu.uuid in on, basis.profile), gpus)
        return {gpu.uuid: why for gpu, why in zip(gpus, found, strict=True) if why}

    def _to_leave(self, basis: MigModeInputs) -> set[GpuUuid]:
        """What was switched by us, and is no longer offered in partitions that are cut for
        claims."""
        rules, _ = rules_by_gpu(basis.profile, basis.inventory.gpus)
        book = self._book.read()
        ours = {*book.switched, *book.left_on}
        return {
            gpu.uuid
            for gpu in basis.inventory.gpus
            if gpu.uuid in ours
            and gpu.mig is not None
            and not gpu.mig.taken
            and not (
                basis.features.counters and rules[gpu.uuid].include and rules[gpu.uuid].mig.dynamic
            )
        }

    def _one(self, gpu: Gpu, on: bool, profile: Profile) -> str:
        """Why it was not switched; empty: it was."""
        word = "on" if on else "off"
        facts = (on, profile.entries)
        if why := self._failures.reason_to_wait(gpu.uuid, facts):
            return why
        try:
            waits = self._idle.change(gpu, self._on if on else self._off)
        except NodeError as e:
            why = f"MIG mode of {gpu.name} could not be turned {word}: {e}"
            self._failures.failed(gpu.uuid, facts, why)
            return why
        if waits:
            return f"MIG mode of {gpu.name} is not turned {word} yet: {waits}"
        self._failures.succeeded(gpu.uuid)
        return ""

    def _on(self, gpu: Gpu) -> None:
        """In the book first: what is switched is to be switched back one day, and what a call did
        that did not end is seen at the next look."""
        if gpu.mig is None or gpu.mig.on:
            return
        self._remember(gpu, True)
        try:
            self._work.switch(gpu, True)
        except TimedOut:
            raise
        except NodeError:
            self._remember(gpu, False)
            raise
        log.info("a GPU is in MIG mode now", extra={"device": gpu.name, "gpu": gpu.uuid})

    def _off(self, gpu: Gpu) -> None:
        if gpu.mig is None or gpu.mig.taken:
            return
        if gpu.mig.on or gpu.mig.pending:
            self._work.switch(gpu, False)
            log.info("a GPU left MIG mode", extra={"device": gpu.name, "gpu": gpu.uuid})
        self._remember(gpu, False)

    def _remember(self, gpu: Gpu, switched: bool) -> None:
        def edit(book: MigState) -> MigState:
            known = set(book.switched) - {gpu.uuid} | ({gpu.uuid} if switched else set())
            left_on = tuple(one for one in book.left_on if one != gpu.uuid)
            return replace(book, switched=tuple(sorted(known)), left_on=left_on)

        self._book.change(edit)
