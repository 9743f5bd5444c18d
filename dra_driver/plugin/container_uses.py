"""Which claims the containers on this node use: asked of the kubelet when one is new."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.kubeletplugin.pods import ListedPod
from dra_driver.model.processes import Process
from dra_driver.plan.memory_shares import Holder, Uses, uses

log = logging.getLogger(__name__)

_ASK_AGAIN_SECONDS: Final = 30.0  # about a container of which something could not be told


class Containers(Protocol):
    """Knows what containers are called in their pods; ``dra_driver.node.containers``."""

    def name(self, container: str) -> str | None: ...


class Kubelet(Protocol):
    """Knows which container of which pod uses which claims."""

    def pods(self) -> Sequence[ListedPod]: ...


@dataclass(frozen=True, slots=True)
class _Known:
    holder: Holder
    uses: Uses
    ask_at: float | None  # None: there is nothing more to know


class ContainerUses:
    """Remembers what containers use for as long as they have processes that somebody asks about."""

    def __init__(
        self,
        containers: Containers,
        kubelet: Kubelet,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._containers = containers
        self._kubelet = kubelet
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._error = ""

    def of(
        self, processes: Iterable[Process], holders: Mapping[PodUid, Holder]
    ) -> Mapping[str, Uses]:
        """For the id of each container with *processes* in a pod of *holders*, what it uses."""
        wanted = {p.container: holders[p.pod] for p in processes if p.pod in holders}
        now = self._clock()
        kept = {id_: one for id_, one in self._known.items() if _holds(one, wanted.get(id_), now)}
        if new := sorted(wanted.keys() - kept.keys()):
            listed = self._listed()
            for id_ in new:
                its = uses(listed, wanted[id_], self._containers.name(id_))
                ask_at = now + _ASK_AGAIN_SECONDS if its.possible else None
                kept[id_] = _Known(wanted[id_], its, ask_at)
        self._known = kept
        return {id_: one.uses for id_, one in kept.items()}

    def _listed(self) -> Sequence[ListedPod]:
        try:
            listed = self._kubelet.pods()
        except NodeError as error:
            if str(error) != self._error:
                log.warning(
                    "which container uses which claim is not known",
                    extra={"error": str(error)},
                )
            self._error = str(error)
            return ()
        self._error = ""
        return listed


def _holds(known: _Known, holder: Holder | None, now: float) -> bool:
    return known.holder == holder and (known.ask_at is None or now < known.ask_at)
