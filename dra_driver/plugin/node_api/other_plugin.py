"""Another device plugin that gives out the GPUs of this node, and what it leaves behind.

Nothing is offered while it is there; nor for a moment after, since an update or a kubelet that
starts takes it away for so long; nor while pods have GPUs by it that nobody keeps from others.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import PodUid
from dra_driver.kubeletplugin.device_plugin.checkpoint import KubeletCheckpoint
from dra_driver.kubeletplugin.device_plugin.resources import (
    AllocatedContainer,
    DeviceId,
    ResourceName,
)
from dra_driver.kubeletplugin.serve.sockets import answers
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import ClaimRecord
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.device_plugin.users import (
    Pods,
    foreign_devices,
    given_by_others,
    pods_left,
)
from dra_driver.plan.node_api import (
    WAS_HERE,
    left_with_gpus,
    not_known_what_is_left,
    other_device_plugin,
)

_NVIDIA_SOCKETS: Final = "nvidia*.sock"  # of NVIDIA's device plugin, and of those of clouds
_PATIENCE_SECONDS: Final = 30.0  # after which it is gone
_MISSING_SECONDS: Final = 15.0  # until the kubelet has told the API server of a static pod
_PODS_SECONDS: Final = 30.0  # between two lists of pods
_LISTED_SECONDS: Final = 5.0  # in which a change of what is listed is seen
_NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class PodsOfOthers:
    """Knows the containers with GPUs by another device plugin, and their pods."""

    checkpoint: Callable[[], Sequence[AllocatedContainer] | None]  # the kubelet's; None: none yet
    containers: Callable[[], Sequence[AllocatedContainer]]  # also asked of the kubelet itself
    pods: Callable[[], Pods | None]  # of this node; None: the API server does not tell
    records: Callable[[], Iterable[ClaimRecord]]
    listed: Callable[[], frozenset[DeviceId] | None]  # by this driver now; None: not known yet
    names: ResourceNames

    def by_checkpoint(self) -> Sequence[AllocatedContainer]:
        """Their containers, also of pods that have ended. NodeError: it cannot be read."""
        return self._theirs(self.checkpoint() or ())

    def now(self) -> Sequence[AllocatedContainer]:
        """The same, by the kubelet itself where its checkpoint does not tell. NodeError: neither
        does."""
        return self._theirs(self.containers())

    def untracked(
        self, theirs: Sequence[AllocatedContainer], serving: AllocationApi | None
    ) -> Sequence[AllocatedContainer]:
        """Those of *theirs* whose devices nobody keeps from others. NodeError: not known yet."""
        if not theirs or serving is not AllocationApi.DEVICE_PLUGIN:
            return theirs
        if (listed := self.listed()) is None:
            raise NodeError("the GPUs of this node were not looked at yet")
        return tuple(each for each in theirs if not listed.issuperset(each.ids))

    def _theirs(self, containers: Sequence[AllocatedContainer]) -> Sequence[AllocatedContainer]:
        return given_by_others(containers, self.records(), self.names)


class OtherDevicePlugin:
    """Says why nothing may be offered; an empty text: no other device plugin is in the way. For one
    thread."""

    def __init__(
        self,
        sockets: Callable[[], Sequence[str]],
        foreign: Callable[[], Mapping[ResourceName, DeviceId]],
        pods: PodsOfOthers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*sockets*: of other device plugins for NVIDIA's GPUs. *foreign*: by resource of ours, a
        device that another one lists."""
        self._sockets = sockets
        self._foreign = foreign
        self._pods = pods
        self._clock = clock
        self._text = ""
        self._is_gone = False
        self._look_at = float("-inf")  # for what it has left
        self._ended: set[PodUid] = set()  # pods that had its GPUs
        self._missing_since: dict[PodUid, float] = {}

    def begin(self, serving: AllocationApi, was_here: bool) -> str:
        """As far as this machine tells. *was_here*: as an earlier process saw it last."""
        self._text = other_device_plugin(self._sockets(), (), self._foreign())
        if not self._text and was_here:
            self._text, self._is_gone = WAS_HERE, True
            self._look_at = self._clock() + _PATIENCE_SECONDS
        elif not self._text and serving is AllocationApi.DRA:
            self._text = self._left_by_checkpoint()
            self._is_gone = bool(self._text)
        return self._text

    def _left_by_checkpoint(self) -> str:
        try:
            is_any = bool(self._pods.by_checkpoint())
        except NodeError as e:
            return not_known_what_is_left(str(e))
        return not_known_what_is_left("the API server was not asked yet") if is_any else ""

    def look(
        self, serving: AllocationApi | None, theirs: Sequence[str], allocatable: Sequence[str]
    ) -> str:
        """*theirs*: the resources of ours that are *allocatable* on the Node by somebody else."""
        foreign = {  # of what is gone the kubelet still knows, but nothing is allocatable
            resource: id_ for resource, id_ in self._foreign().items() if resource in allocatable
        }
        now = self._clock()
        if signs := other_device_plugin(self._sockets(), theirs, foreign):
            self._text, self._is_gone = signs, False
            self._look_at = now + _PATIENCE_SECONDS
        elif now >= self._look_at:
            self._text, self._is_gone = self._left(serving, now), True
        return self._text

    def _left(self, serving: AllocationApi | None, now: float) -> str:
        """It is gone: what it has left."""
        self._look_at = now + _LISTED_SECONDS
        try:
            theirs = [each for each in self._pods.now() if each.pod not in self._ended]
            untracked = self._pods.untracked(theirs, serving)
        except NodeError as e:
            return not_known_what_is_left(str(e))
        if not theirs:
            self._look_at = _NEVER
        return self._names(untracked, now) if untracked else ""

    def _names(self, untracked: Sequence[AllocatedContainer], now: float) -> str:
        """The pods with these containers that have not ended."""
        pods = self._pods.pods()
        if pods is None:
            return not_known_what_is_left("the API server does not tell which pods have ended")
        left = pods_left(untracked, pods)
        missing = {uid: self._missing_since.get(uid, now) for uid in left.missing}
        self._missing_since = missing
        gone = {uid for uid, since in missing.items() if now >= since + _MISSING_SECONDS}
        self._ended |= left.ended | gone
        if names := (*left.living, *(f"pod {uid}" for uid in sorted(left.missing - gone))):
            self._look_at = now + (_PODS_SECONDS if left.living else _MISSING_SECONDS)
            return left_with_gpus(names)
        return ""

    @property
    def is_gone(self) -> bool:
        """Whether only what it has left is in the way."""
        return self._is_gone

    @property
    def look_at(self) -> float | None:
        """When there is something to look at again, by the clock; None: nothing is waited for."""
        return None if self._look_at == _NEVER else self._look_at


def listed_by_others(
    checkpoint: KubeletCheckpoint, names: ResourceNames
) -> Mapping[ResourceName, DeviceId]:
    """By resource of ours, a device of another plugin; none where that is not known."""
    try:
        return foreign_devices(checkpoint.registered(), names)
    except NodeError:  # who needs to know what containers have tells of it
        return {}


def nvidia_sockets(directory: Path) -> tuple[str, ...]:
    """Those of other device plugins for NVIDIA's GPUs. What a killed one left does not count."""
    return tuple(str(path) for path in sorted(directory.glob(_NVIDIA_SOCKETS)) if answers(path))
