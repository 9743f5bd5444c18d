"""How the revision of a NodeProfile reaches its nodes: what the controller writes next.

Decided from what the cluster looks like, again and again; nothing is remembered but since when the
leader has seen that a node was given a revision. A node gets the update revision in two steps: its
name goes into ``status.updating``, and once it is seen there, the annotation of the Node is
written. So whoever leads next counts every node that an earlier leader, which was paused and goes
on, may still write to. Such a write fails once the Node has been written since. Therefore a name
leaves ``status.updating`` only when the Node was written, or changed so that it fails:

* it was given the update revision, and reported (or failed to, in time),
* it became not ready before it was given anything, and nothing is given to such nodes,
* it is gone, or another profile holds there.

Where ``spec`` went back to what a named node has, it need not be given anything: its annotation is
removed and then written again.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace

from dra_driver.base.frozen import frozen
from dra_driver.model.node_profiles import (
    MOST_NODES_AT_ONCE,
    ConditionType,
    Decision,
    GivenSince,
    NodeChange,
    NodeFailure,
    NodeProfileObject,
    NodeView,
    ProfileCondition,
    ProfileStatus,
    ProgressReason,
    Revision,
    RolloutRules,
)
from dra_driver.plan.profiles.revisions import old_revisions, profile_of_revision, revision_change

MOST_FAILURES_NAMED = 10
_LONGEST_REASON = 256  # characters, of a failure


@frozen
class Surroundings:
    """What a profile's rollout depends on, beside the profile."""

    nodes: Sequence[NodeView]  # that it holds for
    revisions: Sequence[Revision]  # of profiles of this name
    revisions_in_use: frozenset[str] = frozenset()  # ``revisions_in_use`` of all nodes
    ties: frozenset[str] = frozenset()  # names of other profiles
    slows_scheduler: str = ""  # why; empty: it does not


@frozen
class Moment:
    """Now, and what the leader saw before."""

    seconds: float  # of a monotonic clock
    written: str  # RFC 3339
    given_since: Mapping[str, GivenSince] = field(default_factory=dict)  # of the last decision


@frozen
class WithoutProfile:
    """What is written to nodes for which no NodeProfile holds any more."""

    nodes: tuple[NodeChange, ...]
    given_since: Mapping[str, GivenSince]  # by node, for the next one
    again_in: float | None  # seconds: a deadline passes then; None: none is waited for


def revisions_in_use(nodes: Iterable[NodeView]) -> frozenset[str]:
    """The revisions that a node was given or reports."""
    given = {node.given for node in nodes if node.given}
    return frozenset(given | {node.report.revision for node in nodes if node.report})


def decide_rollout(profile: NodeProfileObject, around: Surroundings, now: Moment) -> Decision:
    """What is written next for *profile*, which is not being deleted."""
    if profile.problem:
        return Decision(_unreadable(profile, now))
    owned = [each for each in around.revisions if _is_of(profile, each)]
    revision = revision_change(profile, owned)
    count = _Count(profile, now)
    for node in around.nodes:
        count.add(node)
    taken_back = _taken_back(profile, count)
    if taken_back:
        return Decision(
            profile.status,
            revision,
            tuple(_change(node, None) for node in taken_back),
            given_since=count.given_since,
            again_in=count.again_in(),
        )
    if not _is_stopped(profile, count):  # then nobody tries to write them
        count.add_unwritten()
    is_kept = any(each.name == profile.revision for each in owned)
    status = _status(profile, count, around, now)
    return Decision(
        status,
        revision,
        _changes(profile, count) if is_kept else (),
        _unneeded(profile, status, owned, around.revisions_in_use),
        count.given_since,
        count.again_in(),
    )


def _is_of(profile: NodeProfileObject, revision: Revision) -> bool:
    """The revision of the spec may have no owner, from an earlier profile of this name that was
    deleted without its revisions (``--cascade=orphan``). Then nobody else can create it."""
    if not revision.owner_uid:
        return revision.name == profile.revision
    return revision.owner_uid == profile.uid


def decide_without_profile(
    nodes: Sequence[NodeView], now: Moment, rules: RolloutRules | None = None
) -> WithoutProfile:
    """Tell *nodes*, for which no NodeProfile holds, a few at a time, that the files hold there."""
    rules = rules or RolloutRules()
    waits = _Waits(rules, now)
    waiting: list[NodeView] = []
    concerned = moving = 0
    for node in nodes:
        follows = node.report is not None and not node.report.of_files
        concerned += follows or node.given is not None
        if node.given or (node.given is None and follows):
            waiting.append(node)
        elif follows:
            moving += waits.is_in_time(node)
    slots = max(rules.nodes_at_once(concerned) - moving, 0)
    first = heapq.nsmallest(slots, waiting, key=_name)
    changes = tuple(_change(node, "") for node in first)
    return WithoutProfile(changes, waits.given_since, waits.again_in())


class _Waits:
    """Since when each node has been given what it does not report."""

    def __init__(self, rules: RolloutRules, now: Moment) -> None:
        self._deadline = rules.progress_deadline_seconds
        self._now = now
        self._times: list[float] = []
        self.given_since: dict[str, GivenSince] = {}

    def is_in_time(self, node: NodeView) -> bool:
        """Whether the deadline of *node* is not over yet."""
        given = node.given or ""
        since = self._now.given_since.get(node.name)
        if since is None or since.revision != given:
            since = GivenSince(given, self._now.seconds)
        self.given_since[node.name] = since
        seconds = since.seconds + self._deadline - self._now.seconds
        if seconds > 0:
            self._times.append(seconds)
        return seconds > 0

    def again_in(self) -> float | None:
        return min(self._times, default=None)


class _Count:
    """The nodes of a profile, each in the one state that it is in."""

    def __init__(self, profile: NodeProfileObject, now: Moment) -> None:
        status = profile.status
        self._name = profile.name
        self._target = profile.revision
        self._deadline = profile.rollout.progress_deadline_seconds
        self._not_written = f"its annotation could not be written within {self._deadline:.0f} s"
        self._updating = frozenset(status.updating)
        is_same = status.update_revision == profile.revision
        self._failed_before = {each.node: each for each in status.failures if is_same}
        self._waits = _Waits(profile.rollout, now)
        self.given_since = self._waits.given_since
        self.again_in = self._waits.again_in
        self.nodes = self.updated = self.pending = self.in_progress = self.not_ready = 0
        self.unwritten = 0  # of those in progress: they have failed as well
        self.failures: list[NodeFailure] = []
        self.waiting: list[NodeView] = []
        self.named: list[NodeView] = []  # in status.updating
        self._unwritten: list[NodeView] = []  # named, and not given the revision yet
        self.adopted: list[NodeView] = []  # they took the revision by themselves
        self.updating: list[NodeView] = []  # they stay in status.updating
        self.changing: list[NodeView] = []  # they were given another revision and may take it

    def add(self, node: NodeView) -> None:
        self.nodes += 1
        if node.name in self._updating:
            self.named.append(node)
        if node.report is not None and node.report.revision == self._target:
            self._add_reported(node, node.report.pending, node.report.refusal)
        elif node.given == self._target:
            self._add_given(node)
        elif self._may_take_another(node):
            self._add_in_progress(node)
            self.changing += (node,) if node.ready else ()
        elif not node.ready:
            self.not_ready += 1
        elif node.name in self._updating:
            self._add_in_progress(node)
            self._unwritten.append(node)
        else:
            self.waiting.append(node)

    def is_in_time(self, node: NodeView) -> bool:
        """Whether the deadline of *node* is not over yet."""
        return self._waits.is_in_time(node)

    def add_unwritten(self) -> None:
        """Of the nodes that are named, those whose annotation could not be written in time have
        failed. They keep their place: who was paused may write it yet."""
        for node in self._unwritten:
            if not self.is_in_time(node):
                self.failures.append(NodeFailure(node.name, self._not_written))
                self.unwritten += 1

    def _add_reported(self, node: NodeView, pending: int, refusal: str) -> None:
        is_written = node.given == self._target
        is_named = node.name in self._updating
        if not is_written and (is_named or self._may_take_another(node)):
            self._add_in_progress(node)
        elif refusal:
            self.failures.append(NodeFailure(node.name, refusal[:_LONGEST_REASON]))
        if not refusal:
            self.updated += 1
            self.pending += pending
            self.adopted += () if is_written else (node,)

    def _add_given(self, node: NodeView) -> None:
        is_in_time = self._waits.is_in_time(node)
        failure = self._failed_before.get(node.name)
        if failure and failure.reason != self._not_written:
            self.failures.append(failure)
        elif is_in_time:
            self._add_in_progress(node)
        else:
            reason = f"did not report within {self._deadline:.0f} s"
            self.failures.append(NodeFailure(node.name, reason))

    def _may_take_another(self, node: NodeView) -> bool:
        """Whether it was given another revision of the profile, and its deadline is not over."""
        if not node.given or profile_of_revision(node.given) != self._name:
            return False
        has_it = node.report is not None and node.report.revision == node.given
        return not has_it and self._waits.is_in_time(node)

    def _add_in_progress(self, node: NodeView) -> None:
        self.in_progress += 1
        if node.name in self._updating:
            self.updating.append(node)


def _taken_back(profile: NodeProfileObject, count: _Count) -> list[NodeView]:
    """Named nodes that have what ``spec`` went back to. One that cannot be written in time holds
    the others up no longer; nor can a leader that was paused write to it."""
    if profile.status.update_revision == profile.revision:
        return []
    named = (node for node in count.named if node.given == profile.revision)
    return [node for node in named if count.is_in_time(node)]


def _is_stopped(profile: NodeProfileObject, count: _Count) -> bool:
    return profile.rollout.paused or len(count.failures) >= profile.rollout.max_failures


def _changes(profile: NodeProfileObject, count: _Count) -> tuple[NodeChange, ...]:
    """The annotations that are written now: those of nodes that are named for this revision, and of
    nodes that have it."""
    if profile.status.update_revision != profile.revision:
        return ()
    nodes = {node.name: node for node in count.adopted}
    if not _is_stopped(profile, count):
        named = (node for node in count.updating if node.given != profile.revision)
        nodes |= {node.name: node for node in named if node.ready}
    first = heapq.nsmallest(MOST_NODES_AT_ONCE, nodes)
    return tuple(_change(nodes[name], profile.revision) for name in first)


def _status(
    profile: NodeProfileObject, count: _Count, around: Surroundings, now: Moment
) -> ProfileStatus:
    updating = {node.name for node in count.updating}
    if not _is_stopped(profile, count):
        limit = profile.rollout.nodes_at_once(count.nodes)
        changing = [node for node in count.changing if node.name not in updating]
        slots = limit - (count.in_progress - len(changing))
        new = heapq.nsmallest(max(slots, 0), changing, key=_name)
        new += heapq.nsmallest(max(slots - len(changing), 0), count.waiting, key=_name)
        updating |= {node.name for node in new}
    is_complete = count.updated == count.nodes
    return ProfileStatus(
        observed_generation=profile.generation,
        current_revision=profile.revision if is_complete else profile.status.current_revision,
        update_revision=profile.revision,
        nodes=count.nodes,
        updated=count.updated,
        pending=count.pending,
        failed=len(count.failures),
        updating=tuple(sorted(updating)),
        failures=tuple(heapq.nsmallest(MOST_FAILURES_NAMED, count.failures, key=_failed_node)),
        conditions=tuple(_conditions(profile, count, around, now)),
    )


def _conditions(
    profile: NodeProfileObject, count: _Count, around: Surroundings, now: Moment
) -> Iterable[ProfileCondition]:
    reason = _progress(profile, count)
    message = _message(profile, count, reason)
    is_complete = reason is ProgressReason.COMPLETE
    is_going_on = reason in (
        ProgressReason.ROLLING_OUT,
        ProgressReason.WAITING_FOR_NODES,
        ProgressReason.COMPLETE,
    )
    yield _condition(profile, now, (ConditionType.COMPLETE, is_complete), (reason, message))
    yield _condition(profile, now, (ConditionType.PROGRESSING, is_going_on), (reason, message))
    if around.ties:
        names = ", ".join(sorted({profile.name, *around.ties}))
        text = f"profiles of one priority select the same nodes: {names}; the oldest holds there"
        yield _condition(profile, now, (ConditionType.TIED, True), ("SamePriority", text))
    if around.slows_scheduler:
        text = around.slows_scheduler
        slow = (ConditionType.SLOWS_SCHEDULER, True)
        yield _condition(profile, now, slow, ("PartitionsOnManyNodes", text))


def _condition(
    profile: NodeProfileObject, now: Moment, state: tuple[ConditionType, bool], why: tuple[str, str]
) -> ProfileCondition:
    """The condition of a type and status, with its reason and message; its time stays while its
    status does."""
    type_, status = state
    before = profile.status.condition(type_)
    since = before.last_transition if before and before.status == status else now.written
    return ProfileCondition(type_, status, *why, since, profile.generation)


def _progress(profile: NodeProfileObject, count: _Count) -> ProgressReason:
    if not count.nodes:
        return ProgressReason.NO_NODES
    if count.updated == count.nodes:
        return ProgressReason.COMPLETE
    if profile.rollout.paused:
        return ProgressReason.PAUSED
    if len(count.failures) >= profile.rollout.max_failures:
        return ProgressReason.TOO_MANY_FAILURES
    if count.in_progress or count.waiting:
        return ProgressReason.ROLLING_OUT
    return ProgressReason.WAITING_FOR_NODES


def _message(profile: NodeProfileObject, count: _Count, reason: ProgressReason) -> str:
    if reason is ProgressReason.NO_NODES:
        return "no node with GPUs is selected by spec.nodeSelector or names the profile in a label"
    nodes = f"{count.nodes} node{'s' if count.nodes > 1 else ''}"
    parts = [f"revision {profile.revision} is in force on {count.updated} of {nodes}"]
    others = {
        "in progress": count.in_progress - count.unwritten,
        "failed": len(count.failures),
        "not ready": count.not_ready,
        "waiting": len(count.waiting),
    }
    parts += [f"{number} {state}" for state, number in others.items() if number]
    if reason is ProgressReason.TOO_MANY_FAILURES:
        parts.append(f"the rollout stopped at {profile.rollout.max_failures} (maxFailures)")
    return "; ".join(parts)


def _unreadable(profile: NodeProfileObject, now: Moment) -> ProfileStatus:
    why = (ProgressReason.UNREADABLE, f"nodes keep what they have: {profile.problem}"[:1024])
    conditions = tuple(
        _condition(profile, now, (type_, False), why)
        for type_ in (ConditionType.COMPLETE, ConditionType.PROGRESSING)
    )
    return replace(profile.status, observed_generation=profile.generation, conditions=conditions)


def _unneeded(
    profile: NodeProfileObject,
    status: ProfileStatus,
    owned: Sequence[Revision],
    in_use: frozenset[str],
) -> tuple[Revision, ...]:
    named = {
        profile.revision,
        profile.status.current_revision,
        profile.status.update_revision,
        status.current_revision,
    }
    return old_revisions(owned, in_use | named, profile.revision_history_limit)


def _change(node: NodeView, revision: str | None) -> NodeChange:
    return NodeChange(node.name, node.uid, node.resource_version, revision)


def _name(node: NodeView) -> str:
    return node.name


def _failed_node(failure: NodeFailure) -> str:
    return failure.node
