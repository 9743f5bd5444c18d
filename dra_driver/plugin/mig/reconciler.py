"""Keeps GPUs cut as named layouts say, and boards in the MIG mode that their profile needs.

Nothing is changed that a claim has or a process uses; that waits.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from dra_driver.base.backoff import FailedAttempts
from dra_driver.base.errors import ApiServerError, DriverError, NodeError, SettingsError, TimedOut
from dra_driver.base.threads import in_parallel
from dra_driver.model.gpus import Gpu, GpuUuid, Inventory
from dra_driver.model.mig_layouts import (
    DesiredLayout,
    LayoutOutcome,
    LayoutState,
    MigState,
    overall_state,
)
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import Profile
from dra_driver.model.records import HoldingsByDevice
from dra_driver.plan.mig.manager.state import (
    GpuNames,
    MigEvent,
    failure_event,
    mig_events,
    pruned_state,
)
from dra_driver.plan.mig.partitions import created_partitions
from dra_driver.plan.profiles.rules import rules_by_gpu
from dra_driver.plugin.mig.apply import LayoutApplier, MigModeInputs, MigModeSwitcher
from dra_driver.plugin.mig.desired_layouts import DesiredLayouts, LayoutSource, desired_layouts
from dra_driver.plugin.mig.idle_gpus import AllocatedDevices, IdleGpus, WhileUnclaimed
from dra_driver.plugin.mig.idle_gpus import IdleNode as LookedAt
from dra_driver.plugin.mig.repartition import GpuRepartitioner, PartitionEditor, RepartitionJournal

log = logging.getLogger(__name__)

_FIRST_SECONDS = 5.0  # until what failed is tried again; then ever longer
_CUT_AGAIN_SECONDS = 60.0
_RESET_AGAIN_SECONDS = 600.0
_TURN_SECONDS = 10.0


class MigNode(LookedAt, Protocol):
    """This machine; ``dra_driver.node.gpu_node.GpuNode`` is one."""

    @property
    def mig(self) -> PartitionEditor: ...
    def inventory(self) -> Inventory: ...


@dataclass(frozen=True, slots=True)
class MigInputs:
    """What says what is wanted, and who has GPUs. Most may raise a SettingsError or a ClusterError:
    it is not known now."""

    label: Callable[[], str]  # the name of the layout of the whole node; empty: none
    is_labelled: Callable[[], bool]  # whether the Node has a label that tells the state
    layouts: LayoutSource
    profile: Callable[[], Profile]
    features: Callable[[], ApiFeatures]
    held: Callable[[], HoldingsByDevice]
    allocated: AllocatedDevices
    turned_on: Callable[[], Collection[GpuUuid]]  # whose MIG mode claims turned on
    in_charge: Callable[[], bool]  # whether no newer process of this plugin runs


@dataclass(frozen=True, slots=True)
class MigLocks:
    """What keeps others away."""

    while_free: WhileUnclaimed  # claims, from GPUs that none has
    turn: Callable[[float], AbstractContextManager[None]]  # other processes; for so many seconds


@dataclass(frozen=True, slots=True)
class MigCallbacks:
    """Who is told of it, from several threads."""

    book: Callable[[MigState], None]  # when something begins, and after every look
    governed: Callable[[tuple[Gpu, ...], frozenset[GpuUuid]], None]  # of which layouts say anything
    changed: Callable[[], None]  # GPUs are others than they were
    news: Callable[[MigEvent], None] = lambda news: None  # what is logged, for who reads no logs


class MigReconciler:
    """Its looks are one thread's."""

    def __init__(
        self,
        node: MigNode,
        sources: MigInputs,
        apart: MigLocks,
        book: RepartitionJournal,
        told: MigCallbacks,
    ) -> None:
        self._node = node
        self._sources = sources
        self._turn = apart.turn
        self._book = book
        self._told = told
        self._idle = IdleGpus(node, apart.while_free, sources.held, sources.allocated)
        work = GpuRepartitioner(node.mig, book)
        cuts = FailedAttempts(_FIRST_SECONDS, _CUT_AGAIN_SECONDS)
        resets = FailedAttempts(_FIRST_SECONDS, _RESET_AGAIN_SECONDS)
        self._layouts = LayoutApplier(self._idle, work, book, cuts, self._begin)
        self._boards = MigModeSwitcher(self._idle, work, book, resets)
        self._error = ""
        self._is_wanted: bool | None = None  # whether a layout is; None: not known yet
        self._waiting = False

    @property
    def waiting(self) -> bool:
        """Whether something is done once a claim is given back."""
        return self._waiting

    def look(self) -> None:
        """One look: do what can be done. What cannot be told now waits for the next one."""
        if not self._sources.in_charge():
            return
        self._idle.forget()
        try:
            self._look()
        except (NodeError, ApiServerError, SettingsError) as e:
            self._failed(e)
        else:
            self._error = ""
        if self._idle.acted:
            self._node.refresh()
            self._told.changed()

    def _look(self) -> None:
        seen, label = self._node.inventory(), None
        try:
            profile, label = self._sources.profile(), self._sources.label()
            self._wishes(label, profile, seen)  # first of all: what follows takes long, or fails
        finally:
            inventory = self._remember(seen, label)
        wanted, held = self._wishes(label, profile, inventory), self._sources.held()
        outcomes = self._settle(inventory, profile, wanted, held)
        left = self._abandon(inventory, wanted)
        boards = self._switch(inventory, profile, held, wanted) | left
        names = {gpu.uuid: gpu.name for gpu in inventory.gpus}
        self._conclude(wanted, outcomes, boards, names)

    def _wishes(self, label: str, profile: Profile, inventory: Inventory) -> DesiredLayouts:
        """What is wanted. Nothing is cut for claims that may be the business of a layout, also
        where it cannot be told what that says."""
        found = desired_layouts(label, profile, self._sources.layouts, inventory)
        self._is_wanted = found.any
        self._told.governed(inventory.gpus, found.governed)
        return found

    def _failed(self, error: DriverError) -> None:
        """An API server that is away says nothing about GPUs; anything else is a failure."""
        is_new = str(error) != self._error
        self._error = str(error)
        if is_new:
            log.warning("cannot tell how GPUs are to be cut", extra={"error": str(error)})
        if isinstance(error, ApiServerError | TimedOut):
            return
        state = LayoutState.FAILED if self._is_layout_wanted() else None
        if is_new and state:
            self._told.news(failure_event(f"cannot tell how GPUs are to be cut: {error}"))
        self._told.book(MigState(problem=str(error), state=state))

    def _is_layout_wanted(self) -> bool:
        if self._is_wanted is not None:
            return self._is_wanted
        try:
            return bool(self._sources.label())
        except ApiServerError:
            return False

    def _remember(self, inventory: Inventory, label: str | None) -> Inventory:
        """Have in the book what can be seen of GPUs, and nothing that is gone; and what *label*
        names, unless that is not known. What another process makes of GPUs just now, this look may
        be too old for.

        What somebody put in the place of ours between two looks, and is the same, is taken for
        ours: it has the same UUID.
        """
        on = frozenset(self._sources.turned_on())

        def edit(book: MigState) -> MigState:
            its = book.label if label is None else label
            return replace(pruned_state(book, inventory, on), label=its)

        try:
            if edit(self._book.read()) == self._book.read():
                return inventory
        except NodeError:
            pass  # a book that is damaged is set aside when it is changed
        with self._turn(_TURN_SECONDS):
            inventory = self._node.refresh()
            self._book.change(edit)
        return inventory

    def _settle(
        self, inventory: Inventory, profile: Profile, wanted: DesiredLayouts, held: HoldingsByDevice
    ) -> dict[GpuUuid, LayoutOutcome]:
        claimed = created_partitions(held)
        rules, _ = rules_by_gpu(profile, inventory.gpus)

        def one(gpu: Gpu) -> LayoutOutcome:
            keys = {key for uuid, key in claimed if uuid == gpu.uuid}
            found = self._layouts.settle(gpu, wanted.by_gpu[gpu.uuid], keys)
            return _with_warning(found, wanted.by_gpu[gpu.uuid], rules[gpu.uuid].mig.dynamic)

        gpus = [gpu for gpu in inventory.gpus if gpu.uuid in wanted.by_gpu]
        found = in_parallel(one, gpus)
        return {gpu.uuid: outcome for gpu, outcome in zip(gpus, found, strict=True)}

    def _abandon(self, inventory: Inventory, wanted: DesiredLayouts) -> dict[GpuUuid, str]:
        """Put back what a crash cut short and nobody wants any more."""
        begun = set(self._book.read().before) - wanted.governed
        gpus = [gpu for gpu in inventory.gpus if gpu.uuid in begun]
        found = in_parallel(self._layouts.abandon, gpus)
        return {
            gpu.uuid: f"{gpu.name} is half cut: {why}"
            for gpu, why in zip(gpus, found, strict=True)
            if why
        }

    def _switch(
        self, inventory: Inventory, profile: Profile, held: HoldingsByDevice, wanted: DesiredLayouts
    ) -> dict[GpuUuid, str]:
        try:
            features = self._sources.features()
        except ApiServerError:  # the look for what to offer tells of it
            return {}
        return self._boards.switch(
            MigModeInputs(inventory, profile, features, held), wanted.governed
        )

    def _begin(self) -> None:
        self._told.book(replace(self._book.read(), state=LayoutState.PENDING))

    def _conclude(
        self,
        wanted: DesiredLayouts,
        outcomes: Mapping[GpuUuid, LayoutOutcome],
        boards: Mapping[GpuUuid, str],
        names: GpuNames,
    ) -> None:
        kept = wanted.any or (self._book.read().labelled and self._sources.is_labelled())

        def edit(book: MigState) -> MigState:
            return replace(
                book,
                outcomes=outcomes,
                boards=boards,
                problem=wanted.problem,
                state=_state(wanted, outcomes),
                labelled=kept,
            )

        before = self._book.read()
        after = edit(before)
        pending = any(one.state is LayoutState.PENDING for one in outcomes.values())
        self._waiting = pending or bool(boards)
        if after != before:
            _log_changes(before, after)
            with self._turn(_TURN_SECONDS):
                self._book.change(edit)
            for one in mig_events(
                before, after, names
            ):  # what the book could not take is told again
                self._told.news(one)
        self._told.book(after)


def _state(wanted: DesiredLayouts, outcomes: Mapping[GpuUuid, LayoutOutcome]) -> LayoutState | None:
    if not wanted.any:
        return None
    if wanted.problem:
        return LayoutState.FAILED
    return (
        overall_state(outcomes.values()) if outcomes else LayoutState.PENDING
    )  # no GPU can be seen


def _with_warning(outcome: LayoutOutcome, wanted: DesiredLayout, dynamic: bool) -> LayoutOutcome:
    """The layout governs, whatever the profile says."""
    if not dynamic:
        return outcome
    note = f"partitions of it are not cut for claims, as long as layout {wanted.layout!r} is chosen"
    return replace(outcome, reason=f"{outcome.reason}; {note}" if outcome.reason else note)


def _log_changes(before: MigState, after: MigState) -> None:
    if after.problem and after.problem != before.problem:
        log.warning("the layout of this node cannot be used: %s", after.problem)
    for uuid, outcome in after.outcomes.items():
        if outcome == before.outcomes.get(uuid):
            continue
        facts = {"gpu": uuid, "layout": outcome.layout, "state": outcome.state.value}
        level = logging.WARNING if outcome.state is LayoutState.FAILED else logging.INFO
        log.log(level, "layout of a GPU", extra=facts | {"reason": outcome.reason})
    for uuid, why in after.boards.items():
        if why != before.boards.get(uuid):
            log.warning("MIG mode of a GPU is not as it should be: %s", why)
