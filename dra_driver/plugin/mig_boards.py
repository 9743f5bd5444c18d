"""Switches boards that need a reset for it to MIG mode, as long as their profile cuts them.

Those that change their mode without a reset do so with the first claim and the last.
"""

import logging
from collections.abc import Collection
from dataclasses import replace

from dra_driver.errors import NodeError
from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.holdings import Held
from dra_driver.model.inventory import Inventory
from dra_driver.model.offer import Keeps
from dra_driver.model.profiles import Profile
from dra_driver.plan.mig.switches import to_switch
from dra_driver.plan.profiles import rules_by_gpu
from dra_driver.plugin.idle_gpus import IdleGpus
from dra_driver.plugin.mig_work import Kept, Partitions
from dra_driver.plugin.tries import Tries

log = logging.getLogger(__name__)


class MigBoards:
    """For one thread."""

    def __init__(self, idle: IdleGpus, mig: Partitions, book: Kept, tries: Tries) -> None:
        self._idle = idle
        self._mig = mig
        self._book = book
        self._tries = tries

    def switch(
        self,
        inventory: Inventory,
        profile: Profile,
        keeps: Keeps,
        held: Held,
        others: Collection[GpuUuid],
    ) -> dict[GpuUuid, str]:
        """Switch what has to be switched, and tell why the rest was not. *others* are what layouts
        say they are."""
        on = set(to_switch(inventory, profile, keeps, held)) - set(others)
        off = self._to_leave(inventory, profile, keeps) - set(others)
        problems: dict[GpuUuid, str] = {}
        for gpu in inventory.gpus:
            if gpu.uuid in on | off and (why := self._one(gpu, gpu.uuid in on, profile)):
                problems[gpu.uuid] = why
        return problems

    def _to_leave(self, inventory: Inventory, profile: Profile, keeps: Keeps) -> set[GpuUuid]:
        """What we switched, and what is no longer offered in partitions that are cut for claims."""
        rules, _ = rules_by_gpu(profile, inventory.gpus)
        switched = self._book.read().switched
        return {
            gpu.uuid
            for gpu in inventory.gpus
            if gpu.uuid in switched
            and gpu.mig is not None
            and not gpu.mig.taken
            and not (keeps.counters and rules[gpu.uuid].include and rules[gpu.uuid].mig.dynamic)
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
        return f"MIG mode of {gpu.name} is not turned {word} yet: {waits}" if waits else ""

    def _on(self, gpu: Gpu) -> None:
        """In the book first: what is switched is to be switched back one day."""
        if gpu.mig is None or gpu.mig.on:
            return
        self._remember(gpu, True)
        try:
            self._mig.reset_mode(gpu.uuid, True)
        except NodeError:
            self._remember(gpu, False)
            raise
        log.info("a GPU is in MIG mode now", extra={"device": gpu.name, "gpu": gpu.uuid})

    def _off(self, gpu: Gpu) -> None:
        if gpu.mig is None or gpu.mig.taken:
            return
        if gpu.mig.on:
            self._mig.reset_mode(gpu.uuid, False)
            log.info("a GPU left MIG mode", extra={"device": gpu.name, "gpu": gpu.uuid})
        self._remember(gpu, False)

    def _remember(self, gpu: Gpu, switched: bool) -> None:
        book = self._book.read()
        known = set(book.switched) - {gpu.uuid} | ({gpu.uuid} if switched else set())
        self._book.write(replace(book, switched=tuple(sorted(known))))
