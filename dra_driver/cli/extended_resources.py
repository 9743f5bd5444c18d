"""What pods ask for without a claim, as with a device plugin (``nvidia.com/gpu: 1``).

A DeviceClass gives such a name (KEP-5004), and the scheduler claims devices of it: as many as each
container asks for; an init container, which is gone when they run, uses those of the containers
after it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dra_driver.kubeletplugin import quantity

Document = Mapping[str, Any]

IMPLICIT = "deviceclass.resource.kubernetes.io/"  # and the name of any class


@dataclass(frozen=True, slots=True)
class Amount:
    """Devices that are claimed for one container."""

    container: str
    resource: str
    count: int

    def __str__(self) -> str:
        return f"container {self.container}, {self.resource}"


def amounts_of(pod: Document) -> list[Amount]:
    """What is claimed for *pod*, by the names of resources that are none of Kubernetes' own."""
    containers = list(_containers(pod))
    names = sorted({name for one, _ in containers for name in _asked(one) if "/" in name})
    return [amount for name in names for amount in _of_resource(name, containers)]


def classes_of(classes: Mapping[str, Document]) -> dict[str, str]:
    """By the name of a resource the DeviceClass that serves it: of two the newer one, else the
    first by name."""
    found = {f"{IMPLICIT}{name}": name for name in classes}
    for name in sorted(sorted(classes, reverse=True), key=lambda one: _made(classes[one])):
        if resource := (classes[name].get("spec") or {}).get("extendedResourceName"):
            found[resource] = name
    return found


def _of_resource(name: str, containers: list[tuple[Document, bool]]) -> Iterator[Amount]:
    counts = [_count(one, name) for one, _ in containers]
    stays = [0 if goes else count for count, (_, goes) in zip(counts, containers, strict=True)]
    found = [
        Amount(one["name"], name, count)
        for count, (one, _) in zip(stays, containers, strict=True)
        if count
    ]
    before = [
        Amount(one["name"], name, counts[place] - sum(stays[place:]))
        for place, (one, goes) in enumerate(containers)
        if goes
    ]
    most = max(before, key=lambda one: one.count, default=None)
    if most is not None and most.count > 0:  # they run one after the other
        yield most
    yield from found


def _containers(pod: Document) -> Iterator[tuple[Document, bool]]:
    """Each, in the order in which they start, and whether it goes before the next one does."""
    for one in pod["spec"].get("initContainers") or ():
        yield one, one.get("restartPolicy") != "Always"
    for one in pod["spec"].get("containers") or ():
        yield one, False


def _asked(container: Document) -> Mapping[str, str]:
    resources = container.get("resources") or {}
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}


def _count(container: Document, resource: str) -> int:
    return int(quantity.parse(str(_asked(container).get(resource, "0"))))


def _made(device_class: Document) -> str:
    return str((device_class.get("metadata") or {}).get("creationTimestamp") or "")
