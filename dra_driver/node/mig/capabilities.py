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

MONITOR_CAPABILITY: Final = "mig/monitor"  # to look at instances of others
CONFIG_CAPABILITY: Final = "mig/config"  # to create and to remove instances
_OPTIONAL: Final = (MONITOR_CAPABILITY,)  # a driver without MIG has no need of it, and lacks it
_CAPABILITIES: Final = "driver/nvidia/capabilities"
_MAKE_AGAIN_SECONDS: Final = 60.0
_MINOR: Final = re.compile(r"^DeviceFileMinor:\s*(\d+)\s*$", re.MULTILINE)


class CapabilityAccess:
    """The capabilities that this process itself needs in order to create instances.

    A process with CAP_SYS_ADMIN has every capability without its file (the same guide), and NVML
    refuses what it may not do. So a file that cannot be made is logged once, and not tried again at
    each change. *make*: makes the file of a capability where it is missing.
    """

    def __init__(
        self, make: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make
        self._clock = clock
        self._again_at: dict[str, float] = {}  # by name, of those that could not be made
        self._paused_until = 0.0  # nvidia-modprobe hung: no file is made before that

    def have(self, name: str) -> None:
        """Have the file of this capability made, if that can be."""
        now = self._clock()
        if now < max(self._paused_until, self._again_at.get(name, now)):
            return
        try:
            self._make(name)
        except NodeError as error:
            facts = {"capability": name, "error": str(error)}
            log.warning("no device file of MIG: it is tried without", extra=facts)
            self._again_at = {other: at for other, at in self._again_at.items() if now < at}
            self._again_at[name] = now + _MAKE_AGAIN_SECONDS
            if isinstance(error, TimedOut):
                self._paused_until = now + _MAKE_AGAIN_SECONDS


class MigCapabilities:
    """The capabilities of the driver in *driver*.

    *look*: the device file of a name below ``/dev`` of a root, if there is one. *modprobe*: runs
    nvidia-modprobe for a root.
    """

    def __init__(
        self,
        driver: DriverRoot,
        look: Callable[[str, str], DeviceFile | None],
        modprobe: Callable[[str, tuple[str, ...]], None],
    ) -> None:
        self._driver = driver
        self._look = look
        self._modprobe = modprobe

    def files(self, root: str, names: Iterable[str]) -> Mapping[str, DeviceFile]:
        """The device file of each capability, below /dev of *root*; missing ones are made.

        NodeError: the driver has no such capability, or its file could not be made.
        """
        devices = self._devices(names)
        missing = [name for name, device in devices.items() if self._look(root, device) is None]
        failure = self._make(root, missing) if missing else None
        files = {name: self._look(root, device) for name, device in devices.items()}
        absent = [f"/dev/{devices[name]} ({name})" for name, file in files.items() if file is None]
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
        return {name: self._look(root, device) for name, device in self._devices(names).items()}

    def _devices(self, names: Iterable[str]) -> dict[str, str]:
        """The names below /dev, without optional capabilities that the driver has not."""
        devices = {name: self._device(name) for name in names}
        return {name: device for name, device in devices.items() if device}

    def _device(self, name: str) -> str:
        """Its name below /dev. Empty: the driver lacks this capability, which is optional."""
        path = Path(self._driver.local_path(f"{self._driver.proc}/{_below_proc(name)}"))
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
        """The error is reported only for files that are missing afterwards."""
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
    """The file that nvidia-modprobe takes for it."""
    return f"/proc/{_below_proc(name)}"
