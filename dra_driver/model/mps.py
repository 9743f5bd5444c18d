"""MPS servers and their namespaces, as the agent of the node keeps them.

A *namespace* is the part of a server that one claim has: its own limits, and a pipe directory that
leads to it. Protocol 3 of CUDA's Multi-Process Service has namespaces, and the server enforces
their limits. With protocol 2 all namespaces of a server share one pipe directory, and the limits
are in the environment of the claim's containers: so tenants that do not trust each other have
servers of their own.
"""

import hashlib
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NewType

from dra_driver.base.frozen import frozen, ordered
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import GpuUuid

# [a-z0-9_]{1,64}: a namespace for each claim and set of its GPUs, a server for GPUs and tenant
MpsNamespaceName = NewType("MpsNamespaceName", str)
MpsServerName = NewType("MpsServerName", str)

ALL_CORES = 100  # percent
PROTOCOL_3_DRIVER_VERSION: Final = 615  # the driver's major version


def mps_server_name(gpus: Iterable[GpuUuid], tenant: str = "") -> MpsServerName:
    """What the server over these GPUs is called, in whatever order they come: short, because it is
    part of the paths of sockets. *tenant*: whom it is for; empty: everybody.

    >>> mps_server_name(["GPU-1", "GPU-0"]) == mps_server_name(["GPU-0", "GPU-1"])
    True
    """
    whose = f"/{tenant}" if tenant else ""
    digest = hashlib.sha256((",".join(sorted(gpus)) + whose).encode()).hexdigest()
    return MpsServerName(f"s{digest[:12]}")


class MpsPriority(IntEnum):
    """Who is served first; a hint (``CUDA_MPS_CLIENT_PRIORITY``)."""

    NORMAL = 0
    BELOW_NORMAL = 1


@frozen
class MpsLimits:
    """How much of each of its GPUs a client can have at most."""

    percent: int = ALL_CORES  # of the multiprocessors: "active thread percentage", 1 … 100
    memory_bytes: int | None = None  # "pinned device memory limit", whole MiB; None: no limit

    def exceed(self, allowed: "MpsLimits") -> bool:
        """Whether they have more of anything than *allowed*."""
        if self.percent > allowed.percent:
            return True
        if self.memory_bytes is None or allowed.memory_bytes is None:
            return self.memory_bytes is None and allowed.memory_bytes is not None
        return self.memory_bytes > allowed.memory_bytes


@frozen
class MpsNamespace:
    """What a claim wants of MPS: a server over these GPUs, and its own limits there.

    *memory_bytes* has one entry for each of *gpus*. A server of protocol 3 holds one value for all
    of them, the smallest. Protocol 2 has the environment for each, and *default_limits* for the
    server: the most that one claim can have by the rules of the node.

    *tenant*: the Kubernetes namespace with which alone it shares a server of protocol 2; empty:
    with everybody who says so.
    """

    name: MpsNamespaceName
    claim: ClaimUid
    gpus: tuple[GpuUuid, ...]  # in the order in which containers see them
    percent: int = ALL_CORES
    memory_bytes: tuple[int | None, ...] = ()  # whole MiB; empty: no limit on any
    priority: MpsPriority = MpsPriority.NORMAL
    default_limits: MpsLimits = MpsLimits()
    tenant: str = ""

    @property
    def limits(self) -> MpsLimits:
        """What a server that has one value for all GPUs lets a client have of each."""
        limits = (size for size in self.memory_bytes if size is not None)
        return MpsLimits(self.percent, min(limits, default=None))


@frozen
class ServedNamespace:
    """A namespace that clients can use now, with paths that are the same in containers."""

    namespace: MpsNamespace
    protocol: int  # 2 or 3
    pipe_directory: str  # CUDA_MPS_PIPE_DIRECTORY
    shm_directory: str = ""  # what clients need as /dev/shm; empty: nothing


@ordered
class MpsClient:
    """A process that a server serves, by the host's number."""

    pid: int
    namespace: MpsNamespaceName | None = None  # None: protocol 2 does not tell


@frozen
class MpsServer:
    """One control daemon with its server."""

    name: MpsServerName
    gpus: tuple[GpuUuid, ...]
    protocol: int
    ready: bool
    reason: str = ""  # why it is not ready
    namespaces: tuple[ServedNamespace, ...] = ()
    clients: tuple[MpsClient, ...] = ()
    restarts: int = 0
    tenant: str = ""  # the Kubernetes namespace that it is for; empty: several


@frozen
class MpsServerRestart:
    """A server was restarted: what was in it is there again, its clients are not."""

    number: int  # counts up, also across restarts of the agent
    server: MpsServerName
    at: float  # seconds since the epoch
    reason: str
    namespaces: tuple[MpsNamespaceName, ...] = ()  # that were in it
    clients: int = 0  # how many were lost


@frozen
class MpsStatus:
    """Everything that an agent knows. *unmanaged*: daemons that it did not start."""

    servers: tuple[MpsServer, ...] = ()
    incidents: tuple[MpsServerRestart, ...] = ()  # the last ones, oldest first
    unmanaged: tuple[str, ...] = ()

    def namespaces(self) -> Iterable[ServedNamespace]:
        return (served for server in self.servers for served in server.namespaces)
