"""Is this process alive, is it ready: questions to the parts that the answer depends on."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dra_driver.base.errors import NodeError
from dra_driver.base.files import hanging_disk_calls, removed_directory
from dra_driver.base.http import HealthChecks
from dra_driver.kubeletplugin.serve.plugin import KubeletPlugin
from dra_driver.kubeletplugin.slices.publisher import Publisher
from dra_driver.plugin.publish.loops import DeviceScanner, Loops


def liveness_checks(plugin: KubeletPlugin, directories: Sequence[Path]) -> HealthChecks:
    """Alive: the kubelet can reach us through our sockets, the *directories* of the host are those
    that we see, and no call to the disk hangs. Where not, a new process can mend it."""
    return {
        "disk": hanging_disk_calls,
        "directories": lambda: removed_directory(directories),
        "sockets": _sockets(plugin),
    }


def readiness_checks(
    plugin: KubeletPlugin,
    publisher: Publisher,
    looks: tuple[DeviceScanner, Loops],
    cdi_dir: Path,
    directories: Sequence[Path],
) -> HealthChecks:
    """Ready: a pod with a claim could start here now."""
    watcher, rounds = looks
    return {
        "directories": lambda: removed_directory(directories),
        "sockets": _sockets(plugin),
        "registration": lambda: None if plugin.registered else "the kubelet has not accepted us",
        "slices": lambda: _slices(publisher),
        "gpus": lambda: watcher.not_ready,
        "ledger": lambda: rounds.error,
        "cdi": lambda: _writable(cdi_dir),
    }


def _sockets(plugin: KubeletPlugin) -> Callable[[], str | None]:
    def check() -> str | None:
        try:
            plugin.check()
        except NodeError as e:
            return str(e)
        return None

    return check


def _slices(publisher: Publisher) -> str | None:
    return None if publisher.healthy() else publisher.status().error or "not published yet"


def _writable(directory: Path) -> str | None:
    if not directory.exists():
        return None  # it is made with the first claim
    return None if os.access(directory, os.W_OK) else f"{directory} cannot be written"
