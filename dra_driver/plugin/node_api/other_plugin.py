"""Another device plugin that gives out the GPUs of this node, and what it leaves behind.

Nothing is offered while it is there; nor for a moment after, since an update or a kubelet that
starts takes it away for so long; nor while pods have GPUs by it that nobody keeps from others.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Final

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import Pod, PodUid
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
    PodsLeft,
    foreign_devices,
    not_taken,
    pods_left,
    untracked_containers,
)
from dra_driver.plan.node_api import (
    WAS_HERE,
    left_with_gpus,
    not_known_what_is_left,
    other_device_plugin,
)

_NVIDIA_SOCKETS: Final = "nvidia*.sock"  # of NVIDIA's device plugin, and of those of clouds
_PATIENCE_SECONDS: Final = 30.0  # after which it is gone
_MISSING_SECONDS: Final = 15.0  # after which a pod of which nothing is seen has ended
_PODS_SECONDS: Final = 30.0  # between two lists of pods
_ALL_TAKEN_SECONDS: Final = 10.0  # after which it has registered all its resources
_UNKNOWN: Final = (5.0, 60.0)  # the first and the longest wait while something is not known
_NEVER: Final = float("inf")


@frozen
class PodsOfOthers:
    """Knows the pods with GPUs by another device plugin that nobody keeps from others."""

    checkpoint: Callable[[], Sequence[AllocatedContainer] | None]  # the kubelet's; None: none yet
    containers: Callable[[], Sequence[AllocatedContainer]]  # also asked of the kubelet itself
    pods: Callable[[], Pods | None]  # of this node; None: the API server does not tell
    has_processes: Callable[[Pod], bool]
    records: Callable[[], Iterable[ClaimRecord]]
    names: ResourceNames

    def by_checkpoint(self, serving: AllocationApi | None) -> Sequence[AllocatedContainer]:
        """Their containers, also of pods that have ended. NodeError: it cannot be read."""
        return self._untracked(self.checkpoint() or (), serving)

    def now(self, serving: AllocationApi | None) -> Sequence[AllocatedContainer]:
        """The same, by the kubelet itself where its checkpoint does not tell. NodeError: neither
        does."""
        return self._untracked(self.containers(), serving)

    def left(self, containers: Sequence[AllocatedContainer]) -> PodsLeft:
        """What became of the pods of *containers*. One that the API server does not know lives
        where a process of it does: of a static pod it may have no mirror. NodeError: it is not
        known."""
        pods = self.pods()
        if pods is None:
            raise NodeError("the API server does not tell which pods have ended")
        left = pods_left(containers, pods)
        here = {uid for uid in left.missing if self.has_processes(Pod(uid, uid))}
        living = (*left.living, *(f"pod {uid}" for uid in sorted(here)))
        return PodsLeft(living, left.ended, left.missing - here)

    def _untracked(
        self, containers: Sequence[AllocatedContainer], serving: AllocationApi | None
    ) -> Sequence[AllocatedContainer]:
        by_dra = serving is not AllocationApi.DEVICE_PLUGIN
        return untracked_containers(containers, self.records(), self.names, by_dra=by_dra)


class OtherDevicePlugin:
    """Says why nothing may be offered; an empty text: no other device plugin is in the way. For one
    thread."""

    def __init__(
        self,
        sockets: Callable[[], Sequence[str]],
        registered: Callable[[], Mapping[ResourceName, Sequence[DeviceId]]],
        pods: PodsOfOthers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*sockets*: of other device plugins for NVIDIA's GPUs. *registered*: by resource of ours,
        the devices that the kubelet has, whoever lists them."""
        self._sockets = sockets
        self._registered = registered
        self._pods = pods
        self._clock = clock
        self._text = ""
        self._is_gone = False
        self._look_at = float("-inf")  # for what it has left
        self._ended: Set[PodUid] = frozenset()  # pods that had its GPUs
        self._missing_since: Mapping[PodUid, float] = {}  # those of which nothing is seen
        self._unknown = Backoff(*_UNKNOWN, randomized=True)

    def begin(self, serving: AllocationApi, was_here: bool) -> str:
        """Begin anew, as far as this machine tells. *was_here*: so another process saw it last."""
        sockets = self._sockets()
        foreign = foreign_devices(self._registered(), self._pods.names)
        self._text, self._is_gone = other_device_plugin(sockets, (), foreign), False
        is_here = bool(sockets) or was_here
        self._forget_pods(self._clock() + _PATIENCE_SECONDS if is_here else float("-inf"))
        if not self._text and was_here:
            self._text = WAS_HERE
        elif not self._text:
            self._text = self._left_by_checkpoint(serving)
            self._is_gone = bool(self._text)
        return self._text

    def _left_by_checkpoint(self, serving: AllocationApi) -> str:
        try:
            is_any = bool(self._pods.by_checkpoint(serving))
        except NodeError as e:
            return not_known_what_is_left(str(e))
        return not_known_what_is_left("the API server was not asked yet") if is_any else ""

    def listed(self, serving: AllocationApi | None) -> Set[tuple[ResourceName, bool]]:
        """The resources of ours of which the kubelet has devices that may be another plugin's, and
        whether they certainly are. Where this changes, somebody came or went; for some minutes the
        kubelet may still have those of a plugin that has gone."""
        registered = self._registered()
        foreign = foreign_devices(registered, self._pods.names)
        is_ours = serving is AllocationApi.DEVICE_PLUGIN
        return {
            (resource, resource in foreign)
            for resource in registered
            if resource in foreign or not is_ours
        }

    def look(
        self, serving: AllocationApi | None, theirs: Sequence[str], allocatable: Sequence[str]
    ) -> str:
        """*theirs*: the resources of ours that are *allocatable* on the Node by somebody else."""
        foreign = foreign_devices(self._registered(), self._pods.names, allocatable)
        now = self._clock()
        if signs := other_device_plugin(self._sockets(), theirs, foreign):
            self._text, self._is_gone = signs, False
            self._forget_pods(now + _PATIENCE_SECONDS)
        elif now >= self._look_at:
            self._text, self._is_gone = self._left(serving, now), True
        return self._text

    def _forget_pods(self, look_at: float) -> None:
        """It is here: what it leaves is looked for at *look_at*, and is not what it left before."""
        self._look_at, self._ended, self._missing_since = look_at, frozenset(), {}

    def _left(self, serving: AllocationApi | None, now: float) -> str:
        """It is gone: what it has left."""
        try:
            containers = self._pods.now(serving)
            untracked = [each for each in containers if each.pod not in self._ended]
            left = self._pods.left(untracked) if untracked else PodsLeft()
        except NodeError as e:
            self._look_at = now + self._unknown.next_seconds()
            return not_known_what_is_left(str(e))
        self._unknown.reset()
        self._missing_since = {uid: self._missing_since.get(uid, now) for uid in left.missing}
        gone = {uid for uid, at in self._missing_since.items() if now >= at + _MISSING_SECONDS}
        self._ended |= left.ended | gone
        missing = sorted(left.missing - gone)
        self._look_at = _NEVER
        if left.living or missing:
            self._look_at = now + (_MISSING_SECONDS if missing else _PODS_SECONDS)
            return left_with_gpus((*left.living, *(f"pod {uid}" for uid in missing)))
        return ""

    @property
    def is_gone(self) -> bool:
        """Whether only what it has left is in the way."""
        return self._is_gone

    @property
    def look_at(self) -> float | None:
        """When there is something to look at again, by the clock; None: nothing is waited for."""
        return None if self._look_at == _NEVER else self._look_at


class TakenResources:
    """Knows which resources of ours other device plugins serve. For one thread."""

    def __init__(
        self,
        sockets: Callable[[], Sequence[str]],
        registered: Callable[[], Mapping[ResourceName, Sequence[DeviceId]]],
        names: ResourceNames,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """As ``OtherDevicePlugin``."""
        self._sockets = sockets
        self._registered = registered
        self._names = names
        self._clock = clock
        self._seen: Sequence[str] = ()
        self._seen_since = float("-inf")

    def not_taken(self, offered: Iterable[ResourceName]) -> Set[ResourceName]:
        """Those of *offered* resources that nobody else has taken, as far as that is certain: one
        that comes takes its resources one after the other."""
        sockets, now = self._sockets(), self._clock()
        if sockets != self._seen:
            self._seen, self._seen_since = sockets, now
        if now < self._seen_since + _ALL_TAKEN_SECONDS:
            return set()
        foreign = foreign_devices(self._registered(), self._names)
        return not_taken(offered, [Path(each).name for each in sockets], foreign, self._names)


def registered_devices(
    checkpoint: KubeletCheckpoint, names: ResourceNames
) -> Mapping[ResourceName, Sequence[DeviceId]]:
    """By resource of ours, the healthy devices that the kubelet has, whoever lists them; none where
    that is not known."""
    try:
        registered = checkpoint.registered()
    except NodeError:  # who needs to know what containers have tells of it
        return {}
    return {name: ids for name, ids in registered.items() if ids and names.include(name)}


def nvidia_sockets(directory: Path) -> tuple[str, ...]:
    """Those of other device plugins for NVIDIA's GPUs. What a killed one left does not count."""
    return tuple(str(path) for path in sorted(directory.glob(_NVIDIA_SOCKETS)) if answers(path))
