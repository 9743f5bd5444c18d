"""The GPUs of one node, and what it has but cannot offer."""

from dataclasses import dataclass

from dra_driver.model.devices import Gpu, Withheld


@dataclass(frozen=True, slots=True)
class Inventory:
    """One look at the node; GPUs by minor number. What becomes of them is an ``Offer``."""

    gpus: tuple[Gpu, ...] = ()
    withheld: tuple[Withheld, ...] = ()
