"""``/proc``: the files of processes, read up to a limit, and the boot ID of the machine.

A process can make its own command line and environment gigabytes long (``PR_SET_MM``, prctl(2)).
Only the first bytes are read: a variable that is not among them counts as not set.
"""

import ctypes
import os
import stat
import sys
from pathlib import Path
from typing import Final

from dra_driver.base.errors import NodeError


def boot_id(host_root: Path) -> str:
    """The kernel's random boot ID (``/proc/sys/kernel/random/boot_id``, proc(5))."""
    path = host_root / "proc/sys/kernel/random/boot_id"
    try:
        return path.read_text().strip()
    except OSError as e:
        raise NodeError(
            f"{path} cannot be read: {e.strerror}; give --host-root the host's / with its /proc"
        ) from e


_KIB: Final = 1024
_MAX_BYTES: Final = {"cmdline": 4 * _KIB, "environ": 64 * _KIB}
_MAX_OTHER_BYTES: Final = 64 * _KIB  # the kernel writes those itself
_MAX_SHOWN_CHARS: Final = 128  # characters

# statx(2), which Python has from 3.15 on.
_AT_FDCWD: Final = -100
_AT_NO_AUTOMOUNT: Final = 0x800
_AT_STATX_DONT_SYNC: Final = 0x4000
_STATX_TYPE: Final = 1
_STATX_BYTES: Final = 256
_statx: Final = getattr(ctypes.CDLL(None), "statx", None)  # None: glibc before 2.28
_MODE, _MAJOR, _MINOR = slice(28, 30), slice(128, 132), slice(132, 136)  # struct statx


def read_proc_file(proc: Path | str, process: int | str, file: str) -> bytes:
    """As much of ``/proc/<process>/<file>`` as is looked at. OSError: it cannot be read."""
    with open(f"{proc}/{process}/{file}", "rb") as opened:
        return opened.read(_MAX_BYTES.get(file, _MAX_OTHER_BYTES))


def nul_separated(content: bytes, file: str) -> list[bytes]:
    """The entries of a ``cmdline`` or an ``environ``, without one that was cut."""
    entries = content.split(b"\0")
    return entries[:-1] if len(content) >= _MAX_BYTES[file] else entries


def printable(name: str) -> str:
    """What a tenant can have called anything, in one line that does no harm.

    >>> printable("python\\n\\x1b[31m")
    'python??[31m'
    """
    return "".join(
        character if character.isprintable() else "?" for character in name[:_MAX_SHOWN_CHARS]
    )


def device_number_of(path: str) -> tuple[int, int] | None:
    """Major and minor number of the character device behind *path*; None: it is none, or it cannot
    be told.

    A file of a server that does not answer (NFS) is not asked for, as stat() would.
    """
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    flags = _AT_NO_AUTOMOUNT | _AT_STATX_DONT_SYNC
    if _statx is None or _statx(_AT_FDCWD, os.fsencode(path), flags, _STATX_TYPE, buffer):
        return None
    mode, major, minor = (_number(buffer.raw[part]) for part in (_MODE, _MAJOR, _MINOR))
    return (major, minor) if stat.S_ISCHR(mode) else None


def _number(part: bytes) -> int:
    return int.from_bytes(part, sys.byteorder)
