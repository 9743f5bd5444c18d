"""The character devices of the driver: where they are, and how missing ones come to be."""

import logging
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.driver_files import DeviceFile, DeviceFiles, DriverFiles
from dra_driver.node.driver.commands import RunCommand, in_chroot, run_command
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.mig.capabilities import MigCapabilities

log = logging.getLogger(__name__)

CONTROL_DEVICE: Final = "nvidiactl"
UVM_DEVICE: Final = "nvidia-uvm"
REQUIRED_DEVICES: Final = (CONTROL_DEVICE, UVM_DEVICE)
# For Vulkan and EGL; for profilers.
OPTIONAL_DEVICES: Final = ("nvidia-modeset", "nvidia-uvm-tools")

_CONTROL_MINOR: Final = 255  # of /dev/nvidiactl: NV_CONTROL_DEVICE_MINOR
_TIMEOUT_SECONDS: Final = 10.0  # loading a kernel module takes a second or two

DeviceNumberOf = Callable[[str], tuple[int, int] | None]
"""Major and minor number of the character device at a path of this process; None: there is none."""


def device_number(path: str) -> tuple[int, int] | None:
    """The numbers of the character device at *path*; None: there is none."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISCHR(status.st_mode):
        return None
    return os.major(status.st_rdev), os.minor(status.st_rdev)


def modprobe_arguments(missing: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The runs of nvidia-modprobe that make these device files.

    With ``-u`` its ``-c`` means nodes of nvidia-uvm and no others, so that takes a run of its own.

    >>> modprobe_arguments(["nvidia0", "nvidiactl", "nvidia-uvm"])
    (('-c', '0', '-c', '255'), ('-u', '-c', '0'))
    """
    names = set(missing)
    minors = sorted(int(name.removeprefix("nvidia")) for name in names if name[6:].isdigit())
    minors += [_CONTROL_MINOR] if CONTROL_DEVICE in names else []
    runs = [tuple(part for minor in minors for part in ("-c", str(minor)))] if minors else []
    runs += [("-u", "-c", "0")] if UVM_DEVICE in names else []
    return tuple(runs)


class DeviceNodes:
    """The device files of the driver in *driver*.

    They are in the driver root's own ``/dev`` where that has them (a driver container), else in the
    host's.
    """

    def __init__(
        self,
        driver: DriverRoot,
        run: RunCommand = run_command,
        device_number: DeviceNumberOf = device_number,
    ) -> None:
        self._driver = driver
        self._run = run
        self._number = device_number
        self._capabilities = MigCapabilities(driver, self._look, self._modprobe)

    def files(
        self,
        minors: Iterable[int],
        capabilities: Iterable[str] = (),
        driver: DriverFiles | None = None,
    ) -> DeviceFiles:
        """What the GPUs with these minor numbers need, and these capabilities of MIG; missing files
        are made. *driver*: its files, where they were just looked for.

        NodeError: one is missing and could not be made. TimedOut: making it took too long.
        """
        sorted_minors, capability_names = sorted(set(minors)), sorted(set(capabilities))
        gpus = [f"nvidia{minor}" for minor in sorted_minors]
        root, control = self._root(driver)
        names = (*gpus, *sorted((*REQUIRED_DEVICES, *OPTIONAL_DEVICES)))
        files = {
            name: control if name == CONTROL_DEVICE else self._look(root, name) for name in names
        }
        missing = [name for name in (*gpus, *REQUIRED_DEVICES) if files[name] is None]
        if missing:
            self._make(root, missing)
            files = {name: self._look(root, name) for name in names}
        by_minor = {minor: files[gpu] for minor, gpu in zip(sorted_minors, gpus, strict=True)}
        return DeviceFiles(
            common=tuple(file for name in names[len(gpus) :] if (file := files[name])),
            gpus={minor: file for minor, file in by_minor.items() if file},
            capabilities=self._capabilities.files(root, capability_names)
            if capability_names
            else {},
        )

    def make_capability(self, name: str) -> None:
        """The device file of this capability of MIG exists. NodeError: it could not be made."""
        self._capabilities.files(self._root()[0], (name,))

    def existing(self, capabilities: Iterable[str]) -> Mapping[str, DeviceFile | None]:
        """What is there of the files of these capabilities of MIG, while nothing is made; None: it
        is not. NodeError: the driver has no such capability."""
        return self._capabilities.existing(self._root()[0], sorted(set(capabilities)))

    def _root(self, driver: DriverFiles | None = None) -> tuple[str, DeviceFile | None]:
        """The root, a directory of the host, whose ``/dev`` counts, and its control device."""
        files = driver or self._driver.files()
        for root in dict.fromkeys((files.root, "/")):
            if control := self._look(root, CONTROL_DEVICE):
                return root, control
        # None has any so far: they are made where a driver container would have them.
        return self._driver.system_root(files), None

    def _look(self, root: str, name: str) -> DeviceFile | None:
        host_path = f"{root.rstrip('/')}/dev/{name}"
        number = self._number(self._driver.local_path(host_path))
        return DeviceFile(host_path, f"/dev/{name}", *number) if number else None

    def _make(self, root: str, missing: list[str]) -> None:
        failure: NodeError | None = None
        try:
            for args in modprobe_arguments(missing):
                self._modprobe(root, args)
        except TimedOut:
            raise
        except NodeError as e:
            failure = e  # what counts is whether the files are there
        still_missing = [name for name in missing if self._look(root, name) is None]
        if still_missing:
            places = ", ".join(f"{root.rstrip('/')}/dev/{name}" for name in still_missing)
            raise NodeError(
                f"device files are missing and were not made: {places} "
                f"({failure or 'nvidia-modprobe reported success'}); is the kernel module loaded "
                "(modprobe nvidia nvidia-uvm), and is the GPU there (nvidia-smi -L)?"
            ) from failure
        log.info("device files made", extra={"root": root, "files": missing})
        self._make_modeset(root)

    def _make_modeset(self, root: str) -> None:
        """Optional, and so tried only when there was something else to make: many servers have no
        nvidia-modeset module."""
        if self._look(root, "nvidia-modeset"):
            return
        try:
            self._modprobe(root, ("-m",))
        except NodeError as e:
            log.info("no nvidia-modeset on this node: %s", e)

    def _modprobe(self, root: str, args: tuple[str, ...]) -> None:
        driver = self._driver
        tool = driver.tool("nvidia-modprobe")
        command = in_chroot(driver.host_root, root, tool, driver.files().lib_dir, args)
        self._run(command, _TIMEOUT_SECONDS)
