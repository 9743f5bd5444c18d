"""Who a process is for the kernel."""

from dataclasses import dataclass

from dra_driver.node.proc_files import read_of


@dataclass(frozen=True, slots=True)
class User:
    """As whom it opens files and connects; numbers of this host."""

    uid: int
    gid: int
    groups: tuple[int, ...]


def user_of(pid: int) -> User:
    """FileNotFoundError, ProcessLookupError: there is no such process."""
    lines = read_of("/proc", pid, "status").decode(errors="replace").splitlines()
    said = dict(line.split(":", 1) for line in lines if ":" in line)
    effective = 1  # of the real, effective, saved and the file system's number
    uid, gid = (int(said[name].split()[effective]) for name in ("Uid", "Gid"))
    return User(uid, gid, tuple(map(int, said["Groups"].split())))
