"""The words of a command: what stands by itself, and what begins with dashes."""

from collections.abc import Collection
from dataclasses import dataclass

from dra_driver.node.sim.mps.refusals import Refused


@dataclass(frozen=True, slots=True)
class Words:
    """A command, taken apart."""

    plain: tuple[str, ...]
    options: dict[str, str]  # --key=value; --flag has the value ""

    def allow(self, most_plain: int, *options: str) -> None:
        """Refused: there is more than that."""
        if len(self.plain) > most_plain:
            raise Refused(f"Unexpected argument '{self.plain[most_plain]}'")
        for name in self.options:
            if name not in options:
                raise Refused(f"Unknown option '--{name}'")

    def need(self, place: int, what: str) -> str:
        """The plain word at *place*."""
        if place >= len(self.plain):
            raise Refused(f"Missing argument: {what}")
        return self.plain[place]

    def option(self, name: str) -> str:
        """The value of an option that must be there."""
        if not self.options.get(name):
            raise Refused(f"Missing option: --{name}=<value>")
        return self.options[name]

    def flag(self, name: str) -> bool:
        if self.options.get(name):
            raise Refused(f"Option --{name} takes no value")
        return name in self.options


def taken_apart(words: Collection[str]) -> Words:
    """Plain words and options, in whatever order."""
    plain, options = [], {}
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            options[name] = value
        elif word.startswith("-"):
            raise Refused(f"Unknown option '{word}'")
        else:
            plain.append(word)
    return Words(tuple(plain), options)


def number(text: str, what: str) -> int:
    if not text.isdecimal():
        raise Refused(f"Invalid {what} '{text}'")
    return int(text)


def boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise Refused(f"Invalid value '{text}': true or false")
    return text == "true"
