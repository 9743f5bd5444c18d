"""What layouts created on GPUs, and the events of the Node about it."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import Gpu, GpuUuid, Inventory, MigInstance, PartitionKey
from dra_driver.model.mig_layouts import LayoutInstance, LayoutOutcome, LayoutState, MigState

LAYOUT_APPLIED = "MIGLayoutApplied"
LAYOUT_FAILED = "MIGLayoutFailed"
MODE_NOT_SET = "MIGModeNotSet"

GpuNames = Mapping[GpuUuid, str]


@frozen
class MigEvent:
    """*about*: events with the same reason and this are about the same thing."""

    reason: str
    about: str
    message: str

    @property
    def is_good(self) -> bool:
        return self.reason == LAYOUT_APPLIED


def failure_event(message: str) -> MigEvent:
    """An event about the node as a whole."""
    return MigEvent(LAYOUT_FAILED, message, message)


def mig_events(before: MigState, after: MigState, names: GpuNames) -> Iterator[MigEvent]:
    """What is new in *after*. A layout that waits makes no event, since the label of the Node shows
    that; no label shows the MIG mode."""
    if after.problem and after.problem != before.problem:
        yield failure_event(f"the layout of this node cannot be used: {after.problem}")
    yield from _failed(before, after, names)
    yield from _applied(before, after, names)
    for gpu, problem in after.mode_problems.items():
        if problem != before.mode_problems.get(gpu):
            yield MigEvent(MODE_NOT_SET, gpu, problem)


def _failed(before: MigState, after: MigState, names: GpuNames) -> Iterator[MigEvent]:
    """One event for each GPU, since they fail for different reasons."""
    for gpu, outcome in after.outcomes.items():
        if outcome.state is LayoutState.FAILED and outcome != before.outcomes.get(gpu):
            layout, reason = outcome.layout, outcome.reason
            message = f"{names[gpu]} is not partitioned as layout {layout!r} says: {reason}"
            yield MigEvent(LAYOUT_FAILED, f"{gpu} {layout}", message)


def _applied(before: MigState, after: MigState, names: GpuNames) -> Iterator[MigEvent]:
    """One event for all GPUs of a layout."""
    applied = sorted(
        (outcome.layout, names[gpu])
        for gpu, outcome in after.outcomes.items()
        if outcome.state is LayoutState.SUCCESS and _is_new(outcome, before.outcomes.get(gpu))
    )
    for layout, gpus in groupby(applied, key=itemgetter(0)):
        message = f"partitioned as layout {layout!r} says: {', '.join(name for _, name in gpus)}"
        yield MigEvent(LAYOUT_APPLIED, message, message)


def _is_new(outcome: LayoutOutcome, before: LayoutOutcome | None) -> bool:
    """Apart from its reason."""
    return before is None or (outcome.layout, outcome.state) != (before.layout, before.state)


def layout_instance(instance: MigInstance) -> LayoutInstance:
    """By what *instance* is recognized later."""
    return LayoutInstance(instance.key, instance.gi, instance.uuid)


def still_present(gpu: Gpu, recorded: Iterable[LayoutInstance]) -> tuple[LayoutInstance, ...]:
    """The *recorded* instances that *gpu* has, and not another instance in their place.

    Where a crash left only a placement recorded, the instance there counts. Of an instance that is
    half removed the GPU instance is present.
    """
    if gpu.mig is None:
        return ()
    present = {
        *map(layout_instance, gpu.mig.instances),
        *(LayoutInstance(instance.key, instance.gi) for instance in gpu.mig.unusable),
        *map(LayoutInstance, gpu.mig.keys),
    }
    return tuple(
        instance
        for instance in recorded
        if instance in present or LayoutInstance(instance.key, instance.gi) in present
    )


def partition_keys(instances: Iterable[LayoutInstance]) -> frozenset[PartitionKey]:
    return frozenset(instance.key for instance in instances)


def pruned_state(
    state: MigState, inventory: Inventory, enabled_by_claims: Collection[GpuUuid]
) -> MigState:
    """*state* without instances that are gone, since an instance that comes to their place is
    somebody else's, though it may have the same UUID; with the GPUs whose MIG mode claims turned
    on, until it is seen off. Of a GPU that this look could not read nothing is gone."""
    gpus = {
        gpu.uuid: gpu
        for gpu in inventory.gpus
        if gpu.mig is not None and gpu.uuid not in inventory.stale
    }
    present = {
        uuid: still_present(gpus[uuid], recorded) if uuid in gpus else recorded
        for uuid, recorded in state.instances.items()
    }
    off = {uuid for uuid, gpu in gpus.items() if gpu.mig is not None and not gpu.mig.on}
    left_on = (set(state.left_on) - off) | set(enabled_by_claims)
    return replace(
        state,
        instances={uuid: instances for uuid, instances in present.items() if instances},
        left_on=tuple(sorted(left_on)),
    )
