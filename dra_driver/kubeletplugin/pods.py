"""Pods: which container uses which claims, as its runtime, the kubelet and its spec say it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dra_driver.kubeletplugin.claims import ClaimUid, Pod, PodUid

GRACE_SECONDS: Final = 30.0  # that a pod has to end, unless it says otherwise


@dataclass(frozen=True, slots=True)
class Container:
    """A container as its runtime started it. That never changes."""

    id: str
    name: str  # in its pod's spec
    namespace: str
    pod: Pod
    claims: frozenset[ClaimUid] = frozenset()  # that it was given anything of


@dataclass(frozen=True, slots=True, order=True)
class ClaimName:
    """A claim as a pod names it: the kubelet gives no UID here."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class ListedPod:
    """A pod of this node. Of its init containers only those are listed that go on to run."""

    namespace: str
    name: str
    containers: Mapping[str, frozenset[ClaimName]]


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """What a container of a pod asks for; also of an init container."""

    name: str
    uses: frozenset[tuple[str, str]]  # (name of a ResourceClaim, request; "": all of the claim)
    root: bool  # it may run as user 0 of its user namespace, or become it


@dataclass(frozen=True, slots=True)
class Deletion:
    """The kubelet ends the pod, and kills what is left of it after the grace period."""

    ends_at: float  # the grace period is over, by the API server's clock: seconds of the epoch
    grace_seconds: float  # from the deletion to that
    left_seconds: float | None = None  # at least, when it was read; None: nobody could say


@dataclass(frozen=True, slots=True)
class PodSpec:
    """A pod as the API server has it."""

    namespace: str
    name: str
    uid: PodUid
    containers: tuple[ContainerSpec, ...]
    host_users: bool = True  # False: user 0 in there is nobody on the node (hostUsers: false)
    deletion: Deletion | None = None
    grace_seconds: float = (
        GRACE_SECONDS  # that it has once it is deleted, unless that says otherwise
    )
