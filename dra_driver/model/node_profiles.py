"""NodeProfiles as objects of the API server, and the nodes that they are rolled out to, as values.

What a profile says about GPUs is in ``model.profiles``. Here its *rules* are text that nobody
looks into: the canonical JSON of what nodes are given of ``spec``. Times that are counted are
seconds of a monotonic clock; times that are written are RFC 3339 (``2026-01-31T12:00:00Z``), as the
API server writes them.
"""

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from dra_driver.base.frozen import frozen

MOST_NODES_AT_ONCE = 250
"""In progress in one rollout, whatever ``maxUnavailable`` allows: their names are in its status."""


@frozen
class RolloutRules:
    """How a change reaches the nodes of a profile."""

    max_unavailable: int = 10  # nodes, or percent of the profile's nodes
    in_percent: bool = True
    max_failures: int = 3
    progress_deadline_seconds: float = 600.0
    paused: bool = False

    def nodes_at_once(self, nodes: int) -> int:
        """How many of the profile's *nodes* may be in progress at a time; a part of one is one."""
        limit = -(-nodes * self.max_unavailable // 100) if self.in_percent else self.max_unavailable
        return min(max(limit, 1), MOST_NODES_AT_ONCE)


@frozen
class NodeReport:
    """What the plugin of a node says in the condition ``GPUsConfigured``.

    The profile is a NodeProfile, or of the files where *of_files* says so; then it has no revision.
    """

    profile: str
    revision: str = ""  # empty: of a file, or of a NodeProfile of which none could be read
    of_files: bool = False
    pending: int = 0  # GPUs in use that change when no claim holds them
    pending_gpus: tuple[str, ...] = ()  # their names, or the first of them
    not_possible: str = ""  # what of it is not so on this node, and why
    refusal: str = ""  # why it is not in force; empty: it is


@frozen
class NodeView:
    """What the controller keeps of a Node on which a plugin ran."""

    name: str
    uid: str
    resource_version: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ready: bool = True
    given: str | None = None  # the annotation: a revision, "" for no NodeProfile, None for no word
    report: NodeReport | None = None  # None: the condition cannot be read


class ConditionType(StrEnum):
    """Conditions in the status of a NodeProfile."""

    COMPLETE = "Complete"  # every node of the profile has the revision in force
    PROGRESSING = "Progressing"
    TIED = "Tied"  # another profile of the same priority matches one of the nodes
    SLOWS_SCHEDULER = "SlowsScheduler"


class ProgressReason(StrEnum):
    """The reason of the condition ``Progressing``: how far the rollout is, in one word."""

    ROLLING_OUT = "RollingOut"
    COMPLETE = "Complete"
    PAUSED = "Paused"
    TOO_MANY_FAILURES = "TooManyFailures"
    WAITING_FOR_NODES = "WaitingForNodes"  # only failed nodes, or such that are not ready, are left
    NO_NODES = "NoNodes"
    UNREADABLE = "Unreadable"  # the profile says something that this release does not know


@frozen
class ProfileCondition:
    """One of the ``status.conditions``, a ``metav1.Condition``."""

    type: str
    status: bool
    reason: str
    message: str
    last_transition: str  # RFC 3339: since when the status is what it is
    observed_generation: int = 0


@frozen
class NodeFailure:
    """A node on which the update revision failed, and why."""

    node: str
    reason: str


@frozen
class ProfileStatus:
    """The status of a NodeProfile. Counts are of nodes, except *pending*."""

    observed_generation: int = 0
    current_revision: str = ""  # the last one that every node had; empty: none yet
    update_revision: str = ""  # of the spec
    nodes: int = 0  # that the profile holds for
    updated: int = 0  # on which the update revision is in force
    pending: int = 0  # GPUs in use that change when no claim holds them
    failed: int = 0
    updating: tuple[str, ...] = ()  # names, sorted: may be given the update revision
    failures: tuple[NodeFailure, ...] = ()  # the first ones, by name of the node
    conditions: tuple[ProfileCondition, ...] = ()

    def condition(self, type_: ConditionType) -> ProfileCondition | None:
        """The condition of this type, if there is one."""
        return next((each for each in self.conditions if each.type == type_), None)


@frozen
class NodeProfileObject:
    """A NodeProfile of the API server.

    One that cannot be read has a *problem* and holds for no node; nodes that have one of its
    revisions keep it.
    """

    name: str
    uid: str
    resource_version: str
    generation: int = 0
    created: str = ""  # RFC 3339
    deleting: bool = False
    rules: str = "{}"  # canonical JSON
    revision: str = ""  # the name of the revision that *rules* amount to
    node_selector: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0
    rollout: RolloutRules = RolloutRules()
    revision_history_limit: int = 10
    status: ProfileStatus = ProfileStatus()
    problem: str = ""


@frozen
class Revision:
    """A ControllerRevision that keeps what nodes are given of the spec of a NodeProfile."""

    name: str
    profile: str
    number: int  # the highest of a profile is that of its spec
    rules: str  # canonical JSON
    owner_uid: str  # of the NodeProfile
    resource_version: str = ""
    created: str = ""  # RFC 3339


@frozen
class RevisionChange:
    """A ControllerRevision to create, or one that exists and gets another number."""

    revision: Revision  # as it shall be; with the resource version of the one that exists
    exists: bool


@frozen
class NodeChange:
    """The annotation that a Node gets, if it still has the resource version it was decided with."""

    node: str
    uid: str
    resource_version: str
    revision: str | None  # None: the annotation is removed


@frozen
class GivenSince:
    """Since when the leader has seen that a node was given a revision. Seconds."""

    revision: str
    seconds: float


@frozen
class Decision:
    """What is written next for one NodeProfile; decided again after every change of the cluster.

    No write counts on another one of the same decision, so that the order does not matter and each
    can fail for itself. Every one has the resource version of what it was decided with; a conflict
    is no error.
    """

    status: ProfileStatus  # written where it is not that of the profile
    revision: RevisionChange | None = None
    nodes: tuple[NodeChange, ...] = ()
    old_revisions: tuple[Revision, ...] = ()  # to delete
    given_since: Mapping[str, GivenSince] = field(default_factory=dict)  # by node, for the next one
    again_in: float | None = None  # seconds: a deadline passes then; None: none is waited for
