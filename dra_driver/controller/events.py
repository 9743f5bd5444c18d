"""Events on NodeProfiles: what `kubectl describe` shows of a rollout, beside the status."""

import logging

from api.names import CONFIG_VERSION
from dra_driver.k8s.events import ClusterObjectRef, Event, Events
from dra_driver.model.node_profiles import (
    ConditionType,
    NodeProfileObject,
    ProfileStatus,
    ProgressReason,
)

log = logging.getLogger(__name__)

_WARNINGS = {
    ProgressReason.NO_NODES: "NoNodes",
    ProgressReason.TOO_MANY_FAILURES: "RolloutStopped",
    ProgressReason.UNREADABLE: "Unreadable",
}


class ProfileEvents:
    """Tells what has changed between two statuses of a profile, as events and in the log."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def tell(self, profile: NodeProfileObject, status: ProfileStatus) -> None:
        """*status* was written to *profile*, which has the one before."""
        regarding = ClusterObjectRef(CONFIG_VERSION, "NodeProfile", profile.name, profile.uid)
        for reason, message, is_warning in changes(profile.status, status):
            level = logging.WARNING if is_warning else logging.INFO
            log.log(level, message, extra={"profile": profile.name, "reason": reason})
            self._events.emit(Event(regarding, reason, reason, message, is_warning))


def changes(before: ProfileStatus, after: ProfileStatus) -> list[tuple[str, str, bool]]:
    """Reason and message of what happened, and whether it is a warning."""
    happened: list[tuple[str, str, bool]] = []
    progress = after.condition(ConditionType.PROGRESSING)
    progress_before = before.condition(ConditionType.PROGRESSING)
    reason_before = progress_before.reason if progress_before else ""
    if progress and progress.reason != reason_before and progress.reason in _WARNINGS:
        reason = _WARNINGS[ProgressReason(progress.reason)]
        happened.append((reason, progress.message, True))
    if after.nodes and after.current_revision not in ("", before.current_revision):
        nodes = f"all {after.nodes} nodes" if after.nodes > 1 else "the one node"
        text = f"revision {after.current_revision} is in force on {nodes}"
        happened.append(("RolledOut", text, False))
    tied, tied_before = (each.condition(ConditionType.TIED) for each in (after, before))
    if tied and not (tied_before and tied_before.message == tied.message):
        happened.append(("Tied", tied.message, True))
    slow = after.condition(ConditionType.SLOWS_SCHEDULER)
    if slow and not before.condition(ConditionType.SLOWS_SCHEDULER):  # its message has a number
        happened.append(("SlowsScheduler", slow.message, True))
    return happened
