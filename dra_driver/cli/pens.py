"""What pictures in a terminal are drawn with: marks, and colours where it has some."""

from dataclasses import dataclass

from dra_driver.cli.terminal import Terminal

_COLOURS = (36, 33, 35, 32, 34, 31)  # SGR: cyan, yellow, magenta, green, blue, red
_RESET = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Pen:
    """What a bar is drawn with."""

    marks: str  # of the first claim, the second, …, and again from the start
    free: str
    onlooker: str
    edge: str  # between two blocks of memory units
    colour: bool = False

    def mark(self, place: int, number: int = 1) -> str:
        """*number* cells of the claim at *place* on its GPU."""
        return self.coloured(place, self.marks[place % len(self.marks)] * number)

    def coloured(self, place: int, text: str) -> str:
        if not self.colour or not text:
            return text
        return f"\x1b[{_COLOURS[place % len(_COLOURS)]}m{text}{_RESET}"


def pen(terminal: Terminal) -> Pen:
    if terminal.unicode:
        return Pen("█▓▒", "·", "○", "│", terminal.colour)
    return Pen("#=+*%", ".", "o", "|", terminal.colour)
