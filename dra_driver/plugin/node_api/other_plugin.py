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
    UntrackedPods,
    foreign_devices,
    untracked_containers,
    untracked_pods,
)
from dra_driver.plan.node_api import left_with_gpus, other_device_plugin

_NVIDIA_SOCKETS: Final = "nvidia*.sock"  # of NVIDIA's device plugin, and of those of clouds
_PATIENCE_SECONDS: Final = 30.0  # after which it is gone
_LOOK_SECONDS: Final = 30.0  # between two lists of pods


@dataclass(frozen=True, slots=True)
class PodsOfOthers:
    """Knows the pods with GPUs by another device plugin that nobody keeps from others."""

    containers: Callable[[], Sequence[AllocatedContainer] | None]  # with devices; None: not yet
    pods: Callable[[], Pods | None]  # of this node; None: the API server does not tell
    records: Callable[[], Iterable[ClaimRecord]]
    listed: Callable[[], frozenset[DeviceId]]  # by this driver to the kubelet now
    names: ResourceNames

    def given(self, serving: AllocationApi | None) -> Sequence[AllocatedContainer]:
        """Their containers, also of pods that have ended. NodeError: the kubelet does not tell."""
        containers = self.containers() or ()
        theirs = untracked_containers(containers, self.records(), frozenset(), self.names)
        if not theirs or serving is not AllocationApi.DEVICE_PLUGIN:
            return theirs
        return untracked_containers(theirs, self.records(), self.listed(), self.names)

    def now(self, serving: AllocationApi | None) -> UntrackedPods | None:
        """None: it is not known now. The pods of the node are asked for where there may be any."""
        try:
            containers = self.given(serving)
        except NodeError:
            return None
        pods = self.pods() if containers else {}
        return None if pods is None else untracked_pods(containers, pods)


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
        self._seen_at: float | None = clock()  # it may have been here until now; None: settled
        self._look_at = float("-inf")

    def begin(self, serving: AllocationApi) -> str:
        """As far as this machine tells. Pods are asked for in the first ``look``."""
        self._text = other_device_plugin(self._sockets(), (), self._foreign())
        if not self._text:
            try:
                is_unsettled = bool(self._pods.given(serving))
            except NodeError:
                is_unsettled = True
            self._text = left_with_gpus(None) if is_unsettled else ""
            self._is_gone = is_unsettled
        return self._text

    def look(
        self, serving: AllocationApi | None, theirs: Sequence[str], allocatable: Sequence[str]
    ) -> str:
        """*theirs*: the resources of ours that are *allocatable* on the Node by somebody else."""
        foreign = {  # of what is gone the kubelet still knows, but nothing is allocatable
            resource: id_ for resource, id_ in self._foreign().items() if resource in allocatable
        }
        now = self._clock()
        if signs := other_device_plugin(self._sockets(), theirs, foreign):
            self._seen_at, self._look_at = now, now + _PATIENCE_SECONDS
            self._text, self._is_gone = signs, False
        elif self._seen_at is not None and now >= self._look_at:
            self._text, self._is_gone = self._left(serving, self._seen_at, now), True
        return self._text

    def _left(self, serving: AllocationApi | None, seen_at: float, now: float) -> str:
        """It is gone: what it has left. A pod that is not known so long after it came has ended; a
        static one is not known at first."""
        self._look_at = now + _LOOK_SECONDS
        pods = self._pods.now(serving)
        if pods is None:
            return left_with_gpus(None)
        missing = pods.missing if now < seen_at + _PATIENCE_SECONDS else ()
        if pods.living or missing:
            return left_with_gpus((*pods.living, *missing))
        self._seen_at = None
        return ""

    @property
    def is_gone(self) -> bool:
        """Whether only what it has left is in the way."""
        return self._is_gone

    @property
    def look_at(self) -> float | None:
        """When there is something to look at again, by the clock; None: nothing is waited for."""
        return None if self._seen_at is None else self._look_at


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
