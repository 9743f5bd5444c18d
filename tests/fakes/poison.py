"""Places of the machine itself that no test may touch: what is there is another's, or decides."""

import os
import sys
import threading
from pathlib import Path
from typing import Any, Final

from dra_driver.node.cgroups.procfs import boot_id

PLACES: Final = (
    "/var/lib/kubelet",
    "/etc/cdi",
    "/var/run/cdi",
    "/run/cdi",
    "/run/containerd",
    "/run/containers",
    "/run/k3s",
    "/run/k0s",
    "/var/lib/containers",
    "/var/snap/microk8s",
    "/run/dra-driver-gpu",
    "/run/nvidia",
    "/home/kubernetes/bin/nvidia",
    "/usr/local/nvidia",
    "/proc/driver/nvidia",
)
# Of these events the arguments that are paths, or a socket's address. There is none for stat(2).
_EVENTS: Final = frozenset(
    {
        *("open", "os.listdir", "os.scandir", "os.mkdir", "os.rmdir", "os.remove", "os.rename"),
        *("os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate", "os.utime"),
        *("socket.connect", "socket.bind"),
    }
)


class Poison:
    """Notes who touches one of PLACES, once it is swallowed: for as long as the process lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._touched: list[str] = []

    def swallow(self) -> None:
        sys.addaudithook(self._hook)

    def touched(self) -> tuple[str, ...]:
        """What was touched since this was asked last."""
        with self._lock:
            touched, self._touched = self._touched, []
        return tuple(touched)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS:
            for argument in arguments:
                if isinstance(argument, str | bytes) and is_poisoned(argument):
                    with self._lock:
                        self._touched.append(f"{event} {os.fsdecode(argument)}")


def is_poisoned(path: str | bytes) -> bool:
    """Whether *path* is one of PLACES, or below one."""
    text = os.fsdecode(path).removeprefix("unix:")
    return any(text == place or text.startswith(f"{place}/") for place in PLACES)


def own_host(directory: Path) -> Path:
    """*directory* as the host's / for who is to see nothing of this machine but its boot."""
    of_boot = directory / "proc/sys/kernel/random/boot_id"
    of_boot.parent.mkdir(parents=True, exist_ok=True)
    of_boot.write_text(boot_id(Path("/")))
    return directory
