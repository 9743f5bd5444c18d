"""What a node lists for the kubelet, and what containers are given of it, as values."""

from collections.abc import Sequence
from dataclasses import field
from typing import Final, NewType, Protocol

from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import PodUid

ResourceName = NewType("ResourceName", str)  # "nvidia.com/gpu"
DeviceId = NewType("DeviceId", str)  # "GPU-…", "GPU-…::3", "MIG-…": the same after every restart

MAX_LIST_BYTES: Final = 4 * 1024 * 1024 - 1
"""Of a resource's devices in one message: gRPC's limit in Go, which the kubelet does not raise."""


@frozen
class ListedDevice:
    """One device of a resource. An unhealthy one stays with its pod and goes to no other."""

    id: DeviceId
    healthy: bool = True
    numa_node: int | None = None  # None: not known, or not of one node


@frozen
class Resource:
    """What the kubelet is told of one resource, each time all of it."""

    name: ResourceName
    devices: tuple[ListedDevice, ...]  # by id


@frozen
class HostMount:
    """A file or directory of the host in a container."""

    host_path: str
    container_path: str
    read_only: bool = True


@frozen
class HostDevice:
    """A device file of the host in a container."""

    host_path: str
    container_path: str
    permissions: str = "rw"


@frozen
class ContainerResponse:
    """What a container gets with its devices: by CDI names where the kubelet takes these, else file
    by file. The kubelet keeps it as long as the pod lives, also while the node reboots."""

    cdi_names: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()  # (name, value)
    mounts: tuple[HostMount, ...] = ()
    devices: tuple[HostDevice, ...] = ()


@frozen
class AllocatedContainer:
    """A container of a pod, and which devices of one resource the kubelet gave to it."""

    pod: PodUid
    container: str
    resource: ResourceName
    ids: tuple[DeviceId, ...]  # sorted
    answer: ContainerResponse | None = field(default=None, compare=False)  # which the kubelet kept


class DevicePluginHandler(Protocol):
    """Answers the kubelet. Each may raise a DriverError, whose text the kubelet shows to people;
    all of them are called by many threads."""

    def allocate(self, resource: ResourceName, ids: Sequence[DeviceId]) -> ContainerResponse:
        """Give these devices to one container, of which nothing is known yet. Within a second: all
        pods of the node wait. The same devices in any order give the same answer."""

    def pre_start(self, resource: ResourceName, ids: Sequence[DeviceId]) -> None:
        """The container that has these devices is about to be created, also when it is started
        again. Within 30 s; after an error the kubelet asks again."""

    def preferred(
        self,
        resource: ResourceName,
        available: Sequence[DeviceId],
        must_include: Sequence[DeviceId],
        size: int,
    ) -> Sequence[DeviceId]:
        """Which *size* of the *available* devices to give to one container, *must_include* among
        them. Never an error: the pod would fail."""
