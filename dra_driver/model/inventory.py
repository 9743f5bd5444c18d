"""The devices of one node, by name, and what it has but does not offer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dra_driver.model.devices import Device, DeviceName, Withheld


@dataclass(frozen=True, slots=True)
class Inventory:
    """One look at the node. Devices are in publishing order: the scheduler takes the first that
    fits."""

    devices: tuple[Device, ...] = ()
    withheld: tuple[Withheld, ...] = ()
    by_name: Mapping[DeviceName, Device] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {device.name: device for device in self.devices})
