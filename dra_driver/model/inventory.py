"""The GPUs of one node, and what it has but cannot offer."""

from dataclasses import dataclass

from dra_driver.model.devices import Gpu, GpuUuid, Withheld


@dataclass(frozen=True, slots=True)
class Inventory:
    """One look at the node; GPUs by minor number. What becomes of them is an ``Offer``."""

    gpus: tuple[Gpu, ...] = ()
    withheld: tuple[Withheld, ...] = ()
    as_before: frozenset[GpuUuid] = frozenset()
    """Those of *gpus* that this look could not read, since a GPU was being changed or was late:
    they are what an earlier look found."""
