"""What claims can choose from: the published devices and the DeviceClasses."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from fractions import Fraction
from typing import Any

from api import names
from dra_driver.base.frozen import frozen
from dra_driver.cli.doctor.cluster_checks import CheckedCluster
from dra_driver.cli.doctor.scheduling.selectors import Variables, variables_of
from dra_driver.k8s import quantity
from dra_driver.k8s.resource_versions import convert_slice_to_v1

Document = Mapping[str, Any]
Counter = tuple[str, str]  # (counter set, counter)


@frozen
class PublishedDevice:
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
            (str(consumed.get("counterSet")), name): quantity.parse(str(amount["value"]))
            for consumed in self.document.get("consumesCounters") or ()
            for name, amount in (consumed.get("counters") or {}).items()
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


@frozen
class PublishedDevices:
    """What there is to be had: the driver's devices on all nodes, and the DeviceClasses."""

    driver: str
    devices: tuple[PublishedDevice, ...]
    classes: Mapping[str, Document]  # by name
    counters: Mapping[str, Mapping[Counter, Fraction]] = field(default_factory=dict)  # by node


def devices_of_slices(
    driver: str, slices: Iterable[Document], classes: Iterable[Document]
) -> PublishedDevices:
    """*slices* (documents of v1) of all drivers and nodes; those of *driver* count."""
    specs = [spec for each in slices if (spec := each.get("spec") or {}).get("driver") == driver]
    devices = tuple(
        PublishedDevice(_node(spec), device, variables_of(device, driver))
        for spec in specs
        for device in spec.get("devices") or ()
    )
    by_name = {each["metadata"]["name"]: each for each in classes}
    return PublishedDevices(driver, devices, by_name, _counters(specs))


def read_published_devices(cluster: CheckedCluster) -> PublishedDevices:
    """All that is published, and all DeviceClasses. Forbidden: this account may not read them."""
    slices = (convert_slice_to_v1(each) for each in cluster.listed("resourceslices"))
    return devices_of_slices(cluster.driver, slices, cluster.listed("deviceclasses"))


def _node(spec: Document) -> str:
    return str(spec.get("nodeName") or "other nodes")


def _counters(specs: Iterable[Document]) -> Mapping[str, Mapping[Counter, Fraction]]:
    counters: dict[str, dict[Counter, Fraction]] = defaultdict(dict)
    for spec in specs:
        for counter_set in spec.get("sharedCounters") or ():
            for name, amount in (counter_set.get("counters") or {}).items():
                counter = (str(counter_set.get("name")), name)
                counters[_node(spec)][counter] = quantity.parse(str(amount["value"]))
    return counters


def most(capacity: Document) -> str:
    policy = capacity.get("requestPolicy") or {}
    values = policy.get("validValues") or ()
    ranged = (policy.get("validRange") or {}).get("max")
    return str(values[-1] if values else ranged or capacity["value"])


def fits(amount: str, capacity: Document | None) -> bool:
    """Whether an empty device with this *capacity* would be given to a claim for *amount*: the
    scheduler rounds up to what the policy of the device allows (KEP-5075)."""
    if capacity is None:
        return False
    return _consumed(amount, capacity.get("requestPolicy") or {}) <= quantity.parse(most(capacity))


def lacking(name: str, amount: str, devices: Sequence[PublishedDevice], driver: str) -> str:
    """Why no device has this *amount*; empty: some device has."""
    having = [device for device in devices if name in device.capacity]
    if not having:
        known = sorted({each for device in devices for each in device.capacity})
        bare = name.removeprefix(f"{driver}/")
        hint = (
            f"; write {bare}, without the driver's name" if bare in known and bare != name else ""
        )
        return f"no device has a capacity of this name, they have {', '.join(known)}{hint}"
    if any(fits(amount, device.capacity[name]) for device in having):
        return ""
    best = max(having, key=lambda device: quantity.parse(most(device.capacity[name])))
    unit = " percent of the cores of a GPU" if name == names.CORES else ""
    return (
        f"asks for {amount}, but the most that one claim can have of a device is "
        f"{most(best.capacity[name])}{unit} ({best.place})"
    )


def _consumed(amount: str, policy: Document) -> Fraction:
    asked = quantity.parse(amount)
    if values := policy.get("validValues"):
        above = [value for each in values if (value := quantity.parse(str(each))) >= asked]
        return above[0] if above else asked
    ranged = policy.get("validRange")
    if not ranged:
        return asked
    least = quantity.parse(str(ranged["min"]))
    if asked <= least or not ranged.get("step"):
        return max(asked, least)
    step = quantity.parse(str(ranged["step"]))
    return least + -(-(asked - least) // step) * step
