"""Which container of which pod the kubelet gave which devices: its own checkpoint.

The file is private to the kubelet, and nothing else says what is needed here before a container
starts. The list of pod resources has neither UIDs nor init containers, is limited to 100 questions
a second, and can make a kubelet up to 1.29 crash that is admitting a pod at that moment
(kubernetes#119560). Its form has been the same from Kubernetes 1.20 to 1.36. The kubelet replaces
it as a whole after each Allocate, before the container can start. Pods that have ended stay in it
until it is written the next time.
"""

import base64
import functools
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from api.kubelet import device_plugin_v1beta1_pb2 as messages
from dra_driver.base.errors import NodeError
from dra_driver.base.files import FileSignature, disk_errors, read_file, signature_of
from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import PodUid
from dra_driver.kubeletplugin.device_plugin.resources import (
    AllocatedContainer,
    ContainerResponse,
    DeviceId,
    HostDevice,
    HostMount,
    ResourceName,
)

_FILE: Final = "kubelet_internal_checkpoint"
_OTHER_FORM: Final = (
    *(ValueError, TypeError, LookupError, AttributeError),
    *(RecursionError, DecodeError),
)


class KubeletCheckpoint:
    """Reads it again where it changed. Any thread may ask."""

    def __init__(self, directory: Path) -> None:
        """*directory*: where the kubelet has the sockets of device plugins."""
        self._path = directory / _FILE
        self._lock = threading.Lock()
        self._last: tuple[FileSignature, _Contents] | None = None

    def containers(self) -> tuple[AllocatedContainer, ...] | None:
        """Those with devices. None: there is no checkpoint. NodeError: it is not what it should
        be."""
        contents = self._contents()
        return contents.containers if contents else None

    def registered(self) -> Mapping[ResourceName, tuple[DeviceId, ...]]:
        """The healthy devices of each resource as the kubelet was told last, by whatever plugin.
        None are known where there is no checkpoint. NodeError: as above."""
        contents = self._contents()
        return contents.registered if contents else {}

    def _contents(self) -> "_Contents | None":
        with self._lock, disk_errors(f"read the kubelet's checkpoint {self._path}"):
            try:
                signature = signature_of(os.stat(self._path))
                if self._last is None or self._last[0] != signature:
                    self._last = signature, _parsed(read_file(self._path))
            except FileNotFoundError:
                return None
            except _OTHER_FORM as e:
                raise NodeError(
                    f"the kubelet's checkpoint {self._path} says in no known way which container "
                    f"has which devices: {type(e).__name__}: {e}"
                ) from e
            return self._last[1]


@frozen
class _Contents:
    """What the file says."""

    containers: tuple[AllocatedContainer, ...]
    registered: Mapping[ResourceName, tuple[DeviceId, ...]]


def _parsed(text: bytes) -> _Contents:
    data = json.loads(text)["Data"]
    registered = (data.get("RegisteredDevices") or {}).items()
    return _Contents(
        tuple(_containers(data["PodDeviceEntries"] or ())),
        {
            ResourceName(resource): tuple(DeviceId(_text(id_)) for id_ in ids or ())
            for resource, ids in registered
        },
    )


def _containers(entries: Iterable[Any]) -> Iterator[AllocatedContainer]:
    for entry in entries:
        kept = entry.get("AllocResp")
        yield AllocatedContainer(
            PodUid(_text(entry["PodUID"])),
            _text(entry["ContainerName"]),
            ResourceName(_text(entry["ResourceName"])),
            tuple(sorted(_ids(entry["DeviceIDs"] or {}))),
            # Kubelets before 1.28 keep nothing of an answer by CDI names.
            _answer(kept) if kept else None,
        )


@functools.lru_cache(maxsize=1024)  # the kubelet writes all of them again and again
def _answer(text: str) -> ContainerResponse:
    message = messages.ContainerAllocateResponse.FromString(base64.b64decode(text))
    return ContainerResponse(
        tuple(device.name for device in message.cdi_devices),
        tuple(sorted(message.envs.items())),
        tuple(
            HostMount(mount.host_path, mount.container_path, mount.read_only)
            for mount in message.mounts
        ),
        tuple(
            HostDevice(device.host_path, device.container_path, device.permissions)
            for device in message.devices
        ),
    )


def _ids(by_numa_node: Mapping[str, Any]) -> Iterator[DeviceId]:
    for ids in by_numa_node.values():
        yield from (DeviceId(_text(id_)) for id_ in ids)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise TypeError(f"{value!r} is no text")
