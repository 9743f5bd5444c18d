"""A CDI spec as a value: what is done to a container that is given one of these devices.

Fields are named and ordered as in the CDI SPEC, in Python's spelling; a field that holds its
default is not written. Nothing here is checked on the way in: :func:`cdi.check` says everything
that is wrong with a whole spec at once.

A spec has no version: which one to write follows from what it says (:mod:`cdi.validate`).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeVar

Annotations = tuple[tuple[str, str], ...]
"""Pairs of key and value: facts for a reader of the file, without effect on a container."""

_T = TypeVar("_T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node in the container.

    ``type`` with ``major`` (for ``p``: ``type`` alone) describes the node wholly; otherwise the
    runtime looks at ``host_path``, or at ``path`` where that is empty.
    ``permissions`` are those of the device cgroup; empty means ``rwm``.
    """

    path: str
    host_path: str = ""
    type: str = ""
    major: int = 0
    minor: int = 0
    file_mode: int | None = None
    permissions: str = ""
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount; to show a host's file it needs the option ``bind`` or ``rbind`` (OCI, "Mounts")."""

    host_path: str
    container_path: str
    type: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hook:
    """A program the runtime runs at one moment of a container's life (OCI, "POSIX-platform Hooks").

    As in execv, ``args`` begins with the name of the program.
    """

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None
    """Seconds, at least one; ``None`` waits as long as the hook takes."""


@dataclass(frozen=True, slots=True)
class IntelRdt:
    """Cache and memory bandwidth of the container (Linux resctrl)."""

    clos_id: str = ""
    l3_cache_schema: str = ""
    mem_bw_schema: str = ""
    schemata: tuple[str, ...] = ()
    enable_monitoring: bool = False


@dataclass(frozen=True, slots=True)
class NetDevice:
    """A network interface moved from the host into the container."""

    host_interface_name: str
    name: str


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """What is done to a container. Edits add with ``+``, and ``ContainerEdits()`` adds nothing.

    In a sum the right side wins, as a later edit wins in the runtime: of entries that are the
    same, the last stays.
    For hooks this keeps "refresh the cache" behind everything that must precede it.

    >>> one = ContainerEdits(env=("LEVEL=1", "COLOR=red"))
    >>> other = ContainerEdits(env=("LEVEL=2", "COLOR=red"))
    >>> (one + other).env
    ('LEVEL=1', 'LEVEL=2', 'COLOR=red')
    """

    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    additional_gids: tuple[int, ...] = ()
    intel_rdt: IntelRdt | None = None
    net_devices: tuple[NetDevice, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing is done: allowed for a spec, not for a device."""
        return self == ContainerEdits()

    def __add__(self, other: "ContainerEdits") -> "ContainerEdits":
        return ContainerEdits(
            env=_joined(self.env, other.env),
            device_nodes=_joined(self.device_nodes, other.device_nodes),
            mounts=_joined(self.mounts, other.mounts),
            hooks=_joined(self.hooks, other.hooks),
            additional_gids=_joined(self.additional_gids, other.additional_gids),
            intel_rdt=self.intel_rdt if other.intel_rdt is None else other.intel_rdt,
            net_devices=_joined(self.net_devices, other.net_devices),
        )


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """A name a container can be given, and what giving it means."""

    name: str
    annotations: Annotations = ()
    container_edits: ContainerEdits = field(default_factory=ContainerEdits)


@dataclass(frozen=True, slots=True)
class Spec:
    """The devices of one vendor and class in one file.

    ``container_edits`` are done once to a container that is given at least one of ``devices``.
    """

    kind: str
    annotations: Annotations = ()
    devices: tuple[CdiDevice, ...] = ()
    container_edits: ContainerEdits = field(default_factory=ContainerEdits)

    @property
    def vendor(self) -> str:
        """The part of ``kind`` before the slash."""
        return self.kind.partition("/")[0]

    @property
    def device_class(self) -> str:
        """The part of ``kind`` behind the slash."""
        return self.kind.partition("/")[2]

    @property
    def all_edits(self) -> tuple[ContainerEdits, ...]:
        """Every place of the spec that holds edits: its own, then those of each device."""
        return (self.container_edits, *(device.container_edits for device in self.devices))


def _joined(left: tuple[_T, ...], right: tuple[_T, ...]) -> tuple[_T, ...]:
    # A dict keeps the first of equal keys in place; read backwards, that is the last.
    return tuple(reversed(dict.fromkeys(reversed(left + right))))
