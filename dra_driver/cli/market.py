"""What claims can choose from: the devices that are published, and the DeviceClasses."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from api import names
from dra_driver.cli.cluster_checks import Cluster
from dra_driver.cli.selectors import Variables, variables_of
from dra_driver.kubeletplugin import quantity
from dra_driver.kubeletplugin.shapes import slice_from

Document = Mapping[str, Any]
Counter = tuple[str, str]  # (counter set, counter)


@dataclass(frozen=True, slots=True)
class Published:
    """One device as the scheduler sees it, and where."""

    node: str
    document: Document
    variables: Variables

    @property
    def name(self) -> str:
        return str(self.document["name"])

    @property
    def kind(self) -> str:
        return str(self.attribute(names.TYPE) or "")

    @property
    def profile(self) -> str:
        """Of a partition."""
        return str(self.attribute(names.PROFILE) or "")

    @property
    def takes(self) -> Mapping[Counter, Fraction]:
        """What keeps it apart from other devices (KEP-4815)."""
        return {
            (str(one.get("counterSet")), name): quantity.parse(str(amount["value"]))
            for one in self.document.get("consumesCounters") or ()
            for name, amount in (one.get("counters") or {}).items()
        }

    @property
    def capacity(self) -> Mapping[str, Document]:
        return self.document.get("capacity") or {}

    def attribute(self, name: str) -> Any:
        """Its value, whatever its type. None: it has none. *name*: may be without our domain."""
        attributes = self.document.get("attributes") or {}
        value = attributes.get(name) or attributes.get(name.rpartition("/")[2]) or {}
        return next(iter(value.values()), None)

    @property
    def place(self) -> str:
        return f"{self.name} on {self.node}"


@dataclass(frozen=True, slots=True)
class Market:
    """What there is to be had: the driver's devices on all nodes, and the DeviceClasses."""

    driver: str
    devices: tuple[Published, ...]
    classes: Mapping[str, Document]  # by name
    counters: Mapping[str, Mapping[Counter, Fraction]] = field(default_factory=dict)  # by node


def market(driver: str, slices: Iterable[Document], classes: Iterable[Document]) -> Market:
    """*slices* (documents of v1) of all drivers and nodes; those of *driver* count."""
    specs = [spec for each in slices if (spec := each.get("spec") or {}).get("driver") == driver]
    devices = tuple(
        Published(_node(spec), device, variables_of(device, driver))
        for spec in specs
        for device in spec.get("devices") or ()
    )
    by_name = {each["metadata"]["name"]: each for each in classes}
    return Market(driver, devices, by_name, _counters(specs))


def market_of(cluster: Cluster) -> Market:
    """All that is published, and all DeviceClasses. Forbidden: this account may not read them."""
    slices = (slice_from(each) for each in cluster.listed("resourceslices"))
    return market(cluster.driver, slices, cluster.listed("deviceclasses"))


def _node(spec: Document) -> str:
    return str(spec.get("nodeName") or "other nodes")


def _counters(specs: Iterable[Document]) -> Mapping[str, Mapping[Counter, Fraction]]:
    found: dict[str, dict[Counter, Fraction]] = defaultdict(dict)
    for spec in specs:
        for one in spec.get("sharedCounters") or ():
            for name, amount in (one.get("counters") or {}).items():
                counter = (str(one.get("name")), name)
                found[_node(spec)][counter] = quantity.parse(str(amount["value"]))
    return found
