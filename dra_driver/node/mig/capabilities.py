"""The device files that let a container use a MIG instance, or look at all of them.

A capability is a file below ``/proc/driver/nvidia/capabilities`` that names a minor number; whoever
can open ``/dev/nvidia-caps/nvidia-cap<minor>`` has it (NVIDIA's MIG user guide, "Device nodes").
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.driver_files import DeviceFile
from dra_driver.node.driver.root import DriverRoot

log = logging.getLogger(__name__)

MONITOR_CAPABILITY: Final = "mig/monitor"  # to look at instances that are somebody else's
CONFIG_CAPABILITY: Final = "mig/config"  # to create and to remove instances
_OPTIONAL: Final = (
    MONITOR_CAPABILITY,
)  # a driver without MIG has none, and its GPUs can be looked at
_CAPABILITIES: Final = "driver/nvidia/capabilities"
_MAKE_AGAIN_SECONDS: Final = 60.0
_MINOR: Final = re.compile(r"^DeviceFileMinor:\s*(\d+)\s*$", re.MULTILINE)

FindDeviceFile = Callable[[str, str], DeviceFile | None]
"""The device file of a name below /dev of a root; None: there is none."""
RunModprobe = Callable[[str, tuple[str, ...]], None]
"""Runs nvidia-modprobe for a root."""


class CapabilityAccess:
    """What this process itself needs of them, in order to create instances.

    Whoever has CAP_SYS_ADMIN has every one without its file (the same guide), so that the driver
    says what may be done: a file that cannot be made is told once, and not tried again at each
    change. *make*: has the file of a capability be there.
    """

    def __init__(
        self, make: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make
        self._clock = clock
        self._again_at: dict[str, float] = {}  # by name, of those that could not be made
        self._from = 0.0  # from when on anything is tried: making one hung

    def have(self, name: str) -> None:
        """Have the file of this capability, if that can be."""
        now = self._clock()
        if now < max(self._from, self._again_at.get(name, now)):
            return
        try:
            self._make(name)
        except NodeError as error:
            facts = {"capability": name, "error": str(error)}
            log.warning("no device file of MIG: it is tried without", extra=facts)
            self._again_at = {one: at for one, at in self._again_at.items() if now < at}
            self._again_at[name] = now + _MAKE_AGAIN_SECONDS
            if isinstance(error, TimedOut):
                self._from = now + _MAKE_AGAIN_SECONDS


class MigCapabilities:
    """The capabilities of the driver in *driver*."""

    def __init__(self, driver: DriverRoot, look: FindDeviceFile, modprobe: RunModprobe) -> None:
        self._driver = driver
        self._look = look
        self._modprobe = modprobe

    def files(self, root: str, names: Iterable[str]) -> Mapping[str, DeviceFile]:
        """The device file of each capability, below /dev of *root*; missing ones are made.

        NodeError: the driver has no such capability, or its file could not be made.
        """
        devices = {name: self._device(name) for name in names}
        device_names = {name: device for name, device in devices.items() if device}
        missing = [
            name for name, device in device_names.items() if self._look(root, device) is None
        ]
        failure = self._make(root, missing) if missing else None
        files = {name: self._look(root, device) for name, device in device_names.items()}
        absent = [
            f"/dev/{device_names[name]} ({name})" for name, file in files.items() if file is None
        ]
        if absent:
            raise NodeError(
                f"device files of MIG are missing in {root} and were not made: {', '.join(absent)} "
                f"({failure or 'nvidia-modprobe reported success'}); make them with "
                f"nvidia-modprobe -f {_in_proc(missing[0])}"
            ) from failure
        return {name: file for name, file in files.items() if file}

    def existing(self, root: str, names: Iterable[str]) -> Mapping[str, DeviceFile | None]:
        """The device file of each capability, below /dev of *root*; None: it is not there yet. An
        optional capability that the driver has not is missing.

        NodeError: the driver has no such capability.
        """
        devices = {name: self._device(name) for name in names}
        return {name: self._look(root, device) for name, device in devices.items() if device}

    def _device(self, name: str) -> str:
        """Its name below /dev. Empty: the driver has no such capability, and that is no harm."""
        path = Path(self._driver.here(f"{self._driver.proc}/{_below_proc(name)}"))
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            if name in _OPTIONAL:
                return ""
            raise NodeError(
                f"the driver has no capability {name}: {path}: {error.strerror}; the MIG instance "
                "vanished, or /proc/driver/nvidia/capabilities is not that of the host"
            ) from error
        if (match := _MINOR.search(text)) is None:
            raise NodeError(f"{path} names no DeviceFileMinor: {text.strip()!r}")
        return f"nvidia-caps/nvidia-cap{match[1]}"

    def _make(self, root: str, names: list[str]) -> NodeError | None:
        """What counts is whether the files are there then; the error is for those that are not."""
        args = tuple(part for name in names for part in ("-f", _in_proc(name)))
        try:
            self._modprobe(root, args)
        except TimedOut:
            raise
        except NodeError as error:
            return error
        log.info("device files of MIG made", extra={"root": root, "capabilities": names})
        return None


def _below_proc(name: str) -> str:
    """
    >>> _below_proc("mig/monitor"), _below_proc("gpu0/mig/gi1")
    ('driver/nvidia/capabilities/mig/monitor', 'driver/nvidia/capabilities/gpu0/mig/gi1/access')
    """
    return f"{_CAPABILITIES}/{name}" + ("/access" if name.startswith("gpu") else "")


def _in_proc(name: str) -> str:
    """As nvidia-modprobe is told of it."""
    return f"/proc/{_below_proc(name)}"
