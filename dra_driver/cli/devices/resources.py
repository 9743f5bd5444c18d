"""What a node lists by the device-plugin API, for people and as a document."""

from collections import defaultdict
from typing import Any

from dra_driver.cli.findings import abbreviated
from dra_driver.cli.terminal import format_memory, format_table
from dra_driver.kubeletplugin.device_plugin.resources import ListedDevice
from dra_driver.model.offer import Device, Offer, Replica
from dra_driver.plan.device_plugin.resources import ResourceNames, listed_devices, resources
from dra_driver.plan.offer.shapes import describe_shape
from dra_driver.settings import DevicesSettings

_HEAD = ("RESOURCE", "DEVICES", "HEALTHY", "SHAPE", "MEMORY OF EACH", "OF")


class NodeResources:
    """The resources of *offer*."""

    def __init__(self, offer: Offer, settings: DevicesSettings) -> None:
        names = ResourceNames(
            settings.extended_resource_name,
            settings.shared_extended_resource_name,
            settings.mig_extended_resource_prefix,
        )
        self._listed = resources(offer, names, ())
        self._devices = listed_devices(offer.devices, names)

    @property
    def problems(self) -> tuple[str, ...]:
        """What is not listed, and why."""
        return self._listed.problems

    def tables(self) -> list[str]:
        """One, or none: a line for each resource, several where its devices are not alike."""
        rows = []
        for resource in self._listed.resources:
            alike: dict[tuple[str, str], list[tuple[Device, bool]]] = defaultdict(list)
            for each in resource.devices:
                device = self._devices[resource.name][each.id]
                alike[describe_shape(device.shape), _memory(device)].append((device, each.healthy))
            for (shape, memory), same in alike.items():
                units = {(device.gpu.minor, device.unit): None for device, _ in same}
                numbers = (str(len(same)), str(sum(healthy for _, healthy in same)))
                names = abbreviated(unit for _, unit in sorted(units))
                rows.append((resource.name, *numbers, shape, memory, names))
        return [format_table(_HEAD, rows)] if rows else []

    def document(self) -> dict[str, Any]:
        """In the words of the API."""
        return {
            "resources": [
                {"name": resource.name, "devices": [_entry(each) for each in resource.devices]}
                for resource in self._listed.resources
            ]
        }


def _memory(device: Device) -> str:
    shape = device.shape
    size = shape.memory_bytes if isinstance(shape, Replica) else device.memory_bytes
    return "?" if size is None else format_memory(size)


def _entry(device: ListedDevice) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "ID": device.id,
        "health": "Healthy" if device.healthy else "Unhealthy",
    }
    if device.numa_node is not None:
        entry["topology"] = {"nodes": [{"ID": device.numa_node}]}
    return entry
