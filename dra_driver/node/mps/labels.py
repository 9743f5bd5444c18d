"""What SELinux calls files that containers may use: without it no client reaches its server.

The host's ``/run`` has a label of its own, which the rules for containers do not let them use.
What is made in a directory gets the directory's label.
"""

import logging
import os
from pathlib import Path
from typing import Final, Protocol

from dra_driver.node.mps.trees import opened

log = logging.getLogger(__name__)

ATTRIBUTE: Final = "security.selinux"
LABEL: Final = "system_u:object_r:container_file_t:s0"
_LEVELS: Final = 3  # below a pipe directory: servers, namespaces, their sockets


class SetXattr(Protocol):
    """os.setxattr."""

    def __call__(
        self, path: str, attribute: str, value: bytes, *, follow_symlinks: bool
    ) -> None: ...


class Labels:
    """*enforce*: the file that is there where the host's kernel has SELinux switched on."""

    def __init__(self, enforce: Path, setxattr: SetXattr = os.setxattr) -> None:
        self._enforce = enforce
        self._setxattr = setxattr
        self._warned = False

    @property
    def mount_option(self) -> str:
        """What gives a tmpfs the label; none where there is no SELinux."""
        return f"context={LABEL}" if self._enforce.exists() else ""

    def put_on(self, directory: str) -> None:
        """Label it and what is in it. It may have come and gone; a failure is logged, once."""
        if not self._enforce.exists():
            return
        try:
            with opened(directory) as at:
                self._put_on(at, _LEVELS)
        except OSError as e:
            self.warn(directory, e.strerror or str(e))

    def warn(self, directory: str, why: str) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(
            level,
            "a directory cannot be labelled for SELinux: containers may be kept from their MPS "
            "server; it takes the label container_file_t",
            extra={"directory": directory, "label": LABEL, "error": why},
        )

    def _put_on(self, at: int, levels: int) -> None:
        here = f"/proc/self/fd/{at}"  # a socket cannot be opened, and no path is followed to it
        self._set(f"{here}/.")
        for name in os.listdir(at):
            try:
                with opened(name, at) as inside:
                    if levels > 1:
                        self._put_on(inside, levels - 1)
            except NotADirectoryError:
                self._set(f"{here}/{name}")
            except FileNotFoundError:
                continue

    def _set(self, path: str) -> None:
        try:
            self._setxattr(path, ATTRIBUTE, LABEL.encode(), follow_symlinks=False)
        except FileNotFoundError:
            log.debug("it is gone", extra={"path": path})
