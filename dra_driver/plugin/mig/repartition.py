"""Changes the partitions of a GPU so that no error and no crash leaves it half changed.

Before an instance is created it is in the MIG state file, and so is what the GPU looked like before
the change: the next attempt goes on, or restores that.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace

from dra_driver.base.errors import NodeError, PlacementTaken
from dra_driver.model.gpus import Gpu, GpuUuid, PartitionKey
from dra_driver.model.mig_layouts import LayoutBefore, LayoutChange, LayoutInstance, MigState
from dra_driver.node.mig.partitions import MigPartitions
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plan.mig.manager.state import layout_instance, partition_keys, still_present

log = logging.getLogger(__name__)

# Seconds: no claim waits for a layout, so users of a GPU are not waited for; it is tried again.
_NO_WAIT = 0.0
_SHORT_WAIT = 2.0  # a monitoring agent that reads for a moment is no reason to undo the change


class GpuRepartitioner:
    """Only for a GPU that nothing uses and no claim can come to. For many threads."""

    def __init__(self, mig: MigPartitions, state_file: MigStateFile) -> None:
        self._mig = mig
        self._state_file = state_file

    def switch(self, gpu: Gpu, on: bool) -> None:
        """Have its MIG mode on or off. NodeError: it is as it was."""
        if gpu.mig and gpu.mig.switches:
            self._mig.set_mode(gpu.uuid, on, patience=_NO_WAIT)
        else:
            self._mig.reset_mode(gpu.uuid, on, patience=_NO_WAIT)

    def change(self, gpu: Gpu, change: LayoutChange) -> None:
        """Do all of *change* to *gpu* as it is now. NodeError: what failed, and whether the GPU is
        as it was before."""
        managed = self._begin(gpu)
        lost: set[PartitionKey] = set()
        created: list[LayoutInstance] = []
        try:
            to_remove = [instance for instance in managed if instance.key in change.remove]
            self._remove(gpu, to_remove, lost)
            if change.switch is not None:
                self.switch(gpu, change.switch)
            for key in change.create:
                self._create(gpu, key, created, lost)
        except NodeError as e:
            raise NodeError(f"{e}; {self._undo(gpu, lost)}") from e
        present = [layout_instance(instance) for instance in gpu.mig.instances] if gpu.mig else []
        to_keep = [instance for instance in present if instance.key in change.keep]
        self._end(gpu, [*to_keep, *created])

    def restore(self, gpu: Gpu) -> None:
        """Undo the change of *gpu* that is under way, if one is."""
        state = self._state_file.read()
        if (before := state.before.get(gpu.uuid)) is not None:
            self._restore(gpu, still_present(gpu, state.instances.get(gpu.uuid, ())), before)

    def _begin(self, gpu: Gpu) -> tuple[LayoutInstance, ...]:
        """The instances on it that layouts created."""

        def edit(state: MigState) -> MigState:
            present = still_present(gpu, state.instances.get(gpu.uuid, ()))
            keys = tuple(sorted(partition_keys(present)))
            now = LayoutBefore(bool(gpu.mig and gpu.mig.on), keys)
            # After a crash in the middle of a change, the state before that change counts.
            begun = replace(state, before={gpu.uuid: now, **state.before})
            return _with_instances(begun, gpu, present)

        return self._state_file.change(edit).instances.get(gpu.uuid, ())

    def _undo(self, gpu: Gpu, lost: Collection[PartitionKey]) -> str:
        """Every instance in the state file was created by this driver, or is being created, except
        at the *lost* places."""
        try:
            state = self._record(gpu, lost)
            instances = state.instances.get(gpu.uuid, ())
            missing = self._restore(gpu, instances, state.before[gpu.uuid])
        except NodeError as e:
            facts = {"device": gpu.name, "gpu": gpu.uuid, "error": str(e)}
            log.warning("a GPU is neither as its layout says nor as before", extra=facts)
            return f"what was there before could not be restored: {e}; it will be tried again"
        return "the GPU is as it was before" + (f", but for {_names(missing)}" if missing else "")

    def _restore(
        self, gpu: Gpu, instances: Collection[LayoutInstance], before: LayoutBefore
    ) -> list[PartitionKey]:
        """The partitions that are not restored, since somebody else took their places meanwhile:
        those are neither removed nor created again."""
        divided = _divided_by_others(gpu)
        managed = {instance.key: instance for instance in instances if instance.key not in divided}
        to_remove = [instance for key, instance in managed.items() if key not in before.keys]
        self._remove(gpu, to_remove, set())
        self.switch(gpu, before.on)
        created: list[LayoutInstance] = []
        missing = sorted(divided & (partition_keys(instances) | set(before.keys)))
        for key in sorted(set(before.keys) - divided) if before.on else ():
            try:
                self._create(gpu, key, created, set(), new=key not in managed)
            except PlacementTaken:
                missing.append(key)
                self._record(gpu, [key])
        self._end(gpu, created)
        facts = {"device": gpu.name, "gpu": gpu.uuid, "without": _names(missing)}
        log.info("a GPU has its partitions of before", extra=facts)
        return missing

    def _end(self, gpu: Gpu, instances: Iterable[LayoutInstance]) -> None:
        def edit(state: MigState) -> MigState:
            before = {uuid: value for uuid, value in state.before.items() if uuid != gpu.uuid}
            return _with_instances(replace(state, before=before), gpu, instances)

        self._state_file.change(edit)

    def _remove(
        self, gpu: Gpu, instances: Iterable[LayoutInstance], lost: set[PartitionKey]
    ) -> None:
        """By UUID, where that is known, so that another instance in the same place stays. One that
        is half removed has no UUID any more."""
        half_removed = {instance.key for instance in gpu.mig.unusable} if gpu.mig else set()
        for instance in instances:
            has_uuid = bool(instance.uuid) and instance.key not in half_removed
            uuid = GpuUuid(instance.uuid) if has_uuid else None
            self._mig.remove(gpu.uuid, instance.key, uuid, patience=_SHORT_WAIT)
            lost.add(instance.key)

    def _create(
        self,
        gpu: Gpu,
        key: PartitionKey,
        created: list[LayoutInstance],
        lost: set[PartitionKey],
        *,
        new: bool = True,
    ) -> None:
        """Add the instance to *created*; its place to *lost*, where somebody else came first.

        It is in the state file before it exists, so a crash leaves at most one instance whose UUID
        is not recorded. Whatever lies in that place then counts as ours, even if somebody else
        created it in that very moment.
        """
        recorded = [*created, LayoutInstance(key)]
        self._record(gpu, partition_keys(recorded), recorded)
        lost.discard(key)
        try:
            instance = self._mig.create(gpu.uuid, key, new, patience=_SHORT_WAIT)
        except PlacementTaken:
            lost.add(key)
            raise
        created.append(layout_instance(instance))

    def _record(
        self, gpu: Gpu, keys: Collection[PartitionKey], instances: Iterable[LayoutInstance] = ()
    ) -> MigState:
        """Have *instances* in the state file, and nothing else in the places of *keys*."""

        def edit(state: MigState) -> MigState:
            recorded = state.instances.get(gpu.uuid, ())
            others = [instance for instance in recorded if instance.key not in keys]
            return _with_instances(state, gpu, [*others, *instances])

        return self._state_file.change(edit)


def _divided_by_others(gpu: Gpu) -> set[PartitionKey]:
    """Where somebody created compute instances. Whoever did may be using them, also where the GPU
    instance around them was ours (see ``plan.mig.manager.changes``)."""
    unusable = gpu.mig.unusable if gpu.mig else ()
    return {instance.key for instance in unusable if instance.cis}


def _with_instances(state: MigState, gpu: Gpu, instances: Iterable[LayoutInstance]) -> MigState:
    ordered = tuple(sorted(instances, key=lambda instance: instance.key))
    by_gpu = {**state.instances, gpu.uuid: ordered}
    return replace(state, instances={uuid: value for uuid, value in by_gpu.items() if value})


def _names(keys: Iterable[PartitionKey]) -> str:
    return ", ".join(map(str, keys))
