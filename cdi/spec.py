"""A CDI spec as a value: what is done to a container that is given one of these devices.

Fields are named and ordered as in the CDI SPEC, in Python's spelling; a field that holds its
default is not written, unless the SPEC requires it. Nothing here is checked on the way in:
:func:`cdi.validate.check` says everything that is wrong with a whole spec at once.

A spec has no version: which one to write follows from what it says (:mod:`cdi.validate`).

The names of devices, ``vendor/class=device``, are checked here, too. The legal characters are those
of the CDI SPEC ("Kind", "CDI Devices") as the Go library's ``pkg/parser`` checks them: a vendor and
a class begin with a letter, a device name may begin with a digit too, and all end with a letter or
a digit. One rule is ours: a vendor and a class have two characters.

>>> print(qualify("vendor.example", "gpu", "gpu-0"))
vendor.example/gpu=gpu-0
>>> parse_name("vendor.example/gpu=gpu-0").device
'gpu-0'
>>> qualify("vendor.example", "gpu", "gpu 0")
Traceback (most recent call last):
cdi.errors.CdiNameError: device name 'gpu 0': must begin and end with a letter or digit, with only \
letters, digits, '_', '-', '.', ':' between
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from cdi.errors import CdiNameError

# A temporary file is called ".<name>.<8 characters>.tmp", and Linux allows 255 bytes (NAME_MAX).
LONGEST_FILE_NAME: Final = 240


@dataclass(frozen=True, slots=True)
class QualifiedName:
    """One device of one vendor, as a runtime is asked for it."""

    vendor: str
    device_class: str
    device: str

    @property
    def kind(self) -> str:
        """What a spec file calls ``kind``."""
        return f"{self.vendor}/{self.device_class}"

    def __str__(self) -> str:
        return f"{self.kind}={self.device}"


@dataclass(frozen=True, slots=True)
class _Rule:
    noun: str
    legal: re.Pattern[str]
    longest: int
    says: str

    def problem(self, name: str) -> str | None:
        if not name:
            return "must not be empty"
        if len(name) > self.longest:
            return f"must be no longer than {self.longest} characters"
        return None if self.legal.fullmatch(name) else self.says


_KIND_SAYS: Final = (
    "must have two characters or more,"
    " begin with a letter and end with a letter or digit,"
    " with only letters, digits, '_', '-', '.' between"
)
_DEVICE_SAYS: Final = (
    "must begin and end with a letter or digit,"
    " with only letters, digits, '_', '-', '.', ':' between"
)
# One letter would be legal, but the Go library up to 1.1.0 panics on it, and the runtime with it.
_KIND_PART: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]")
_DEVICE: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")

# 253 and 63 are the CDI SPEC's ("Kind"); it sets no limit for devices, where 255 is ours.
_VENDOR_RULE: Final = _Rule("vendor", _KIND_PART, 253, _KIND_SAYS)
_CLASS_RULE: Final = _Rule("class", _KIND_PART, 63, _KIND_SAYS)
_DEVICE_RULE: Final = _Rule("device name", _DEVICE, 255, _DEVICE_SAYS)
_ID_RULE: Final = _Rule("transient id", _DEVICE, 255, _DEVICE_SAYS)


def device_problem(name: str) -> str | None:
    """Say what is wrong with an unqualified device name, or ``None``."""
    return _DEVICE_RULE.problem(name)


def kind_problem(kind: str) -> str | None:
    """Say what is wrong with ``vendor/class``, or ``None``.

    >>> kind_problem("vendor.example/gpu")
    >>> kind_problem("vendor.example")
    "must be 'vendor/class'"
    """
    vendor, slash, device_class = kind.partition("/")
    if not slash:
        return "must be 'vendor/class'"
    for rule, part in ((_VENDOR_RULE, vendor), (_CLASS_RULE, device_class)):
        if problem := rule.problem(part):
            return f"{rule.noun} {part!r}: {problem}"
    return None


def qualify(vendor: str, device_class: str, device: str) -> QualifiedName:
    """Join three names that were checked, or raise ``CdiNameError``."""
    _check(_VENDOR_RULE, vendor)
    _check(_CLASS_RULE, device_class)
    _check(_DEVICE_RULE, device)
    return QualifiedName(vendor, device_class, device)


def parse_name(text: str) -> QualifiedName:
    """Split ``vendor/class=device``; the inverse of ``str``.

    >>> parse_name("gpu-0")
    Traceback (most recent call last):
    cdi.errors.CdiNameError: 'gpu-0': must be 'vendor/class=device'
    """
    kind, equals, device = text.partition("=")
    vendor, slash, device_class = kind.partition("/")
    if not (equals and slash):
        raise CdiNameError(f"{text!r}: must be 'vendor/class=device'")
    return qualify(vendor, device_class, device)


def spec_file_name(vendor: str, device_class: str, transient_id: str) -> str:
    """Name the file of a spec that lives as long as something else does.

    The pattern is the Go library's (``GenerateTransientSpecName``).
    Where that replaces a ``/`` in the id, this refuses it: two ids never share a file.

    >>> spec_file_name("vendor.example", "gpu", "5b0f")
    'vendor.example-gpu_5b0f.json'
    """
    _check(_ID_RULE, transient_id)
    name = f"{spec_file_prefix(vendor, device_class)}{transient_id}.json"
    if len(name) > LONGEST_FILE_NAME:
        raise CdiNameError(f"file name {name!r}: must be no longer than {LONGEST_FILE_NAME}")
    return name


def spec_file_prefix(vendor: str, device_class: str) -> str:
    """Give what the files of all transient specs of one vendor and class begin with."""
    _check(_VENDOR_RULE, vendor)
    _check(_CLASS_RULE, device_class)
    return f"{vendor}-{device_class}_"


def _check(rule: _Rule, name: str) -> None:
    if problem := rule.problem(name):
        raise CdiNameError(f"{rule.noun} {name!r}: {problem}")


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

    clos_id: str = field(default="", metadata={"name": "closID"})
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

    >>> left = ContainerEdits(env=("LEVEL=1", "COLOR=red"))
    >>> right = ContainerEdits(env=("LEVEL=2", "COLOR=red"))
    >>> (left + right).env
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
        return self == _NOTHING

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


_NOTHING: Final = ContainerEdits()


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """A name a container can be given, and what giving it means."""

    name: str
    annotations: Annotations = ()
    container_edits: ContainerEdits = field(default=_NOTHING, metadata={"required": True})


@dataclass(frozen=True, slots=True)
class Spec:
    """The devices of one vendor and class in one file.

    ``container_edits`` are done once to a container that is given at least one of ``devices``.
    """

    kind: str
    annotations: Annotations = ()
    devices: tuple[CdiDevice, ...] = field(default=(), metadata={"required": True})
    container_edits: ContainerEdits = _NOTHING

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
