"""Changes how a GPU is cut, so that no error and no crash at any point leaves it half done.

What is about to be made is in the book before it is made, and so is what was there before: whoever
comes next goes on, or puts that back.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Protocol

from dra_driver.base.errors import NodeError, PlacementTaken
from dra_driver.model.gpus import Gpu, GpuUuid, MigInstance, PartitionKey
from dra_driver.model.mig_layouts import LayoutBefore, LayoutChange, LayoutInstance, MigState
from dra_driver.plan.mig.manager.state import layout_instance, partition_keys, still_present

log = logging.getLogger(__name__)

# Seconds: nobody waits for it, so who uses a GPU is not waited for, and it is tried again later.
_NO_WAIT = 0.0
_SHORT_WAIT = 2.0  # a look of a monitoring agent is no reason to take back what was cut already


class PartitionEditor(Protocol):
    """What cuts GPUs; ``dra_driver.node.mig.partitions``."""

    def set_mode(self, gpu: GpuUuid, on: bool, patience: float | None = None) -> None: ...
    def reset_mode(self, gpu: GpuUuid, on: bool, patience: float | None = None) -> None: ...
    def cut(
        self, gpu: GpuUuid, key: PartitionKey, new: bool = False, patience: float | None = None
    ) -> MigInstance: ...
    def remove(
        self,
        gpu: GpuUuid,
        key: PartitionKey,
        uuid: GpuUuid | None = None,
        patience: float | None = None,
    ) -> None: ...


class RepartitionJournal(Protocol):
    """Where the book is; ``dra_driver.node.state.mig_state``."""

    def read(self) -> MigState: ...
    def change(self, edit: Callable[[MigState], MigState]) -> MigState: ...


class GpuRepartitioner:
    """Only for a GPU that nothing uses and no claim can come to. For many threads."""

    def __init__(self, mig: PartitionEditor, book: RepartitionJournal) -> None:
        self._mig = mig
        self._book = book

    def switch(self, gpu: Gpu, on: bool) -> None:
        """Have its MIG mode on or off. NodeError: it is as it was."""
        if gpu.mig and gpu.mig.switches:
            self._mig.set_mode(gpu.uuid, on, patience=_NO_WAIT)
        else:
            self._mig.reset_mode(gpu.uuid, on, patience=_NO_WAIT)

    def change(self, gpu: Gpu, change: LayoutChange) -> None:
        """Do all of *change* to *gpu* as it is now. NodeError: it failed, and whether the GPU is as
        it was before."""
        mine = self._begin(gpu)
        lost: set[PartitionKey] = set()
        try:
            self._remove(gpu, [one for one in mine if one.key in change.remove], lost)
            if change.switch is not None:
                self.switch(gpu, change.switch)
            cut: list[LayoutInstance] = []
            for key in change.cut:
                self._cut(gpu, key, cut, lost)
        except NodeError as e:
            raise NodeError(f"{e}; {self._back_from(gpu, lost)}") from e
        kept = [one for one in _partitions_of(gpu) if one.key in change.keep]
        self._end(gpu, [*kept, *cut])

    def put_back(self, gpu: Gpu) -> None:
        """Make of *gpu*, which is as it is now, what it was before the change that is under way, if
        one is."""
        book = self._book.read()
        before = book.before.get(gpu.uuid)
        if before is not None:
            self._restore(gpu, still_present(gpu, book.made.get(gpu.uuid, ())), before)

    def _begin(self, gpu: Gpu) -> tuple[LayoutInstance, ...]:
        """What of it is ours."""

        def edit(book: MigState) -> MigState:
            made = still_present(gpu, book.made.get(gpu.uuid, ()))
            now = LayoutBefore(bool(gpu.mig and gpu.mig.on), tuple(sorted(partition_keys(made))))
            # Of a change that a crash cut short, the first one counts.
            return _with_partitions(replace(book, before={gpu.uuid: now, **book.before}), gpu, made)

        return self._book.change(edit).made.get(gpu.uuid, ())

    def _back_from(self, gpu: Gpu, lost: Collection[PartitionKey]) -> str:
        """What the book has was made by us, or is being made, but for what we *lost*."""
        try:
            book = self._note(gpu, lost)
            left = self._restore(gpu, book.made.get(gpu.uuid, ()), book.before[gpu.uuid])
        except NodeError as e:
            facts = {"device": gpu.name, "gpu": gpu.uuid, "error": str(e)}
            log.warning("a GPU is neither as its layout says nor as before", extra=facts)
            return f"what was there before could not be put back: {e}; it will be tried again"
        return "the GPU is as it was before" + (f", but for {_named(left)}" if left else "")

    def _restore(
        self, gpu: Gpu, mine: Collection[LayoutInstance], before: LayoutBefore
    ) -> list[PartitionKey]:
        """What somebody else came in the way of, in the meantime: it is neither removed nor cut
        again."""
        divided = _divided(gpu)
        ours = {one.key: one for one in mine if one.key not in divided}
        self._remove(gpu, [one for key, one in ours.items() if key not in before.keys], set())
        self.switch(gpu, before.on)
        cut: list[LayoutInstance] = []
        left = sorted(divided & ({one.key for one in mine} | set(before.keys)))
        for key in sorted(set(before.keys) - divided) if before.on else ():
            try:
                self._cut(gpu, key, cut, set(), new=key not in ours)
            except PlacementTaken:
                left.append(key)
                self._note(gpu, [key])
        self._end(gpu, cut)
        facts = {"device": gpu.name, "gpu": gpu.uuid, "without": _named(left)}
        log.info("a GPU is cut as before", extra=facts)
        return left

    def _end(self, gpu: Gpu, made: Iterable[LayoutInstance]) -> None:
        def edit(book: MigState) -> MigState:
            before = {uuid: one for uuid, one in book.before.items() if uuid != gpu.uuid}
            return _with_partitions(replace(book, before=before), gpu, made)

        self._book.change(edit)

    def _remove(self, gpu: Gpu, made: Iterable[LayoutInstance], lost: set[PartitionKey]) -> None:
        """By what they are known by, where that is known: nothing that is there instead goes. What
        was half removed is called nothing any more."""
        halves = {one.key for one in gpu.mig.unusable} if gpu.mig else set()
        for one in made:
            uuid = GpuUuid(one.uuid) if one.uuid and one.key not in halves else None
            self._mig.remove(gpu.uuid, one.key, uuid, patience=_SHORT_WAIT)
            lost.add(one.key)

    def _cut(
        self,
        gpu: Gpu,
        key: PartitionKey,
        cut: list[LayoutInstance],
        lost: set[PartitionKey],
        *,
        new: bool = True,
    ) -> None:
        """Add it to what was *cut*; to what is *lost*, where somebody else came first.

        Each is in the book before it is there, so that a crash leaves at most one of which the book
        does not say how to know it again. Whatever lies in that place then is taken for ours, also
        what somebody else made there in that very moment.
        """
        noted = [*cut, LayoutInstance(key)]
        self._note(gpu, partition_keys(noted), noted)
        lost.discard(key)
        try:
            cut.append(layout_instance(self._mig.cut(gpu.uuid, key, new, patience=_SHORT_WAIT)))
        except PlacementTaken:
            lost.add(key)
            raise

    def _note(
        self, gpu: Gpu, keys: Collection[PartitionKey], made: Iterable[LayoutInstance] = ()
    ) -> MigState:
        """Have *made* in the book, and nothing else in the places of *keys*."""

        def edit(book: MigState) -> MigState:
            others = [one for one in book.made.get(gpu.uuid, ()) if one.key not in keys]
            return _with_partitions(book, gpu, [*others, *made])

        return self._book.change(edit)


def _divided(gpu: Gpu) -> set[PartitionKey]:
    """Where somebody made compute instances of his own. Whoever did may be using them, also where
    the instance around them was ours (see ``plan.mig.manager.changes``)."""
    return {one.key for one in gpu.mig.unusable if one.cis} if gpu.mig else set()


def _partitions_of(gpu: Gpu) -> list[LayoutInstance]:
    return [layout_instance(one) for one in gpu.mig.instances] if gpu.mig else []


def _with_partitions(book: MigState, gpu: Gpu, made: Iterable[LayoutInstance]) -> MigState:
    listed = tuple(sorted(made, key=lambda one: one.key))
    rest = {uuid: one for uuid, one in book.made.items() if uuid != gpu.uuid}
    return replace(book, made=rest | ({gpu.uuid: listed} if listed else {}))


def _named(keys: Iterable[PartitionKey]) -> str:
    return ", ".join(map(str, keys))
