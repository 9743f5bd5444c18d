"""The driver's memory limits by cgroup (615 and newer), over a directory that stands for cgroup v2.

It is as strict as either backend is known to be, and where that is not known, as the harsher one:

* *dmem*, the kernel's: a limit is in ``dmem.max`` (hard) and ``dmem.min`` (soft) of a cgroup, and
  those of all its parents count too. A limit below what is in use is not taken, and nothing is said
  of that. What a soft limit adds to the parents stays when the cgroup is removed.
* *misc*, the driver's own: only the nearest cgroup that was ever limited counts. A limit below what
  is in use is refused. Memory that was allocated before there was a limit is never counted.

With the driver, or with its GPU, every limit goes.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import pynvml

from dra_driver.base.frozen import frozen
from dra_driver.sim.node_spec import SimulatedGpu, SimulatedNode

_NO_LIMIT: Final = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
_CONTROLLERS: Final = "cpuset cpu io memory pids misc dmem\n"
_HARD, _SOFT, _USED = "dmem.max", "dmem.min", "dmem.current"
_MISC: Final = ".misc.json"  # by GPU; hidden, because in reality the driver keeps it
_OLDEST: Final = 615


class CgroupTree:
    """A directory that stands for ``/sys/fs/cgroup``: what the kernel does when cgroups come and
    go.

    As the kubelet does it, a new cgroup has every controller of its parent and gives them all on;
    what a parent does not give on (``cgroup.subtree_control``) its children lack.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / "cgroup.controllers").exists():
            root.mkdir(parents=True, exist_ok=True)
            (root / "cgroup.subtree_control").write_text(_CONTROLLERS)
            (root / "cgroup.controllers").write_text(_CONTROLLERS)

    def make(self, path: str | Path) -> Path:
        """The cgroup at *path*, below the root, with its parents."""
        cgroup = self.root / path
        if cgroup == self.root or cgroup.is_dir():
            return cgroup
        parent = self.make(cgroup.parent)
        controllers = (parent / "cgroup.subtree_control").read_text()
        # It appears with all of its files.
        fresh = Path(tempfile.mkdtemp(prefix=f".{cgroup.name}.", dir=self.root.parent))
        fresh.chmod(0o755)
        (fresh / "cgroup.controllers").write_text(controllers)
        (fresh / "cgroup.subtree_control").write_text(controllers)
        if "dmem" in controllers.split():
            for name in (_HARD, _SOFT, _USED):
                (fresh / name).touch()
        try:
            fresh.rename(cgroup)
        except OSError:  # another process, in a rolling update, was first, or the parent is gone
            shutil.rmtree(fresh)
            if not cgroup.is_dir():
                raise
        return cgroup

    def remove(self, path: str | Path) -> None:
        """The cgroup at *path* goes, at once with all files.

        OSError: it is not there (ENOENT), or there are others in it (EBUSY).
        """
        cgroup = self.root / path
        if any(inside.is_dir() for inside in cgroup.iterdir()):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(cgroup))
        aside = tempfile.mkdtemp(prefix=".gone.", dir=self.root.parent)
        try:
            cgroup.rename(aside)
        finally:
            shutil.rmtree(aside)


@frozen
class GpuAllocation:
    """Memory of a GPU, and the cgroups on which it is counted."""

    gpu: str
    size_bytes: int
    counted_on: tuple[Path, ...]


class SimulatedMemoryLimits:
    """What the driver keeps. *root*: where it sees the cgroup file system."""

    def __init__(self, root: Path, is_root: Callable[[], bool] = lambda: os.geteuid() == 0) -> None:
        self._root = root
        self._is_root = is_root
        self._driver: str | None = None  # the version that is loaded
        self._lock = threading.Lock()

    def follow(self, node: SimulatedNode) -> None:
        """Forget what the driver, or a GPU, of *node* has lost."""
        driver = node.driver_version if node.driver == "ready" else None
        bus_ids = frozenset(gpu.bus_id for gpu in node.gpus if gpu.listed)
        anew = driver is None or driver != (self._driver or driver)
        self._driver = driver or "none"
        with self._lock:
            for cgroup in _below(self._root):
                for store in (_store(cgroup, name) for name in (_HARD, _SOFT, _USED, _MISC)):
                    store.keep(frozenset() if anew else bus_ids)

    def set(self, node: SimulatedNode, gpu: SimulatedGpu, limits: Any) -> None:
        """``nvmlDeviceSetMemoryLimits_v1``."""
        cgroup = self._checked(node, gpu, limits)
        if not self._is_root():
            _raise_nvml_error(pynvml.NVML_ERROR_NO_PERMISSION)
        if limits.softLimit > limits.hardLimit:
            _raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        change = self._set_dmem if node.memory_limits == "dmem" else _set_misc
        with self._lock:
            change(gpu.bus_id, cgroup, limits.softLimit, limits.hardLimit)

    def get(self, node: SimulatedNode, gpu: SimulatedGpu, limits: Any) -> None:
        """``nvmlDeviceGetMemoryLimits_v1``: it is written into *limits*."""
        cgroup = self._checked(node, gpu, limits)
        with self._lock:
            values = self._limits_of(node, gpu.bus_id, cgroup)
        limits.softLimit, limits.hardLimit, limits.currentUsed = values

    def allocate(
        self, node: SimulatedNode, gpu: SimulatedGpu, cgroup: Path, size_bytes: int
    ) -> GpuAllocation | None:
        """What a process in *cgroup* gets; None: out of memory."""
        with self._lock:
            chain = self._counting(node, gpu.bus_id, cgroup)
            for parent in chain:
                _, hard, used = self._limits_of(node, gpu.bus_id, parent)
                if used + size_bytes > hard:
                    return None
            allocation = GpuAllocation(gpu.bus_id, size_bytes, chain)
            _count(allocation, 1)
            return allocation

    def free(self, allocation: GpuAllocation) -> None:
        """The memory is given back."""
        with self._lock:
            _count(allocation, -1)

    def _limits_of(self, node: SimulatedNode, gpu: str, cgroup: Path) -> tuple[int, int, int]:
        """Soft, hard, used: of *cgroup*, or of the nearest above it that has any of them."""
        if node.memory_limits == "dmem":
            holder = next((parent for parent in self._upwards(cgroup) if _has_dmem(parent)), None)
            if holder is None:
                _raise_nvml_error(pynvml.NVML_ERROR_NOT_FOUND)
            hard = _store(holder, _HARD).of(gpu, _NO_LIMIT)
            return _store(holder, _SOFT).of(gpu, 0), hard, _store(holder, _USED).of(gpu, 0)
        limited = self._limited(gpu, cgroup)
        if limited is None:
            _raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return limited[1]

    def _counting(self, node: SimulatedNode, gpu: str, cgroup: Path) -> tuple[Path, ...]:
        """The cgroups on which memory of a process in *cgroup* is counted."""
        if node.memory_limits == "dmem":
            return tuple(parent for parent in self._upwards(cgroup) if _has_dmem(parent))
        limited = self._limited(gpu, cgroup) if node.memory_limits == "misc" else None
        return (limited[0],) if limited else ()

    def _checked(self, node: SimulatedNode, gpu: SimulatedGpu, limits: Any) -> Path:
        if int(node.driver_version.split(".")[0]) < _OLDEST:
            _raise_nvml_error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        if gpu.mig or node.memory_limits == "off" or not _is_cgroup(self._root):
            _raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if not limits.nameSpace:
            _raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        cgroup = Path(os.fsdecode(limits.nameSpace))
        if cgroup == self._root:
            _raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if ".." in cgroup.parts or not cgroup.is_relative_to(self._root):
            _raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if not cgroup.is_dir():
            _raise_nvml_error(pynvml.NVML_ERROR_NOT_FOUND)
        return cgroup

    def _upwards(self, cgroup: Path) -> Iterator[Path]:
        while cgroup != self._root:
            yield cgroup
            cgroup = cgroup.parent

    def _limited(self, gpu: str, cgroup: Path) -> tuple[Path, tuple[int, int, int]] | None:
        """The nearest cgroup that misc has a limit for: soft, hard, used."""
        for parent in self._upwards(cgroup):
            if (limit := _store(parent, _MISC).triple(gpu)) is not None:
                return parent, limit
        return None

    def _set_dmem(self, gpu: str, cgroup: Path, soft: int, hard: int) -> None:
        if not _has_dmem(cgroup):
            _raise_nvml_error(pynvml.NVML_ERROR_NOT_FOUND)
        if _store(cgroup, _USED).of(gpu, 0) <= hard:  # else the kernel leaves it, and says nothing
            _store(cgroup, _HARD).put(gpu, hard)
        growth = soft - _store(cgroup, _SOFT).of(gpu, 0)
        for parent in self._upwards(cgroup):
            if not _has_dmem(parent):
                break  # a gap: no further
            _store(parent, _SOFT).put(gpu, _store(parent, _SOFT).of(gpu, 0) + growth)


def _set_misc(gpu: str, cgroup: Path, soft: int, hard: int) -> None:
    store = _store(cgroup, _MISC)
    _, _, used = store.triple(gpu) or (0, 0, 0)
    if hard < used:
        _raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    store.put(gpu, [soft, hard, used])


def _count(allocation: GpuAllocation, sign: int) -> None:
    gpu, change = allocation.gpu, sign * allocation.size_bytes
    for cgroup in allocation.counted_on:
        if not cgroup.is_dir():
            continue
        if (limit := _store(cgroup, _MISC).triple(gpu)) is not None:
            soft, hard, used = limit
            _store(cgroup, _MISC).put(gpu, [soft, hard, used + change])
        else:
            _store(cgroup, _USED).put(gpu, _store(cgroup, _USED).of(gpu, 0) + change)


@frozen
class _LimitFile:
    """A file with a value for each GPU; in a file of the kernel one line for each."""

    path: Path

    def of(self, gpu: str, default: int) -> int:
        return int(self._read().get(gpu, default))

    def triple(self, gpu: str) -> tuple[int, int, int] | None:
        limits = self._read().get(gpu)
        return tuple(limits) if limits is not None else None

    def put(self, gpu: str, value: Any) -> None:
        self._write(self._read() | {gpu: value})

    def keep(self, gpus: frozenset[str]) -> None:
        before = self._read()
        after = {gpu: value for gpu, value in before.items() if gpu in gpus}
        if after != before:
            self._write(after)

    def _read(self) -> dict[str, Any]:
        try:
            text = self.path.read_text()
        except OSError:
            return {}
        if self.path.name == _MISC:
            return dict(json.loads(text))
        lines = (line.split() for line in text.splitlines())
        return {
            region.split("/")[1][4:]: _NO_LIMIT if value == "max" else int(value)
            for region, value in lines
        }

    def _write(self, values: dict[str, Any]) -> None:
        if self.path.name == _MISC:
            self.path.write_text(json.dumps(values))
            return
        self.path.write_text(
            "".join(
                f"nvidia/0000{gpu}/vidmem {'max' if value == _NO_LIMIT else value}\n"
                for gpu, value in sorted(values.items())
            )
        )


def _store(cgroup: Path, name: str) -> _LimitFile:
    return _LimitFile(cgroup / name)


def _has_dmem(cgroup: Path) -> bool:
    return (cgroup / _HARD).exists()


def _is_cgroup(root: Path) -> bool:
    return (root / "cgroup.controllers").exists()


def _below(directory: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(directory.iterdir()):
            if path.is_dir():
                yield path
                yield from _below(path)


def _raise_nvml_error(error: int) -> NoReturn:
    raise pynvml.NVMLError(error)
