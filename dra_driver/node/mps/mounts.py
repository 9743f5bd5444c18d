"""The one door to mount(2): what is mounted for MPS, and taken away.

No program of the host is needed for it: a host may have none.
"""

import ctypes
import errno
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

from dra_driver.base.errors import NodeError

T = TypeVar("T")

# linux/mount.h, linux/sched.h
_NOSUID, _NODEV, _BIND, _REC, _SLAVE = 0x2, 0x4, 0x1000, 0x4000, 0x80000
_DETACH: Final = 2
_NEW_MOUNTS: Final = 0x20000
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
_OWN: Final = Path("/proc/self/mountinfo")

_libc = ctypes.CDLL(None, use_errno=True)


def tmpfs(target: str, options: str) -> None:
    """*options*: those of the file system ("size=1048576,mode=1777")."""
    _mount("tmpfs", target, "tmpfs", _NOSUID | _NODEV, options)


def bind(source: str, target: str) -> None:
    """Have *target* be *source*, with what is mounted below that."""
    _mount(source, target, "", _BIND | _REC, "")


def unmount(target: str) -> None:
    """Unmount what was mounted last at *target*; while it is in use, only its path goes. Nothing
    there: fine."""
    for flags in (0, _DETACH):
        if _libc.umount2(os.fsencode(target), flags) == 0:
            return
        error = ctypes.get_errno()
        if error in (errno.EINVAL, errno.ENOENT):
            return
        if error != errno.EBUSY:
            break
    raise _failed(f"{target} cannot be unmounted", error)


def mounted_at_or_below(directory: str, mountinfo: Path = _OWN) -> list[str]:
    """Mount points, each as often as something is mounted there, the last one first."""
    points = [point for point, _ in _points(mountinfo)]
    return [at for at in reversed(points) if at == directory or at.startswith(f"{directory}/")]


def is_mounted(path: str, mountinfo: Path = _OWN) -> bool:
    return any(point == path for point, _ in _points(mountinfo))


def is_shared(path: str, mountinfo: Path = _OWN) -> bool:
    """Whether what is mounted at *path* is there for the host, too, and not for this container
    alone."""
    return any(point == path and shared for point, shared in _points(mountinfo))


def with_own_mounts(binds: Mapping[str, str], act: Callable[[], T]) -> T:
    """Call *act* with the sources (values) of *binds* mounted at their targets (keys).

    Only *act* and the processes that it starts see that; what the host unmounts later is unmounted
    for them, too.
    """

    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(alone())
        except BaseException as e:  # noqa: BLE001 - for the thread that waits
            done.set_exception(e)

    def alone() -> T:
        # Of this thread, which ends with it.
        if _libc.unshare(_NEW_MOUNTS):
            raise _failed("no mounts of its own can be given to a daemon", ctypes.get_errno())
        _mount("none", "/", "", _REC | _SLAVE, "")
        for target, source in binds.items():
            bind(source, target)
        return act()

    # The end of this process does not wait for it, as it would for the threads of a pool.
    threading.Thread(target=work, name="own-mounts", daemon=True).start()
    return done.result()


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    arguments = [os.fsencode(text) for text in (source, target, kind)]
    if _libc.mount(*arguments, ctypes.c_ulong(flags), os.fsencode(options) or None):
        raise _failed(f"{source} cannot be mounted at {target}", ctypes.get_errno())


def _failed(problem: str, error: int) -> NodeError:
    message = f"{problem}: {os.strerror(error)}"
    if error in (errno.EPERM, errno.EACCES):
        message += (
            "; mounting takes root and a privileged container (securityContext.privileged: true)"
        )
    return NodeError(message)


def _points(mountinfo: Path) -> list[tuple[str, bool]]:
    """Mount points in the order in which they came, and whether their mounts are shared."""
    points = []
    for line in mountinfo.read_text(errors="surrogateescape").split("\n"):
        fields = line.partition(" - ")[0].split(" ")  # proc_pid_mountinfo(5)
        if len(fields) > 5:
            point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields[4])
            points.append((point, any(field.startswith("shared:") for field in fields[6:])))
    return points
