"""Where a plugin's two sockets lie, and how they come and go without hurting another process.

gRPC unlinks whatever lies at a socket's path when it binds, and unlinks the path again when it
stops, whoever's socket lies there by then. So it never gets to know the real path: it binds a
hidden name beside it (the kubelet ignores names that begin with a dot), and once it serves, that
file is linked to the real name, which fails where another process was faster. A socket thus
appears only when somebody answers behind it, and only its owner removes it. What a killed process
left, under either name, the others sweep away.
"""

import base64
import glob
import hashlib
import logging
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from dra_driver.base.errors import NodeError, SettingsError
from dra_driver.base.frozen import frozen

log = logging.getLogger(__name__)

MAX_PATH_BYTES = 107  # sockaddr_un.sun_path holds 108 with the closing NUL: unix(7)

_TAIL = len("reg.sock")  # what a hidden name gives up for its dot and what is random in it
_RANDOM = "[0-9a-f]{7}"
_POD = "[0-9a-f-]{32,36}|[A-Za-z0-9_-]{11}"  # a pod's UID, or what _digest makes of it
_APPEARS_SECONDS = 60.0  # a socket that was just bound does not listen yet; this is ample


@frozen
class SocketPaths:
    """The two sockets of one plugin process."""

    driver: str
    service: Path  # DRA calls; the endpoint that GetInfo names
    registration: Path  # in the registry that the kubelet watches


@frozen
class SocketFile:
    """A socket file as we made it: another file under the same name is not ours."""

    path: Path
    device: int
    inode: int

    def in_place(self) -> bool:
        """Whether the path still leads to this very socket."""
        return _identity(self.path) == (self.device, self.inode)

    def remove(self) -> None:
        """Remove it, unless it is gone or another's by now."""
        if self.in_place():
            self.path.unlink(missing_ok=True)


def socket_paths(
    driver: str, data: Path, registry: Path, pod_uid: str | None = None
) -> SocketPaths:
    """Where the sockets of *driver* lie; with *pod_uid* (rolling update), those of this pod.

    A name too long for a socket is shortened by hash, the registration's as Kubernetes' Go helper
    does. SettingsError: even that does not fit, or a directory is relative (the kubelet dials the
    path we name).
    """
    if pod_uid is None:
        return SocketPaths(
            driver, fitting(data, "dra.sock"), fitting(registry, f"{driver}-reg.sock")
        )
    short, shortest = digest(pod_uid, 8), digest(f"{driver}\0{pod_uid}", 16)
    return SocketPaths(
        driver,
        service=fitting(data, f"dra-{pod_uid}.sock", f"dra-{short}.sock"),
        registration=fitting(
            registry,
            f"{driver}-{pod_uid}-reg.sock",
            f"{driver}-{short}-reg.sock",
            f"dra-{shortest}-reg.sock",
        ),
    )


def fitting(directory: Path, *names: str) -> Path:
    """The first of *names* that makes a path short enough in *directory*."""
    if not directory.is_absolute():
        raise SettingsError(f"{directory} is relative: give the absolute path the kubelet knows")
    for name in names:
        if len(os.fsencode(directory / name)) <= MAX_PATH_BYTES:
            return directory / name
    room = MAX_PATH_BYTES - min(len(os.fsencode(name)) for name in names) - 1
    raise SettingsError(
        f"no socket fits into {directory}: the path has {len(os.fsencode(directory))} bytes, "
        f"at most {room} leave room for a socket's name; use a shorter kubelet directory"
    )


def digest(text: str, length: int) -> str:
    """*length* bytes of SHA-256 in base64 for file names, unpadded (as in the Go helper)."""
    return (
        base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()[:length])
        .decode()
        .rstrip("=")
    )


def hidden_path(path: Path) -> Path:
    """A new hidden name beside *path* for gRPC to bind, as long as its own.

    It begins as the real name does, so that in the registry, which all drivers share, it says whose
    it is: ".gpu.nvidia.com-1a2b3c4". In the directory of one driver it may be just ".1a2b3c4".
    """
    return path.with_name(f".{path.name[:-_TAIL]}{secrets.token_hex(4)[:7]}")


def make_directory(directory: Path, mode: int) -> None:
    """Make *directory* with *mode* if it is missing; one that exists is left as it is."""
    try:
        directory.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise NodeError(f"cannot make the directory {directory} for a socket: {error}") from error


def rename_into_place(hidden: Path, path: Path) -> SocketFile | None:
    """Give the served socket *hidden* its real name *path*; None: a live process answers there.

    A stale socket or a file in the way is removed. SettingsError: a directory is in the way.
    """
    while True:
        try:
            os.link(hidden, path)
            break
        except FileExistsError:
            if not _clear(path):
                return None
        except OSError as error:
            raise NodeError(f"cannot create the socket {path}: {error}") from error
    hidden.unlink(missing_ok=True)
    device, inode = _identity(path) or (0, 0)
    return SocketFile(path, device, inode)


def remove_dead_sockets(paths: SocketPaths) -> bool:
    """Remove the sockets of this driver's dead processes; those of live ones answer and stay.
    Whether any of other processes stay: these may die, of which no directory tells.

    A pod that was killed leaves sockets under its own UID, or under a hidden name, which nobody
    else will ever clear; the former the kubelet goes on dialling. Names that are a hash of driver
    and another pod are not known to be ours.
    """
    data, registry = paths.service.parent, paths.registration.parent
    names = glob.escape(paths.driver)
    others = {*data.glob("dra*.sock"), *registry.glob(f"{names}-*reg.sock")}
    others -= {paths.service, paths.registration}
    hidden = tuple(_hidden(paths))
    remove_if_dead(others, hidden)
    return bool(others or hidden)


def remove_if_dead(shown: Iterable[Path], hidden: Iterable[Path]) -> None:
    """Remove those of these sockets behind which nobody answers; *hidden* ones may just begin."""
    for path in sorted(shown):
        identity = _identity(path)
        if identity and not answers(path) and _identity(path) == identity:
            _remove_dead(path)
    for path in sorted(hidden):
        is_old_socket = _identity(path) and _age_seconds(path) > _APPEARS_SECONDS
        if is_old_socket and isinstance(_failure(path), ConnectionRefusedError):
            _remove_dead(path)


def _hidden(paths: SocketPaths) -> Iterator[Path]:
    """What lies under hidden names of this driver's processes, this one's among them."""
    own = re.escape(paths.registration.name[:-_TAIL])
    registered = rf"\.({re.escape(paths.driver)}-(({_POD})-)?|{own}){_RANDOM}"
    served = rf"\.(dra-[A-Za-z0-9_-]+)?{_RANDOM}"
    for directory, form in (
        (paths.service.parent, served),
        (paths.registration.parent, registered),
    ):
        yield from (path for path in directory.glob(".*") if re.fullmatch(form, path.name))


def _remove_dead(path: Path) -> None:
    log.info("removed a dead process's socket", extra={"path": str(path)})
    path.unlink(missing_ok=True)


def _clear(path: Path) -> bool:
    """Remove what lies at *path* if nobody alive answers there; whether the path is free now."""
    if path.is_dir() and not path.is_symlink():
        raise SettingsError(f"{path} is a directory, but a socket has to be there: remove it")
    identity = _identity(path)
    if answers(path):
        return False
    if _identity(path) == identity:  # not yet replaced by somebody who just started
        log.warning("removed what another process left", extra={"path": str(path)})
        path.unlink(missing_ok=True)
    return True


def answers(path: Path) -> bool:
    """Whether a live process listens on the socket *path*."""
    return _failure(path) is None


def _failure(path: Path) -> OSError | None:
    """What keeps a caller from the socket *path*; None: a live process listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:  # its queue is full: somebody is there, and busy
            return None
        except OSError as error:
            return error
    return None


def _age_seconds(path: Path) -> float:
    """How long ago the socket *path* was bound; 0: it is gone."""
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None
