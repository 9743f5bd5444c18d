"""Keeps the CDI spec of the driver's files, which every container with a GPU is given.

It is there before a claim is answered, and follows the driver: a container that is started again
after an upgrade gets the files that are there now. While no whole driver is there the last one
stays.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final

from dra_driver.base.errors import NodeError
from dra_driver.base.files import FileSignature, disk_call
from dra_driver.model.driver_files import DriverFiles
from dra_driver.node.state.claim_files import DriverSpecFile
from dra_driver.plan.prepare.driver_spec import driver_spec
from dra_driver.plugin.claims.dependencies import DriverIdentity

log = logging.getLogger(__name__)


class DriverSpec:
    """Only the process that holds the lease writes or removes it. Safe to use from several threads.

    Every error is a NodeError.
    """

    def __init__(
        self, names: DriverIdentity, files: Callable[[], DriverFiles], file: DriverSpecFile
    ) -> None:
        """*files*: the driver as it is installed now; the same value while nothing changes."""
        self._names: Final = names
        self._files = files
        self._file = file
        self._lock = threading.Lock()
        # What this process knows to be in the file, and what that was like then.
        self._written: tuple[DriverFiles, FileSignature | None] | None = None

    def is_behind(self) -> bool:
        """Whether the driver is another one than the spec says, or somebody has changed or removed
        the file. False while no whole driver is there."""
        try:
            files = self._look()
        except NodeError as e:
            log.debug("no whole driver", extra={"error": str(e)})
            return False
        return not self._is_current(files)

    def keep(self) -> DriverFiles:
        """Write it where it is behind; the driver's files. NodeError: no whole driver is there,
        which leaves the spec as it was."""
        files = self._look()
        with self._lock:
            if not self._is_current(files):
                self._file.write(driver_spec(files, self._names.hook, self._names.driver))
                self._written = files, self._file.signature()
        return files

    def keep_after_others(self) -> None:
        """The same where another process may have written or removed it."""
        self._written = None
        self.keep()

    def restore(self) -> None:
        """There is one, of an earlier driver where none is whole. NodeError: there is neither one
        nor a whole driver, or it cannot be written."""
        if self.is_behind() or self._file.signature() is None:
            self.keep()

    def remove(self) -> None:
        """No claim is left that needs it."""
        with self._lock:
            self._written = None
            self._file.remove()

    def _look(self) -> DriverFiles:
        with disk_call("look for the driver's files"):
            return self._files()

    def _is_current(self, files: DriverFiles) -> bool:
        return self._written == (files, self._file.signature())
