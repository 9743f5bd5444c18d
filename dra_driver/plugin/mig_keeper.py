"""Keeps GPUs cut as named layouts say, and boards in the MIG mode that their profile needs.

Which layout: the label ``nvidia.com/mig.config`` of the Node names it for all GPUs, else the
profile for each. Nothing is changed that a claim holds or a process uses; that waits.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from dra_driver.errors import ClusterError, NodeError, SettingsError
from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.holdings import Held
from dra_driver.model.inventory import Inventory
from dra_driver.model.layouts import Book, Layout, Outcome, State, Wanted, state_of
from dra_driver.model.offer import Keeps
from dra_driver.model.profiles import Profile
from dra_driver.plan.mig.layouts import wanted
from dra_driver.plan.mig.offered import made
from dra_driver.plan.profiles import rules_by_gpu
from dra_driver.plugin.idle_gpus import IdleGpus, WhileFree
from dra_driver.plugin.idle_gpus import Node as LookedAt
from dra_driver.plugin.mig_boards import MigBoards
from dra_driver.plugin.mig_layouts import MigLayouts
from dra_driver.plugin.mig_work import Kept, MigWork, Partitions
from dra_driver.plugin.tries import Tries

log = logging.getLogger(__name__)

_CUT_AGAIN_SECONDS = 60.0
_RESET_AGAIN_SECONDS = 600.0


class Node(LookedAt, Protocol):
    """This machine; ``dra_driver.node.node.GpuNode`` is one."""

    @property
    def mig(self) -> Partitions: ...
    def inventory(self) -> Inventory: ...


class Layouts(Protocol):
    """Where layouts come from; ``dra_driver.plugin.layouts.Layouts`` is one."""

    def named(self, name: str, gpus: tuple[Gpu, ...]) -> Layout: ...


@dataclass(frozen=True, slots=True)
class Sources:
    """What says what is wanted. Each of the first ones may raise a SettingsError or a ClusterError:
    it is not known now."""

    label: Callable[[], str]  # the name of the layout of the whole node; empty: none
    layouts: Layouts
    profile: Callable[[], Profile]
    keeps: Callable[[], Keeps]
    held: Callable[[], Held]
    in_charge: Callable[[], bool]  # whether no newer process of this plugin runs


@dataclass(frozen=True, slots=True)
class _Wishes:
    """What GPUs should look like. *unknown*: those of which that cannot be told."""

    by_gpu: Mapping[GpuUuid, Wanted] = field(default_factory=dict)
    unknown: frozenset[GpuUuid] = frozenset()
    problem: str = ""
    any: bool = False  # whether a layout is wanted, if only of GPUs that are not here

    @property
    def governed(self) -> frozenset[GpuUuid]:
        """The GPUs that are the business of layouts."""
        return frozenset(self.by_gpu) | self.unknown


class MigKeeper:
    """Its looks are one thread's."""

    def __init__(
        self,
        node: Node,
        sources: Sources,
        while_free: WhileFree,
        book: Kept,
        tell: Callable[[Book], None],
    ) -> None:
        """*tell* is told when something begins, and after every look what came of it."""
        self._node = node
        self._sources = sources
        self._book = book
        self._tell = tell
        idle = IdleGpus(node, while_free)
        self._work = MigWork(node.mig, book)
        self._layouts = MigLayouts(idle, self._work, book, Tries(_CUT_AGAIN_SECONDS), self._begin)
        self._boards = MigBoards(idle, node.mig, book, Tries(_RESET_AGAIN_SECONDS))
        self._error = ""
        self._waiting = False

    @property
    def waiting(self) -> bool:
        """Whether something is done once a claim is given back."""
        return self._waiting

    def look(self) -> None:
        """One look: do what can be done. What cannot be told now waits for the next one."""
        if not self._sources.in_charge():
            return
        try:
            self._look()
        except (NodeError, ClusterError, SettingsError) as e:
            if str(e) != self._error:
                log.warning("cannot tell how GPUs are to be cut", extra={"error": str(e)})
            self._error = str(e)
            return
        self._error = ""

    def _look(self) -> None:
        inventory, profile = self._node.inventory(), self._sources.profile()
        held = self._sources.held()
        wishes = self._wishes(inventory, profile)
        outcomes = self._settle(inventory, wishes, held)
        left = self._abandon(inventory, wishes)
        boards = self._switch(inventory, profile, held, wishes) | left
        self._conclude(wishes, outcomes, boards)

    def _wishes(self, inventory: Inventory, profile: Profile) -> _Wishes:
        """The label counts for all GPUs, else the profile for each; not for those that the profile
        leaves alone."""
        rules, _ = rules_by_gpu(profile, inventory.gpus)
        label = self._sources.label()
        names = {
            gpu: label or rules[gpu.uuid].mig.layout
            for gpu in inventory.gpus
            if rules[gpu.uuid].include
        }
        by_gpu: dict[GpuUuid, Wanted] = {}
        unknown: set[GpuUuid] = set()
        problems: list[str] = []
        for name in sorted({*names.values(), label} - {""}):
            gpus = [gpu for gpu, its in names.items() if its == name]
            try:
                layout = self._sources.layouts.named(name, inventory.gpus)
            except SettingsError as e:
                problems.append(str(e))
                unknown |= {gpu.uuid for gpu in gpus}
            else:
                found = ((gpu.uuid, wanted(layout, gpu)) for gpu in gpus)
                by_gpu |= {uuid: one for uuid, one in found if one is not None}
        is_any = bool(label) or any(names.values())
        return _Wishes(by_gpu, frozenset(unknown), "; ".join(problems), is_any)

    def _settle(self, inventory: Inventory, wishes: _Wishes, held: Held) -> dict[GpuUuid, Outcome]:
        claimed = made(held)
        outcomes: dict[GpuUuid, Outcome] = {}
        for gpu in inventory.gpus:
            if (wish := wishes.by_gpu.get(gpu.uuid)) is not None:
                keys = {key for uuid, key in claimed if uuid == gpu.uuid}
                outcomes[gpu.uuid] = self._layouts.settle(gpu, wish, keys)
        return outcomes

    def _abandon(self, inventory: Inventory, wishes: _Wishes) -> dict[GpuUuid, str]:
        """Put back what a crash cut short and nobody wants any more."""
        begun = set(self._book.read().before) - wishes.governed
        found = {
            gpu.uuid: self._layouts.abandon(gpu) for gpu in inventory.gpus if gpu.uuid in begun
        }
        return {uuid: f"it is half cut: {why}" for uuid, why in found.items() if why}

    def _switch(
        self, inventory: Inventory, profile: Profile, held: Held, wishes: _Wishes
    ) -> dict[GpuUuid, str]:
        try:
            keeps = self._sources.keeps()
        except ClusterError:  # the look for what to offer tells of it
            return {}
        return self._boards.switch(inventory, profile, keeps, held, wishes.governed)

    def _begin(self) -> None:
        self._tell(replace(self._book.read(), state=State.PENDING))

    def _conclude(
        self, wishes: _Wishes, outcomes: Mapping[GpuUuid, Outcome], boards: Mapping[GpuUuid, str]
    ) -> None:
        before = self._book.read()
        state = State.FAILED if wishes.problem else state_of(outcomes.values())
        after = replace(
            before,
            outcomes=outcomes,
            boards=boards,
            problem=wishes.problem,
            state=state if wishes.any else None,
        )
        pending = any(one.state is State.PENDING for one in outcomes.values())
        self._waiting = pending or bool(boards)
        if after != before:
            self._log(before, after)
            self._book.write(after)
        self._tell(after)

    def _log(self, before: Book, after: Book) -> None:
        if after.problem and after.problem != before.problem:
            log.warning("the layout of this node cannot be used: %s", after.problem)
        for uuid, outcome in after.outcomes.items():
            if outcome == before.outcomes.get(uuid):
                continue
            facts = {"gpu": uuid, "layout": outcome.layout, "state": outcome.state.value}
            level = logging.WARNING if outcome.state is State.FAILED else logging.INFO
            log.log(level, "layout of a GPU", extra=facts | {"reason": outcome.reason})
        for uuid, why in after.boards.items():
            if why != before.boards.get(uuid):
                log.warning("MIG mode of a GPU is not as it should be: %s", why)
