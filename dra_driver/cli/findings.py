"""Findings of checks, as values and as the lines that ``doctor`` prints."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

_MOST_NAMED = 5


class Level(Enum):
    """How bad it is; the value is what is printed."""

    OK = "[ok]"
    WARN = "[warn]"  # works, but somebody should know
    FAIL = "[FAIL]"  # pods with claims will not start, or not as they should
    SKIP = "[skip]"  # was not looked at


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found; and what to do, where something is to do."""

    level: Level
    what: str
    found: str
    mend: str = ""

    def __str__(self) -> str:
        """
        >>> print(Finding(Level.WARN, "CDI directory", "/run/cdi is missing", "nothing yet"))
        [warn] CDI directory: /run/cdi is missing
               -> nothing yet
        """
        line = f"{self.level.value:6} {self.what}: {self.found}"
        return f"{line}\n       -> {self.mend}" if self.mend else line


def ok(what: str, found: str) -> Finding:
    return Finding(Level.OK, what, found)


def warn(what: str, found: str, mend: str) -> Finding:
    return Finding(Level.WARN, what, found, mend)


def fail(what: str, found: str, mend: str) -> Finding:
    return Finding(Level.FAIL, what, found, mend)


def skip(what: str, found: str) -> Finding:
    return Finding(Level.SKIP, what, found)


def abbreviated(names: Iterable[str]) -> str:
    """*names* for a line: the first few, and how many more.

    >>> abbreviated("abcdefg")
    'a, b, c, d, e and 2 more'
    """
    every = list(names)
    more = len(every) - _MOST_NAMED
    return ", ".join(every[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def summary(findings: Sequence[Finding]) -> str:
    """The last line: how many findings of each kind, the worst first.

    >>> summary([ok("a", ""), fail("b", "", "")])
    '1 failed, 0 warnings, 1 in order, 0 skipped'
    """
    number = {level: sum(one.level is level for one in findings) for level in Level}
    return (
        f"{number[Level.FAIL]} failed, {number[Level.WARN]} warnings, "
        f"{number[Level.OK]} in order, {number[Level.SKIP]} skipped"
    )
