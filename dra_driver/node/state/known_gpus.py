"""The GPUs as they were when they last answered, kept where it outlives a restart.

A plugin that starts while a GPU is lost, or while NVML is released, knows them from here. After a
reboot they may be others: what was kept of another boot says nothing.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dra_driver.base.codec import Codec
from dra_driver.base.files import read_file, write_atomically
from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import Gpu

log = logging.getLogger(__name__)

_KEEP_SECONDS: Final = 10.0  # between two writes: partitions come and go with every claim


@frozen
class GpusOfBoot:
    """GPUs of a node, and during which boot they answered."""

    boot: str
    gpus: tuple[Gpu, ...]


KNOWN_GPUS: Final = Codec[GpusOfBoot](GpusOfBoot)


class KnownGpusFile:
    """Kept in *path*. Where it cannot be written or read, a warning is logged."""

    def __init__(
        self, path: Path, boot_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._boot = boot_id
        self._clock = clock
        self._kept_at = float("-inf")
        self._kept: tuple[Gpu, ...] | None = None

    def read(self) -> tuple[Gpu, ...]:
        """Those that answered during this boot."""
        try:
            known = KNOWN_GPUS.decode(read_file(self._path))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as e:
            facts = {"path": str(self._path), "error": str(e)}
            log.warning("the GPUs as they last answered cannot be read", extra=facts)
            return ()
        return known.gpus if known.boot == self._boot else ()

    def keep(self, gpus: tuple[Gpu, ...]) -> None:
        """Keep *gpus* instead. Nothing is written where they are the same, nor ten seconds after
        the last time: it is asked again at the next scan."""
        if gpus == self._kept or self._clock() < self._kept_at + _KEEP_SECONDS:
            return
        self._kept, self._kept_at = gpus, self._clock()
        try:
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            write_atomically(self._path, KNOWN_GPUS.encode(GpusOfBoot(self._boot, gpus)))
        except OSError as e:
            facts = {"path": str(self._path), "error": str(e)}
            log.warning("the GPUs are not kept for a restart", extra=facts)
