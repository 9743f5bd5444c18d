"""Watches MPS while claims use it, and repairs what is not served.

The MPS agent keeps servers running; what only the plugin knows is here: which claims exist, whose
pods use them, and what runs on the GPUs.

``LostMpsInstances`` ends servers over MIG instances that are gone. A daemon of protocol 2 does not
notice that, and every program that connects to it fails. ``plugin.mig.lost_instances`` informs the
pods.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from dra_driver.base.errors import NodeError
from dra_driver.base.threads import BackgroundTask, BackgroundTasks, Loop
from dra_driver.k8s.claims import ClaimUid, PodUid
from dra_driver.k8s.events import Event, Events, PodRef
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName, MpsServerRestart, MpsStatus
from dra_driver.model.processes import GpuProcess
from dra_driver.model.records import ClaimRecord
from dra_driver.node.cgroups.containers import ContainerBundles
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.plan.mps.usage import (
    ClaimNamespace,
    NamespaceClients,
    agent_down_message,
    claim_namespaces,
    last_restart,
    mps_usages,
    namespace_clients,
    new_restarts,
    orphaned_namespaces,
    server_for,
    server_restarted_message,
    unserved_claims,
)
from dra_driver.plugin.claims import partitions
from dra_driver.plugin.claims.dependencies import ClaimChanged
from dra_driver.plugin.claims.partitions import InstanceReader, instance_at
from dra_driver.plugin.metrics import MpsMetrics
from dra_driver.plugin.mps.drain import MpsAgent, MpsDrain, PodMpsClients, PodSource
from dra_driver.plugin.mps.unserved import MpsBypassDetector, MpsLedger, UnservedPods
from dra_driver.plugin.process_owners import ProcessOwners

log = logging.getLogger(__name__)

_RELEASE_AGAIN_SECONDS: Final = 30.0  # after a namespace could not be ended


class LostMpsInstances:
    """Remembers whose instance is gone. One thread at a time may ``look``."""

    def __init__(self, node: InstanceReader, agent: MpsAgent, tasks: BackgroundTasks) -> None:
        self._node = node
        self._agent = agent
        self._tasks = tasks
        self._gone: frozenset[MpsNamespaceName] = frozenset()

    def look(
        self, namespaces: Iterable[ClaimNamespace], status: MpsStatus
    ) -> frozenset[MpsNamespaceName]:
        """End the namespaces of prepared claims whose instance is gone, and return all of these."""
        gone = [
            namespace
            for namespace in namespaces
            if namespace.completed and self._is_gone(namespace)
        ]
        self._gone = frozenset(one.namespace.name for one in gone)
        self._end([one for one in gone if server_for(one.namespace.name, status) is not None])
        return self._gone

    def _is_gone(self, namespace: ClaimNamespace) -> bool:
        """Of a GPU that does not answer, what was seen the last time stands."""
        if namespace.instance is None:
            return False
        gpu, instance = namespace.instance
        try:
            current = instance_at(self._node, gpu, instance.key)
        except NodeError as e:
            log.debug("an instance cannot be looked for", extra={"gpu": gpu, "error": str(e)})
            return namespace.namespace.name in self._gone
        return current is None or current.uuid != instance.uuid

    def _end(self, served: Sequence[ClaimNamespace]) -> None:
        if served:
            tasks = [self._ending(one.namespace.name) for one in served]
            self._tasks.go("instances that are gone", tasks)

    def _ending(self, name: MpsNamespaceName) -> BackgroundTask:
        release = partial(self._agent.release, name)
        return BackgroundTask(
            f"end namespace {name}, whose instance is gone", release, _RELEASE_AGAIN_SECONDS
        )


_LOOK_SECONDS: Final = 5.0
_SERVE_AGAIN_SECONDS: Final = 30.0  # before a claim that could not be served again is tried again
_DOWN_SECONDS: Final = 60.0  # an agent that is replaced is back sooner


class MpsPreparedClaims(Protocol):
    """Repairs what is served; ``dra_driver.plugin.claims.prepared_claims``. Both read the ledger
    again, under the lock of the claim."""

    def serve_again(self, uid: ClaimUid) -> None: ...
    def end_unknown(self, namespace: MpsNamespace) -> None: ...


class MpsNode(partitions.InstanceReader, Protocol):
    """The GPUs of this machine; ``dra_driver.node.gpu_node``."""

    def processes(self, gpu: GpuUuid) -> Sequence[GpuProcess]: ...


@dataclass(frozen=True, slots=True)
class MpsDependencies:
    """What is looked after. *is_newest*: whether no newer process of this plugin runs."""

    agent: MpsAgent
    ledger: MpsLedger
    preparer: MpsPreparedClaims
    node: MpsNode
    pods: PodSource
    events: Events
    observer: MpsMetrics
    is_newest: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class MpsClocks:
    """*steady* for what is between two moments; *epoch* for those that others tell."""

    steady: Callable[[], float] = time.monotonic
    epoch: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class MpsChecks:
    """What a look works with."""

    processes: ContainerProcesses
    bypasses: MpsBypassDetector
    drain: MpsDrain
    joined: UnservedPods
    instances: LostMpsInstances
    tasks: BackgroundTasks
    clock: MpsClocks


@dataclass(slots=True)
class _AgentOutage:
    """The agent does not answer."""

    since: float
    reported: bool = False


def watch_mps(
    dependencies: MpsDependencies,
    containers: ContainerBundles,
    stack: ExitStack,
    seconds: float = _LOOK_SECONDS,
) -> ClaimChanged:
    """Begin to look after MPS; *stack* ends that, and leaves what is served as it is.

    The answer is to be called after a claim changed. *seconds*: from one look to the next.
    """
    processes, clock, tasks = ContainerProcesses(), MpsClocks(), BackgroundTasks()
    users = ProcessOwners(dependencies.node.processes, processes, containers.find)
    checks = MpsChecks(
        processes,
        MpsBypassDetector(users, dependencies.events),
        MpsDrain(dependencies.pods, dependencies.agent, tasks, dependencies.observer, clock.steady),
        UnservedPods(
            dependencies.ledger, dependencies.pods, dependencies.events, tasks, clock.steady
        ),
        LostMpsInstances(dependencies.node, dependencies.agent, tasks),
        tasks,
        clock,
    )
    watch = MpsWatch(dependencies, checks)
    loop = Loop("mps-watch", watch.look, seconds)
    checks.drain.on_ending = loop.soon
    checks.drain.on_read = checks.joined.saw
    loop.start()
    stack.callback(loop.stop)

    def claim_changed(record: ClaimRecord | None) -> None:
        if record is None or record.namespaces:
            loop.soon()

    return claim_changed


class MpsWatch:
    """One thread at a time may ``look``."""

    def __init__(self, dependencies: MpsDependencies, checks: MpsChecks) -> None:
        self._dependencies = dependencies
        self._checks = checks
        self._seen: tuple[ClaimRecord, ...] = ()  # when it was last looked whether any is under MPS
        self._any_under_mps = False
        self._serves = True  # as far as we know: what it served before we came, too
        self._last_restart: int | None = None
        self._outage: _AgentOutage | None = None
        self._sees_pods = False

    def look(self) -> float | None:
        """One look and what follows from it; the seconds until the next, if that is sooner.

        Without claims under MPS, and with an agent that serves nothing, it does nothing.
        """
        if not self._has_work() or not self._dependencies.is_newest():
            return None
        try:
            status = self._dependencies.agent.status()
        except NodeError as error:
            self._agent_down(str(error))
            return None
        self._agent_answered()
        records = self._dependencies.ledger.records()  # not before the agent: see plan.mps.usage
        namespaces = claim_namespaces(records)
        self._serves = any(status.namespaces())
        clients = namespace_clients(namespaces, status, self._pods(status))
        by_pod = _clients_by_pod(namespaces, clients)
        soon = self._checks.drain.look(by_pod)
        gone = self._checks.instances.look(namespaces, status)
        self._repair_served(namespaces, gone, status)
        self._report_restarts(namespaces, status.incidents)
        unserved_pods = self._checks.joined
        unserved_pods.look(records)
        self._checks.drain.end_now(
            [user for user in by_pod if unserved_pods.keeps_out(user.claim.uid, user.pod.uid)]
        )
        bypasses = self._checks.bypasses.look(records, namespaces, status)
        self._dependencies.observer.mps_uses(mps_usages(namespaces, clients, bypasses))
        return soon

    def _has_work(self) -> bool:
        """The ledger gives the same object again where nothing changed."""
        if (records := self._dependencies.ledger.records()) is not self._seen:
            self._seen = records
            self._any_under_mps = any(record.namespaces for record in records)
        return self._any_under_mps or self._serves

    def _pods(self, status: MpsStatus) -> Mapping[int, PodUid]:
        """Of which pod each client is, as far as that can be seen from here."""
        processes = self._checks.processes
        self._sees_pods = self._sees_pods or processes.sees_pods()
        if not self._sees_pods:
            return {}
        pids = {client.pid for server in status.servers for client in server.clients}
        container_processes = ((pid, processes.find(pid)) for pid in sorted(pids))
        return {pid: process.pod for pid, process in container_processes if process is not None}

    def _repair_served(
        self,
        namespaces: Sequence[ClaimNamespace],
        gone: Collection[MpsNamespaceName],
        status: MpsStatus,
    ) -> None:
        preparer = self._dependencies.preparer
        unreadable = {aside.uid for aside in self._dependencies.ledger.set_aside()}
        tasks = [
            BackgroundTask(
                f"serve claim {uid} again", partial(preparer.serve_again, uid), _SERVE_AGAIN_SECONDS
            )
            for uid in unserved_claims(
                (namespace for namespace in namespaces if namespace.namespace.name not in gone),
                status,
            )
        ]
        tasks += [
            BackgroundTask(
                f"end namespace {namespace.name}",
                partial(preparer.end_unknown, namespace),
                _SERVE_AGAIN_SECONDS,
            )
            for namespace in orphaned_namespaces(namespaces, status, unreadable)
        ]
        if tasks:
            self._checks.tasks.go("what is served", tasks)

    def _report_restarts(
        self, namespaces: Sequence[ClaimNamespace], incidents: Sequence[MpsServerRestart]
    ) -> None:
        for incident in new_restarts(incidents, self._last_restart, self._checks.clock.epoch()):
            if self._last_restart is not None:  # one that an earlier process counted is no new one
                self._dependencies.observer.mps_restarted()
            facts = {"server": incident.server, "reason": incident.reason}
            log.warning("an MPS server was restarted", extra=facts)
            for namespace in namespaces:
                if namespace.namespace.name in incident.namespaces:
                    message = server_restarted_message(incident, namespace)
                    self._send_event(namespace, "MPSServerRestarted", incident.server, message)
        self._last_restart = last_restart(incidents)

    def _send_event(self, namespace: ClaimNamespace, reason: str, about: str, message: str) -> None:
        for pod in namespace.pods:
            ref = PodRef(namespace.claim.namespace, pod.name, pod.uid)
            self._dependencies.events.emit(
                Event(ref, reason, f"{about} {namespace.claim}", message)
            )

    def _agent_answered(self) -> None:
        if self._outage is not None:
            log.info("the MPS agent answers again")
        self._outage = None
        self._dependencies.observer.mps_agent(True)

    def _agent_down(self, error: str) -> None:
        """Claims go on as they are. That the agent is replaced is no news for their pods."""
        namespaces = claim_namespaces(self._seen)
        self._dependencies.observer.mps_agent(False)
        self._dependencies.observer.mps_uses(mps_usages(namespaces, None, None))
        if not namespaces and self._last_restart is None:
            self._serves = False  # it never answered, and nobody needs it
            return
        now = self._checks.clock.steady()
        if self._outage is None:
            log.warning("the MPS agent of this node does not answer", extra={"error": error})
            self._outage = _AgentOutage(now)
        if now - self._outage.since >= _DOWN_SECONDS and not self._outage.reported:
            self._outage.reported = True
            for namespace in namespaces:
                self._send_event(
                    namespace,
                    "MPSAgentDown",
                    "agent",
                    agent_down_message(namespace, _DOWN_SECONDS, error),
                )


def _clients_by_pod(
    namespaces: Sequence[ClaimNamespace], clients: Mapping[MpsNamespaceName, NamespaceClients]
) -> Sequence[PodMpsClients]:
    """The clients whose pod is known, by claim and pod."""
    none = NamespaceClients()
    return [
        PodMpsClients(namespace.claim, pod, namespace.namespace.name, pids)
        for namespace in namespaces
        for pod in namespace.pods
        if (pids := clients.get(namespace.namespace.name, none).by_pod.get(pod.uid))
    ]
