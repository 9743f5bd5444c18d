"""What is said while it happens: numbered steps, and below each how far it is."""

import os
import sys
import time
from collections.abc import Mapping

from hack.demonstration.page import Style


class Steps:
    """So many steps in all. Goes to standard error: standard output is for the page alone."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._style = style(sys.stderr.isatty(), os.environ)
        self._begun = time.monotonic()
        self._at = 0
        self.current = ""

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begun

    def step(self, text: str) -> None:
        """The next step begins."""
        self._at += 1
        self.current = text
        self.say(self._style.strong(f"[{self._at}/{self._number}] {text}"))

    def detail(self, line: str) -> None:
        """How far the step is; fits where the testbed tells its progress."""
        self.say(self._style.faint(f"      {self.seconds:5.1f} s  {line}"))

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def style(is_terminal: bool, environment: Mapping[str, str]) -> Style:
    """Colours for a terminal that has them and a person who wants them (no-color.org)."""
    unwanted = "NO_COLOR" in environment or environment.get("TERM") == "dumb"
    plain = unwanted or not is_terminal
    return Style() if plain else Style("\x1b[1m", "\x1b[2m", "\x1b[0m")
