"""Which claims containers use, remembered: what one uses never changes, so it is asked once.

Asking can take seconds, and a kubelet that hangs does not answer at all. So it is asked about all
that are new at once, by one thread that holds up nobody, and everybody else gets what is known.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from dra_driver.kubeletplugin.claims import ClaimUid, PodUid
from dra_driver.node.containers import Uses

_ASK_AGAIN_SECONDS: Final = 30.0  # about a container of which nothing could be told
_NOTHING: Final[frozenset[ClaimUid]] = frozenset()


@dataclass(frozen=True, slots=True)
class PodClaims:
    """A pod, and the claims of ours that it has."""

    pod: PodUid
    claims: frozenset[ClaimUid]


@dataclass(frozen=True, slots=True)
class _Answer:
    asked: PodClaims
    used: frozenset[ClaimUid] | None  # None: it could not be told
    ask_at: float


class ContainerClaims:
    """Remembers containers by their ids, for as long as somebody wants to know of them."""

    def __init__(self, ask: Uses, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._known: Mapping[str, _Answer] = {}

    def learn(self, containers: Mapping[str, PodClaims]) -> None:
        """Ask about those of which nothing is known; what is known of others is forgotten.

        One thread at a time may do that.
        """
        now = self._clock()
        known = {
            container: answer
            for container, answer in self._known.items()
            if answer.asked == containers.get(container) and now < answer.ask_at
        }
        if new := sorted(containers.keys() - known.keys()):
            told = self._ask([(containers[container].pod, container) for container in new])
            for container in new:
                asked = containers[container]
                used = told.get((asked.pod, container))
                if used is None:
                    known[container] = _Answer(asked, None, now + _ASK_AGAIN_SECONDS)
                else:
                    known[container] = _Answer(asked, frozenset(used), math.inf)
        self._known = known

    def used(self, container: str, claims: Collection[ClaimUid]) -> frozenset[ClaimUid]:
        """Those of *claims* that *container* is known to use."""
        answer = self._known.get(container)
        if answer is None or not answer.asked.claims.issuperset(claims):
            return _NOTHING  # what the pod got since, it may use as well
        return (answer.used or _NOTHING) & frozenset(claims)

    @property
    def ask_at(self) -> float:
        """When there is something to ask again, on the clock."""
        return min((answer.ask_at for answer in self._known.values()), default=math.inf)
