"""A simulated host that has another kernel than before was rebooted: its GPUs are as if reset.

A test reboots it by starting what runs on the host with another boot ID, in mounts of its own::

    uuidgen >ID && unshare --mount sh -c 'mount --bind ID /proc/sys/kernel/random/boot_id && exec …'
"""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import Final

from dra_driver.sim.health.resets import LOADED, GpuResets
from dra_driver.sim.host.tools import SETTINGS_DIRECTORY
from dra_driver.sim.mig.state import put_file
from dra_driver.sim.node_spec import SimulatedNode

_BOOT: Final = f"{SETTINGS_DIRECTORY}/boot"


def follow_boot(host: Path, node: SimulatedNode, boot: str) -> None:
    """Forget what the driver and the GPUs lose at a reboot, unless *boot* is the ID of the last
    time. Several processes may do it at the same time."""
    file = host / _BOOT
    with contextlib.suppress(PermissionError):  # who only looks leaves it to the others
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = file.read_text() if file.exists() else ""
            if before not in ("", boot):
                _reboot(host, node)
            if before != boot:
                put_file(file, boot)
        finally:
            os.close(lock)


def _reboot(host: Path, node: SimulatedNode) -> None:
    for settings in (host / SETTINGS_DIRECTORY / node.driver_version).glob("*"):
        settings.unlink(missing_ok=True)
    shutil.rmtree(host / "dev/nvidia-caps", ignore_errors=True)
    if node.driver == "ready":
        os.utime(host / LOADED)
        for gpu in node.gpus:
            if gpu.listed:
                GpuResets(host).record(node, gpu)
