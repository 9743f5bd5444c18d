"""What layouts made of GPUs, kept where it outlives a restart.

What layouts create does not outlive a boot, so the state of another boot says nothing of it: an
instance that is there now was made by somebody else. MIG mode of boards before Hopper does outlive
it, and so do labels of the Node.
"""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dra_driver.base.codec import Codec, Undecodable
from dra_driver.base.errors import NodeError
from dra_driver.base.files import (
    FileSignature,
    NotAFile,
    disk_errors,
    read_file,
    signature_of,
    write_atomically,
)
from dra_driver.base.frozen import frozen
from dra_driver.model.mig_layouts import MigState

log = logging.getLogger(__name__)


@frozen
class MigStateOfBoot:
    """What layouts made, and during which boot."""

    boot: str
    state: MigState


MIG_STATES: Final = Codec[MigStateOfBoot](MigStateOfBoot)
_NOTHING: Final = MigState()


class _DamagedMigState(NodeError):
    """The file does not hold a state."""


class MigStateFile:
    """Kept in *path*. One process at a time may write it: the one that has the lease."""

    def __init__(self, path: Path, boot_id: str) -> None:
        self._path = path
        self._boot = boot_id
        self._lock = threading.Lock()
        self._last: tuple[FileSignature, MigState] | None = None

    def read(self) -> MigState:
        """The recorded state, the same object as long as the file does not change; an empty one
        without a file. NodeError: it cannot be read."""
        last = self._last
        with disk_errors(f"read {self._path}"):
            try:
                signature = signature_of(os.stat(self._path))  # of this state, or an older one
                if last is not None and last[0] == signature:
                    return last[1]
                state = self._of_this_boot(MIG_STATES.decode(read_file(self._path)))
            except FileNotFoundError:
                return _NOTHING
            except (NotAFile, Undecodable) as e:
                problem = (
                    f"{self._path} cannot be understood, so it is not known which MIG instances "
                    f"layouts made: {e}"
                )
                if isinstance(e, Undecodable) and e.release:  # it is left as it is
                    raise NodeError(f"{problem}; install that release again") from e
                raise _DamagedMigState(problem) from e
        self._last = signature, state
        return state

    def _of_this_boot(self, recorded: MigStateOfBoot) -> MigState:
        state = recorded.state
        if recorded.boot == self._boot:
            return state
        return MigState(switched=state.switched, labelled=state.labelled, label=state.label)

    def change(self, edit: Callable[[MigState], MigState]) -> MigState:
        """Keep what *edit* makes of the state, and answer with it. One edit at a time.

        A state that is damaged is set aside, for whoever wants to look, and an empty one is edited.
        NodeError: it cannot be read or kept, or is of another release.
        """
        with self._lock:
            try:
                before: MigState | None = self.read()
            except _DamagedMigState as e:
                self._set_aside(e)
                before = None
            after = edit(before or MigState())
            if after != before:
                self._write(after)
        return after

    def write(self, state: MigState) -> None:
        """Keep *state* instead. NodeError: it cannot be kept."""
        with self._lock:
            self._write(state)

    def _set_aside(self, error: NodeError) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged")
        try:
            os.replace(self._path, aside)
        except OSError as e:
            raise NodeError(f"{error}; it cannot be set aside: {e.strerror}; remove it") from e
        log.error(
            "what layouts made counts as somebody else's from now on; where that is in their way, "
            "remove it by hand (nvidia-smi mig -lgi): %s",
            error,
            extra={"kept": str(aside)},
        )

    def _write(self, state: MigState) -> None:
        remedy = "let this process write there, or give another --state-dir"
        with disk_errors(f"write {self._path}", {None: remedy}):
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            before = read_file(self._path) if self._path.is_file() else None
            text = MIG_STATES.encode(MigStateOfBoot(self._boot, state), indent=2, over=before)
            write_atomically(self._path, text, durable=True)
            self._last = None
