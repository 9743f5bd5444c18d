"""Changes how a GPU is cut, so that no error and no crash at any point leaves it half done.

What is about to be made is in the book before it is made, and so is what was there before: whoever
comes next goes on, or puts that back.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from dra_driver.errors import NodeError
from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.layouts import Before, Book, Change
from dra_driver.model.mig import Instance, PartitionKey

log = logging.getLogger(__name__)


class Partitions(Protocol):
    """What cuts GPUs; ``dra_driver.node.mig.partitions``."""

    def set_mode(self, gpu: GpuUuid, on: bool) -> None: ...
    def reset_mode(self, gpu: GpuUuid, on: bool) -> None: ...
    def cut(self, gpu: GpuUuid, key: PartitionKey) -> Instance: ...
    def remove(self, gpu: GpuUuid, key: PartitionKey) -> None: ...


class Kept(Protocol):
    """Where the book is; ``dra_driver.node.mig_book``."""

    def read(self) -> Book: ...
    def write(self, book: Book) -> None: ...


class MigWork:
    """Only for a GPU that nothing uses and no claim can come to."""

    def __init__(self, mig: Partitions, book: Kept) -> None:
        self._mig = mig
        self._book = book

    def change(self, gpu: Gpu, change: Change) -> None:
        """Do all of *change*. NodeError: it failed, and whether the GPU is as it was before."""
        self._begin(gpu, change)
        try:
            self._do(gpu, change)
        except NodeError as e:
            raise NodeError(f"{e}; {self._back_from(gpu)}") from e
        self._end(gpu.uuid, change.made)

    def put_back(self, gpu: Gpu) -> None:
        """Make of *gpu* what it was before the change that is under way, if one is."""
        book = self._book.read()
        before = book.before.get(gpu.uuid)
        if before is None:
            return
        self._remove(gpu, set(book.made.get(gpu.uuid, ())) - set(before.keys))
        self._switch(gpu, before.on)
        if before.on:
            self._cut(gpu, before.keys)
        self._end(gpu.uuid, before.keys)
        log.info("a GPU is cut as before", extra={"device": gpu.name, "gpu": gpu.uuid})

    def _begin(self, gpu: Gpu, change: Change) -> None:
        book = self._book.read()
        made = book.made.get(gpu.uuid, ())
        there = gpu.mig.taken if gpu.mig else ()
        now = Before(bool(gpu.mig and gpu.mig.on), tuple(sorted(set(made) & set(there))))
        # Of a change that a crash cut short, the first one counts.
        before = {gpu.uuid: now, **book.before}
        known = {*made, *change.made}
        self._book.write(
            replace(book, made={**book.made, gpu.uuid: tuple(sorted(known))}, before=before)
        )

    def _do(self, gpu: Gpu, change: Change) -> None:
        self._remove(gpu, change.remove)
        if change.switch is not None:
            self._switch(gpu, change.switch)
        self._cut(gpu, change.cut)

    def _back_from(self, gpu: Gpu) -> str:
        try:
            self.put_back(gpu)
        except NodeError as e:
            facts = {"device": gpu.name, "gpu": gpu.uuid, "error": str(e)}
            log.warning("a GPU is neither as its layout says nor as before", extra=facts)
            return f"what was there before could not be put back: {e}; it will be tried again"
        return "the GPU is as it was before"

    def _end(self, gpu: GpuUuid, made: tuple[PartitionKey, ...]) -> None:
        book = self._book.read()
        rest = {uuid: keys for uuid, keys in book.made.items() if uuid != gpu}
        before = {uuid: one for uuid, one in book.before.items() if uuid != gpu}
        self._book.write(replace(book, made=rest | ({gpu: made} if made else {}), before=before))

    def _switch(self, gpu: Gpu, on: bool) -> None:
        if gpu.mig and gpu.mig.switches:
            self._mig.set_mode(gpu.uuid, on)
        else:
            self._mig.reset_mode(gpu.uuid, on)

    def _remove(self, gpu: Gpu, keys: Iterable[PartitionKey]) -> None:
        for key in sorted(keys):
            self._mig.remove(gpu.uuid, key)

    def _cut(self, gpu: Gpu, keys: Iterable[PartitionKey]) -> None:
        for key in keys:
            self._mig.cut(gpu.uuid, key)
