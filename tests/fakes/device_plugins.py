"""A handler of imaginary devices, and a server that lists them to the kubelet."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dra_driver.base.errors import DriverError
from dra_driver.kubeletplugin.device_plugin.endpoint import DevicePluginTimeouts
from dra_driver.kubeletplugin.device_plugin.resources import (
    ContainerResponse,
    DeviceId,
    ListedDevice,
    Resource,
    ResourceName,
)
from dra_driver.kubeletplugin.device_plugin.server import DevicePluginServer

GPU = ResourceName("nvidia.com/gpu")
SHARED = ResourceName("nvidia.com/gpu.shared")


def devices(*ids: str, sick: Sequence[str] = (), numa: int | None = None) -> Sequence[ListedDevice]:
    """Devices of these IDs, those in *sick* among them."""
    unhealthy = set(sick)
    return [ListedDevice(DeviceId(id), id not in unhealthy, numa) for id in ids]


def resource(
    *ids: str, name: str = GPU, sick: Sequence[str] = (), numa: int | None = None
) -> Resource:
    return Resource(ResourceName(name), tuple(devices(*ids, sick=sick, numa=numa)))


def answer(ids: Sequence[str]) -> ContainerResponse:
    """One and the same for the same devices."""
    return ContainerResponse(cdi_names=tuple(f"example.com/gpu={id}" for id in sorted(ids)))


@dataclass
class FakeHandler:
    """Gives every device to whoever asks. *on_allocate* and *on_pre_start* may wait or raise;
    *prefers* chooses."""

    on_allocate: Callable[[Sequence[DeviceId]], None] = lambda ids: None
    on_pre_start: Callable[[Sequence[DeviceId]], None] = lambda ids: None
    prefers: Callable[[Sequence[DeviceId], Sequence[DeviceId], int], Sequence[DeviceId]] = (
        lambda available, must_include, size: tuple(sorted({*must_include, *available}))[:size]
    )
    response: Callable[[Sequence[str]], ContainerResponse] = answer
    calls: list[tuple[str, str, frozenset[str]]] = field(default_factory=list)

    def allocate(self, resource: ResourceName, ids: Sequence[DeviceId]) -> ContainerResponse:
        self.calls.append(("allocate", resource, frozenset(ids)))
        self.on_allocate(ids)
        return self.response(ids)

    def pre_start(self, resource: ResourceName, ids: Sequence[DeviceId]) -> None:
        self.calls.append(("pre_start", resource, frozenset(ids)))
        self.on_pre_start(ids)

    def preferred(
        self,
        resource: ResourceName,
        available: Sequence[DeviceId],
        must_include: Sequence[DeviceId],
        size: int,
    ) -> Sequence[DeviceId]:
        return self.prefers(available, must_include, size)


class DeviceGate:
    """Where calls wait: *begun* once the first is there, until *go* is set."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, ids: Sequence[DeviceId]) -> None:
        self.begun.set()
        assert self.go.wait(60)


def fail(error: DriverError) -> None:
    raise AssertionError(f"serving ended: {error}")


@contextmanager
def serving(
    directory: Path,
    *resources: Resource,
    handler: FakeHandler | None = None,
    instance: str = "pod-a",
    on_fatal: Callable[[DriverError], None] = fail,
    **times: float,
) -> Iterator[DevicePluginServer]:
    """A server in this process that offers *resources*, with *times* of DevicePluginTimeouts."""
    server = DevicePluginServer(
        directory, instance, handler or FakeHandler(), on_fatal, DevicePluginTimeouts(**times)
    )
    server.start()
    try:
        server.offer(resources)
        yield server
    finally:
        server.stop()
