"""Lets go of GPUs for a while, so that they can be reset, or their driver be replaced.

An open NVML session holds every GPU of the node, so NVML is closed as a whole, whichever GPUs are
named; only these are tainted. Claims are still unprepared: what needs NVML for that is tried again,
as it is where the driver is away.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from typing import Final

from api.names import RELEASE_ANNOTATION, RELEASED_ANNOTATION
from api.strict import ConfigError
from dra_driver.base.errors import ApiServerError, NodeError
from dra_driver.base.frozen import frozen
from dra_driver.base.threads import UNTIL_WOKEN, Loop
from dra_driver.k8s.api import KubernetesApi
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.health import Fault, Problem
from dra_driver.model.records import ClaimRecord
from dra_driver.node.gpu_node import GpuNode
from dra_driver.plan.health.release import (
    DEFAULT_SECONDS,
    NO_SUCH_GPU,
    Release,
    new_release,
    requested_release,
)
from dra_driver.plan.health.state import after_release
from dra_driver.plugin.health.clear_requests import named_gpus
from dra_driver.plugin.health.monitor import HealthMonitor
from dra_driver.plugin.parts import PluginParts

log = logging.getLogger(__name__)

_AGAIN_SECONDS: Final = 10.0  # the agent is asked again, for it may be another one by now
_SOON_SECONDS: Final = 1.0  # until it is tried again to let go, or to read the GPUs
_AGENT_SECONDS: Final = 60.0  # for which the agent lets go: without a plugin it goes on after that


def start(parts: PluginParts, stack: ExitStack) -> None:
    """A node whose GPUs are released already does not open NVML at all."""
    release = GpuRelease(
        ReleaseDoors(
            parts.api,
            parts.labels,
            parts.node,
            parts.health,
            parts.is_newest,
            parts.scan_soon,
            parts.ledger.records,
        )
    )
    release.begin()
    loop = Loop("gpu-release", release.step, _AGAIN_SECONDS)
    parts.labels.start(loop.soon, 0.0)
    parts.before_publishing.append(loop.start)
    stack.callback(loop.stop)


@frozen
class ReleaseDoors:
    """Whom it asks and tells."""

    api: KubernetesApi
    labels: NodeLabels
    node: GpuNode
    monitor: HealthMonitor
    is_newest: Callable[[], bool]
    scan_soon: Callable[[], None]
    records: Callable[[], Iterable[ClaimRecord]]
    epoch: Callable[[], float] = time.time


class GpuRelease:
    """For one thread."""

    def __init__(self, doors: ReleaseDoors) -> None:
        self._doors = doors
        self._release: Release | None = None  # what is let go of, or about to be
        self._closed = False  # NVML is
        self._problem = ""  # with what is asked for
        self._logged = ""

    def begin(self) -> None:
        """Close NVML before anything opens it, if that is wanted already, and what was released
        before the restart at once: somebody may be resetting it."""
        earlier = self._before_restart()
        if earlier is not None and self._may_last():
            self._close(earlier)
            return
        release, _ = self._wanted()
        if release is not None:
            self._close(release)

    def step(self) -> float | None:
        """Let go, or come back, as is wanted now. The seconds until the next time."""
        release, problem = self._wanted()
        self._note_problem(problem)
        if release is not None:
            return self._let_go(release, problem)
        if self._release is not None:
            self._come_back(self._release)
        return self._return(problem)

    def _wanted(self) -> tuple[Release | None, str]:
        """What is to be let go of now, and what is wrong with what is asked for: then, and while
        the API server is away, an earlier release goes on until its time is over."""
        labels, now = self._doors.labels, self._doors.epoch()
        known = self._release if self._release is not None and now < self._release.ends else None
        earlier = known if known is not None and known.ends < math.inf else None  # no label ended
        try:
            release = requested_release(labels.now(), labels.annotations(), now)
        except ApiServerError:
            return known, ""
        except ConfigError as e:
            return earlier, str(e)
        if release is None:
            return None, ""
        if unknown := self._unknown(release):
            problem = f"{release} {NO_SUCH_GPU}: {', '.join(unknown)}"
            return earlier, problem if earlier is not None or now < release.ends else ""
        return release if now < release.ends else None, ""

    def _unknown(self, release: Release) -> list[str]:
        """The words that name no GPU of this node."""
        gpus = self._doors.node.known_gpus()  # NVML may not be opened for that
        return named_gpus(release.gpus, gpus)[1] if gpus else []

    def _before_restart(self) -> Release | None:
        """What was released, if its time is not over. Ten minutes, where no time is known."""
        now = self._doors.epoch()
        ends = [fault.until or now + DEFAULT_SECONDS for fault in self._faults()]
        if not ends or max(ends) <= now:
            return None
        return new_release(",".join(sorted(self._released())), max(ends))

    def _may_last(self) -> bool:
        """Whether anything is asked for, or nobody tells."""
        labels = self._doors.labels
        try:
            return requested_release(labels.now(), labels.annotations(), 0.0) is not None
        except (ApiServerError, ConfigError):
            return True

    def _let_go(self, release: Release, problem: str) -> float:
        gpus = self._named(release)
        is_newest = self._doors.is_newest()
        if is_newest and (gpus or not self._released()):
            self._tell_monitor(gpus, release.ends)
        waits = self._close(release)
        if is_newest:
            waits = waits or self._ask_agent(gpus, release)
            if problem:  # who asks must not go on as if they were let go of
                known = self._doors.node.known_gpus()
                names = ",".join(gpu.name for gpu in known if gpu.uuid in gpus) or release.gpus
                self._answer(f"{problem}; {names} stays released until {release.until}")
            else:
                self._answer(f"{release} {waits}".strip())
        seconds = _SOON_SECONDS if waits else _AGAIN_SECONDS
        return min(seconds, max(release.ends - self._doors.epoch(), 0.1))

    def _close(self, release: Release) -> str:
        """Close NVML. What that waits for; empty: it is closed."""
        if self._release is None:
            log.info("GPUs are released", extra={"gpus": release.gpus, "until": release.until})
        self._release = release
        if self._closed:
            return ""
        try:
            self._doors.node.release(f"GPUs are released until {release.until}")
        except NodeError as e:
            self._log(str(e))
            return str(e)
        self._closed = True
        return ""

    def _come_back(self, release: Release) -> None:
        log.info("GPUs are not released any more", extra={"gpus": release.gpus})
        self._doors.node.resume()
        self._release, self._closed = None, False
        if self._doors.is_newest():
            self._try_agent((), 0.0)

    def _return(self, problem: str) -> float:
        """End the taint of GPUs that answer again, and then the answer and what asked for it, or
        answer what is wrong with that."""
        if not self._doors.is_newest():
            return _AGAIN_SECONDS
        if released := self._released():
            inventory = self._doors.node.refresh()
            # One that is lost does not come back soon, and has the taint of that.
            waiting = (released & inventory.stale) - dict(inventory.lost).keys()
            self._tell_monitor(waiting, math.inf)
            self._doors.monitor.look_soon()
            self._doors.scan_soon()
            if waiting:
                return _SOON_SECONDS
        if problem:
            self._answer(problem)
            return _AGAIN_SECONDS
        self._logged = ""
        return UNTIL_WOKEN if self._clean_up() else _AGAIN_SECONDS

    def _named(self, release: Release) -> frozenset[GpuUuid]:
        """The GPUs of this node that are named."""
        gpus = self._doors.node.known_gpus()
        named, _ = named_gpus(release.gpus, gpus)
        every = {gpu.uuid for gpu in gpus} if None in named else set()
        return frozenset(every.union(uuid for uuid in named if uuid is not None))

    def _released(self) -> frozenset[GpuUuid]:
        """The GPUs that are said to be released."""
        return frozenset(fault.gpu for fault in self._faults())

    def _faults(self) -> list[Fault]:
        faults = self._doors.monitor.faults
        return [fault for fault in faults if fault.problem is Problem.RELEASED]

    def _tell_monitor(self, gpus: Collection[GpuUuid], ends: float) -> None:
        until = None if ends == math.inf else ends
        if {fault.gpu: fault.until for fault in self._faults()} != dict.fromkeys(gpus, until):
            self._doors.monitor.change(lambda state, now: after_release(state, gpus, until, now))

    def _ask_agent(self, gpus: Collection[GpuUuid], release: Release) -> str:
        """Have MPS servers over *gpus* end. What that waits for; empty: nothing."""
        over = frozenset(gpus).union(  # MIG instances have MPS servers of their own
            *(gpu.uuids for gpu in self._doors.node.inventory().gpus if gpu.uuid in gpus)
        )
        until = min(release.ends, self._doors.epoch() + _AGENT_SECONDS)
        why = self._try_agent(over, until)
        if self._doors.node.mps is None:
            return ""
        try:
            servers = self._doors.node.mps.status().servers
        except NodeError as e:  # an agent that never served anything is in nobody's way
            return (why or str(e)) if self._is_served(over) else ""
        concerned = [each for each in servers if not over.isdisjoint(each.gpus)]
        if why and concerned:
            return why
        if clients := sum(len(each.clients) for each in concerned):
            return f"{clients} clients of MPS servers have to end"
        return "MPS servers have to end" if any(each.ready for each in concerned) else ""

    def _is_served(self, gpus: Collection[GpuUuid]) -> bool:
        """Whether a claim is under MPS on any of *gpus*."""
        return any(
            not set(namespace.gpus).isdisjoint(gpus)
            for record in self._doors.records()
            for namespace in record.namespaces
        )

    def _try_agent(self, gpus: Collection[GpuUuid], until: float) -> str:
        """Why the agent does not do it; empty: it does, or there is none."""
        if self._doors.node.mps is None:
            return ""
        try:
            self._doors.node.mps.let_go(gpus, until)
        except NodeError as e:
            self._log(str(e))
            return str(e)
        return ""

    def _answer(self, answer: str) -> None:
        """Have *answer* on the Node."""
        try:
            if self._doors.labels.annotations().get(RELEASED_ANNOTATION) != answer:
                self._patch({RELEASED_ANNOTATION: answer})
        except ApiServerError as e:
            self._log(f"annotation {RELEASED_ANNOTATION} of the Node cannot be written: {e}")

    def _clean_up(self) -> bool:
        """Remove our answer, and a request whose time is over. Whether nothing of it is left."""
        try:
            there = self._doors.labels.annotations()
        except ApiServerError:
            return False
        try:
            is_over = RELEASE_ANNOTATION in there
            if RELEASED_ANNOTATION not in there and not is_over:
                return True
            answer = dict.fromkeys([RELEASED_ANNOTATION])
            if not is_over:
                self._patch(answer)
                return True
            metadata = self._doors.api.get(self._path)["metadata"]
            if metadata["annotations"].get(RELEASE_ANNOTATION) == there[RELEASE_ANNOTATION]:
                version = metadata["resourceVersion"]  # Conflict: another one may have come
                self._patch(answer | dict.fromkeys([RELEASE_ANNOTATION]), version)
        except ApiServerError as e:
            self._log(f"annotation {RELEASED_ANNOTATION} of the Node cannot be removed: {e}")
            return False
        return True

    @property
    def _path(self) -> str:
        return f"/api/v1/nodes/{self._doors.labels.node}"

    def _patch(self, annotations: dict[str, str | None], version: str = "") -> None:
        metadata: dict[str, object] = {"annotations": annotations}
        if version:
            metadata["resourceVersion"] = version
        self._doors.api.patch(self._path, {"metadata": metadata})

    def _note_problem(self, problem: str) -> None:
        """What is wrong with what is asked for: once, as long as it is the same."""
        if problem and problem != self._problem:
            facts = {"error": f"annotation {RELEASE_ANNOTATION}: {problem}"}
            log.warning("GPUs cannot be released as wanted", extra=facts)
        self._problem = problem

    def _log(self, problem: str) -> None:
        """Once, as long as it is the same."""
        if problem != self._logged:
            log.warning("GPUs cannot be released as wanted", extra={"error": problem})
        self._logged = problem
