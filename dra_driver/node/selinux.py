"""Labels of SELinux for what containers use of the host.

Rules for containers do not allow the labels of the host's ``/run`` and ``/var/lib``; what is
created in a directory gets its label.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dra_driver.node.mps.untrusted_trees import open_directory

log = logging.getLogger(__name__)

SELINUX_ATTRIBUTE: Final = "security.selinux"
SELINUX_LABEL: Final = "system_u:object_r:container_file_t:s0"
_LEVELS: Final = 3  # below a pipe directory of MPS: servers, namespaces, their sockets

SetXattr = Callable[..., None]  # as os.setxattr


class SelinuxLabels:
    """*enforce*: a file that exists where the host's kernel has SELinux switched on."""

    def __init__(self, enforce: Path, setxattr: SetXattr = os.setxattr) -> None:
        self._enforce = enforce
        self._setxattr = setxattr
        self._warned = False

    @property
    def mount_option(self) -> str:
        """Gives a tmpfs the label; empty where there is no SELinux."""
        return f"context={SELINUX_LABEL}" if self._enforce.exists() else ""

    def put_on(self, directory: str) -> None:
        """Label it and what is in it. What is removed meanwhile is skipped; a failure is logged,
        once."""
        if not self._enforce.exists():
            return
        try:
            with open_directory(directory) as at:
                self._put_on(at, _LEVELS)
        except OSError as e:
            self.warn(directory, e.strerror or str(e))

    def warn(self, directory: str, why: str) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(
            level,
            "a directory cannot be labelled for SELinux: containers may be kept from what is "
            "in it; it takes the label container_file_t",
            extra={"directory": directory, "label": SELINUX_LABEL, "error": why},
        )

    def _put_on(self, at: int, levels: int) -> None:
        path = f"/proc/self/fd/{at}"  # a socket cannot be opened, and no path is followed to it
        self._set(f"{path}/.")
        for name in os.listdir(at):
            try:
                with open_directory(name, at) as inside:
                    if levels > 1:
                        self._put_on(inside, levels - 1)
            except NotADirectoryError:
                self._set(f"{path}/{name}")
            except FileNotFoundError:
                continue

    def _set(self, path: str) -> None:
        try:
            self._setxattr(path, SELINUX_ATTRIBUTE, SELINUX_LABEL.encode(), follow_symlinks=False)
        except FileNotFoundError:
            log.debug("it is gone", extra={"path": path})
