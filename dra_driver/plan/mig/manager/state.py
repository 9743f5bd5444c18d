"""Which instances of a GPU layouts made, or took over.

What a look at layouts and boards tells of the node that the one before did not.
"""

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
    """*about*: news of the same reason and this are the same thing, told in other words maybe."""

    reason: str
    about: str
    words: str

    @property
    def is_good(self) -> bool:
        return self.reason == LAYOUT_APPLIED


def failure_event(words: str) -> MigEvent:
    """Of the node as a whole."""
    return MigEvent(LAYOUT_FAILED, words, words)


def mig_events(before: MigState, after: MigState, names: GpuNames) -> Iterator[MigEvent]:
    """What is so in *after* and was not in *before*. That something waits is none for a layout,
    whose state says so; a board has no such state."""
    if after.problem and after.problem != before.problem:
        yield failure_event(f"the layout of this node cannot be used: {after.problem}")
    yield from _failed(before, after, names)
    yield from _applied(before, after, names)
    for gpu, why in after.boards.items():
        if why != before.boards.get(gpu):
            yield MigEvent(MODE_NOT_SET, gpu, why)


def _failed(before: MigState, after: MigState, names: GpuNames) -> Iterator[MigEvent]:
    """Each GPU for itself: they fail for reasons of their own."""
    for gpu, now in after.outcomes.items():
        if now.state is LayoutState.FAILED and now != before.outcomes.get(gpu):
            words = f"{names[gpu]} is not cut as layout {now.layout!r} says: {now.reason}"
            yield MigEvent(LAYOUT_FAILED, f"{gpu} {now.layout}", words)


def _applied(before: MigState, after: MigState, names: GpuNames) -> Iterator[MigEvent]:
    """All GPUs of a layout together."""
    fresh = sorted(
        (now.layout, names[gpu])
        for gpu, now in after.outcomes.items()
        if now.state is LayoutState.SUCCESS and _is_other(now, before.outcomes.get(gpu))
    )
    for layout, gpus in groupby(fresh, key=lambda one: one[0]):
        words = f"cut as layout {layout!r} says: {', '.join(name for _, name in gpus)}"
        yield MigEvent(LAYOUT_APPLIED, words, words)


def _is_other(now: LayoutOutcome, before: LayoutOutcome | None) -> bool:
    """Apart from what is noted of it."""
    return before is None or (now.layout, now.state) != (before.layout, before.state)


def layout_instance(instance: MigInstance) -> LayoutInstance:
    """What *instance* is known by later."""
    return LayoutInstance(instance.key, instance.gi, instance.uuid)


def still_present(gpu: Gpu, made: Iterable[LayoutInstance]) -> tuple[LayoutInstance, ...]:
    """Those of *made* that *gpu* has, and not something else in their places.

    What a crash kept from being known further is what lies there. Of one that is half removed only
    the GPU instance is left.
    """
    seen = _seen(gpu)
    return tuple(one for one in made if one in seen or _half(one) in seen)


def partition_keys(made: Iterable[LayoutInstance]) -> frozenset[PartitionKey]:
    return frozenset(one.key for one in made)


def pruned_state(book: MigState, inventory: Inventory, turned_on: Collection[GpuUuid]) -> MigState:
    """Without instances that are gone, since what comes to their places is somebody else's, though
    it may have the same UUID; with the GPUs of which claims *turned_on* MIG mode, until they are
    seen without. Of a GPU that this look could not read nothing is gone."""
    seen = {
        gpu.uuid: gpu
        for gpu in inventory.gpus
        if gpu.mig is not None and gpu.uuid not in inventory.stale
    }

    def made() -> Iterator[tuple[GpuUuid, tuple[LayoutInstance, ...]]]:
        for uuid, entries in book.made.items():
            if left := still_present(seen[uuid], entries) if uuid in seen else entries:
                yield uuid, left

    off = {uuid for uuid, gpu in seen.items() if gpu.mig is not None and not gpu.mig.on}
    on = (set(book.left_on) - off) | set(turned_on)
    return replace(book, made=dict(made()), left_on=tuple(sorted(on)))


def _seen(gpu: Gpu) -> frozenset[LayoutInstance]:
    """All that can be said of what is there."""
    if gpu.mig is None:
        return frozenset()
    whole = {layout_instance(one) for one in gpu.mig.instances}
    unusable = {LayoutInstance(one.key, one.gi) for one in gpu.mig.unusable}
    return frozenset(whole | unusable | {LayoutInstance(key) for key in gpu.mig.taken})


def _half(one: LayoutInstance) -> LayoutInstance:
    return LayoutInstance(one.key, one.gi)
