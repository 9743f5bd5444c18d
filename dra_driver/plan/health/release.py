"""Which GPUs an administrator has the driver let go of.

An annotation of the Node says so, or the labels with which NVIDIA's GPU operator pauses what uses
GPUs.
The annotation is ``gpu-0,gpu-3 2026-11-24T03:00:00Z`` or ``all 2026-11-24T03:00:00Z``; without a
time it holds for ten minutes from when it is seen. What the plugin answers, in an annotation of its
own, is the same with a time, and after that what it waits for.
"""

import math
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from api.names import PAUSE_LABELS, RELEASE_ANNOTATION, RELEASED_ANNOTATION
from api.strict import ConfigError
from dra_driver.base.frozen import frozen
from dra_driver.plan.health.messages import timestamp

ALL: Final = "all"
NO_SUCH_GPU: Final = "no such GPU"  # begins what is waited for where a name is wrong
DEFAULT_SECONDS: Final = 600.0
_PAUSED: Final = "paused-for-"  # what the operator has in its labels while it changes the driver
_EXAMPLE: Final = "2026-11-24T03:00:00Z"
_TIME: Final = re.compile(r"\d{4}-.*")
_COMMA: Final = re.compile(r"\s*,\s*")


@frozen
class Release:
    """What is to be let go of, and for how long."""

    gpus: str  # "gpu-0,gpu-3", or "all"
    until: str  # a time, or the label that says so
    ends: float = math.inf  # seconds since the epoch

    def __str__(self) -> str:
        return f"{self.gpus} {self.until}"


def requested_release(
    labels: Mapping[str, str], annotations: Mapping[str, str], now: float
) -> Release | None:
    """What is asked for *now*, also where its time is over; None: nothing. ConfigError: the
    annotation cannot be read."""
    for label in PAUSE_LABELS:
        if labels.get(label, "").startswith(_PAUSED):
            return Release(ALL, label)
    if RELEASE_ANNOTATION not in annotations:
        return None
    answered = annotations.get(RELEASED_ANNOTATION, "").split()
    return parse_release(annotations[RELEASE_ANNOTATION], answered, now)


def parse_release(request: str, answered: list[str], now: float) -> Release:
    """*answered*: the words of the answer, whose time goes on where *request* has none."""
    gpus, _, time = _COMMA.sub(",", request.strip()).partition(" ")
    gpus, time = gpus.strip(","), time.strip()
    if not gpus or _TIME.fullmatch(gpus):
        raise ConfigError([f"{request!r} names no GPU: write for example all {_EXAMPLE}, or gpu-0"])
    if not time and answered[:1] == [gpus] and _TIME.fullmatch("".join(answered[1:2])):
        time = answered[1]
    if not time:
        return new_release(gpus, now + DEFAULT_SECONDS)
    try:
        ends = datetime.fromisoformat(time)
    except ValueError as e:
        raise ConfigError([f"{time!r} is no time: write for example {_EXAMPLE}"]) from e
    if ends.tzinfo is None:
        raise ConfigError([f"{time!r} has no time zone: write for example {_EXAMPLE}"])
    return Release(gpus, time, ends.timestamp())


def new_release(gpus: str, ends: float) -> Release:
    """Of *gpus*, to the second."""
    return Release(gpus, timestamp(ends), float(int(ends)))
