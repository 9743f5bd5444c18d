"""Conditions of a Node as values, and how much fits into one."""

from collections.abc import Mapping, Sequence
from typing import Any

from dra_driver.base.frozen import frozen

LONGEST_MESSAGE = 1024  # characters


@frozen
class NodeCondition:
    """What a condition says; the times are for who writes it."""

    status: str  # "True" or "False"
    reason: str
    message: str


def condition_of(node: Mapping[str, Any], type_: str) -> Mapping[str, str]:
    """The condition of that type of a Node as it was read; empty: it has none."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == type_), {})


def first_names(names: Sequence[str], count: int, room: int) -> str:
    """As many of *names* as there is *room* for; how many of *count* are not named."""
    for shown in range(len(names), 0, -1):
        more = f" and {count - shown} more" if count > shown else ""
        text = ", ".join(names[:shown]) + more
        if len(text) <= room:
            return text
    return ""


def bounded(text: str, room: int) -> str:
    """*text*, as far as there is *room* for it."""
    return text if len(text) <= room else f"{text[: room - 1]}…"
