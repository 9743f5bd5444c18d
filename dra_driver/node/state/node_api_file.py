"""By which API the node gives its GPUs out, kept where it outlives a restart.

Without it, a plugin that starts while the API server is away could not tell. A file that cannot be
read is set aside: what is held tells then.
"""

import logging
import os
from pathlib import Path
from typing import Final

from dra_driver.base.codec import Codec, Undecodable
from dra_driver.base.files import NotAFile, disk_errors, read_file, write_atomically
from dra_driver.base.frozen import frozen
from dra_driver.model.profiles import AllocationApi

log = logging.getLogger(__name__)


@frozen
class ServedApi:
    """The API that GPUs are given out by."""

    api: AllocationApi
    draining: bool = False  # nothing more is given out by it: the node goes to another one
    other_plugin: bool = False  # another device plugin is on the node, or has left pods with GPUs


SERVED_APIS: Final = Codec[ServedApi](ServedApi)


class ServedApiFile:
    """Kept in *path*. One process at a time may write it: the newest."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> ServedApi | None:
        """What was kept; None: nothing. NodeError: the disk fails."""
        with disk_errors(f"read {self._path}"):
            try:
                return SERVED_APIS.decode(read_file(self._path))
            except FileNotFoundError:
                return None
            except (NotAFile, Undecodable) as e:
                self._set_aside(e)
                return None

    def inspect(self) -> ServedApi | None:
        """As ``read``, by a process that changes nothing."""
        with disk_errors(f"read {self._path}"):
            try:
                return SERVED_APIS.decode(read_file(self._path))
            except (FileNotFoundError, NotAFile, Undecodable):
                return None

    def write(self, served: ServedApi) -> None:
        """Keep *served* instead, also after a power cut. NodeError: it cannot be kept."""
        remedy = "let this process write there, or give another --state-dir"
        with disk_errors(f"write {self._path}", {None: remedy}):
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            write_atomically(self._path, SERVED_APIS.encode(served, indent=2), durable=True)

    def _set_aside(self, error: Exception) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged")
        os.replace(self._path, aside)
        log.error(
            "by which API GPUs were given out cannot be understood; what is held tells: %s",
            error,
            extra={"kept": str(aside)},
        )
