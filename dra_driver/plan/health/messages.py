"""What is wrong with a GPU, in words: for events, the kubelet, claims, ``doctor`` and commands."""

from collections.abc import Iterable
from datetime import UTC, datetime

from dra_driver.model.health import Fault, GpuEvent, Problem
from dra_driver.plan.health.problems import PROBLEMS, RECOVERY_ACTIONS, xid_entry

LONGEST_MESSAGE = 1024  # that the kubelet takes of a device's health


def meaning(problem: Problem, value: str = "") -> str:
    """What is wrong.

    >>> meaning(Problem.XID, "79")
    'Xid 79: the GPU has fallen off the bus'
    """
    if problem is Problem.XID:
        return f"Xid {value}: {xid_entry(value).meaning}"
    text = PROBLEMS[problem].meaning
    return f"{text}: {value}" if value else text


def action(problem: Problem, value: str = "") -> str:
    """What to do about it."""
    if problem is Problem.XID:
        return xid_entry(value).action
    if problem is Problem.RECOVERY_ACTION and value in RECOVERY_ACTIONS:
        return RECOVERY_ACTIONS[value]
    return PROBLEMS[problem].action


def describe_problem(fault: Fault) -> str:
    """What is wrong, where and since when."""
    where = f", in the partition of {fault.partition}" if fault.partition else ""
    what = meaning(fault.problem, fault.value)
    return f"{what}{where}, since {timestamp(fault.since)}{_times(fault.count)}"


def describe_fault(fault: Fault) -> str:
    """What is wrong, where, since when, and what to do, in one sentence."""
    return f"{describe_problem(fault)}; {action(fault.problem, fault.value)}"


def describe_faults(faults: Iterable[Fault]) -> str:
    """All of it in at most ``LONGEST_MESSAGE`` characters, the latest first; what is to be done for
    several is said once."""
    latest = sorted(faults, key=lambda fault: (-fault.since, fault.problem, fault.value))
    actions = dict.fromkeys(action(fault.problem, fault.value) for fault in latest)
    text = "; ".join([*(describe_problem(fault) for fault in latest), *actions])
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 4]} ..."


def describe_event(event: GpuEvent) -> str:
    """An event that leaves no fault."""
    where = "" if event.gi is None else f" in GPU instance {event.gi}"
    process = "" if event.pid is None else f" by process {event.pid}"
    advice = action(event.problem, event.value)
    return f"{meaning(event.problem, event.value)}{where}{process}{_times(event.count)}; {advice}"


def timestamp(seconds: float) -> str:
    """As Kubernetes writes times.

    >>> timestamp(0)
    '1970-01-01T00:00:00Z'
    """
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _times(count: int) -> str:
    return f", {count} times" if count > 1 else ""
