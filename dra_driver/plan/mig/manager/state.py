"""What layouts created on GPUs, and what is reported of it as events of the Node."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from dra_driver.model.gpus import Gpu, GpuUuid, Inventory, MigInstance, PartitionKey
from dra_driver.model.mig_layouts import LayoutInstance, LayoutOutcome, LayoutState, MigState

LAYOUT_APPLIED = "MIGLayoutApplied"
LAYOUT_FAILED = "MIGLayoutFailed"
MODE_NOT_SET = "MIGModeNotSet"

GpuNames = Mapping[GpuUuid, str]


@dataclass(frozen=True, slots=True)
class MigEvent:
    """*about*: events of the same reason and this are the same thing, maybe in other words."""

    reason: str
    about: str
    message: str

    @property
    def is_good(self) -> bool:
        return self.reason == LAYOUT_APPLIED


def failure_event(message: str) -> MigEvent:
    """Of the node as a whole."""
    return MigEvent(LAYOUT_FAILED, message, message)


def mig_events(before: MigState, after: MigState, names: GpuNames) -> Iterator[MigEvent]:
    """What is so in *after* and was not in *before*. A layout that waits makes no event, since its
    state says so; MIG mode has no such state."""
    if after.problem and after.problem != before.problem:
        yield failure_event(f"the layout of this node cannot be used: {after.problem}")
    yield from _failed(before, after, names)
    yield from _applied(before, after, names)
    for gpu, problem in after.mode_problems.items():
        if problem != before.mode_problems.get(gpu):
            yield MigEvent(MODE_NOT_SET, gpu, problem)


def _failed(before: MigState, after: MigState, names: GpuNames) -> Iterator[MigEvent]:
    """Each GPU for itself: they fail for reasons of their own."""
    for gpu, now in after.outcomes.items():
        if now.state is LayoutState.FAILED and now != before.outcomes.get(gpu):
            message = f"{names[gpu]} is not partitioned as layout {now.layout!r} says: {now.reason}"
            yield MigEvent(LAYOUT_FAILED, f"{gpu} {now.layout}", message)


def _applied(before: MigState, after: MigState, names: GpuNames) -> Iterator[MigEvent]:
    """All GPUs of a layout together."""
    applied = sorted(
        (now.layout, names[gpu])
        for gpu, now in after.outcomes.items()
        if now.state is LayoutState.SUCCESS and _is_new(now, before.outcomes.get(gpu))
    )
    for layout, gpus in groupby(applied, key=lambda layout_and_gpu: layout_and_gpu[0]):
        message = f"partitioned as layout {layout!r} says: {', '.join(name for _, name in gpus)}"
        yield MigEvent(LAYOUT_APPLIED, message, message)


def _is_new(now: LayoutOutcome, before: LayoutOutcome | None) -> bool:
    """Apart from its reason."""
    return before is None or (now.layout, now.state) != (before.layout, before.state)


def layout_instance(instance: MigInstance) -> LayoutInstance:
    """What *instance* is known by later."""
    return LayoutInstance(instance.key, instance.gi, instance.uuid)


def still_present(gpu: Gpu, recorded: Iterable[LayoutInstance]) -> tuple[LayoutInstance, ...]:
    """Those of *recorded* that *gpu* has, and not something else in their places.

    Where a crash left only a place recorded, it is what lies there. Of an instance that is half
    removed only the GPU instance is left.
    """
    present = _present(gpu)
    return tuple(
        instance
        for instance in recorded
        if instance in present or LayoutInstance(instance.key, instance.gi) in present
    )


def _present(gpu: Gpu) -> frozenset[LayoutInstance]:
    """Everything by which what is there may be recorded."""
    if gpu.mig is None:
        return frozenset()
    whole = {layout_instance(instance) for instance in gpu.mig.instances}
    unusable = {LayoutInstance(instance.key, instance.gi) for instance in gpu.mig.unusable}
    return frozenset(whole | unusable | {LayoutInstance(key) for key in gpu.mig.keys})


def partition_keys(instances: Iterable[LayoutInstance]) -> frozenset[PartitionKey]:
    return frozenset(instance.key for instance in instances)


def pruned_state(
    state: MigState, inventory: Inventory, enabled_by_claims: Collection[GpuUuid]
) -> MigState:
    """Without instances that are gone, since what comes to their places is somebody else's, though
    it may have the same UUID; with the GPUs whose MIG mode claims turned on, until they are seen
    without. Of a GPU that this look could not read nothing is gone."""
    seen = {
        gpu.uuid: gpu
        for gpu in inventory.gpus
        if gpu.mig is not None and gpu.uuid not in inventory.stale
    }
    present = {
        uuid: still_present(seen[uuid], recorded) if uuid in seen else recorded
        for uuid, recorded in state.instances.items()
    }
    off = {uuid for uuid, gpu in seen.items() if gpu.mig is not None and not gpu.mig.on}
    left_on = (set(state.left_on) - off) | set(enabled_by_claims)
    return replace(
        state,
        instances={uuid: instances for uuid, instances in present.items() if instances},
        left_on=tuple(sorted(left_on)),
    )
