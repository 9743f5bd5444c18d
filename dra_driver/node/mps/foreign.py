"""Control daemons that somebody else started, in words that a tenant cannot fill a page with."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dra_driver.node.cgroups import place_of
from dra_driver.node.mps.control import PROGRAM
from dra_driver.node.proc_files import printable

MOST: Final = 16  # lines
_SUMS: Final = 2  # lines that give a number of others


@dataclass(frozen=True, slots=True, order=True)
class Foreign:
    """A control daemon, by the number of its process. A tenant can call anything so."""

    pid: int
    pipe_directory: str
    in_pod: bool = False


def described(found: Iterable[Foreign]) -> tuple[str, ...]:
    """A line for each on the host itself, as far as there are few, and the number of others."""
    everybody = sorted(found)
    here = [one for one in everybody if not one.in_pod]
    said = [
        f"{PROGRAM} (process {one.pid}, pipe directory {printable(one.pipe_directory)})"
        for one in here[: MOST - _SUMS]
    ]
    if more := len(here) - len(said):
        said.append(f"{PROGRAM} ({more} more on this host)")
    if inside := len(everybody) - len(here):
        said.append(f"{PROGRAM} ({_counted(inside)} in pods)")
    return tuple(said)


def is_in_pod(proc_cgroup: bytes) -> bool:
    """By what ``/proc/<pid>/cgroup`` says. With cgroup v1 a tenant can leave the tree of one
    controller; the others still tell."""
    text = proc_cgroup.decode(errors="replace")
    return "kubepods" in text or place_of(text) is not None


def _counted(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
