"""Decides about all NodeProfiles again and again, and has what was decided written.

A round looks at everything that is followed: what 5,000 nodes amount to is decided in some ten
milliseconds. The writes of a profile are made beside the rounds, so that one whose writes fail or
hang holds up no other. A profile is decided anew when its writes have ended and are seen in what is
followed.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import DriverError
from dra_driver.base.frozen import frozen
from dra_driver.base.threads import Loop, StandingThreads
from dra_driver.controller.cluster import ClusterView, FollowedCluster, ServerVersion
from dra_driver.controller.events import ProfileEvents
from dra_driver.controller.metrics import ControllerMetrics
from dra_driver.controller.writes import ControllerWrites, Kind, NotLeading, ObjectVersion
from dra_driver.k8s.events import timestamp
from dra_driver.model.node_profiles import (
    Decision,
    GivenSince,
    NodeProfileObject,
    ProfileStatus,
    Revision,
)
from dra_driver.plan.profiles.rollout import (
    Moment,
    Surroundings,
    decide_rollout,
    decide_without_profile,
    revisions_in_use,
)
from dra_driver.plan.profiles.scheduler_cost import slow_scheduler_warnings
from dra_driver.plan.profiles.selection import Assignment, assign_nodes

log = logging.getLogger(__name__)

_MOST_PROFILES: Final = 16  # whose writes are made at the same time
_MOST_WRITES: Final = 16  # to Nodes at the same time
_WITHOUT_PROFILE: Final = ""  # stands for the nodes for which no profile holds


@frozen
class RolloutIntervals:
    """How soon things happen again, in seconds."""

    round: float = 0.2  # what changes within it is decided on together
    status: float = 1.0  # between two writes of the status of a profile
    seen: float = 5.0  # in which a write has to be seen in what is followed
    first_retry: float = 0.5  # after a write of a profile failed
    last_retry: float = 30.0
    longest: float = 60.0  # between two rounds, whatever changes


@frozen
class RolloutParts:
    """What the rounds work with."""

    cluster: FollowedCluster
    writes: ControllerWrites
    leads: Callable[[], bool]
    server_version: ServerVersion
    events: ProfileEvents
    metrics: ControllerMetrics


@frozen
class _Written:
    """What came of the writes for one profile."""

    unseen: tuple[ObjectVersion, ...] = ()  # as they were before
    error: DriverError | None = None  # the first one


@dataclass(slots=True)
class _Progress:
    """What is remembered of one profile from round to round, as long as this process leads."""

    backoff: Backoff
    given_since: Mapping[str, GivenSince] = field(default_factory=dict)
    writing: Future[_Written] | None = None
    unseen: tuple[ObjectVersion, ...] = ()
    decide_at: float = 0.0  # on the monotonic clock, whatever is not seen by then
    retry_at: float = 0.0
    status_at: float = 0.0
    logged: str = ""


class RolloutLoop:
    """Rolls the profiles out while this process leads. Only its own thread decides."""

    def __init__(self, parts: RolloutParts, intervals: RolloutIntervals | None = None) -> None:
        self._parts = parts
        self._intervals = intervals or RolloutIntervals()
        self._progress: dict[str, _Progress] = {}  # by UID
        self._awaited: frozenset[tuple[Kind, str]] = frozenset()
        self._profile_threads = StandingThreads("rollout", _MOST_PROFILES)
        self._node_threads = StandingThreads("rollout-node", _MOST_WRITES)
        self._stopping = threading.Event()
        self.rounds = 0  # that have begun
        self._round_at = time.monotonic()
        self._loop = Loop("rollouts", self._round, self._intervals.longest)

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._stopping.set()
        self._loop.stop()
        self._loop.join(1.0)

    @property
    def alive(self) -> bool:
        return self._loop.alive

    def soon(self) -> None:
        """Decide again: whether this process leads has changed."""
        self._loop.soon()

    def note_change(self, kind: Kind, name: str, is_other: bool) -> None:
        """Decide again, if the change matters: kubelets write to their Nodes all the time."""
        if is_other or (kind, name) in self._awaited:
            self._loop.soon()

    def is_writing(self) -> bool:
        """Whether writes are under way, or not seen yet."""
        return any(each.writing or each.unseen for each in tuple(self._progress.values()))

    def stuck_seconds(self) -> float:
        """For how long no round has begun."""
        return time.monotonic() - self._round_at

    def _round(self) -> float | None:
        self._stopping.wait(self._intervals.round)
        self.rounds += 1
        self._round_at = time.monotonic()
        if not self._parts.leads():
            self._progress = {}
            self._parts.metrics.statuses = {}
            return None
        if self._parts.cluster.problem():
            return 1.0
        seconds = self._decide_all(self._parts.cluster.now())
        self._awaited = frozenset(
            (version.kind, version.name)
            for progress in self._progress.values()
            for version in progress.unseen
        )
        return max(seconds, 0.001)

    def _decide_all(self, view: ClusterView) -> float:
        """In how many seconds to decide again."""
        profiles = sorted(view.profiles.values(), key=lambda profile: profile.name)
        assignment = assign_nodes(profiles, view.nodes.values())
        uids = {profile.uid for profile in profiles} | {_WITHOUT_PROFILE}
        self._progress = {uid: each for uid, each in self._progress.items() if uid in uids}
        around = self._surroundings(view, profiles, assignment)
        statuses: dict[str, ProfileStatus] = {}
        seconds = self._intervals.longest
        for profile in profiles:
            if profile.deleting:
                continue
            statuses[profile.name] = profile.status
            try:
                seconds = min(seconds, self._decide(view, profile, around[profile.name]))
            except Exception:  # a fault of ours: the other profiles go on
                log.exception("a profile was not decided", extra={"profile": profile.name})
                progress = self._progress_of(profile.uid)
                wait = progress.backoff.next_seconds()
                progress.retry_at = time.monotonic() + wait
                seconds = min(seconds, wait)
        self._parts.metrics.statuses = statuses
        return min(seconds, self._decide_without_profile(view, assignment))

    def _surroundings(
        self, view: ClusterView, profiles: Sequence[NodeProfileObject], assignment: Assignment
    ) -> Mapping[str, Surroundings]:
        revisions: dict[str, list[Revision]] = {}
        for revision in view.revisions.values():
            revisions.setdefault(revision.profile, []).append(revision)
        in_use = revisions_in_use(view.nodes.values())
        minor = self._parts.server_version.minor()
        warnings = slow_scheduler_warnings(profiles, assignment.nodes, minor)
        return {
            profile.name: Surroundings(
                assignment.nodes[profile.name],
                revisions.get(profile.name, ()),
                in_use,
                assignment.ties.get(profile.name, frozenset()),
                warnings.get(profile.name, ""),
            )
            for profile in profiles
        }

    def _decide(self, view: ClusterView, profile: NodeProfileObject, around: Surroundings) -> float:
        progress = self._progress_of(profile.uid)
        seconds = self._seconds_until_free(progress, view, profile.name)
        if seconds > 0:
            return seconds
        now = time.monotonic()
        decision = decide_rollout(profile, around, Moment(now, timestamp(), progress.given_since))
        progress.given_since = decision.given_since
        again_in = self._intervals.longest if decision.again_in is None else decision.again_in
        writes_status = decision.status != profile.status
        if writes_status and now < progress.status_at:
            again_in = min(again_in, progress.status_at - now)
            writes_status = False
        writes = _writes_of(self._parts, profile, decision, writes_status)
        if writes_status:
            progress.status_at = now + self._intervals.status
        if writes or decision.nodes:
            self._write(progress, writes, decision)
        return again_in

    def _decide_without_profile(self, view: ClusterView, assignment: Assignment) -> float:
        """Tell nodes for which no profile holds any more."""
        progress = self._progress_of(_WITHOUT_PROFILE)
        seconds = self._seconds_until_free(progress, view, "nodes without a NodeProfile")
        if seconds > 0:
            return seconds
        moment = Moment(time.monotonic(), timestamp(), progress.given_since)
        decision = decide_without_profile(assignment.without_profile, moment)
        progress.given_since = decision.given_since
        if decision.nodes:
            self._write(progress, [], Decision(ProfileStatus(), nodes=decision.nodes))
        return self._intervals.longest if decision.again_in is None else decision.again_in

    def _progress_of(self, uid: str) -> _Progress:
        if uid not in self._progress:
            waits = (self._intervals.first_retry, self._intervals.last_retry)
            self._progress[uid] = _Progress(Backoff(*waits))
        return self._progress[uid]

    def _seconds_until_free(self, progress: _Progress, view: ClusterView, name: str) -> float:
        """How long nothing is to be decided, since what was written is not known yet."""
        if progress.writing is not None:
            if not progress.writing.done():
                return self._intervals.longest  # its end wakes us
            writing, progress.writing = progress.writing, None
            self._finish(progress, writing.result(), name)
        progress.unseen = tuple(
            version for version in progress.unseen if not view.has_changed(version)
        )
        now = time.monotonic()
        return max(progress.retry_at, progress.decide_at if progress.unseen else 0.0) - now

    def _finish(self, progress: _Progress, written: _Written, name: str) -> None:
        now = time.monotonic()
        progress.unseen = written.unseen
        progress.decide_at = now + self._intervals.seen
        if written.unseen or written.error is None:
            progress.backoff.reset()  # one node that refuses its annotation slows no other down
        if written.error is None:
            progress.logged = ""
        elif not isinstance(written.error, NotLeading):
            seconds = progress.backoff.next_seconds()
            progress.retry_at = now + seconds
            if str(written.error) != progress.logged:
                facts = {"profile": name, "error": str(written.error)}
                log.warning("cannot be written, trying again", extra=facts)
                progress.logged = str(written.error)

    def _write(
        self, progress: _Progress, writes: Sequence[Callable[[], ObjectVersion]], decision: Decision
    ) -> None:
        def write() -> _Written:
            outcomes = [_attempt(each) for each in writes]
            nodes = [
                self._node_threads.submit(_attempt, partial(self._parts.writes.node, change))
                for change in decision.nodes
            ]
            outcomes += [node.result() for node in nodes]
            unseen = tuple(each for each in outcomes if isinstance(each, ObjectVersion))
            errors = (each for each in outcomes if isinstance(each, DriverError))
            return _Written(unseen, next(errors, None))

        progress.writing = self._profile_threads.submit(write)
        progress.writing.add_done_callback(lambda _: self._loop.soon())


def _writes_of(
    parts: RolloutParts, profile: NodeProfileObject, decision: Decision, writes_status: bool
) -> list[Callable[[], ObjectVersion]]:
    """Those to anything but Nodes, in their order."""
    writes: list[Callable[[], ObjectVersion]] = []
    if decision.revision is not None:
        writes.append(partial(parts.writes.revision, decision.revision))
    if writes_status:
        tell = partial(parts.events.tell, profile, decision.status)
        writes.append(partial(parts.writes.status, profile, decision.status, tell))
    writes += [partial(parts.writes.deletion, old) for old in decision.old_revisions]
    return writes


def _attempt(write: Callable[[], ObjectVersion]) -> ObjectVersion | DriverError:
    try:
        return write()
    except DriverError as error:
        return error
