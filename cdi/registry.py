"""What a runtime finds in its CDI directories: which devices there are, and which it cannot use.

The rules are those of the Go library's cache: only ``*.json`` and ``*.yaml`` count, directories
inside are not entered, a later directory wins over an earlier one, a file that is not legal is
ignored as a whole, and a device that two files of one directory define belongs to neither.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cdi.encoding import from_text
from cdi.errors import CdiDeviceError, CdiSpecError
from cdi.spec import CdiDevice, ContainerEdits, Spec

DEFAULT_DIRECTORIES: Final = ("/etc/cdi", "/var/run/cdi")
"""Where runtimes look: specs that stay, then those that come and go and are lost at boot."""

Directory = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class RegisteredDevice:
    """A device, the spec it is part of, and the file of that spec."""

    device: CdiDevice
    spec: Spec
    path: Path


@dataclass(frozen=True, slots=True)
class DeviceRegistry:
    """The usable devices by qualified name, and everything that was wrong on the way to them."""

    devices: Mapping[str, RegisteredDevice]
    problems: tuple[str, ...]

    def edits(self, names: Iterable[str]) -> ContainerEdits:
        """Add up what is done to a container that is given these devices, in this order.

        The edits of a spec come once, before those of its first device.
        """
        distinct = tuple(dict.fromkeys(names))
        if unknown := [name for name in distinct if name not in self.devices]:
            raise CdiDeviceError(self._explain(unknown))
        total = ContainerEdits()
        used: set[Path] = set()
        for registered in (self.devices[name] for name in distinct):
            if registered.path not in used:
                used.add(registered.path)
                total += registered.spec.container_edits
            total += registered.device.container_edits
        return total

    def _explain(self, unknown: list[str]) -> str:
        known = ", ".join(sorted(self.devices)) or "none"
        problems = f"; problems: {'; '.join(self.problems)}" if self.problems else ""
        return f"unresolvable CDI devices {', '.join(unknown)}; known are: {known}{problems}"


def load_registry(directories: Iterable[Directory] = DEFAULT_DIRECTORIES) -> DeviceRegistry:
    """Read all directories, the least important first; one that is missing is empty."""
    devices: dict[str, RegisteredDevice] = {}
    conflicts: set[str] = set()
    problems: list[str] = []
    for directory in directories:
        in_directory: dict[str, RegisteredDevice] = {}
        for new in _scan(Path(directory), problems):
            name = f"{new.spec.kind}={new.device.name}"
            if name in in_directory:
                problems.append(f"{name} is in conflict: {in_directory[name].path} and {new.path}")
                conflicts.add(name)
            in_directory.setdefault(name, new)
        devices |= in_directory
    # As in the Go library, a device in conflict stays unusable even if a later directory has it.
    usable = {name: devices[name] for name in sorted(devices.keys() - conflicts)}
    return DeviceRegistry(MappingProxyType(usable), tuple(problems))


def _scan(directory: Path, problems: list[str]) -> Iterator[RegisteredDevice]:
    for path in _files(directory, problems):
        try:
            spec = from_text(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, CdiSpecError) as e:
            problems.append(f"{path} is ignored: {e}")
            continue
        yield from (RegisteredDevice(device, spec, path) for device in spec.devices)


def _files(directory: Path, problems: list[str]) -> list[Path]:
    try:
        entries = sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as e:
        problems.append(f"{directory} is ignored: {e}")
        return []
    return [
        path
        for path in entries
        if path.suffix in (".json", ".yaml") and (path.is_symlink() or not path.is_dir())
    ]
