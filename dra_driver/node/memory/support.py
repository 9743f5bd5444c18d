"""Memory limits by cgroup through NVML (driver 615 and newer), and whether this node has them.

NVML: ``nvmlDeviceSetMemoryLimits_v1`` and ``nvmlDeviceGetMemoryLimits_v1``. A limit concerns all
processes of a cgroup together. Only the hard limit is used: a soft one promises memory, and what it
promises stays with the parents of a cgroup that is removed.

The driver's version and the cgroup controllers say where there are no limits. That there are, only
a trial shows: a read gives the same answer where nothing was ever set and where accounting is off.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import GpuUuid
from dra_driver.node.cgroups.tree import Cgroups
from dra_driver.node.nvml.api import (
    FUNCTION_NOT_FOUND,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    NvmlFunctions,
    nvml_error_code,
)
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.values import NvmlSystem

MIN_DRIVER_MAJOR: Final = 615
_NO_LIMIT: Final = 2**64 - 1  # NVML_DEVICE_MEMORY_LIMIT_MAX


@frozen
class CgroupMemoryLimit:
    """What holds for a cgroup on one GPU."""

    hard_bytes: int | None  # None: as much as there is
    used_bytes: int


def set_memory_limit(nvml: Nvml, gpu: GpuUuid, cgroup: Path, hard_bytes: int | None) -> None:
    """Let the processes of *cgroup* use so much of *gpu*; None: as much as there is. NodeError."""

    def call(functions: NvmlFunctions, handle: Any) -> None:
        limits = _struct(functions, "c_nvmlSetMemoryLimits_v1_t", cgroup)
        limits.softLimit = 0
        limits.hardLimit = _NO_LIMIT if hard_bytes is None else hard_bytes
        functions.nvmlDeviceSetMemoryLimits_v1(handle, limits)

    nvml.on_gpu(gpu, f"limiting the GPU memory of {cgroup}", call)


def get_memory_limit(nvml: Nvml, gpu: GpuUuid, cgroup: Path) -> CgroupMemoryLimit:
    """What *cgroup* may use of *gpu*, by its own limit or a parent's. NodeError."""

    def call(functions: NvmlFunctions, handle: Any) -> CgroupMemoryLimit:
        limits = _struct(functions, "c_nvmlGetMemoryLimits_v1_t", cgroup)
        functions.nvmlDeviceGetMemoryLimits_v1(handle, limits)
        hard = int(limits.hardLimit)
        return CgroupMemoryLimit(None if hard == _NO_LIMIT else hard, int(limits.currentUsed))

    try:
        return nvml.on_gpu(gpu, f"reading the GPU memory limit of {cgroup}", call)
    except NodeError as error:
        if nvml_error_code(error) == NOT_SUPPORTED:  # what is said where no limit was ever set
            return CgroupMemoryLimit(None, 0)
        raise


def _struct(functions: NvmlFunctions, name: str, cgroup: Path) -> Any:
    struct = getattr(functions, name, None)
    if struct is None:
        raise NodeError(
            "this pynvml has no memory limits: "
            f"nvidia-ml-py 13.{MIN_DRIVER_MAJOR} or newer is needed"
        )
    limits = struct()
    limits.nameSpace = str(cgroup).encode()
    return limits


log = logging.getLogger(__name__)

_TTL_SECONDS: Final = 60.0
_NOT_READY_SECONDS: Final = 5.0  # a driver that is being loaded has come by then
_TRIAL: Final = "dra-driver-gpu-trial-"  # and a process's number: an empty cgroup for a moment
_STALE_TRIAL_SECONDS: Final = 60.0  # older ones were left by a crash: no call takes that long
_TRIAL_BYTES: Final = 1 << 30
_REMEDIES: Final = {
    NOT_SUPPORTED: "its accounting is off: remove RmMemacctMode=0 from the nvidia module's options",
    NO_PERMISSION: "run this as root",
    NOT_FOUND: "dmem is missing in cgroup.subtree_control of the root cgroup: add +dmem",
    FUNCTION_NOT_FOUND: f"the NVML library is older than driver {MIN_DRIVER_MAJOR}",
}


class MemoryAccounting(StrEnum):
    """What counts the memory."""

    DMEM = "dmem"  # the kernel: the limits of all parents of a cgroup hold too
    MISC = "misc"  # the driver: only the nearest cgroup that has a limit holds


@frozen
class MemoryLimitSupport:
    """What the driver offers. *reason*: why it is nothing, and what to change."""

    backend: MemoryAccounting | None
    reason: str = ""
    fault: bool = False  # it was refused, which may pass


class MemoryLimitProbe:
    """Reads once a minute at most; once in 5 s while the driver is not ready."""

    def __init__(
        self, nvml: Nvml, cgroups: Cgroups, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = nvml
        self._cgroups = cgroups
        self._clock = clock
        self._lock = threading.Lock()
        self._last: MemoryLimitSupport | None = None
        self._until = 0.0
        self._session: int | None = None  # of NVML, at the last read
        self._timed_out = False  # whether NVML did not answer the last time

    def support(self) -> MemoryLimitSupport:
        """What the driver offered when it was last read; as slow as the deadlines of NVML."""
        with self._lock:
            if self._last is None or self._clock() >= self._until:
                support, seconds = self._read_support()
                if support != self._last:
                    log.info(
                        "GPU memory limits by cgroup",
                        extra={"backend": support.backend or "none", "reason": support.reason},
                    )
                self._last = support
                self._until = self._clock() + seconds
            return self._last

    def known(self) -> MemoryAccounting | None:
        """What was offered when it was last read; read only where it never was."""
        return (self._last or self.support()).backend

    def _read_support(self) -> tuple[MemoryLimitSupport, float]:
        """What is offered now, and for how many seconds that counts. One timeout of NVML changes
        nothing: claims would be prepared without a limit, or strict ones be refused."""
        timed_out_before, self._timed_out = self._timed_out, False
        try:
            system = self._nvml.system()
        except NodeError as error:
            self._timed_out = isinstance(error, TimedOut)
            if self._timed_out and not timed_out_before and self._last and self._last.backend:
                log.warning("NVML is late, and limits are as they were: %s", error)
                return self._last, _NOT_READY_SECONDS
            return _no_support(error), _NOT_READY_SECONDS
        try:
            return self._support_of(system), _TTL_SECONDS
        except NodeError as error:
            return _no_support(error), _TTL_SECONDS

    def _support_of(self, system: NvmlSystem) -> MemoryLimitSupport:
        version, before = system.driver_version, self._session
        self._session = system.session
        if self._last and self._last.backend and system.session == before:
            return self._last  # it is chosen as the driver is loaded
        if version.major < MIN_DRIVER_MAJOR:
            return MemoryLimitSupport(
                None, f"driver {version} is too old: {MIN_DRIVER_MAJOR} or newer does"
            )
        if reason := self._missing():
            return MemoryLimitSupport(None, reason)
        return self._try(self._gpu(system))

    def _missing(self) -> str:
        root = self._cgroups.root
        if not root.is_dir():
            return f"{root} is missing: mount the host's cgroup file system there"
        if not self._cgroups.unified:
            return f"{root} is cgroup v1: boot with systemd.unified_cgroup_hierarchy=1"
        if not self._cgroups.controllers() & {"dmem", "misc"}:
            return f"{root} has neither the dmem nor the misc controller: build the kernel with one"
        return ""

    def _gpu(self, system: NvmlSystem) -> GpuUuid:
        """One on which it can be tried."""
        by_index = self._nvml.dynamic_states(range(system.gpus)).values()
        readings = [reading for reading in by_index if not isinstance(reading, NodeError)]
        if not readings:
            raise NodeError("no GPU answers")
        if not (without_mig := [reading.uuid for reading in readings if not reading.mig_on]):
            raise NodeError("every GPU is in MIG mode, which the driver limits no cgroup on")
        return without_mig[0]

    def _try(self, gpu: GpuUuid) -> MemoryLimitSupport:
        """Limit an empty cgroup, read that back, and take it all away."""
        self._remove_stale_trials()
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
            backend = _detect_accounting(trial)
            apply_limit(self._nvml, gpu, trial, None)
            return MemoryLimitSupport(backend)
        finally:
            with contextlib.suppress(OSError):  # a later look removes it
                self._cgroups.remove(trial)

    def _remove_stale_trials(self) -> None:
        for trial in self._cgroups.root.glob(f"{_TRIAL}*"):
            with contextlib.suppress(OSError):  # another process was first, or it is forbidden
                if time.time() - trial.stat().st_mtime > _STALE_TRIAL_SECONDS:
                    self._cgroups.remove(trial)


def _no_support(error: NodeError) -> MemoryLimitSupport:
    mend = _REMEDIES.get(nvml_error_code(error) or 0)
    return MemoryLimitSupport(None, f"{error}" + (f"; {mend}" if mend else ""), fault=True)


def _detect_accounting(trial: Path) -> MemoryAccounting:
    """What keeps the limit of *trial*. The driver can be told not to use the kernel's dmem: then
    the files of dmem are there and empty."""
    try:
        lines = (trial / "dmem.max").read_text().splitlines()
    except OSError:
        return MemoryAccounting.MISC
    limits = (line for line in lines if line.startswith("nvidia/") and not line.endswith(" max"))
    return MemoryAccounting.DMEM if any(limits) else MemoryAccounting.MISC


def apply_limit(nvml: Nvml, gpu: GpuUuid, cgroup: Path, hard_bytes: int | None) -> None:
    """Set it and read it back. NodeError: it was refused, or is another now."""
    set_memory_limit(nvml, gpu, cgroup, hard_bytes)
    current = get_memory_limit(nvml, gpu, cgroup)
    if not same_limit(current.hard_bytes, hard_bytes):
        raise NodeError(
            f"GPU {gpu}: {cgroup} was to have {_format_bytes(hard_bytes)} of its memory, "
            f"the driver left it at {_format_bytes(current.hard_bytes)} "
            f"({current.used_bytes} bytes are in use)"
        )


_LARGEST_PAGE: Final = 2 << 20  # of a GPU's memory, in which a driver may count


def same_limit(current_bytes: int | None, limit_bytes: int | None) -> bool:
    """Whether they are equal, as far as a driver that counts in pages can say."""
    if current_bytes is None or limit_bytes is None:
        return current_bytes is limit_bytes
    return abs(current_bytes - limit_bytes) < _LARGEST_PAGE


def _format_bytes(limit: int | None) -> str:
    return "all" if limit is None else f"{limit} bytes"
