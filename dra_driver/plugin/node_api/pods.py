"""Tells pods that ask for GPUs and get none, since no scheduler has seen them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import DriverError
from dra_driver.base.threads import UNTIL_WOKEN
from dra_driver.k8s.claims import PodUid
from dra_driver.k8s.events import Event, Events, PodRef
from dra_driver.k8s.pods import KubeletPod, NodePod
from dra_driver.kubeletplugin.device_plugin.resources import AllocatedContainer
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import ClaimRecord
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_api import (
    DEVICE_MEND,
    POD_MEND,
    pods_without_devices,
    pods_without_gpus,
)
from dra_driver.plugin.node_api.current import NodeApi

log = logging.getLogger(__name__)

LONGEST_SECONDS: Final = 600.0  # between two looks
_LOOK_SECONDS: Final = 30.0
_NOT_REGISTERED_SECONDS: Final = 5.0  # until a kubelet that is new has heard of a device
_REASON: Final = "GPUNotAllocated"


@dataclass(frozen=True, slots=True)
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
    crash: it is asked ever more seldom, as such pods come with a new node or a new resource. For
    one thread."""

    def __init__(
        self, node_api: NodeApi, names: ResourceNames, sources: PodSources, events: Events
    ) -> None:
        self._node_api = node_api
        self._names = names
        self._sources = sources
        self._events = events
        self._seen: frozenset[tuple[str, str]] = frozenset()
        self._told: frozenset[PodUid] = frozenset()
        self._error = ""
        self._waits = Backoff(_LOOK_SECONDS, LONGEST_SECONDS)

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
            self._tell(pods_without_gpus(self._sources.on_node(), self._names), POD_MEND)
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
        self._tell(pods_without_devices(pods, containers, records, self._names), DEVICE_MEND)
        return self._waits.next_seconds()

    def _tell(self, without: Sequence[NodePod], mend: str) -> None:
        for pod in without:
            if pod.pod.uid not in self._told:
                log.warning(
                    "a pod asks for a GPU and gets none",
                    extra={"pod": f"{pod.namespace}/{pod.pod.name}"},
                )
                regarding = PodRef(pod.namespace, pod.pod.name, pod.spec.uid)
                message = f"the pod asks for a GPU and gets none: {mend}"
                self._events.emit(Event(regarding, _REASON, pod.pod.name, message))
        self._told = frozenset(pod.pod.uid for pod in without)
