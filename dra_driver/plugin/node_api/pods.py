"""Tells pods that set spec.nodeName and ask for GPUs that by DRA nobody allocates any for them."""

import logging
from collections.abc import Callable
from typing import Final

from dra_driver.base.errors import DriverError
from dra_driver.base.threads import UNTIL_WOKEN
from dra_driver.k8s.claims import PodUid
from dra_driver.k8s.events import Event, Events, PodRef
from dra_driver.k8s.pods import KubeletPod, NodePod
from dra_driver.model.profiles import AllocationApi
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_api import POD_MEND, pods_without_gpus
from dra_driver.plugin.node_api.current import NodeApi

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 30.0
_REASON: Final = "GPUNotAllocated"


class PodsWithoutGpus:
    """Each pod is told once. The API server is asked only where the kubelet has a new pod. For one
    thread."""

    def __init__(
        self,
        node_api: NodeApi,
        names: ResourceNames,
        listed: Callable[[], tuple[KubeletPod, ...]],
        pods: Callable[[], tuple[NodePod, ...]],
        events: Events,
    ) -> None:
        """*listed*: the pods by the kubelet. *pods*: the same by the API server."""
        self._node_api = node_api
        self._names = names
        self._listed = listed
        self._pods = pods
        self._events = events
        self._seen: frozenset[tuple[str, str]] = frozenset()
        self._told: frozenset[PodUid] = frozenset()
        self._error = ""

    def look(self) -> float | None:
        if self._node_api.serving is not AllocationApi.DRA:
            self._seen = frozenset()
            return UNTIL_WOKEN
        try:
            listed = frozenset((pod.namespace, pod.name) for pod in self._listed())
            if not listed <= self._seen:
                self._tell(self._pods())
        except DriverError as e:
            if str(e) != self._error:
                log.info("pods without GPUs are not known now", extra={"error": str(e)})
            self._error = str(e)
            return None
        self._error, self._seen = "", listed
        return None

    def _tell(self, pods: tuple[NodePod, ...]) -> None:
        without = pods_without_gpus(pods, self._names)
        for pod in without:
            if pod.pod.uid not in self._told:
                log.warning(
                    "a pod asks for a GPU and gets none",
                    extra={"pod": f"{pod.namespace}/{pod.pod.name}"},
                )
                regarding = PodRef(pod.namespace, pod.pod.name, pod.spec.uid)
                message = f"the pod asks for a GPU and gets none: {POD_MEND}"
                self._events.emit(Event(regarding, _REASON, pod.pod.name, message))
        self._told = frozenset(pod.pod.uid for pod in without)
