"""How the rollout of a NodeProfile is printed: as a table, or as JSON. Pure."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from dra_driver.base.frozen import frozen
from dra_driver.cli.terminal import format_table
from dra_driver.model.node_profiles import (
    ConditionType,
    NodeProfileObject,
    NodeView,
    Revision,
)
from dra_driver.plan.profiles.report import report_condition
from dra_driver.plan.profiles.revisions import profile_of_revision

_CONTROLLERS = "kubectl get pods --all-namespaces --selector app.kubernetes.io/component=controller"
_MAX_SHOWN = 20  # nodes of each state in the table

FAILED, NOT_READY, UPDATING = "failed", "not ready", "updating"
PENDING, PARTLY = "pending", "partly"  # of those that have the update


@frozen
class NodeLine:
    """A node of which something is to be said."""

    node: str
    state: str
    revision: str  # what it has; empty: none, or not known
    why: str


@frozen
class Rollout:
    """What is known of the rollout of a profile. Without *nodes*, *nodes_problem* says why."""

    profile: NodeProfileObject
    revisions: Sequence[Revision]
    nodes: Sequence[NodeView]
    nodes_problem: str = ""


def rollout_text(rollout: Rollout, now: float) -> str:
    """For people. *now*: seconds since the epoch."""
    parts = [
        "\n".join(_messages(rollout)),
        _profile_table(rollout.profile, now),
        _node_table(node_lines(rollout)),
        _revision_table(rollout, now),
    ]
    return "\n\n".join(part for part in parts if part)


def rollout_json(rollout: Rollout) -> str:
    """For programs, as ``cli.profile.run`` says."""
    profile, status = rollout.profile, rollout.profile.status
    document = {
        "name": profile.name,
        "generation": profile.generation,
        "observedGeneration": status.observed_generation,
        "paused": profile.rollout.paused,
        "nodes": status.nodes,
        "updated": status.updated,
        "pending": status.pending,
        "failed": status.failed,
        "conditions": [
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message,
            }
            for condition in status.conditions
        ],
        "nodeStates": None
        if rollout.nodes_problem
        else [
            {"node": line.node, "state": line.state, "revision": line.revision, "why": line.why}
            for line in node_lines(rollout)
        ],
        "revisions": [
            {
                "number": revision.number,
                "name": revision.name,
                "created": revision.created,
                "current": revision.name == status.current_revision,
                "update": revision.name == profile.revision,
            }
            for revision in _newest_first(rollout.revisions)
        ],
    }
    return json.dumps(document, indent=2)


def node_lines(rollout: Rollout) -> list[NodeLine]:
    """The nodes of which something is to be said: those that failed first, then by name."""
    profile = rollout.profile
    reasons = {failure.node: failure.reason for failure in profile.status.failures}
    lines = {name: NodeLine(name, FAILED, "", why) for name, why in reasons.items()}
    for node in rollout.nodes:
        if not _is_of_profile(node, profile):
            continue
        report = node.report  # a refusal does not say what the node has instead
        revision = report.revision if report and not report.refusal else ""
        if node.name in reasons:
            lines[node.name] = replace(lines[node.name], revision=revision)
        elif found := _state(node, profile):
            lines[node.name] = NodeLine(node.name, found[0], revision, found[1])
    order = (FAILED, NOT_READY, UPDATING, PENDING, PARTLY)
    return sorted(lines.values(), key=lambda line: (order.index(line.state), line.node))


def _is_of_profile(node: NodeView, profile: NodeProfileObject) -> bool:
    """Whether it has a revision of the profile, or is being given one."""
    if (
        node.name in profile.status.updating
        or profile_of_revision(node.given or "") == profile.name
    ):
        return True
    return bool(node.report and not node.report.of_files and node.report.profile == profile.name)


def _state(node: NodeView, profile: NodeProfileObject) -> tuple[str, str] | None:
    """The state of a node, and why; None: nothing is to be said of it."""
    report = node.report
    if report and report.revision == profile.revision:
        if report.refusal:
            return FAILED, report.refusal
        outcome = report_condition(report).message.partition(": ")[2]
        state = PENDING if report.pending else PARTLY if report.not_possible else ""
        return (state, outcome) if state else None
    if not node.ready:
        return NOT_READY, "it gets the update when it is Ready"
    if node.name in profile.status.updating:
        return UPDATING, "it has not reported yet"
    return None


def _messages(rollout: Rollout) -> Iterator[str]:
    profile, status = rollout.profile, rollout.profile.status
    progressing = status.condition(ConditionType.PROGRESSING)
    if status.observed_generation < profile.generation:
        yield (
            f'NodeProfile "{profile.name}": the controller has not seen the last change yet '
            f"(generation {profile.generation}; it has seen {status.observed_generation}); if that "
            f"lasts, see whether it runs: {_CONTROLLERS}"
        )
    elif progressing:
        yield f'NodeProfile "{profile.name}": {progressing.message or progressing.reason}'
    for type_ in (ConditionType.TIED, ConditionType.SLOWS_SCHEDULER):
        condition = status.condition(type_)
        if condition and condition.status:
            yield condition.message
    if profile.problem:
        yield profile.problem
    if rollout.nodes_problem:
        yield f"The nodes are not listed: {rollout.nodes_problem}"


def _profile_table(profile: NodeProfileObject, now: float) -> str:
    """The columns of ``kubectl get nodeprofiles``."""
    status = profile.status
    progressing = status.condition(ConditionType.PROGRESSING)
    return format_table(
        ("NAME", "NODES", "UPDATED", "PENDING", "FAILED", "STATUS", "AGE"),
        [
            (
                profile.name,
                *map(str, (status.nodes, status.updated, status.pending, status.failed)),
                progressing.reason if progressing else "",
                age(profile.created, now),
            )
        ],
    )


def _node_table(lines: Sequence[NodeLine]) -> str:
    if not lines:
        return ""
    rows: list[tuple[str, ...]] = []
    shown: dict[str, int] = {}
    for line in lines:
        shown[line.state] = shown.get(line.state, 0) + 1
        if shown[line.state] <= _MAX_SHOWN:
            rows.append((line.node, line.state, line.revision or "-", line.why))
    hidden = [
        f"and {number - _MAX_SHOWN} more {state} (-o json names all)"
        for state, number in shown.items()
        if number > _MAX_SHOWN
    ]
    return "\n".join([format_table(("NODE", "STATE", "HAS", "WHY"), rows), *hidden])


def _revision_table(rollout: Rollout, now: float) -> str:
    profile = rollout.profile
    rows = [
        (
            str(revision.number),
            revision.name,
            age(revision.created, now),
            ", ".join(_uses(revision, profile)),
        )
        for revision in _newest_first(rollout.revisions)
    ]
    return format_table(("REVISION", "NAME", "AGE", "USED"), rows) if rows else ""


def _uses(revision: Revision, profile: NodeProfileObject) -> Iterator[str]:
    if revision.name == profile.revision:
        yield "update"
    if revision.name == profile.status.current_revision:
        yield "current"


def _newest_first(revisions: Sequence[Revision]) -> list[Revision]:
    return sorted(revisions, key=lambda revision: -revision.number)


_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def age(written: str, now: float) -> str:
    """As kubectl shows it, of a time that is *written* as RFC 3339.

    >>> age("2026-01-31T12:00:00Z", datetime.fromisoformat("2026-01-31T14:30:00Z").timestamp())
    '2h'
    """
    try:
        seconds = max(0, int(now - datetime.fromisoformat(written).timestamp()))
    except ValueError:
        return "-"
    size, unit = next((each for each in _UNITS if seconds >= 2 * each[0]), _UNITS[-1])
    return f"{seconds // size}{unit}"
