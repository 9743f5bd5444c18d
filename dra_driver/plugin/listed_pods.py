"""Pods that use claims as the kubelet lists them, where no container's bundle can be found.

The list has names, so the pod's UID is read from the API server.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from dra_driver.errors import DriverError, NodeError
from dra_driver.kubeletplugin.claims import ClaimUid, Pod, PodUid
from dra_driver.kubeletplugin.pods import ClaimName, Container, ListedPod, PodSpec
from dra_driver.model.holdings import Record
from dra_driver.plan.claim_pods import with_pods

log = logging.getLogger(__name__)

_AT_ONCE: Final = 8  # pods that one look reads: there may be many

Records = Callable[[], Sequence[Record]]


class Kubelet(Protocol):
    """Knows which container of which pod uses which claims."""

    def pods(self) -> Sequence[ListedPod]: ...


class Pods(Protocol):
    """Where pods are read from; ``dra_driver.kubeletplugin.pod_reader``."""

    def read(self, namespace: str, name: str) -> PodSpec: ...


class ListedPods:
    """One thread at a time may ``look``."""

    def __init__(
        self, ledger: Records, kubelet: Kubelet, pods: Pods, hidden: Callable[[], bool]
    ) -> None:
        """*hidden*: whether containers' bundles are nowhere to be found."""
        self._ledger = ledger
        self._kubelet = kubelet
        self._pods = pods
        self._hidden = hidden
        self._uids: Mapping[tuple[str, str], PodUid] = {}
        self._found: tuple[Container, ...] = ()
        self._last: tuple[Sequence[Record], tuple[Container, ...], Sequence[Record]] | None = None

    def records(self) -> Sequence[Record]:
        """The claims with the pods that are listed; the same object where nothing changed."""
        records, found = self._ledger(), self._found
        if self._last is None or self._last[0] is not records or self._last[1] is not found:
            self._last = (records, found, with_pods(records, found))
        return self._last[2]

    def look(self) -> None:
        """Ask the kubelet, where nobody else tells. What fails waits for the next look."""
        try:
            found = tuple(self._listed()) if self._hidden() else ()
        except NodeError as error:
            log.info("which pods use a claim is not known", extra={"error": str(error)})
            return
        if found != self._found:
            self._found = found

    def _listed(self) -> Iterator[Container]:
        limited = {
            ClaimName(record.claim.namespace, record.claim.name): record
            for record in self._ledger()
            if record.completed and record.limited
        }
        wanted: dict[tuple[str, str], frozenset[ClaimUid]] = {}
        for pod in self._kubelet.pods() if limited else ():
            named = {name for names in pod.containers.values() for name in names}
            its = [limited[name] for name in named if name in limited]
            new = [one for one in its if pod.name not in {known.name for known in one.pods}]
            if new:
                wanted[pod.namespace, pod.name] = frozenset(one.claim.uid for one in new)
        self._read([name for name in sorted(wanted) if name not in self._uids][:_AT_ONCE])
        self._uids = {name: uid for name, uid in self._uids.items() if name in wanted}
        for (namespace, name), uid in sorted(self._uids.items()):
            yield Container("", "", namespace, Pod(name, uid), wanted[namespace, name])

    def _read(self, names: Sequence[tuple[str, str]]) -> None:
        for namespace, name in names:
            try:
                uid = self._pods.read(namespace, name).uid
            except DriverError as error:
                log.info("a pod of a claim cannot be read", extra={"error": str(error)})
                continue
            self._uids = {**self._uids, (namespace, name): uid}
