"""The kubelet plugin, which is killed or held before one of the effects of an allocation.

``python -m tests.e2e.plugin_at_effect kill|hold NUMBER ARMED RECORD kubelet-plugin ARGUMENTS``:
once the file ARMED exists, each effect is written to RECORD. With ``hold``, the thread waits before
the one of that NUMBER, from 1, until ARMED is gone. With ``kill``, the process is killed before the
first one that is not in the file NUMBER: how often something is tried again, and so the number of
what comes after it, is not the same each time.

An effect is what Python says that it does (``sys.addaudithook``) to a record, to a file that
containers or the container runtime read, or to the cgroup of a pod, and each turn to the MPS agent.
What is written to a file under another name first has no effect before it is renamed.
"""

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dra_driver.__main__ import main

_CHANGES = {"os.rename", "os.remove"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_WRITTEN = re.compile(r"/metadata/|/pod[^/]*/dmem\.max$")
_CHANGED = re.compile(r"/state/claims/|-claim_|/metadata/")
_AGENT = re.compile(r"agent\.sock$")
_VARIABLE = re.compile(r"(?<=/pod)[0-9a-f-]{36}|(?<=\.)[0-9a-f]{8}(?=\.tmp)")  # in names
_MOST_TIMES = re.compile(r" for the [1-4]\. time$")  # of the same kind that are looked for


class Effects:
    """Writes down what is done, and calls *reached* before what *is_next*, given its number and
    itself, says that it is."""

    def __init__(
        self,
        is_next: Callable[[int, str], bool],
        armed: Path,
        record: Path,
        reached: Callable[[Path], None],
    ) -> None:
        self._armed = armed
        self._is_next = is_next
        self._reached = reached
        self._times: Counter[str] = Counter()
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._count = 0
        self._last = ""

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """A hook: told of each thing before it is done."""
        effect = _effect(event, arguments)
        if not effect or effect == self._last or not os.path.exists(self._armed):
            return
        self._last = effect
        self._count += 1
        kind = _VARIABLE.sub("", effect)
        self._times[kind] += 1
        effect = f"{kind} for the {self._times[kind]}. time"
        os.write(self._record, f"{effect}\n".encode())
        if self._is_next(self._count, effect):
            self._reached(self._armed)


def _kill(_armed: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hold(armed: Path) -> None:
    while armed.exists():
        time.sleep(0.05)


def _effect(event: str, arguments: tuple[Any, ...]) -> str:
    if event == "socket.connect":
        return _at(_AGENT, "call", arguments[1])
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
        return _at(_WRITTEN, "write", arguments[0])
    return _at(_CHANGED, event, arguments[0]) if event in _CHANGES else ""


def _at(places: re.Pattern[str], action: str, place: Any) -> str:
    path = os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else ""
    return f"{action} {path}" if places.search(path) else ""


if __name__ == "__main__":
    doing, number, armed, record = sys.argv[1:5]
    if doing == "hold":
        effects = Effects(lambda count, _: count == int(number), Path(armed), Path(record), _hold)
    else:
        known = Path(number).read_text().splitlines()

        def is_new(_: int, effect: str) -> bool:
            return effect not in known and _MOST_TIMES.search(effect) is not None

        effects = Effects(is_new, Path(armed), Path(record), _kill)
    sys.addaudithook(effects)
    sys.exit(main(sys.argv[5:]))
