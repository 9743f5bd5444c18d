"""What a daemon of protocol 2 and its clients write together: each a tmpfs of its own.

Their shared memory, which both have as /dev/shm, and the pipe directory. A daemon of protocol 3
needs neither.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dra_driver.errors import NodeError
from dra_driver.node.mps import mounts
from dra_driver.node.mps.labels import Labels

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tmpfs:
    """How much it may hold, and who may write."""

    size_bytes: int
    mode: int = 0o1777  # everybody, as in /dev/shm
    most_files: int | None = None

    @property
    def options(self) -> str:
        """As mount(8) has them."""
        files = "" if self.most_files is None else f",nr_inodes={self.most_files}"
        return f"size={self.size_bytes},mode={self.mode:o}{files}"


def provide(directory: str, in_container: bool, labels: Labels, tmpfs: Tmpfs | None = None) -> None:
    """Mount it at *directory*; where it is already, nothing changes.

    *tmpfs*: with half of the machine's memory, if nothing is said. NodeError: mounting is not
    permitted, or the mount is not seen outside this container.
    """
    at = os.path.realpath(directory)
    os.makedirs(at, mode=0o755, exist_ok=True)
    if not mounts.is_mounted(at):
        _mount(at, tmpfs or Tmpfs(_half_of_memory()), labels)
    if in_container and not mounts.is_shared(at):
        mounts.unmount(at)
        raise NodeError(
            f"what is mounted at {directory} stays inside this container: the directory for MPS "
            "must be mounted into it with mountPropagation: Bidirectional"
        )


def withdraw(directory: str) -> None:
    """Unmount everything at and below *directory*, however often it was mounted."""
    for at in mounts.mounted_at_or_below(os.path.realpath(directory)):
        mounts.unmount(at)


def with_own(directory: str, root: str, act: Callable[[], T]) -> T:
    """Do *act*; what it starts in *root* has *directory* as ``/dev/shm``."""
    target = root.rstrip("/") + "/dev/shm"
    os.makedirs(target, mode=0o1777, exist_ok=True)
    return mounts.with_own_mounts({target: directory}, act)


def _mount(at: str, tmpfs: Tmpfs, labels: Labels) -> None:
    if label := labels.mount_option:
        try:
            return mounts.tmpfs(at, f"{tmpfs.options},{label}")
        except NodeError as e:
            labels.warn(at, str(e))  # unless it fails without it, too
    mounts.tmpfs(at, tmpfs.options)


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
