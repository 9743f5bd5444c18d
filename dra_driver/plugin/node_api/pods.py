"""Tells pods that ask for GPUs and get none, and pods whose GPUs the kubelet has forgotten."""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import DriverError
from dra_driver.base.frozen import frozen
from dra_driver.base.threads import UNTIL_WOKEN
from dra_driver.k8s.events import Event, Events, PodRef
from dra_driver.k8s.pods import KubeletPod, NodePod
from dra_driver.kubeletplugin.device_plugin.resources import AllocatedContainer
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import ClaimRecord
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_api import (
    DEVICE_MEND,
    FORGOTTEN_MEND,
    POD_MEND,
    forgotten_pods,
    pods_without_devices,
    pods_without_gpus,
)
from dra_driver.plugin.node_api.current import NodeApi

log = logging.getLogger(__name__)

LONGEST_SECONDS: Final = 600.0  # between two looks
_LOOK_SECONDS: Final = 30.0
_NOT_REGISTERED_SECONDS: Final = 5.0  # until a kubelet that is new has heard of a device
_NOT_ALLOCATED: Final = "GPUNotAllocated"
_FORGOTTEN: Final = "GPUForgotten"


@frozen
class PodSources:
    """Who says what pods there are, and what they have."""

    listed: Callable[[], tuple[KubeletPod, ...]]  # by the kubelet
    on_node: Callable[[], tuple[NodePod, ...]]  # by the API server
    # With devices, by the kubelet's checkpoint; None: it has none yet.
    containers: Callable[[], tuple[AllocatedContainer, ...] | None]
    records: Callable[[], Sequence[ClaimRecord]]


class PodsWithoutGpus:
    """Each pod is told once. By DRA the API server is asked only where the kubelet has a new pod.
    By the device-plugin API that is not known, since to list its pods can make an old kubelet
    crash: it is asked ever more seldom, as such pods come with a new node, a new resource or a new
    kubelet. For one thread."""

    def __init__(
        self, node_api: NodeApi, names: ResourceNames, sources: PodSources, events: Events
    ) -> None:
        self._node_api = node_api
        self._names = names
        self._sources = sources
        self._events = events
        self._seen: frozenset[tuple[str, str]] = frozenset()
        self._told: frozenset[Event] = frozenset()
        self._error = ""
        self._waits = Backoff(_LOOK_SECONDS, LONGEST_SECONDS)

    def kubelet_changed(self) -> None:
        """It started: what it does not know any more shows soon. Any thread may say so."""
        self._waits.reset()

    def look(self) -> float:
        """The seconds until the next look."""
        serving = self._node_api.serving
        if serving is None:
            return UNTIL_WOKEN
        try:
            by_dra = serving is AllocationApi.DRA
            seconds = self._by_dra() if by_dra else self._by_device_plugin()
        except DriverError as e:
            if str(e) != self._error:
                log.info("pods without GPUs are not known now", extra={"error": str(e)})
            self._error = str(e)
            return _LOOK_SECONDS
        self._error = ""
        return seconds

    def _by_dra(self) -> float:
        """The kubelet forgets by this question what pods had that have ended. Else it would take
        our resources for those of a device plugin that is gone, and start no pod with them."""
        self._waits.reset()
        listed = frozenset((pod.namespace, pod.name) for pod in self._sources.listed())
        if not listed <= self._seen:
            without = pods_without_gpus(self._sources.on_node(), self._names)
            self._tell([_not_allocated(pod, POD_MEND) for pod in without])
        self._seen = listed
        return _LOOK_SECONDS

    def _by_device_plugin(self) -> float:
        self._seen = frozenset()
        if self._sources.containers() is None:
            self._waits.reset()
            return _NOT_REGISTERED_SECONDS
        pods = self._sources.on_node()
        containers = self._sources.containers() or ()  # after the pods, which are older so
        records = self._sources.records()
        without = pods_without_devices(pods, containers, records, self._names)
        forgotten = forgotten_pods(pods, containers, records)
        self._tell(
            [
                *(_not_allocated(pod, DEVICE_MEND) for pod in without),
                *(_forgotten(pod) for pod in forgotten),
            ]
        )
        return self._waits.next_seconds()

    def _tell(self, events: Sequence[Event]) -> None:
        for event in events:
            if event not in self._told:
                log.warning("pod %s: %s", event.about, event.message)
                self._events.emit(event)
        self._told = frozenset(events)


def _not_allocated(pod: NodePod, mend: str) -> Event:
    return _event(pod, _NOT_ALLOCATED, f"the pod asks for a GPU and gets none: {mend}")


def _forgotten(pod: NodePod) -> Event:
    problem = "the kubelet has lost which devices the pod has"
    return _event(pod, _FORGOTTEN, f"{problem}: {FORGOTTEN_MEND}")


def _event(pod: NodePod, reason: str, message: str) -> Event:
    name = pod.pod.name
    about = f"{pod.namespace}/{name}"
    return Event(PodRef(pod.namespace, name, pod.spec.uid), reason, about, message)
