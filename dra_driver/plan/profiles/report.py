"""What a node reports in its condition ``GPUsConfigured``, and what the controller keeps of a Node.

The plugin writes the condition, the controller reads it. The message is for people, and nothing but
the message has the names, so that it is read back::

    NodeProfile a, revision a-5d8fbz7k2x: in force
    NodeProfile a, revision a-5d8fbz7k2x: 1 GPU changes when no claim holds it: gpu-0
    NodeProfile a, revision a-5d8fbz7k2x: refused: <why>
    profile default of the files: in force
    profile default of the files: in force; not possible: gpu-2: <why>
"""

import re
from dataclasses import replace
from sys import intern
from typing import Any

import pydantic
from pydantic import Field

from api.names import GPUS_CONFIGURED, PROFILE_REVISION_ANNOTATION
from api.strict import ConfigError, problem_message, show_name
from dra_driver.model.node_profiles import NodeReport, NodeView
from dra_driver.plan.node_conditions import (
    LONGEST_MESSAGE,
    NodeCondition,
    bounded,
    first_names,
)
from dra_driver.plan.profiles.revisions import ApiDocument, ObjectMetadata

_PROFILE_IN_FORCE = "ProfileInForce"
_GPUS_PENDING = "GPUsPending"
_PARTLY_IN_FORCE = "ProfilePartlyInForce"
_PROFILE_REFUSED = "ProfileRefused"
_IN_FORCE = "in force"
_REFUSED = "refused: "
_NOT_POSSIBLE = "; not possible: "
_LONGEST_NOT_POSSIBLE = 512
_NO_REASON = "no reason is given"
_MESSAGE = re.compile(
    r"(?:NodeProfile (?P<profile>\S+?)(?:, revision (?P<revision>\S+))?"
    r"|profile (?P<file>.+?) of the files): (?P<outcome>.*)",
    re.DOTALL,
)
_PENDING = re.compile(
    r"(?P<count>[0-9]{1,9}) GPUs? changes? when no claim holds (?:it|them)(?:: (?P<gpus>.*))?",
    re.DOTALL,
)
_MORE = re.compile(r" and [0-9]+ more$")


class _ReportedCondition(ApiDocument):
    type: str
    status: str
    message: str = ""


class _NodeStatus(ApiDocument):
    conditions: list[Any] | None = None


class _Node(ApiDocument):
    metadata: ObjectMetadata
    status: _NodeStatus = Field(default_factory=_NodeStatus)


def report_condition(report: NodeReport) -> NodeCondition:
    """The condition that says *report*: at most LONGEST_MESSAGE characters, the number of pending
    GPUs always among them."""
    name = show_name(report.profile)
    if report.of_files:
        head = f"profile {name} of the files: "
    elif report.revision:
        head = f"NodeProfile {name}, revision {show_name(report.revision)}: "
    else:
        head = f"NodeProfile {name}: "
    room = LONGEST_MESSAGE - len(head)
    if report.refusal:
        refusal = bounded(_REFUSED + report.refusal, room)
        return NodeCondition("False", _PROFILE_REFUSED, head + refusal)
    tail = (
        bounded(_NOT_POSSIBLE + report.not_possible, _LONGEST_NOT_POSSIBLE)
        if report.not_possible
        else ""
    )
    if report.pending:
        pending = _pending(report, room - len(tail))
        return NodeCondition("True", _GPUS_PENDING, head + pending + tail)
    reason = _PARTLY_IN_FORCE if tail else _PROFILE_IN_FORCE
    return NodeCondition("True", reason, head + _IN_FORCE + tail)


def read_report(condition: Any) -> NodeReport | None:
    """The report that *condition*, a part of a Node, says. None: it says none."""
    try:
        parsed = _ReportedCondition.model_validate(condition)
    except pydantic.ValidationError:
        return None
    match = _MESSAGE.fullmatch(parsed.message)
    if not match or parsed.status not in ("True", "False"):
        return None
    report = NodeReport(
        profile=intern(match["profile"] or match["file"]),
        revision=intern(match["revision"] or ""),
        of_files=match["file"] is not None,
    )
    outcome = match["outcome"]
    if parsed.status == "False":
        return replace(report, refusal=outcome.removeprefix(_REFUSED) or _NO_REASON)
    outcome, _, not_possible = outcome.partition(_NOT_POSSIBLE)
    report = replace(report, not_possible=not_possible)
    if outcome == _IN_FORCE:
        return report
    pending = _PENDING.fullmatch(outcome)
    if not pending:
        return None
    names = _MORE.sub("", pending["gpus"] or "")
    gpus = tuple(names.split(", ")) if names else ()
    return replace(report, pending=int(pending["count"]), pending_gpus=gpus)


def read_node(document: Any) -> NodeView | None:
    """What the controller keeps of a Node. None: no plugin has reported from there.

    ConfigError: it is no Node. A condition that cannot be read costs the node its report.
    """
    try:
        node = _Node.model_validate(document)
    except pydantic.ValidationError as e:
        raise ConfigError([problem_message(error, _Node) for error in e.errors()]) from e
    conditions = {
        condition["type"]: condition
        for condition in node.status.conditions or ()
        if isinstance(condition, dict) and isinstance(condition.get("type"), str)
    }
    if GPUS_CONFIGURED not in conditions:
        return None
    metadata = node.metadata
    given = (metadata.annotations or {}).get(PROFILE_REVISION_ANNOTATION)
    labels = metadata.labels or {}
    return NodeView(
        name=metadata.name,
        uid=metadata.uid,
        resource_version=metadata.resource_version,
        labels={intern(key): intern(value) for key, value in labels.items()},
        ready=conditions.get("Ready", {}).get("status") == "True",
        given=given if given is None else intern(given),
        report=read_report(conditions[GPUS_CONFIGURED]),
    )


def _pending(report: NodeReport, room: int) -> str:
    count = report.pending
    one = "1 GPU changes when no claim holds it"
    text = one if count == 1 else f"{count} GPUs change when no claim holds them"
    names = first_names(report.pending_gpus, count, room - len(text) - len(": "))
    return f"{text}: {names}" if names else text
