"""Another user: what root may and others may not is otherwise never seen."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def locked_out(directory: Path, mode: int) -> Iterator[None]:
    """Be somebody for whom *directory* has *mode* and no more. Who is not root already is."""
    before, me = directory.stat().st_mode, os.geteuid()
    directory.chmod(mode)
    if me == 0:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(me)
        directory.chmod(before)


def let_in(directory: Path) -> None:
    """Let every user into *directory*: those above it that pytest made are for this user only."""
    top = Path(tempfile.gettempdir())
    for path in (directory, *directory.parents):
        if path.is_relative_to(top) and path.stat().st_mode & 0o005 != 0o005:
            path.chmod(0o755)
