"""Where the host keeps the driver: libraries, tools, firmware and sockets.

Roots that are tried when none is given, the first complete one wins: a driver container of the GPU
Operator, the host itself, Container-Optimized OS on GKE, and drivers installed with a prefix.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dra_driver.base.errors import NodeError
from dra_driver.base.files import closing_file
from dra_driver.model.driver_files import DriverFiles
from dra_driver.node.driver.commands import Command, in_chroot
from dra_driver.node.driver.layout import find_driver_files, find_tool
from dra_driver.node.driver.rootfs import FileSignatures, RootFs, files_unchanged

DRIVER_ROOT_CANDIDATES: Final = (
    "/run/nvidia/driver",
    "/",
    "/home/kubernetes/bin/nvidia",
    "/usr/local/nvidia",
)
# System V ABI, "Program Interpreter", of either processor.
_LOADERS: Final = {
    "x86_64": "/lib64/ld-linux-x86-64.so.2",
    "aarch64": "/lib/ld-linux-aarch64.so.1",
}
_LOADED: Final = "/driver/nvidia/version"  # below the procfs
_VERSION_BYTES: Final = 4096  # some lines of text
# "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  …",
# "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  …"
_KERNEL_MODULE: Final = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+){1,2})")


class DriverRoot:
    """The driver below *root*, a directory of the host, or below the first complete candidate.

    *host_root* is where this process sees the host's ``/``; all paths in :meth:`files` are the
    host's own. Every method looks again, which takes 0.2 ms as long as nothing changed on disk
    (``driver.watch`` spares that). NodeError where no complete driver is found: what is missing,
    where, what to do. Safe to use from several threads.
    """

    def __init__(self, root: str | None, host_root: Path, proc: str = "/proc") -> None:
        """*proc*: the host's procfs, a path of the host; a simulated host has one of its own."""
        self.host_root = str(host_root)
        self.proc = proc
        self._loaded = f"{proc}{_LOADED}"
        self._roots = DRIVER_ROOT_CANDIDATES if root is None else (root,)
        self.unchanged: Callable[[FileSignatures], bool] = files_unchanged
        # Replaced as a whole: another thread reads the old value or the new one.
        self._last: tuple[DriverFiles, FileSignatures, str | None] | None = None

    def files(self) -> DriverFiles:
        """The driver as it is installed now."""
        last = self._last
        try:
            loaded = self.loaded_version()
            if last is not None and last[2] == loaded and self.unchanged(last[1]):
                return last[0]
            files, signatures = self._look(loaded)
        except OSError as e:
            raise NodeError(
                f"cannot look for the driver at {e.filename or self._loaded}: {e.strerror}; "
                "this process needs to read the driver root"
            ) from e
        self._last = files, signatures, loaded
        return files

    def nvml_library(self) -> Path:
        """NVML's library, as this process sees it."""
        files = self.files()
        library = next(lib for lib in files.libraries if lib.soname.startswith("libnvidia-ml.so"))
        return Path(self.local_path(library.host_path))

    def tool(self, name: str) -> str:
        """The host's path of a program of the driver ("nvidia-smi", "nvidia-modprobe")."""
        files = self.files()
        fs = RootFs(self.host_root, files.root)
        path = find_tool(fs, name)
        if path is None:
            raise NodeError(f"the driver in {files.root} has no {name}: install the whole driver")
        return fs.on_host(path)

    def command(self, name: str, *args: str) -> Command:
        """How to run a program of the driver: inside the driver root where that is a whole system
        (a driver container), else on the host."""
        files = self.files()
        root = self.system_root(files)
        return in_chroot(self.host_root, root, self.tool(name), files.lib_dir, args)

    def system_root(self, files: DriverFiles) -> str:
        """The driver's root where that is a whole system, else the host's.

        A prefix may have an empty ``/dev`` for mounts, so what counts as well is the loader that
        programs name: without that, the kernel runs none of them in there.
        """
        fs = RootFs(self.host_root, files.root)
        whole = fs.resolve("/dev") and fs.resolve(_LOADERS[files.machine])
        return files.root if whole else "/"

    def loaded_version(self) -> str | None:
        """The version of the loaded kernel module, where the host tells."""
        try:
            opened = os.open(self.local_path(self._loaded), os.O_RDONLY | os.O_CLOEXEC)
            with closing_file(opened) as file:
                text = os.read(file, _VERSION_BYTES).decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        match = _KERNEL_MODULE.search(text)
        return match[1] if match else None

    def local_path(self, host_path: str) -> str:
        """A path of the host, as this process sees it."""
        return self.host_root.rstrip("/") + host_path

    def _look(self, loaded: str | None) -> tuple[DriverFiles, FileSignatures]:
        signatures: FileSignatures = {}
        problems = []
        for root in self._roots:
            fs = RootFs(self.host_root, root)
            try:
                files = find_driver_files(fs, loaded)
            except NodeError as e:
                problems.append(str(e))
                signatures |= fs.signatures
            else:
                return files, signatures | fs.signatures
        raise NodeError(
            f"no complete NVIDIA driver: {'; '.join(problems)}. Is the driver installed? "
            "If it is somewhere else, set --driver-root to the directory that holds its "
            "lib and bin directories"
        )
