"""Watches MPS while claims use it, and repairs what is not served.

The MPS agent keeps servers running; what only the plugin knows is here: which claims exist, whose
pods use them, and what runs on the GPUs.

``LostMpsInstances`` ends servers over MIG instances that are gone. A daemon of protocol 2 does not
notice that, and every program that connects to it fails. ``plugin.mig.lost_instances`` informs the
pods.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Final

from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import frozen
from dra_driver.base.threads import (
    UNTIL_WOKEN,
    BackgroundTask,
    BackgroundTasks,
    StartThread,
    start_thread,
)
from dra_driver.k8s.claims import ClaimUid, PodUid
from dra_driver.k8s.events import Event, PodRef
from dra_driver.model.mps import MpsNamespaceName, MpsStatus
from dra_driver.model.records import ClaimRecord
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.mps.agent_client import MpsAgentClient
from dra_driver.plan.mps.usage import (
    ClaimNamespace,
    MpsSnapshot,
    NamespaceClients,
    agent_down_message,
    claim_namespaces,
    last_restart,
    mps_usages,
    new_restarts,
    orphaned_namespaces,
    server_failures,
    server_for,
    server_restarted_message,
    unserved_claims,
)
from dra_driver.plugin.claims.partitions import instance_at
from dra_driver.plugin.metrics import MpsMetrics
from dra_driver.plugin.mps.drain import MpsDrain, PodMpsClients
from dra_driver.plugin.mps.unserved import MpsBypassDetector, UnservedPods
from dra_driver.plugin.parts import PluginParts
from dra_driver.plugin.process_owners import ProcessOwners

log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 30.0  # before what failed is tried again
_DOWN_SECONDS: Final = 60.0  # an agent that is replaced is back sooner


class LostMpsInstances:
    """Remembers the namespaces whose instance is gone. One thread at a time may ``look``."""

    def __init__(self, node: GpuNode, agent: MpsAgentClient, tasks: BackgroundTasks) -> None:
        self._node = node
        self._agent = agent
        self._tasks = tasks
        self._lost: frozenset[MpsNamespaceName] = frozenset()

    def look(self, snapshot: MpsSnapshot) -> frozenset[MpsNamespaceName]:
        """End the namespaces of prepared claims whose instance is gone, and return all of these."""
        self._lost = frozenset(
            namespace.name
            for namespace in snapshot.namespaces
            if namespace.completed and self._is_lost(namespace)
        )
        self._tasks.go(
            "instances that are gone",
            [
                BackgroundTask(
                    f"end namespace {name}, whose instance is gone",
                    partial(self._agent.release, name),
                    _RETRY_SECONDS,
                )
                for name in sorted(self._lost)
                if server_for(name, snapshot.status) is not None
            ],
        )
        return self._lost

    def _is_lost(self, namespace: ClaimNamespace) -> bool:
        """Of a GPU that does not answer, what was seen the last time stands."""
        if namespace.instance is None:
            return False
        gpu, instance = namespace.instance
        try:
            current = instance_at(self._node, gpu, instance.key)
        except NodeError as e:
            log.debug("an instance cannot be looked for", extra={"gpu": gpu, "error": str(e)})
            return namespace.name in self._lost
        return current is None or current.uuid != instance.uuid


@frozen
class MpsHost:
    """This machine, as far as the watch needs it."""

    processes: ContainerProcesses = field(default_factory=ContainerProcesses)
    clock: Callable[[], float] = time.monotonic
    epoch: Callable[[], float] = time.time  # for moments that others tell
    start: StartThread = start_thread


class MpsWatch:
    """One thread at a time may ``look``."""

    def __init__(
        self,
        parts: PluginParts,
        agent: MpsAgentClient,
        metrics: MpsMetrics,
        host: MpsHost | None = None,
    ) -> None:
        host = host or MpsHost()
        tasks = BackgroundTasks(host.clock, host.start)
        owners = ProcessOwners(parts.node.processes, host.processes, parts.node.containers.find)
        self._parts = parts
        self._agent = agent
        self._metrics = metrics
        self._host = host
        self._tasks = tasks
        self._bypasses = MpsBypassDetector(owners, parts.events, host.clock)
        self._instances = LostMpsInstances(parts.node, agent, tasks)
        self.unserved_pods = UnservedPods(parts, tasks, host.clock)
        self.drain = MpsDrain(parts.pods, agent, tasks, metrics, host.clock)
        self.drain.on_read = self.unserved_pods.saw
        self._records: Sequence[ClaimRecord] = ()  # at the last look
        self._any_under_mps = False  # of these
        self._serves = True  # as far as we know: what it served before we came, too
        self._unserved: frozenset[ClaimUid] = frozenset()  # at the last look
        self._last_restart: int | None = None
        self._down_since: float | None = None  # the agent does not answer
        self._down_reported = False
        self._sees_pods = False

    def look(self) -> float | None:
        """One look and what follows from it; the seconds until the next, if that is sooner.

        Without claims under MPS, and with an agent that serves nothing, there is nothing to do
        until a claim changed.
        """
        if not self._has_work():
            return UNTIL_WOKEN
        if not self._parts.is_newest():
            return None
        try:
            status = self._agent.status()
        except NodeError as error:
            self._agent_down(str(error))
            return None
        self._agent_answered()
        snapshot = MpsSnapshot(status, self._parts.ledger.records(), self._pods(status))
        self._serves = any(status.namespaces())
        by_pod = _clients_by_pod(snapshot)
        soon = self.drain.look(by_pod)
        lost = self._instances.look(snapshot)
        self._repair_served(snapshot, lost)
        self._note_failures(snapshot, lost)
        self._report_restarts(snapshot)
        self.unserved_pods.look(snapshot.records)
        self.drain.end_now(
            [user for user in by_pod if self.unserved_pods.keeps_out(user.claim.uid, user.pod.uid)]
        )
        bypasses = self._bypasses.look(snapshot)
        self._metrics.mps_uses(mps_usages(snapshot.namespaces, snapshot.clients, bypasses))
        return soon

    def _has_work(self) -> bool:
        """The ledger gives the same object again where nothing changed."""
        if (records := self._parts.ledger.records()) is not self._records:
            self._records = records
            self._any_under_mps = any(record.namespaces for record in records)
        return self._any_under_mps or self._serves

    def _pods(self, status: MpsStatus) -> Mapping[int, PodUid]:
        """Of which pod each client is, as far as that can be seen from here."""
        processes = self._host.processes
        self._sees_pods = self._sees_pods or processes.sees_pods()
        if not self._sees_pods:
            return {}
        pids = {client.pid for server in status.servers for client in server.clients}
        container_processes = ((pid, processes.find(pid)) for pid in sorted(pids))
        return {pid: process.pod for pid, process in container_processes if process is not None}

    def _repair_served(self, snapshot: MpsSnapshot, lost: Collection[MpsNamespaceName]) -> None:
        prepared_claims = self._parts.prepared_claims
        unreadable = {damaged.uid for damaged in self._parts.ledger.set_aside()}
        self._tasks.go(
            "what is served",
            [
                *(
                    BackgroundTask(
                        f"serve claim {uid} again",
                        partial(prepared_claims.serve_again, uid),
                        _RETRY_SECONDS,
                    )
                    for uid in unserved_claims(snapshot, lost)
                ),
                *(
                    BackgroundTask(
                        f"end namespace {namespace.name}",
                        partial(prepared_claims.end_unknown, namespace),
                        _RETRY_SECONDS,
                    )
                    for namespace in orphaned_namespaces(snapshot, unreadable)
                ),
            ],
        )

    def _note_failures(self, snapshot: MpsSnapshot, lost: Collection[MpsNamespaceName]) -> None:
        """For the status of claims. One that was not served at the last look either was not merely
        prepared while the agent was asked."""
        unserved = frozenset(unserved_claims(snapshot, lost))
        failures = server_failures(snapshot, lost, unserved & self._unserved)
        self._unserved = unserved
        if failures != self._parts.mps_failures:
            self._parts.mps_failures = failures
            self._parts.health_changed()

    def _report_restarts(self, snapshot: MpsSnapshot) -> None:
        incidents = snapshot.status.incidents
        for incident in new_restarts(incidents, self._last_restart, self._host.epoch()):
            if self._last_restart is not None:  # one that an earlier process counted is no new one
                self._metrics.mps_restarted()
            facts = {"server": incident.server, "reason": incident.reason}
            log.warning("an MPS server was restarted", extra=facts)
            for namespace in snapshot.namespaces:
                if namespace.name in incident.namespaces:
                    message = server_restarted_message(incident, namespace)
                    self._send_event(namespace, "MPSServerRestarted", incident.server, message)
        self._last_restart = last_restart(incidents)

    def _send_event(self, namespace: ClaimNamespace, reason: str, about: str, message: str) -> None:
        for pod in namespace.pods:
            ref = PodRef(namespace.claim.namespace, pod.name, pod.uid)
            self._parts.events.emit(Event(ref, reason, f"{about} {namespace.claim}", message))

    def _agent_answered(self) -> None:
        if self._down_since is not None:
            log.info("the MPS agent answers again")
        self._down_since, self._down_reported = None, False
        self._metrics.mps_agent(True)

    def _agent_down(self, error: str) -> None:
        """Claims go on as they are. Their pods get no event while the agent is only replaced."""
        namespaces = claim_namespaces(self._records)
        self._metrics.mps_agent(False)
        self._metrics.mps_uses(mps_usages(namespaces))
        if not namespaces and self._last_restart is None:
            self._serves = False  # it never answered, and nobody needs it
            return
        now = self._host.clock()
        if self._down_since is None:
            log.warning("the MPS agent of this node does not answer", extra={"error": error})
            self._down_since = now
        if now - self._down_since >= _DOWN_SECONDS and not self._down_reported:
            self._down_reported = True
            for namespace in namespaces:
                message = agent_down_message(namespace, _DOWN_SECONDS, error)
                self._send_event(namespace, "MPSAgentDown", "agent", message)


def _clients_by_pod(snapshot: MpsSnapshot) -> Sequence[PodMpsClients]:
    """The clients whose pod is known, by claim and pod."""
    nobody = NamespaceClients()
    return [
        PodMpsClients(namespace.claim, pod, namespace.name, pids)
        for namespace in snapshot.namespaces
        for pod in namespace.pods
        if (pids := snapshot.clients.get(namespace.name, nobody).by_pod.get(pod.uid))
    ]
