"""The shared memory of a daemon of protocol 2 and its clients: a tmpfs that both have as /dev/shm.

A daemon of protocol 3 needs none of its own.
"""

import os
from collections.abc import Callable
from typing import TypeVar

from dra_driver.errors import NodeError
from dra_driver.node.mps import mounts

T = TypeVar("T")


def provide(directory: str, in_container: bool) -> None:
    """Mount it at *directory*; where it is already, nothing changes.

    NodeError: mounting is not permitted, or the mount is not seen outside this container.
    """
    at = os.path.realpath(directory)
    os.makedirs(at, mode=0o755, exist_ok=True)
    if not mounts.is_mounted(at):
        mounts.tmpfs(at, _half_of_memory())
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


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
