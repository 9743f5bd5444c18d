"""A root file system for a container, made of this machine's own programs, without its GPU driver.

Directories are merged as Debian, Ubuntu and RHEL have them (``/lib`` is ``usr/lib``), so that a
library is found under either spelling of its path. The driver's libraries are left out: what is
there of it inside the container came through its CDI spec.
"""

import glob
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from dra_driver.model.driver_files import DriverFiles

TOOLS = ("bash", "cat", "env", "ls", "sleep")
PYTHON = "/usr/bin/python3"
PROGRAM = "/cuda_program.py"
_MERGED = ("bin", "sbin", "lib", "lib64")
_SECONDS = 30


def make_rootfs(root: Path, driver: DriverFiles) -> None:
    """Fill *root*: the tools above, python3 and cuda_program.py, and every library they need."""
    for name in _MERGED:
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("dev", "proc", "tmp", "etc", "run"):
        (root / name).mkdir()
    programs = [path for name in TOOLS if (path := shutil.which(name))]
    python = os.path.realpath(sys.executable)
    theirs = [library.host_path for library in driver.libraries]
    theirs += [tool.host_path for tool in driver.tools]
    for program in programs:
        put(root, program, f"/usr/bin/{Path(program).name}")
    put(root, python, python)  # where it looks for its library (RUNPATH) counts from there
    (root / PYTHON.lstrip("/")).unlink(missing_ok=True)
    (root / PYTHON.lstrip("/")).symlink_to(python)
    put(root, str(Path(__file__).with_name("cuda_program.py")), PROGRAM)
    stdlib(root).mkdir(parents=True, exist_ok=True)
    for library in needed([*programs, python, *_ctypes(), *theirs], set(theirs)):
        put(root, library, library)
        # What this machine finds through /etc/ld.so.conf is put where no such file is needed.
        for directory in (f"/usr/lib/{driver.machine}-linux-gnu", "/usr/lib64"):
            if not _is_searched(library):
                put(root, library, f"{directory}/{Path(library).name}")


def stdlib(root: Path = Path("/")) -> Path:
    """Where Python's standard library is; in a container it is mounted at the same place."""
    return root / sysconfig.get_path("stdlib").lstrip("/")


def put(root: Path, source: str, at: str) -> None:
    """Copy a file to where *root* has *at*, whatever links lead there on this machine."""
    target = root / at.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(os.path.realpath(source), target)


def needed(programs: Iterable[str], without: set[str]) -> list[str]:
    """The libraries and the loader that *programs* are linked with, but for those in *without*."""
    left_out = {os.path.realpath(path) for path in without}
    libraries = {
        path
        for program in programs
        for path in linked(_ldd(program))
        if os.path.realpath(path) not in left_out
    }
    return sorted(libraries)


def linked(text: str) -> list[str]:
    """The files in what ldd printed.

    >>> linked('''
    ...     linux-vdso.so.1 (0x00007ffd)
    ...     libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f12)
    ...     libcuda.so.1 => not found
    ...     /lib64/ld-linux-x86-64.so.2 (0x00007f13)''')
    ['/lib/x86_64-linux-gnu/libc.so.6', '/lib64/ld-linux-x86-64.so.2']
    """
    words = (line.rpartition("=> ")[2].split() for line in text.splitlines())
    return [first for first, *_ in filter(None, words) if first.startswith("/")]


def _is_searched(library: str) -> bool:
    """Whether it is in, or below, a directory that the loader knows by itself, or is the loader."""
    return library.startswith(("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/"))


def _ldd(program: str) -> str:
    """Nothing where it is linked statically, is a script, or is for another machine."""
    ran = subprocess.run(
        ["ldd", program], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    return ran.stdout if ran.returncode == 0 else ""


def _ctypes() -> list[str]:
    """Python's own library behind ``import ctypes``, where that is a file (it needs libffi)."""
    return sorted(glob.glob(f"{sysconfig.get_path('stdlib')}/lib-dynload/_ctypes.*.so"))
