"""The memory guard: looks at shared GPUs, and warns or ends who uses more than a claim was given.

It comes after the fact: between two looks a neighbour may find no memory. Where the driver itself
limits memory, this is what remains for what that does not see.
"""

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from dra_driver.cluster.events import Event, PodRef
from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.processes import Process
from dra_driver.model.profiles import GuardPolicy
from dra_driver.plan.guard import (
    Action,
    Began,
    Excursions,
    Kill,
    Terminate,
    Warn,
    decide,
)
from dra_driver.plan.memory_look import ClaimUse, Use, claim_uses
from dra_driver.plan.memory_shares import Holder, Share, holders, known_as, shares
from dra_driver.plan.outliers import Group
from dra_driver.plugin.memory_use import Seen

log = logging.getLogger(__name__)

_GIB: Final = 1024**3
_NOTHING: Final = Seen()
_DONE: Final = {
    signal.SIGTERM: "was asked to end (SIGTERM)",
    signal.SIGKILL: "was killed (SIGKILL)",
}


class MemoryUse(Protocol):
    """Who uses how much; ``dra_driver.plugin.memory_use``."""

    def look(
        self, shares: Mapping[GpuUuid, Sequence[Share]], holders: Mapping[PodUid, Holder]
    ) -> Seen: ...


class Signals(Protocol):
    """Signals a process and no other; False: it is gone. ``dra_driver.node.processes``."""

    def signal(self, process: Process, number: signal.Signals) -> bool: ...


class Events(Protocol):
    """Tells of pods without waiting; ``dra_driver.cluster.events``."""

    def tell(self, event: Event) -> None: ...


class Observer(Protocol):
    """Who counts; ``dra_driver.plugin.metrics``."""

    def memory_used(self, uses: Sequence[ClaimUse], blind: int) -> None: ...
    def memory_excursion(self) -> None: ...
    def memory_kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Tools:
    """What the guard works with."""

    use: MemoryUse
    signals: Signals
    events: Events
    observer: Observer
    clock: Callable[[], float] = time.monotonic


class _Shared:
    """What follows from the records, worked out once for all looks until they change."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.shares = shares(records)
        self.pods = holders(records)
        self.names = known_as(records)


class MemoryGuard:
    """Guards what the claims of *records* were given. One thread at a time may ``look``."""

    def __init__(self, records: Callable[[], Sequence[Record]], tools: Tools) -> None:
        """*records* gives the same object again where nothing changed."""
        self._records = records
        self._tools = tools
        self._shared = _Shared(())
        self._pods: Mapping[PodUid, Holder] = {}  # who uses what is guarded, at the last look
        self._excursions: Excursions = {}
        self._told = _NOTHING
        self._watched = False

    def look(self) -> None:
        """One look and what follows from it. Where no claim is guarded, it looks at nothing."""
        if (records := self._records()) is not self._shared.records:
            self._shared = _Shared(records)
        shared = self._shared
        if not shared.shares and not self._watched:
            return
        seen = self._tools.use.look(shared.shares, shared.pods) if shared.shares else _NOTHING
        self._pods = {**shared.pods, **seen.joined}
        self._excursions, actions = decide(seen.looks, self._excursions, self._tools.clock())
        for action in actions:
            self._do(action, shared)
        if seen != self._told:
            uses = [use for look in seen.looks for use in claim_uses(look)]
            self._tools.observer.memory_used(uses, len(seen.blind))
        self._told, self._watched = seen, bool(shared.shares)

    def _do(self, action: Action, shared: _Shared) -> None:
        match action:
            case Began():
                self._tools.observer.memory_excursion()
            case Warn(group):
                self._warn(group, shared)
            case Terminate(group, use):
                if self._signal(group, use, signal.SIGTERM):
                    self._tools.observer.memory_kill()
                    self._tell_of_end(group, use, signal.SIGTERM, shared)
            case Kill(group, use):
                if self._signal(group, use, signal.SIGKILL):
                    self._tell_of_end(group, use, signal.SIGKILL, shared)
            case _:
                assert_never(action)

    def _warn(self, group: Group, shared: _Shared) -> None:
        log.warning("a claim uses more GPU memory than its share", extra=_facts(group))
        then = (
            f"; if it stays so for {group.guard.grace_seconds:g} s, its largest process is ended"
            if group.guard.policy is GuardPolicy.KILL
            else ""
        )
        for pod in sorted({use.process.pod for use in group.uses}):
            about, message = _about(group), f"{_above(group, shared)}{then}"
            ref = _ref(pod, self._pods)
            self._tools.events.tell(Event(ref, "GPUMemoryAboveShare", about, message))

    def _tell_of_end(
        self,
        group: Group,
        use: Use,
        number: signal.Signals,
        shared: _Shared,
    ) -> None:
        message = (
            f"process {use.process.pid} of the host, which used {_gib(use.memory_bytes)} of it, "
            f"{_DONE[number]}: {_above(group, shared)}"
        )
        # Each signal is an event of its own: the same one told again so soon would only count.
        about = f"{_about(group)} {number.name}"
        pod = _ref(use.process.pod, self._pods)
        self._tools.events.tell(Event(pod, "GPUMemoryProcessEnded", about, message))

    def _signal(self, group: Group, use: Use, number: signal.Signals) -> bool:
        facts = _facts(group) | {
            "pid": use.process.pid,
            "container": use.process.container,
            "signal": number.name,
        }
        try:
            sent = self._tools.signals.signal(use.process, number)
        except NodeError as error:
            facts["error"] = str(error)
            log.warning("a process of a claim above its share cannot be ended", extra=facts)
            return False
        if not sent:
            log.info("a process of a claim above its share is gone already", extra=facts)
        elif number is signal.SIGKILL:
            log.warning("killed a process of a claim above its share", extra=facts)
        else:
            log.warning("asked a process of a claim above its share to end", extra=facts)
        return sent


def _ref(pod: PodUid, pods: Mapping[PodUid, Holder]) -> PodRef:
    return PodRef(pods[pod].namespace, pods[pod].name, pod)


def _above(group: Group, shared: _Shared) -> str:
    claims = "claim" if len(group.claims) == 1 else "claims (told apart by nothing)"
    return (
        f"{claims} {_names(group)} uses {_gib(group.used_bytes)} of "
        f"{shared.names.get(group.gpu, group.gpu)}, "
        f"but has a share of {_gib(group.limit_bytes)}"
    )


def _about(group: Group) -> str:
    return f"{group.gpu} {_names(group)}"


def _names(group: Group) -> str:
    return ", ".join(map(str, group.claims))


def _gib(size: int | None) -> str:
    return f"{(size or 0) / _GIB:.2f} GiB"


def _facts(group: Group) -> dict[str, object]:
    return {
        "claim": _names(group),
        "gpu": group.gpu,
        "used_bytes": group.used_bytes,
        "share_bytes": group.limit_bytes,
    }
