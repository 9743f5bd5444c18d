"""Which pods of this node have devices: asks the kubelet, and the API server for what it knows."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dra_driver.base.deadlines import seconds_within_request
from dra_driver.base.errors import ApiServerError, NodeError, Unreachable
from dra_driver.k8s.claims import PodUid
from dra_driver.k8s.pods import KubeletPod, NodePod
from dra_driver.kubeletplugin.device_plugin.resources import AllocatedContainer
from dra_driver.model.records import DeviceAllocation
from dra_driver.plan.device_plugin.users import (
    AllocatedPod,
    Pods,
    listed_containers,
    pods_with,
)

log = logging.getLogger(__name__)

_QUESTION_SECONDS: Final = 20.0  # that somebody waits for the end of another's question
_FAILED_SECONDS: Final = 10.0  # that no container waits for an API server that did not answer


class NodePods:
    """The pods of this node as the API server has them. Any thread may ask: one question serves all
    who came before it."""

    def __init__(
        self,
        read: Callable[[], tuple[NodePod, ...]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._pods: Pods = {}
        self._questions = 0  # that were begun
        self._failed_until = float("-inf")
        self._error = ""

    def now(self) -> Pods:
        """Asked now. ApiServerError: it does not answer."""
        with self._alone():
            return self._ask()

    def with_these(self, uids: Collection[PodUid]) -> Pods:
        """As they were known last, if that is all of *uids*; else they are asked for. What is not
        known is left out."""
        before = self._questions
        with suppress(ApiServerError), self._alone():
            is_asked = self._questions > before or self._clock() < self._failed_until
            if not is_asked and not self._pods.keys() >= set(uids):
                self._ask()
        return self._pods

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else asks. ApiServerError: somebody has no answer for too long."""
        if not self._lock.acquire(timeout=seconds_within_request(_QUESTION_SECONDS)):
            raise Unreachable("an earlier question for the pods of this node has no answer yet")
        try:
            yield
        finally:
            self._lock.release()

    def _ask(self) -> Pods:
        self._questions += 1
        try:
            self._pods = {pod.pod.uid: pod for pod in self._read()}
        except ApiServerError as e:
            self._failed_until = self._clock() + _FAILED_SECONDS
            if str(e) != self._error:
                self._error = str(e)
                log.warning("the pods of this node are not known now", extra={"error": str(e)})
            raise
        self._error = ""
        return self._pods


class AllocatedPods:
    """Who has what of the kubelet's devices. Any thread may ask."""

    def __init__(
        self,
        checkpoint: Callable[[], tuple[AllocatedContainer, ...] | None],
        list_pods: Callable[[], tuple[KubeletPod, ...]],
        pods: NodePods,
    ) -> None:
        """*list_pods*: as the kubelet tells by PodResources, for where it has no checkpoint (None)
        or none that can be read."""
        self._checkpoint = checkpoint
        self._list_pods = list_pods
        self._pods = pods
        self._problem = ""

    def containers(self) -> tuple[AllocatedContainer, ...]:
        """All containers with devices. NodeError: that is not known."""
        problem = ""
        try:
            containers = self._checkpoint()
        except NodeError as e:
            containers, problem = None, str(e)
        if problem != self._problem:
            self._problem = problem
            if problem:
                log.warning("the kubelet is asked for its list of pods instead: %s", problem)
        return self._listed() if containers is None else containers

    def with_devices(self, allocation: DeviceAllocation) -> tuple[AllocatedPod, ...]:
        """The pods that have *allocation*; none: nobody says so. NodeError: that is not known."""
        containers = self.containers()
        uids = {each.pod for each in containers if each.ids == allocation.ids}
        return pods_with(allocation, containers, self._pods.with_these(uids))

    def pods(self) -> Pods | None:
        """All pods of this node, asked now; None: the API server does not tell."""
        try:
            return self._pods.now()
        except ApiServerError:
            return None

    def _listed(self) -> tuple[AllocatedContainer, ...]:
        """Without init containers, which are not listed."""
        listed = [pod for pod in self._list_pods() if pod.devices]
        try:
            pods = self._pods.now().values() if listed else ()
        except ApiServerError as e:
            raise NodeError(f"which pods the kubelet's list means cannot be asked: {e}") from e
        return tuple(listed_containers(listed, pods))
