"""Keeps GPUs partitioned as layouts say, and boards in the MIG mode that their profile needs.

What a claim holds or a process uses is not changed: the change waits.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

from dra_driver.base.backoff import FailedAttempts
from dra_driver.base.errors import ApiServerError, DriverError, NodeError, SettingsError, TimedOut
from dra_driver.base.frozen import frozen
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
from dra_driver.model.records import HoldingsByGpu
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plan.mig.manager.state import (
    MigEvent,
    failure_event,
    mig_events,
    pruned_state,
)
from dra_driver.plan.mig.partitions import created_partitions
from dra_driver.plan.profiles.rules import rules_by_gpu
from dra_driver.plugin.mig.apply import LayoutApplier, MigModeInputs, MigModeSwitcher
from dra_driver.plugin.mig.desired_layouts import DesiredLayouts, LayoutCatalog, desired_layouts
from dra_driver.plugin.mig.idle_gpus import AllocatedDevices, IdleGpus, WhileUnclaimed
from dra_driver.plugin.mig.repartition import GpuRepartitioner

log = logging.getLogger(__name__)

_FIRST_SECONDS = 5.0  # until what failed is tried again; then ever longer
_LAYOUT_AGAIN_SECONDS = 60.0
_RESET_AGAIN_SECONDS = 600.0
_LEASE_SECONDS = 10.0


@frozen
class MigInputs:
    """What decides how GPUs should be partitioned, who uses them, and what keeps others away. Most
    may raise a SettingsError or an ApiServerError: it is not known now."""

    label: Callable[[], str]  # the name of the layout of the whole node; empty: none
    is_labelled: Callable[[], bool]  # whether the Node has a label that tells the state
    layouts: LayoutCatalog
    profile: Callable[[], Profile]
    features: Callable[[], ApiFeatures]
    holdings: Callable[[], HoldingsByGpu]
    allocated: AllocatedDevices
    enabled_by_claims: Callable[[], Collection[GpuUuid]]  # GPUs whose MIG mode claims turned on
    is_newest: Callable[[], bool]  # whether no newer process of this plugin runs
    while_free: WhileUnclaimed
    # keeps other processes from the state file; it is waited for so many seconds
    lease: Callable[[float], AbstractContextManager[None]]


_Seen = tuple[object, ...]


@frozen
class MigCallbacks:
    """What is reported, from several threads."""

    state: Callable[[MigState], None]  # when something begins, and after every look
    governed: Callable[[tuple[Gpu, ...], frozenset[GpuUuid]], None]  # GPUs that layouts govern
    gpus_changed: Callable[[], None]
    event: Callable[[MigEvent], None] = lambda event: None


class MigReconciler:
    """Its looks are one thread's."""

    def __init__(
        self,
        node: GpuNode,
        inputs: MigInputs,
        state_file: MigStateFile,
        callbacks: MigCallbacks,
    ) -> None:
        self._node = node
        self._inputs = inputs
        self._state_file = state_file
        self._callbacks = callbacks
        self._idle = IdleGpus(node, inputs.while_free, inputs.holdings, inputs.allocated)
        repartitioner = GpuRepartitioner(node.mig, state_file)
        failed_layouts = FailedAttempts(_FIRST_SECONDS, _LAYOUT_AGAIN_SECONDS)
        failed_modes = FailedAttempts(_FIRST_SECONDS, _RESET_AGAIN_SECONDS)
        self._layouts = LayoutApplier(
            self._idle, repartitioner, state_file, failed_layouts, self._report_pending
        )
        self._modes = MigModeSwitcher(self._idle, repartitioner, state_file, failed_modes)
        self._error = ""
        self._settled: _Seen | None = None  # by the last look, if that found nothing to do
        self._is_layout_desired: bool | None = None  # None: not known yet
        self._waiting = False

    @property
    def waiting(self) -> bool:
        """Whether something is done once a claim is given back."""
        return self._waiting

    def look(self) -> None:
        """Do what can be done now; the rest waits for the next look."""
        seen = self._see()
        if seen is not None and seen == self._settled:
            return
        if not self._inputs.is_newest():
            return
        self._idle.start_look()
        self._settled = None
        try:
            if self._reconcile():
                self._settled = seen
        except (NodeError, ApiServerError, SettingsError) as e:
            self._failed(e)
        else:
            self._error = ""
        if self._idle.acted:
            self._node.refresh()
            self._callbacks.gpus_changed()

    def _see(self) -> _Seen | None:
        """All that a look goes by, of which most is the same object until it changes. None: not
        all of it is known."""
        inputs = self._inputs
        try:
            state = self._state_file.read()
            return (
                state,
                self._node.inventory(),
                inputs.profile(),
                inputs.label(),
                inputs.layouts.contents(),
                inputs.features(),
                inputs.holdings(),
                frozenset(inputs.enabled_by_claims()),
                state.labelled and inputs.is_labelled(),
            )
        except (NodeError, ApiServerError, SettingsError):
            return None

    def _reconcile(self) -> bool:
        """Whether nothing is left to be done, or to be tried again."""
        last_seen, label = self._node.inventory(), None
        try:
            profile, label = self._inputs.profile(), self._inputs.label()
            # Claims are kept away from governed GPUs first: the rest takes long, or fails.
            self._desired(label, profile, last_seen)
        finally:
            inventory = self._record_seen(last_seen, label)
        desired = self._desired(label, profile, inventory)
        holdings = self._inputs.holdings()
        outcomes = self._apply(inventory, profile, desired, holdings)
        problems = self._abandon(inventory, desired)
        mode_problems = self._switch_modes(inventory, profile, holdings, desired) | problems
        self._report(desired, outcomes, mode_problems, inventory)
        states = {outcome.state for outcome in outcomes.values()}
        return not (self._waiting or desired.problem or LayoutState.FAILED in states)

    def _desired(self, label: str, profile: Profile, inventory: Inventory) -> DesiredLayouts:
        """The desired layouts. On a GPU that a layout may govern no partitions are created for
        claims, even while it is not known what the layout says."""
        desired = desired_layouts(label, profile, self._inputs.layouts, inventory)
        self._is_layout_desired = desired.any
        self._callbacks.governed(inventory.gpus, desired.governed)
        return desired

    def _failed(self, error: DriverError) -> None:
        """An outage of the API server says nothing about GPUs; any other error is a failure."""
        is_new = str(error) != self._error
        self._error = str(error)
        if is_new:
            log.warning("cannot tell how GPUs are to be partitioned", extra={"error": str(error)})
        if isinstance(error, ApiServerError | TimedOut):
            return
        state = LayoutState.FAILED if self._may_layout_be_desired() else None
        if is_new and state:
            message = f"cannot tell how GPUs are to be partitioned: {error}"
            self._callbacks.event(failure_event(message))
        self._callbacks.state(MigState(problem=str(error), state=state))

    def _may_layout_be_desired(self) -> bool:
        if self._is_layout_desired is not None:
            return self._is_layout_desired
        try:
            return bool(self._inputs.label())
        except ApiServerError:
            return False

    def _record_seen(self, inventory: Inventory, label: str | None) -> Inventory:
        """Remove instances that are gone from the state file, and record the *label*, unless that
        is None: not known. Where the file has to change, the answer is a newer inventory, since
        *inventory* may be older than what another process just did.

        An instance that somebody created between two looks, equal to ours and in its place, counts
        as ours: it has the same UUID.
        """
        enabled_by_claims = frozenset(self._inputs.enabled_by_claims())

        def edit(state: MigState) -> MigState:
            pruned = pruned_state(state, inventory, enabled_by_claims)
            return replace(pruned, label=state.label if label is None else label)

        try:
            if edit(self._state_file.read()) == self._state_file.read():
                return inventory
        except NodeError:
            pass  # a damaged file is set aside when it is changed
        with self._inputs.lease(_LEASE_SECONDS):
            inventory = self._node.refresh()
            self._state_file.change(edit)
        return inventory

    def _apply(
        self,
        inventory: Inventory,
        profile: Profile,
        desired: DesiredLayouts,
        holdings: HoldingsByGpu,
    ) -> dict[GpuUuid, LayoutOutcome]:
        claimed = created_partitions(holdings)
        rules, _ = rules_by_gpu(profile, inventory.gpus)

        def apply(gpu: Gpu) -> LayoutOutcome:
            keys = {key for uuid, key in claimed if uuid == gpu.uuid}
            layout = desired.by_gpu[gpu.uuid]
            outcome = self._layouts.apply(gpu, layout, keys)
            return _with_warning(outcome, layout) if rules[gpu.uuid].mig.dynamic else outcome

        gpus = [gpu for gpu in inventory.answering if gpu.uuid in desired.by_gpu]
        outcomes = in_parallel(apply, gpus)
        return {gpu.uuid: outcome for gpu, outcome in zip(gpus, outcomes, strict=True)}

    def _abandon(self, inventory: Inventory, desired: DesiredLayouts) -> dict[GpuUuid, str]:
        """Undo changes that a crash interrupted and that no layout desires any more."""
        begun = set(self._state_file.read().before) - desired.governed
        gpus = [gpu for gpu in inventory.answering if gpu.uuid in begun]
        problems = in_parallel(self._layouts.abandon, gpus)
        return {
            gpu.uuid: f"{gpu.name} is half partitioned: {problem}"
            for gpu, problem in zip(gpus, problems, strict=True)
            if problem
        }

    def _switch_modes(
        self,
        inventory: Inventory,
        profile: Profile,
        holdings: HoldingsByGpu,
        desired: DesiredLayouts,
    ) -> dict[GpuUuid, str]:
        try:
            features = self._inputs.features()
        except ApiServerError:  # reported by the publisher, which asks too
            return {}
        inputs = MigModeInputs(inventory, profile, features, holdings)
        return self._modes.switch(inputs, desired.governed)

    def _report_pending(self) -> None:
        self._callbacks.state(replace(self._state_file.read(), state=LayoutState.PENDING))

    def _report(
        self,
        desired: DesiredLayouts,
        outcomes: Mapping[GpuUuid, LayoutOutcome],
        mode_problems: Mapping[GpuUuid, str],
        inventory: Inventory,
    ) -> None:
        before = self._state_file.read()
        labelled = desired.any or (before.labelled and self._inputs.is_labelled())

        def edit(state: MigState) -> MigState:
            return replace(
                state,
                outcomes=outcomes,
                mode_problems=mode_problems,
                problem=desired.problem,
                state=_state(desired, outcomes),
                labelled=labelled,
            )

        after = edit(before)
        pending = any(outcome.state is LayoutState.PENDING for outcome in outcomes.values())
        self._waiting = pending or bool(mode_problems)
        if after != before:
            _log_changes(before, after)
            with self._inputs.lease(_LEASE_SECONDS):
                self._state_file.change(edit)
            names = {gpu.uuid: gpu.name for gpu in inventory.gpus}
            # After the file: a change that it could not take is reported once more.
            for event in mig_events(before, after, names):
                self._callbacks.event(event)
        self._callbacks.state(after)


def _state(
    desired: DesiredLayouts, outcomes: Mapping[GpuUuid, LayoutOutcome]
) -> LayoutState | None:
    if not desired.any:
        return None
    if desired.problem:
        return LayoutState.FAILED
    # Without an outcome no GPU can be seen.
    return overall_state(outcomes.values()) if outcomes else LayoutState.PENDING


def _with_warning(outcome: LayoutOutcome, desired: DesiredLayout) -> LayoutOutcome:
    """The layout governs, whatever the profile says."""
    note = (
        "no partitions of it are created for claims, "
        f"as long as layout {desired.layout!r} is chosen"
    )
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
    for uuid, problem in after.mode_problems.items():
        if problem != before.mode_problems.get(uuid):
            log.warning("MIG mode of a GPU is not as it should be: %s", problem)
