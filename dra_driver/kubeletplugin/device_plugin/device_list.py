"""What the kubelet is told of one resource: what is offered, and what it may be giving out."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from api.kubelet import device_plugin_v1beta1_pb2 as messages
from dra_driver.kubeletplugin.device_plugin.resources import (
    MAX_LIST_BYTES,
    DeviceId,
    ListedDevice,
    ResourceName,
)

# The kubelet may have chosen a device before it read that we do not offer it any longer, and looks
# for it in the list after the answer. From 1.34 on it crashes if the device is not there.
LEAVING_SECONDS: Final = 10.0


class DeviceList:
    """The devices of one resource, as the kubelet shall know them. For all threads.

    A device that is not offered any longer leaves the list once it has been unhealthy for a while,
    and not while an Allocate of it runs. Of a list that would be too large for the kubelet only the
    devices that were listed before are listed.
    """

    def __init__(
        self,
        resource: ResourceName,
        leaving_seconds: float = LEAVING_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resource = resource
        self._leaving_seconds = leaving_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._offered: dict[DeviceId, ListedDevice] = {}
        self._allocating: Counter[DeviceId] = Counter()
        self._listed: dict[DeviceId, ListedDevice] = {}
        self._unhealthy_since: dict[DeviceId, float] = {}
        self._leaving: dict[DeviceId, float] = {}  # until when they stay
        self._frozen = False
        self._encoded = b""
        self._problem = ""

    def offer(self, devices: Iterable[ListedDevice]) -> None:
        """From now on these, and no others."""
        with self._lock:
            self._offered = {device.id: device for device in devices}
            self._update()

    def freeze(self, frozen: bool) -> None:
        """While *frozen*, the list changes only with what is offered: no device leaves it."""
        with self._lock:
            self._frozen = frozen

    @contextmanager
    def allocating(self, ids: Sequence[DeviceId]) -> Iterator[None]:
        """An Allocate of these devices runs meanwhile."""
        with self._lock:
            self._allocating.update(ids)
        try:
            yield
        finally:
            with self._lock:
                self._allocating.subtract(ids)
                self._allocating = +self._allocating
                now = self._clock()
                self._unhealthy_since |= dict.fromkeys(self._unhealthy_since.keys() & set(ids), now)
                if self._leaving:
                    self._update()

    def encoded(self) -> bytes:
        """The list as the kubelet reads it. Empty: no devices."""
        with self._lock:
            if self._leaving and not self._frozen:
                self._update()
            return self._encoded

    def seconds_to_change(self) -> float | None:
        """When the next device leaves the list, if no offer comes before; None: never."""
        with self._lock:
            if self._frozen or not self._leaving:
                return None
            return max(0.1, min(self._leaving.values()) - self._clock())

    @property
    def problem(self) -> str:
        """What is not listed, and why; empty: everything is."""
        return self._problem

    def _update(self) -> None:
        now = self._clock()
        stays_until = {
            id: self._unhealthy_since.get(id, now) + self._leaving_seconds
            for id in self._listed.keys() - self._offered.keys()
        }
        self._leaving = {
            id: until for id, until in stays_until.items() if id in self._allocating or until > now
        }
        leaving = {id: replace(self._listed[id], healthy=False) for id in self._leaving}
        devices = self._offered | leaving
        message = encode(devices)
        largest = message.ByteSize() + 2 * len(devices)  # "Unhealthy" is longer than "Healthy"
        self._problem = ""
        if largest > MAX_LIST_BYTES:
            self._problem = _too_large(self.resource, len(devices), largest)
            devices = {id: device for id, device in devices.items() if id in self._listed}
            message = encode(devices)
        self._listed, self._encoded = devices, message.SerializeToString()
        self._unhealthy_since = {
            id: self._unhealthy_since.get(id, now)
            for id, device in devices.items()
            if not device.healthy
        }


def encode(devices: Mapping[DeviceId, ListedDevice]) -> messages.ListAndWatchResponse:
    """The kubelet's message with *devices*, by ID."""
    response = messages.ListAndWatchResponse()
    for id in sorted(devices):
        device = devices[id]
        entry = response.devices.add(ID=id, health="Healthy" if device.healthy else "Unhealthy")
        if device.numa_node is not None:  # an empty topology would hide the device
            entry.topology.nodes.add(ID=device.numa_node)
    return response


def _too_large(resource: ResourceName, count: int, size: int) -> str:
    return (
        f"{resource} has {count} devices, whose list takes up to {size / 1024 / 1024:.1f} MiB, and "
        "the kubelet takes none of 4 MiB or more: offer fewer replicas of each GPU"
    )
