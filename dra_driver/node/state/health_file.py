"""What is known of the health of GPUs, kept where it outlives a restart.

A reboot makes GPUs well, so the state of another boot says nothing. A file that cannot be read is
set aside: what looks at the GPUs tell is found again, what only events told is not.
"""

import logging
import os
from pathlib import Path
from typing import Final

from dra_driver.base.codec import Codec, Undecodable
from dra_driver.base.errors import NodeError
from dra_driver.base.files import NotAFile, disk_errors, read_file, write_atomically
from dra_driver.base.frozen import frozen
from dra_driver.model.health import HealthState

log = logging.getLogger(__name__)


@frozen
class HealthOfBoot:
    """The health of the GPUs, and during which boot."""

    boot: str
    state: HealthState


HEALTH_STATES: Final = Codec[HealthOfBoot](HealthOfBoot)


class HealthFile:
    """Kept in *path*. One process at a time may write it: the newest, once it looks at GPUs."""

    def __init__(self, path: Path, boot_id: str) -> None:
        self._path = path
        self._boot = boot_id

    def read(self) -> HealthState:
        """What was kept during this boot. NodeError: the disk fails."""
        with disk_errors(f"read {self._path}"):
            try:
                return self._decoded()
            except (NotAFile, Undecodable) as e:
                self._set_aside(e)
                return HealthState()

    def inspect(self) -> HealthState:
        """As ``read``, by a process that changes nothing. NodeError: also of a file that cannot be
        understood."""
        with disk_errors(f"read {self._path}"):
            try:
                return self._decoded()
            except (NotAFile, Undecodable) as e:
                raise NodeError(f"{self._path}: {e}; the plugin sets it aside at its start") from e

    def write(self, state: HealthState) -> None:
        """Keep *state* instead, also after a power cut. NodeError: it cannot be kept."""
        remedy = "let this process write there, or give another --state-dir"
        with disk_errors(f"write {self._path}", {None: remedy}):
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            text = HEALTH_STATES.encode(HealthOfBoot(self._boot, state), indent=2)
            write_atomically(self._path, text, durable=True)

    def _decoded(self) -> HealthState:
        try:
            kept = HEALTH_STATES.decode(read_file(self._path))
        except FileNotFoundError:
            return HealthState()
        return kept.state if kept.boot == self._boot else HealthState()

    def _set_aside(self, error: Exception) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged")
        os.replace(self._path, aside)
        log.error(
            "the recorded health of GPUs cannot be understood: what only events told of is "
            "forgotten, and what looks tell is found again: %s",
            error,
            extra={"kept": str(aside)},
        )
