"""Brings each GPU to its layout, and to the MIG mode that its profile needs, while nothing uses it.

Boards that need a reset are in MIG mode as long as their profile creates partitions for claims.
Boards that need none change their mode with the first claim and the last; a mode that a claim could
not switch back is switched back here.
"""

import logging
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace

from dra_driver.base.backoff import FailedAttempts
from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.base.frozen import frozen
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
from dra_driver.model.records import HoldingsByGpu
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plan.mig.dynamic import gpus_to_switch
from dra_driver.plan.mig.manager.changes import LayoutError, plan_layout_change
from dra_driver.plan.mig.manager.state import layout_instance, partition_keys, still_present
from dra_driver.plan.profiles.rules import rules_by_gpu
from dra_driver.plugin.mig.idle_gpus import IdleGpus
from dra_driver.plugin.mig.repartition import GpuRepartitioner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayoutApplier:
    """For many threads, each GPU one thread's at a time."""

    idle: IdleGpus
    repartitioner: GpuRepartitioner
    state_file: MigStateFile
    failures: FailedAttempts
    begin: Callable[[], None]  # called before a change that did not fail the last time

    def apply(
        self, gpu: Gpu, desired: DesiredLayout, claimed: Collection[PartitionKey]
    ) -> LayoutOutcome:
        """Have *gpu* look as *desired*, or stay as it is. *claimed*: the partitions that were
        created for claims when *gpu* was read."""
        state = self.state_file.read()
        change = plan_layout_change(gpu, desired, _managed_keys(gpu, state), claimed)
        if _is_applied(gpu, change, state):
            self.failures.succeeded(gpu.uuid)
            return LayoutOutcome(desired.layout, LayoutState.SUCCESS)
        if isinstance(change, LayoutError) and change.always and gpu.uuid not in state.before:
            return LayoutOutcome(desired.layout, LayoutState.FAILED, change.reason)
        inputs = _retry_key(gpu, desired)
        if reason := self.failures.reason_to_wait(gpu.uuid, inputs):
            return LayoutOutcome(desired.layout, LayoutState.FAILED, reason)
        try:
            waits_for = self.idle.change(gpu, lambda now: self._apply(now, desired))
        except NodeError as e:
            self.failures.failed(gpu.uuid, inputs, str(e))
            return LayoutOutcome(desired.layout, LayoutState.FAILED, str(e))
        return _outcome(desired, change, waits_for)

    def abandon(self, gpu: Gpu) -> str:
        """Undo a change that was begun for a layout that is no longer desired; the answer is why
        that failed, or what it waits for."""
        try:
            return self.idle.change(gpu, self.repartitioner.restore)
        except NodeError as e:
            return str(e)

    def _apply(self, gpu: Gpu, desired: DesiredLayout) -> None:
        """*gpu* is as it is now, and nothing on it is for claims."""
        state = self.state_file.read()
        change = plan_layout_change(gpu, desired, _managed_keys(gpu, state))
        if isinstance(change, LayoutError):
            self.repartitioner.restore(gpu)
            raise NodeError(change.reason)
        last = state.outcomes.get(gpu.uuid, LayoutOutcome("", LayoutState.PENDING))
        failed_before = (last.layout, last.state) == (desired.layout, LayoutState.FAILED)
        if not change.is_nothing and not failed_before:
            self.begin()
        self.repartitioner.change(gpu, change)
        if not change.is_nothing:
            facts = {"device": gpu.name, "gpu": gpu.uuid, "layout": desired.layout}
            log.info("a GPU was partitioned as its layout says", extra=facts)


def _managed_keys(gpu: Gpu, state: MigState) -> frozenset[PartitionKey]:
    return partition_keys(still_present(gpu, state.instances.get(gpu.uuid, ())))


def _is_applied(gpu: Gpu, change: LayoutChange | LayoutError, state: MigState) -> bool:
    if isinstance(change, LayoutError) or not change.is_nothing or gpu.uuid in state.before:
        return False
    present = {layout_instance(instance) for instance in gpu.mig.instances} if gpu.mig else set()
    recorded = state.instances.get(gpu.uuid, ())
    return set(recorded) <= present and change.managed == tuple(
        instance.key for instance in recorded
    )


def _outcome(
    desired: DesiredLayout, change: LayoutChange | LayoutError, waits_for: str
) -> LayoutOutcome:
    if not waits_for or (isinstance(change, LayoutChange) and change.is_nothing):
        return LayoutOutcome(desired.layout, LayoutState.SUCCESS)
    if isinstance(change, LayoutError):
        waits_for = f"{waits_for}; then: {change.reason}"
    return LayoutOutcome(desired.layout, LayoutState.PENDING, waits_for)


def _retry_key(gpu: Gpu, desired: DesiredLayout) -> Hashable:
    """What the success of an attempt depends on."""
    return (desired, gpu.mig.on, gpu.mig.pending, gpu.mig.keys) if gpu.mig else desired


@frozen
class MigModeInputs:
    """What decides in which MIG mode boards should be."""

    inventory: Inventory
    profile: Profile
    features: ApiFeatures
    holdings: HoldingsByGpu


@dataclass(frozen=True)
class MigModeSwitcher:
    """For one thread."""

    idle: IdleGpus
    repartitioner: GpuRepartitioner
    state_file: MigStateFile
    failures: FailedAttempts

    def switch(self, inputs: MigModeInputs, governed: Collection[GpuUuid]) -> dict[GpuUuid, str]:
        """Switch the boards that are in the wrong mode; the answer is why some were not. Layouts
        decide about the *governed* GPUs."""
        switch_on = gpus_to_switch(
            inputs.inventory, inputs.profile, inputs.features, inputs.holdings
        )
        on = set(switch_on) - set(governed)
        off = self._to_switch_off(inputs) - set(governed)
        gpus = [gpu for gpu in inputs.inventory.answering if gpu.uuid in on | off]
        problems = in_parallel(lambda gpu: self._switch(gpu, gpu.uuid in on, inputs.profile), gpus)
        return {gpu.uuid: problem for gpu, problem in zip(gpus, problems, strict=True) if problem}

    def _to_switch_off(self, inputs: MigModeInputs) -> set[GpuUuid]:
        """The GPUs that this driver switched on, and whose profile creates no partitions for claims
        any more."""
        rules, _ = rules_by_gpu(inputs.profile, inputs.inventory.gpus)
        state = self.state_file.read()
        switched_by_us = {*state.switched, *state.left_on}
        counters = inputs.features.counters
        return {
            gpu.uuid
            for gpu in inputs.inventory.gpus
            if gpu.uuid in switched_by_us
            and gpu.mig is not None
            and not gpu.mig.keys
            and not (counters and rules[gpu.uuid].include and rules[gpu.uuid].mig.dynamic)
        }

    def _switch(self, gpu: Gpu, on: bool, profile: Profile) -> str:
        """Why it was not switched; empty: it was."""
        mode = "on" if on else "off"
        inputs = (on, profile.entries)
        if reason := self.failures.reason_to_wait(gpu.uuid, inputs):
            return reason
        try:
            waits_for = self.idle.change(gpu, self._switch_on if on else self._switch_off)
        except NodeError as e:
            reason = f"MIG mode of {gpu.name} could not be turned {mode}: {e}"
            self.failures.failed(gpu.uuid, inputs, reason)
            return reason
        if waits_for:
            return f"MIG mode of {gpu.name} is not turned {mode} yet: {waits_for}"
        self.failures.succeeded(gpu.uuid)
        return ""

    def _switch_on(self, gpu: Gpu) -> None:
        """It is recorded first that the board is to be switched off one day. The next look sees
        what a call did that did not return in time."""
        if gpu.mig is None or gpu.mig.on:
            return
        self._record(gpu, True)
        try:
            self.repartitioner.switch(gpu, True)
        except TimedOut:
            raise
        except NodeError:
            self._record(gpu, False)
            raise
        log.info("a GPU is in MIG mode now", extra={"device": gpu.name, "gpu": gpu.uuid})

    def _switch_off(self, gpu: Gpu) -> None:
        if gpu.mig is None or gpu.mig.keys:
            return
        if gpu.mig.on or gpu.mig.pending:
            self.repartitioner.switch(gpu, False)
            log.info("a GPU left MIG mode", extra={"device": gpu.name, "gpu": gpu.uuid})
        self._record(gpu, False)

    def _record(self, gpu: Gpu, switched: bool) -> None:
        def edit(state: MigState) -> MigState:
            uuids = set(state.switched) - {gpu.uuid} | ({gpu.uuid} if switched else set())
            left_on = tuple(uuid for uuid in state.left_on if uuid != gpu.uuid)
            return replace(state, switched=tuple(sorted(uuids)), left_on=left_on)

        self.state_file.change(edit)
