"""Switches boards that need a reset for it to MIG mode, as long as their profile cuts them.

Those that change their mode without a reset do so with the first claim and the last; what a claim
could not switch back is switched back here.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

from dra_driver.errors import NodeError, TimedOut
from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.holdings import Held
from dra_driver.model.inventory import Inventory
from dra_driver.model.layouts import Book
from dra_driver.model.offer import Keeps
from dra_driver.model.profiles import Profile
from dra_driver.plan.mig.switches import to_switch
from dra_driver.plan.profiles import rules_by_gpu
from dra_driver.plugin.mig.idle import IdleGpus
from dra_driver.plugin.mig.tries import Tries
from dra_driver.plugin.mig.work import Kept, MigWork
from dra_driver.plugin.side_by_side import side_by_side

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Basis:
    """What it follows from how boards should be."""

    inventory: Inventory
    profile: Profile
    keeps: Keeps
    held: Held


class MigBoards:
    """Its looks are one thread's."""

    def __init__(self, idle: IdleGpus, work: MigWork, book: Kept, tries: Tries) -> None:
        self._idle = idle
        self._work = work
        self._book = book
        self._tries = tries

    def switch(self, basis: Basis, others: Collection[GpuUuid]) -> dict[GpuUuid, str]:
        """Switch what has to be switched, and tell why the rest was not. *others* are what layouts
        say they are."""
        on = set(to_switch(basis.inventory, basis.profile, basis.keeps, basis.held)) - set(others)
        off = self._to_leave(basis) - set(others)
        gpus = [gpu for gpu in basis.inventory.gpus if gpu.uuid in on | off]
        found = side_by_side(lambda gpu: self._one(gpu, gpu.uuid in on, basis.profile), gpus)
        return {gpu.uuid: why for gpu, why in zip(gpus, found, strict=True) if why}

    def _to_leave(self, basis: Basis) -> set[GpuUuid]:
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
                basis.keeps.counters and rules[gpu.uuid].include and rules[gpu.uuid].mig.dynamic
            )
        }

    def _one(self, gpu: Gpu, on: bool, profile: Profile) -> str:
        """Why it was not switched; empty: it was."""
        word = "on" if on else "off"
        facts = (on, profile.entries)
        if why := self._tries.why_not(gpu.uuid, facts):
            return why
        try:
            waits = self._idle.change(gpu, self._on if on else self._off)
        except NodeError as e:
            why = f"MIG mode of {gpu.name} could not be turned {word}: {e}"
            self._tries.failed(gpu.uuid, facts, why)
            return why
        if waits:
            return f"MIG mode of {gpu.name} is not turned {word} yet: {waits}"
        self._tries.worked(gpu.uuid)
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
        def edit(book: Book) -> Book:
            known = set(book.switched) - {gpu.uuid} | ({gpu.uuid} if switched else set())
            left_on = tuple(one for one in book.left_on if one != gpu.uuid)
            return replace(book, switched=tuple(sorted(known)), left_on=left_on)

        self._book.change(edit)
