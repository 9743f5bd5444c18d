"""Looks after MPS while claims use it: who is not served, not limited, cut off, or about to end.

The MPS agent keeps servers alive; here is what only the plugin knows: which claims there are, whose
pods they have, and what runs on the GPUs.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from dra_driver.cluster.events import Event, PodRef
from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import ClaimUid, PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.mps import Incident, MpsStatus, Space, SpaceName
from dra_driver.model.processes import GpuProcess
from dra_driver.node.ledger_files import SetAside
from dra_driver.node.processes import Processes
from dra_driver.plan.mps_watch import (
    ClaimSpace,
    Clients,
    MpsUse,
    claim_spaces,
    clients,
    lacking,
    latest,
    news,
    unknown,
    uses,
)
from dra_driver.plan.mps_words import agent_down, restarted
from dra_driver.plugin import gpu_users, instance_at, mps_drain, mps_instances, mps_joined
from dra_driver.plugin.container_uses import Containers, ContainerUses
from dra_driver.plugin.errands import Errand, Errands
from dra_driver.plugin.gpu_users import GpuUsers
from dra_driver.plugin.mps_drain import MpsDrain, PodClients
from dra_driver.plugin.mps_instances import MpsInstances
from dra_driver.plugin.mps_joined import MpsJoined
from dra_driver.plugin.mps_strays import Events, MpsStrays
from dra_driver.plugin.tools import Changed
from dra_driver.process.loops import Loop

log = logging.getLogger(__name__)

_SECONDS: Final = 5.0
_AGAIN_SECONDS: Final = 30.0  # before a claim that could not be served again is tried again
_DOWN_SECONDS: Final = 60.0  # an agent that is replaced is back sooner


class Agent(mps_drain.Agent, mps_instances.Agent, Protocol):
    """Who serves; ``dra_driver.node.mps.agent``."""

    def status(self) -> MpsStatus: ...


class Ledger(mps_joined.Ledger, Protocol):
    """What claims hold; ``dra_driver.node.ledger``."""

    def records(self) -> tuple[Record, ...]: ...
    def set_aside(self) -> tuple[SetAside, ...]: ...


class Preparer(Protocol):
    """Who puts right what is served; ``dra_driver.plugin.prepare``. Both look at the ledger again,
    where nobody else can act on the claim."""

    def serve_again(self, uid: ClaimUid) -> None: ...
    def end_unknown(self, space: Space) -> None: ...


class Pods(mps_drain.Pods, mps_joined.Pods, Protocol):
    """Where pods are read from; ``dra_driver.kubeletplugin.pod_reader``."""


class Node(instance_at.Node, Protocol):
    """The GPUs of this machine; ``dra_driver.node.node``."""

    def processes(self, gpu: GpuUuid) -> Sequence[GpuProcess]: ...


class Observer(mps_drain.Observer, Protocol):
    """Who counts; ``dra_driver.plugin.mps_metrics``."""

    def mps_agent(self, up: bool) -> None: ...
    def mps_uses(self, uses: Sequence[MpsUse]) -> None: ...
    def mps_restarted(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Watched:
    """What is looked after. *in_charge*: whether no newer process of this plugin runs."""

    agent: Agent
    ledger: Ledger
    preparer: Preparer
    node: Node
    pods: Pods
    events: Events
    observer: Observer
    in_charge: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Clock:
    """*steady* for what is between two moments; *epoch* for those that others tell."""

    steady: Callable[[], float] = time.monotonic
    epoch: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class Tools:
    """What a look works with."""

    processes: gpu_users.Processes
    strays: MpsStrays
    drain: MpsDrain
    joined: MpsJoined
    instances: MpsInstances
    errands: Errands
    clock: Clock


@dataclass(slots=True)
class _Outage:
    """The agent does not answer."""

    since: float
    told: bool = False


def watch_mps(
    its: Watched, known: Containers, stack: ExitStack, seconds: float = _SECONDS
) -> Changed:
    """Begin to look after MPS; *stack* ends that, and leaves what is served as it is.

    The answer is to be called after a claim changed. *seconds*: from one look to the next.
    """
    processes, clock, errands = Processes(), Clock(), Errands()
    users = GpuUsers(its.node.processes, processes, ContainerUses(known))
    tools = Tools(
        processes,
        MpsStrays(users, its.events),
        MpsDrain(its.pods, its.agent, errands, its.observer, clock.steady),
        MpsJoined(its.ledger, its.pods, its.events, errands, clock.steady),
        MpsInstances(its.node, its.agent, errands),
        errands,
        clock,
    )
    watch = MpsWatch(its, tools)
    loop = Loop("mps-watch", watch.look, seconds)
    tools.drain.on_ending = loop.soon
    tools.drain.on_read = tools.joined.saw
    loop.start()
    stack.callback(loop.stop)

    def claim_changed(record: Record | None) -> None:
        if record is None or record.spaces:
            loop.soon()

    return claim_changed


class MpsWatch:
    """One thread at a time may ``look``."""

    def __init__(self, its: Watched, tools: Tools) -> None:
        self._its = its
        self._tools = tools
        self._seen: tuple[Record, ...] = ()  # when it was last looked whether any is under MPS
        self._wanted = False
        self._serves = True  # as far as we know: what it served before we came, too
        self._last: int | None = None
        self._outage: _Outage | None = None
        self._sees_pods = False

    def look(self) -> float | None:
        """One look and what follows from it; the seconds until the next, if that is sooner.

        Without claims under MPS, and with an agent that serves nothing, it does nothing.
        """
        if not self._has_work() or not self._its.in_charge():
            return None
        try:
            status = self._its.agent.status()
        except NodeError as error:
            self._down(str(error))
            return None
        self._up()
        records = self._its.ledger.records()  # not before the agent: see plan.mps_watch
        spaces = claim_spaces(records)
        self._serves = any(status.spaces())
        found = clients(spaces, status, self._pods(status))
        by_pod = _by_pod(spaces, found)
        soon = self._tools.drain.look(by_pod)
        gone = self._tools.instances.look(spaces, status)
        self._put_right(spaces, gone, status)
        self._tell_of_restarts(spaces, status.incidents)
        joined = self._tools.joined
        joined.look(records)
        self._tools.drain.end_now([c for c in by_pod if joined.keeps_out(c.claim.uid, c.pod.uid)])
        unserved = self._tools.strays.look(records, spaces, status)
        self._its.observer.mps_uses(uses(spaces, found, unserved))
        return soon

    def _has_work(self) -> bool:
        """The ledger gives the same object again where nothing changed."""
        if (records := self._its.ledger.records()) is not self._seen:
            self._seen = records
            self._wanted = any(record.spaces for record in records)
        return self._wanted or self._serves

    def _pods(self, status: MpsStatus) -> Mapping[int, PodUid]:
        """Of which pod each client is, as far as that can be seen from here."""
        processes = self._tools.processes
        self._sees_pods = self._sees_pods or processes.sees_pods()
        if not self._sees_pods:
            return {}
        pids = {client.pid for server in status.servers for client in server.clients}
        found = ((pid, processes.find(pid)) for pid in sorted(pids))
        return {pid: process.pod for pid, process in found if process is not None}

    def _put_right(
        self, spaces: Sequence[ClaimSpace], gone: Collection[SpaceName], status: MpsStatus
    ) -> None:
        preparer = self._its.preparer
        unreadable = {aside.uid for aside in self._its.ledger.set_aside()}
        errands = [
            Errand(f"serve claim {uid} again", partial(preparer.serve_again, uid), _AGAIN_SECONDS)
            for uid in lacking((one for one in spaces if one.space.name not in gone), status)
        ]
        errands += [
            Errand(f"end space {space.name}", partial(preparer.end_unknown, space), _AGAIN_SECONDS)
            for space in unknown(spaces, status, unreadable)
        ]
        if errands:
            self._tools.errands.go("what is served", errands)

    def _tell_of_restarts(
        self, spaces: Sequence[ClaimSpace], incidents: Sequence[Incident]
    ) -> None:
        for incident in news(incidents, self._last, self._tools.clock.epoch()):
            if self._last is not None:  # one that an earlier process counted is no new one
                self._its.observer.mps_restarted()
            facts = {"server": incident.server, "reason": incident.reason}
            log.warning("an MPS server was restarted", extra=facts)
            for one in spaces:
                if one.space.name in incident.spaces:
                    message = restarted(incident, one)
                    self._tell(one, "MPSServerRestarted", incident.server, message)
        self._last = latest(incidents)

    def _tell(self, one: ClaimSpace, reason: str, about: str, message: str) -> None:
        for pod in one.pods:
            ref = PodRef(one.claim.namespace, pod.name, pod.uid)
            self._its.events.tell(Event(ref, reason, f"{about} {one.claim}", message))

    def _up(self) -> None:
        if self._outage is not None:
            log.info("the MPS agent answers again")
        self._outage = None
        self._its.observer.mps_agent(True)

    def _down(self, error: str) -> None:
        """Claims go on as they are. That the agent is replaced is no news for their pods."""
        spaces = claim_spaces(self._seen)
        self._its.observer.mps_agent(False)
        self._its.observer.mps_uses(uses(spaces, None, None))
        if not spaces and self._last is None:
            self._serves = False  # it never answered, and nobody needs it
            return
        now = self._tools.clock.steady()
        if self._outage is None:
            log.warning("the MPS agent of this node does not answer", extra={"error": error})
            self._outage = _Outage(now)
        if now - self._outage.since >= _DOWN_SECONDS and not self._outage.told:
            self._outage.told = True
            for one in spaces:
                self._tell(one, "MPSAgentDown", "agent", agent_down(one, _DOWN_SECONDS, error))


def _by_pod(
    spaces: Sequence[ClaimSpace], found: Mapping[SpaceName, Clients]
) -> Sequence[PodClients]:
    """The clients whose pod is known, by claim and pod."""
    none = Clients()
    return [
        PodClients(one.claim, pod, one.space.name, pids)
        for one in spaces
        for pod in one.pods
        if (pids := found.get(one.space.name, none).of_pods.get(pod.uid))
    ]
