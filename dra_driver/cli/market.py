"""What claims can choose from: the devices that are published, and the DeviceClasses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from api import names
from dra_driver.cli.selectors import Variables, variables_of

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Published:
    """One device as the scheduler sees it, and where."""

    node: str
    document: Document
    variables: Variables

    @property
    def kind(self) -> str:
        kind = ((self.document.get("attributes") or {}).get(names.TYPE) or {}).get("string")
        return str(kind or "")

    @property
    def capacity(self) -> Mapping[str, Document]:
        return self.document.get("capacity") or {}

    @property
    def place(self) -> str:
        return f"{self.document['name']} on {self.node}"


@dataclass(frozen=True, slots=True)
class Market:
    """What there is to be had: the driver's devices on all nodes, and the DeviceClasses."""

    driver: str
    devices: tuple[Published, ...]
    classes: Mapping[str, Document]  # by name


def market(driver: str, slices: Iterable[Document], classes: Iterable[Document]) -> Market:
    """*slices* (documents of v1) of all drivers and nodes; those of *driver* count."""
    devices = tuple(
        Published(str(spec.get("nodeName") or "other nodes"), device, variables_of(device, driver))
        for each in slices
        if (spec := each.get("spec") or {}).get("driver") == driver
        for device in spec.get("devices") or ()
    )
    return Market(driver, devices, {each["metadata"]["name"]: each for each in classes})
