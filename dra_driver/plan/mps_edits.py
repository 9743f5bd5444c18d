"""What a container gets to be a client of the MPS server that serves its claim.

::

    CUDA_MPS_PIPE_DIRECTORY=/run/…         the way to the server: with protocol 3 the claim's own
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30   of the multiprocessors
    CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=24576M,1=8192M   by index, as programs see the GPUs
    CUDA_MPS_CLIENT_PRIORITY=1             below normal

With protocol 3 the server holds the limits, and the variables only show them; with protocol 2 they
are the limits, of each process. A limit for a GPU that a program does not see makes the server
forget all of them, seen with protocol 3: so there it is shown for a single GPU only, which is
number 0 whatever a program hides from itself.
"""

from typing import Final

from cdi import ContainerEdits, Mount
from dra_driver.model.mps import Priority, Served

_MIB: Final = 1024 * 1024
_NAMESPACES: Final = 3  # the protocol from which on the server holds the limits
_NOTHING_ODD: Final = ("nosuid", "nodev", "noexec", "rbind", "rprivate")
_READ_WRITE: Final = ("rw", *_NOTHING_ODD)
# Sockets are connected to and named pipes written to all the same. What root in a container could
# make there would be in the host's memory.
_READ_ONLY: Final = ("ro", *_NOTHING_ODD)


def mps_edits(served: Served) -> ContainerEdits:
    """The same for every device of the space, since a container can have any of them."""
    space = served.space
    env = [
        f"CUDA_MPS_PIPE_DIRECTORY={served.pipe_directory}",
        f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={space.percent}",
    ]
    limits = {place: size for place, size in enumerate(space.memory_bytes) if size is not None}
    if limits and (served.protocol < _NAMESPACES or len(space.gpus) == 1):
        each = ",".join(f"{place}={size // _MIB}M" for place, size in limits.items())
        env.append(f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={each}")
    if space.priority is not Priority.NORMAL:
        env.append(f"CUDA_MPS_CLIENT_PRIORITY={space.priority.value}")
    # With protocol 2 it is a small file system of its own: clients may make files in it.
    options = _READ_WRITE if served.protocol < _NAMESPACES else _READ_ONLY
    mounts = [Mount(served.pipe_directory, served.pipe_directory, options=options)]
    if served.shm_directory:
        mounts.append(Mount(served.shm_directory, "/dev/shm", options=_READ_WRITE))
    return ContainerEdits(env=tuple(env), mounts=tuple(mounts))
