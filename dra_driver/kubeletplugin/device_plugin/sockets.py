"""Names of the sockets of device plugins, and what dead processes left of them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dra_driver.base.files import disk_errors
from dra_driver.base.frozen import frozen
from dra_driver.kubeletplugin.device_plugin.resources import ResourceName
from dra_driver.kubeletplugin.serve.sockets import digest, fitting, remove_if_dead

_PREFIX: Final = "dra-"  # of every socket of ours in the directory, which all device plugins share


@frozen
class ResourceSockets:
    """The sockets of one resource. The kubelet is told of *endpoint*, which no other process has.
    *owner* has the process that may register the resource: one at a time."""

    endpoint: Path
    owner: Path


def resource_sockets(directory: Path, resource: ResourceName, instance: str) -> ResourceSockets:
    """Where *resource* is served. SettingsError: the path of the directory is too long."""
    name, short = resource.replace("/", "_"), digest(resource, 16)
    return ResourceSockets(
        endpoint=fitting(
            directory,
            f"{_PREFIX}{name}-{instance}.sock",
            f"{_PREFIX}{name}-{digest(instance, 8)}.sock",
            f"{_PREFIX}{digest(f'{resource}-{instance}', 16)}.sock",
        ),
        owner=fitting(directory, f"{_PREFIX}{name}.sock", f"{_PREFIX}{short}.sock"),
    )


def is_own_socket(name: str) -> bool:
    """Whether a socket of this name in the kubelet's directory is of a process of ours."""
    return name.startswith(_PREFIX) and name.endswith(".sock")


def remove_dead_sockets(directory: Path) -> None:
    """Remove the sockets of ours behind which nobody answers. NodeError: the disk."""
    shown = (path for path in directory.glob(f"{_PREFIX}*") if is_own_socket(path.name))
    with disk_errors(f"remove sockets of dead processes in {directory}"):
        remove_if_dead(shown, _hidden(directory))


def _hidden(directory: Path) -> Iterator[Path]:
    for path in directory.glob(f".{_PREFIX}*"):
        if re.fullmatch(rf"\.{re.escape(_PREFIX)}.*[0-9a-f]{{7}}", path.name):
            yield path
