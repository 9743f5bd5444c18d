"""Findings of checks, as values and as the lines that ``doctor`` prints."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from dra_driver.base.frozen import frozen

_MOST_NAMED = 5


class Level(Enum):
    """How bad it is; the value is what is printed."""

    OK = "[ok]"
    WARN = "[warn]"  # works, but somebody should know
    FAIL = "[FAIL]"  # pods with claims will not start, or not as they should
    SKIP = "[skip]"  # was not looked at


@frozen
class Finding:
    """One line: what was looked at, what was found; and what to do, where something is to do."""

    level: Level
    subject: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        """
        >>> print(Finding(Level.WARN, "CDI directory", "/run/cdi is missing", "nothing yet"))
        [warn] CDI directory: /run/cdi is missing
               -> nothing yet
        """
        line = f"{self.level.value:6} {self.subject}: {self.message}"
        return f"{line}\n       -> {self.remedy}" if self.remedy else line


Check = tuple[str, Callable[[], Iterable[Finding]]]
"""The subject of a check, and the check itself."""


def ok(subject: str, message: str) -> Finding:
    return Finding(Level.OK, subject, message)


def warn(subject: str, message: str, remedy: str) -> Finding:
    return Finding(Level.WARN, subject, message, remedy)


def fail(subject: str, message: str, remedy: str) -> Finding:
    return Finding(Level.FAIL, subject, message, remedy)


def skip(subject: str, message: str) -> Finding:
    return Finding(Level.SKIP, subject, message)


def abbreviated(names: Iterable[str], separator: str = ", ") -> str:
    """*names* for a line: the first few, and how many more.

    >>> abbreviated("abcdefg")
    'a, b, c, d, e and 2 more'
    """
    all_names = list(names)
    hidden = len(all_names) - _MOST_NAMED
    return separator.join(all_names[:_MOST_NAMED]) + (f" and {hidden} more" if hidden > 0 else "")


def summary(findings: Sequence[Finding]) -> str:
    """The last line: how many findings of each kind, the worst first.

    >>> summary([ok("a", ""), fail("b", "", "")])
    '1 failed, 0 warnings, 1 in order, 0 skipped'
    >>> summary([warn("a", "", "")])
    '0 failed, 1 warning, 0 in order, 0 skipped'
    """
    number = {level: sum(finding.level is level for finding in findings) for level in Level}
    warnings = "1 warning" if number[Level.WARN] == 1 else f"{number[Level.WARN]} warnings"
    return (
        f"{number[Level.FAIL]} failed, {warnings}, "
        f"{number[Level.OK]} in order, {number[Level.SKIP]} skipped"
    )
