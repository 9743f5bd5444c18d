"""What can go wrong, as a small tree.

::

    CdiError
    ├── CdiNameError     a name the CDI SPEC does not allow
    ├── CdiSpecError     a spec no runtime would load; holds every problem, each with its field path
    ├── CdiStoreError    a spec directory that does not serve; names the directory and the mend
    └── CdiDeviceError   a device that cannot be given to a container

Asking again can help with a ``CdiStoreError`` and a ``CdiDeviceError``, whose causes lie outside
the program; never with the other two.
"""

from collections.abc import Iterable
from pathlib import Path


class CdiError(Exception):
    """The root: catch it to catch everything this package raises on purpose."""


class CdiNameError(CdiError):
    """A vendor, class, device or file name is not legal; the message says which rule it breaks."""


class CdiSpecError(CdiError):
    """A spec is not legal; ``problems`` lists everything that is wrong, in the file's order.

    >>> raise CdiSpecError(["kind: is required", "devices: at least one is required"])
    Traceback (most recent call last):
    cdi.errors.CdiSpecError: kind: is required; devices: at least one is required
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class CdiStoreError(CdiError):
    """A spec directory could not be read or written; ``directory`` says which one."""

    def __init__(self, message: str, directory: Path) -> None:
        self.directory = directory
        super().__init__(message)


class CdiDeviceError(CdiError):
    """A device is unknown, claimed by two files, or not there on the host."""
