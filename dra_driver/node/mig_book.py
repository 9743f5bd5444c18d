"""What was made of GPUs other than for claims, kept where it outlives a restart.

What layouts cut does not outlive a boot, so that the book of another boot says nothing of it: an
instance that is there now was made by somebody else. MIG mode of boards before Hopper does outlive
it.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pydantic

from dra_driver.errors import NodeError
from dra_driver.model.layouts import Book


@dataclass(frozen=True, slots=True)
class _Kept:
    """A book, and the boot that it is of."""

    boot: str
    book: Book


_FORM: pydantic.TypeAdapter[_Kept] = pydantic.TypeAdapter(_Kept)


class MigBook:
    """Kept in *path*. One process at a time may write it: the one that has the turn."""

    def __init__(self, path: Path, boot_id: str) -> None:
        self._path = path
        self._boot = boot_id

    def read(self) -> Book:
        """What was kept; an empty one where nothing was. NodeError: it cannot be told."""
        try:
            kept = _FORM.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return Book()
        except OSError as e:
            raise NodeError(f"{self._path} cannot be read: {e.strerror}") from e
        except ValueError as e:
            raise NodeError(
                f"{self._path} cannot be understood, so it is not known which MIG instances "
                f"layouts made: {str(e).splitlines()[0]}; remove it, and remove by hand what they "
                "made (nvidia-smi mig -lgi)"
            ) from e
        return kept.book if kept.boot == self._boot else Book(switched=kept.book.switched)

    def write(self, book: Book) -> None:
        """Keep *book* instead; a reader sees the one or the other. NodeError: it cannot be kept."""
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            temporary.write_bytes(_FORM.dump_json(_Kept(self._boot, book), indent=2))
            os.replace(temporary, self._path)
        except OSError as e:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise NodeError(
                f"{self._path} cannot be written: {e.strerror}; let this process write there, or "
                "give another --state-dir"
            ) from e
