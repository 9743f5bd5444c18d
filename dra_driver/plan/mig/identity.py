"""Which instances of a GPU layouts made, or took over."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.inventory import Inventory
from dra_driver.model.layouts import Book, Made
from dra_driver.model.mig import Instance, PartitionKey


def known_by(instance: Instance) -> Made:
    """What *instance* is known by later."""
    return Made(instance.key, instance.gi, instance.uuid)


def still_there(gpu: Gpu, made: Iterable[Made]) -> tuple[Made, ...]:
    """Those of *made* that *gpu* has, and not something else in their places.

    What a crash kept from being known further is what lies there. Of one that is half removed only
    the GPU instance is left.
    """
    seen = _seen(gpu)
    return tuple(one for one in made if one in seen or _half(one) in seen)


def keys_of(made: Iterable[Made]) -> frozenset[PartitionKey]:
    return frozenset(one.key for one in made)


def remembered(book: Book, inventory: Inventory, turned_on: Collection[GpuUuid]) -> Book:
    """Without instances that are gone, since what comes to their places is somebody else's, though
    it may have the same UUID; with the GPUs of which claims *turned_on* MIG mode, until they are
    seen without. Of a GPU that this look could not read nothing is gone."""
    seen = {
        gpu.uuid: gpu
        for gpu in inventory.gpus
        if gpu.mig is not None and gpu.uuid not in inventory.as_before
    }

    def made() -> Iterator[tuple[GpuUuid, tuple[Made, ...]]]:
        for uuid, entries in book.made.items():
            if left := still_there(seen[uuid], entries) if uuid in seen else entries:
                yield uuid, left

    off = {uuid for uuid, gpu in seen.items() if gpu.mig is not None and not gpu.mig.on}
    on = (set(book.left_on) - off) | set(turned_on)
    return replace(book, made=dict(made()), left_on=tuple(sorted(on)))


def _seen(gpu: Gpu) -> frozenset[Made]:
    """All that can be said of what is there."""
    if gpu.mig is None:
        return frozenset()
    whole = {known_by(one) for one in gpu.mig.instances}
    odd = {Made(one.key, one.gi) for one in gpu.mig.odd}
    return frozenset(whole | odd | {Made(key) for key in gpu.mig.taken})


def _half(one: Made) -> Made:
    return Made(one.key, one.gi)
