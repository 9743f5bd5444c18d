"""Which container of which pod uses which claims, as the kubelet tells it."""

from collections.abc import Mapping
from dataclasses import dataclass


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
