"""Whether the driver of this node limits GPU memory by cgroup, and by whose accounting.

Version and controllers say where it cannot be; that it is, only trying says, because reading gives
the same answer where nothing was ever set and where accounting is off.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from dra_driver.errors import NodeError, TimedOut
from dra_driver.model.devices import GpuUuid
from dra_driver.node.cgroups import Cgroups
from dra_driver.node.nvml import Nvml
from dra_driver.node.nvml_codes import (
    FUNCTION_NOT_FOUND,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    code,
)
from dra_driver.node.nvml_memory import OLDEST_DRIVER, memory_limit, set_memory_limit
from dra_driver.node.nvml_values import System

log = logging.getLogger(__name__)

_HOLDS_SECONDS: Final = 60.0
_NOT_READY_SECONDS: Final = 5.0  # a driver that is being loaded has come by then
_TRIAL: Final = "dra-driver-gpu-trial-"  # and a process's number: an empty cgroup for a moment
_LEFT_SECONDS: Final = 60.0  # a trial that is older was left by a crash: no call takes that long
_TRIAL_BYTES: Final = 1 << 30
_MENDS: Final = {
    NOT_SUPPORTED: "its accounting is off: remove RmMemacctMode=0 from the nvidia module's options",
    NO_PERMISSION: "run this as root",
    NOT_FOUND: "dmem is missing in cgroup.subtree_control of the root cgroup: add +dmem",
    FUNCTION_NOT_FOUND: f"the NVML library is older than driver {OLDEST_DRIVER}",
}


class Backend(StrEnum):
    """Who counts the memory."""

    DMEM = "dmem"  # the kernel: the limits of all parents of a cgroup hold too
    MISC = "misc"  # the driver: only the nearest cgroup that has a limit holds


@dataclass(frozen=True, slots=True)
class Offered:
    """What the driver offers. *reason*: why it is nothing, and what to change."""

    backend: Backend | None
    reason: str = ""
    fault: bool = False  # it was refused, which may pass


class LimitBackend:
    """Looks when it is asked, once a minute at most; once in 5 s while the driver is not ready."""

    def __init__(
        self, nvml: Nvml, cgroups: Cgroups, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = nvml
        self._cgroups = cgroups
        self._clock = clock
        self._lock = threading.Lock()
        self._last: Offered | None = None
        self._until = 0.0
        self._session: int | None = None  # of NVML, at the last look
        self._late = False  # whether NVML did not answer at the last look

    def offered(self) -> Offered:
        """What the last look found. It takes as long as NVML's deadlines at most."""
        with self._lock:
            if self._last is None or self._clock() >= self._until:
                found, seconds = self._look()
                if found != self._last:
                    log.info(
                        "GPU memory limits by cgroup",
                        extra={"backend": found.backend or "none", "reason": found.reason},
                    )
                self._last = found
                self._until = self._clock() + seconds
            return self._last

    def known(self) -> Backend | None:
        """What was offered when it was last looked at, without a look where there was one."""
        return (self._last or self.offered()).backend

    def _look(self) -> tuple[Offered, float]:
        """What is found now, and for how many seconds that is good enough. That NVML is late once
        changes nothing: claims would be prepared without a limit, or strict ones be refused."""
        late, self._late = self._late, False
        try:
            system = self._nvml.system()
        except NodeError as error:
            self._late = isinstance(error, TimedOut)
            if self._late and not late and self._last and self._last.backend:
                log.warning("NVML is late, and limits are as they were: %s", error)
                return self._last, _NOT_READY_SECONDS
            return _refused(error), _NOT_READY_SECONDS
        try:
            return self._offered_by(system), _HOLDS_SECONDS
        except NodeError as error:
            return _refused(error), _HOLDS_SECONDS

    def _offered_by(self, system: System) -> Offered:
        version, before = system.driver_version, self._session
        self._session = system.session
        if self._last and self._last.backend and system.session == before:
            return self._last  # it is chosen as the driver is loaded
        if version.major < OLDEST_DRIVER:
            return Offered(None, f"driver {version} is too old: {OLDEST_DRIVER} or newer does")
        if reason := self._lacking():
            return Offered(None, reason)
        return self._try(self._gpu(system))

    def _lacking(self) -> str:
        root = self._cgroups.root
        if not root.is_dir():
            return f"{root} is missing: mount the host's cgroup file system there"
        if not self._cgroups.unified:
            return f"{root} is cgroup v1: boot with systemd.unified_cgroup_hierarchy=1"
        if not self._cgroups.controllers() & {"dmem", "misc"}:
            return f"{root} has neither the dmem nor the misc controller: build the kernel with one"
        return ""

    def _gpu(self, system: System) -> GpuUuid:
        """One on which it can be tried."""
        looks = self._nvml.glances(range(system.gpus)).values()
        seen = [look for look in looks if not isinstance(look, NodeError)]
        if not seen:
            raise NodeError("no GPU answers")
        if not (outside := [look.uuid for look in seen if not look.mig_on]):
            raise NodeError("every GPU is in MIG mode, which the driver limits no cgroup on")
        return outside[0]

    def _try(self, gpu: GpuUuid) -> Offered:
        """Limit an empty cgroup, read that back, and take it all away."""
        self._remove_left()
        # Several processes may try at a time: two plugins in a rolling update, the doctor.
        trial = self._cgroups.root / f"{_TRIAL}{os.getpid()}"
        try:
            if not trial.is_dir():
                self._cgroups.make(trial)
        except OSError as error:
            raise NodeError(
                f"no cgroup can be made in {trial.parent}: {error.strerror}; "
                "it has to be mounted writable"
            ) from error
        try:
            apply_limit(self._nvml, gpu, trial, _TRIAL_BYTES)
            backend = _who_counts(trial)
            apply_limit(self._nvml, gpu, trial, None)
            return Offered(backend)
        finally:
            with contextlib.suppress(OSError):  # a later look removes it
                self._cgroups.remove(trial)

    def _remove_left(self) -> None:
        for left in self._cgroups.root.glob(f"{_TRIAL}*"):
            with contextlib.suppress(OSError):  # another process was first, or nobody may
                if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                    self._cgroups.remove(left)


def _refused(error: NodeError) -> Offered:
    mend = _MENDS.get(code(error) or 0)
    return Offered(None, f"{error}" + (f"; {mend}" if mend else ""), fault=True)


def _who_counts(trial: Path) -> Backend:
    """Who keeps the limit of *trial*. The driver can be told not to use the kernel's dmem, so that
    its files are there and say nothing."""
    try:
        lines = (trial / "dmem.max").read_text().splitlines()
    except OSError:
        return Backend.MISC
    kept = (line for line in lines if line.startswith("nvidia/") and not line.endswith(" max"))
    return Backend.DMEM if any(kept) else Backend.MISC


def apply_limit(nvml: Nvml, gpu: GpuUuid, cgroup: Path, hard_bytes: int | None) -> None:
    """Set it and read it back. NodeError: it was refused, or is another now."""
    set_memory_limit(nvml, gpu, cgroup, hard_bytes)
    found = memory_limit(nvml, gpu, cgroup)
    if not same_limit(found.hard_bytes, hard_bytes):
        raise NodeError(
            f"GPU {gpu}: {cgroup} was to have {_written(hard_bytes)} of its memory, the driver "
            f"left it at {_written(found.hard_bytes)} ({found.used_bytes} bytes are in use)"
        )


_LARGEST_PAGE: Final = 2 << 20  # of a GPU's memory, in which a driver may count


def same_limit(found: int | None, wanted: int | None) -> bool:
    """Whether they are one, as far as a driver that counts in pages can say."""
    if found is None or wanted is None:
        return found is wanted
    return abs(found - wanted) < _LARGEST_PAGE


def _written(limit: int | None) -> str:
    return "all" if limit is None else f"{limit} bytes"
