"""Who holds a GPU: the processes that keep it from being partitioned, switched or reset."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import ordered
from dra_driver.model.gpus import GpuUuid
from dra_driver.node.cgroups.procfs import device_number_of, printable, read_proc_file
from dra_driver.node.nvml.api import NvmlFunctions
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.processes import COMPUTE_LIST, OTHER_LISTS, list_processes_if_allowed

_NVIDIA: Final = 195  # the major number of nvidiaN (Linux, devices.txt)
_MOST_NAMED: Final = 8  # in a message
_HOLDING_MODULES: Final = ("nvidia_drm",)  # with modeset it is a client of every GPU


@ordered
class GpuHolder:
    """A process, by its number on the host."""

    pid: int
    command: str  # empty: it is not seen from here

    def __str__(self) -> str:
        return f"{self.command} ({self.pid})" if self.command else f"process {self.pid}"


class GpuHolders:
    """The processes that NVML lists, and those that have the device open. *proc*: where the host's
    processes are seen; *major*: the major number of the devices of GPUs."""

    def __init__(self, nvml: Nvml, proc: Path = Path("/proc"), major: int = _NVIDIA) -> None:
        self._nvml = nvml
        self._proc = proc
        self._major = major

    def of(self, gpu: GpuUuid, gi: int | None = None) -> tuple[GpuHolder, ...]:
        """The processes that hold *gpu*, or its GPU instance *gi*, by number, as far as they can be
        seen. A process that only has the device file open is in no instance."""
        try:
            minor, pids = self._nvml.on_gpu(gpu, "listing its processes", _pids_of(gi))
        except NodeError:
            return ()
        if gi is None:
            pids |= set(self._with_open((self._major, minor)))
        return tuple(GpuHolder(pid, process_command(pid, self._proc)) for pid in sorted(pids))

    def in_words(self, holders: tuple[GpuHolder, ...]) -> str:
        """Names them; where there are none, names what may hold the GPU unseen."""
        return describe_holders(holders, self._modules() if not holders else ())

    def _modules(self) -> tuple[str, ...]:
        """The modules of the kernel that hold GPUs: they have no process."""
        try:
            lines = (self._proc / "modules").read_text(errors="replace").splitlines()
        except OSError:
            return ()
        loaded = {line.split(" ", 1)[0] for line in lines}
        return tuple(name for name in _HOLDING_MODULES if name in loaded)

    def _with_open(self, device: tuple[int, int]) -> Iterator[int]:
        """Processes other than this one with that device open, whatever their file is called."""
        for directory in self._proc.glob("[0-9]*"):
            if directory.name != self._own() and _has_open(directory / "fd", device):
                yield int(directory.name)

    def _own(self) -> str:
        try:
            return os.readlink(self._proc / "self")
        except OSError:
            return ""


def _has_open(files: Path, device: tuple[int, int]) -> bool:
    try:
        return any(device_number_of(f"{files}/{name}") == device for name in os.listdir(files))
    except OSError:  # the process ended, or may not be looked at
        return False


def process_command(pid: int, proc: Path = Path("/proc")) -> str:
    """The name that this process has; empty: it is not seen from here."""
    try:
        name = read_proc_file(proc, pid, "comm").decode(errors="replace")
    except OSError:
        return ""
    return printable(name.removesuffix("\n")).strip()


def name_holders(holders: Sequence[GpuHolder]) -> str:
    """The first of them, and how many more there are.

    >>> name_holders((GpuHolder(7, "dcgm"), GpuHolder(9, "")))
    'dcgm (7), process 9'
    """
    more = len(holders) - _MOST_NAMED
    first = ", ".join(map(str, holders[:_MOST_NAMED]))
    return first + (f" and {more} more" if more > 0 else "")


def describe_holders(holders: tuple[GpuHolder, ...], modules: tuple[str, ...] = ()) -> str:
    """Says that they hold the GPU; where there are none, that these *modules* of the kernel may.

    >>> describe_holders((GpuHolder(7, "dcgm"), GpuHolder(9, "")))
    'held by dcgm (7), process 9'
    """
    if not holders and modules:
        return (
            f"by no process that can be seen from here; {', '.join(modules)} is loaded, which "
            "holds every GPU while it sets modes: modprobe -r, or modeset=0"
        )
    if not holders:
        return (
            "by nobody that can be seen from here; a monitoring agent such as DCGM may hold it "
            "from a container"
        )
    return f"held by {name_holders(holders)}"


def _pids_of(gi: int | None) -> Any:
    def call(functions: NvmlFunctions, handle: Any) -> tuple[int, set[int]]:
        pids = {
            int(process.pid)
            for function in (COMPUTE_LIST, *OTHER_LISTS)
            for process in list_processes_if_allowed(functions, function, handle)
            if gi is None or process.gpuInstanceId == gi
        }
        return int(functions.nvmlDeviceGetMinorNumber(handle)), pids

    return call
