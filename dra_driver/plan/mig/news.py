"""What a look at layouts and boards tells of the node that the one before did not."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from dra_driver.model.devices import GpuUuid
from dra_driver.model.layouts import Book, Outcome, State

LAYOUT_APPLIED = "MIGLayoutApplied"
LAYOUT_FAILED = "MIGLayoutFailed"
MODE_NOT_SET = "MIGModeNotSet"

Names = Mapping[GpuUuid, str]


@dataclass(frozen=True, slots=True)
class News:
    """*about*: news of the same reason and this are the same thing, told in other words maybe."""

    reason: str
    about: str
    words: str

    @property
    def is_good(self) -> bool:
        return self.reason == LAYOUT_APPLIED


def failure(words: str) -> News:
    """Of the node as a whole."""
    return News(LAYOUT_FAILED, words, words)


def news(before: Book, after: Book, names: Names) -> Iterator[News]:
    """What is so in *after* and was not in *before*. That something waits is none for a layout,
    whose state says so; a board has no such state."""
    if after.problem and after.problem != before.problem:
        yield failure(f"the layout of this node cannot be used: {after.problem}")
    yield from _failed(before, after, names)
    yield from _applied(before, after, names)
    for gpu, why in after.boards.items():
        if why != before.boards.get(gpu):
            yield News(MODE_NOT_SET, gpu, why)


def _failed(before: Book, after: Book, names: Names) -> Iterator[News]:
    """Each GPU for itself: they fail for reasons of their own."""
    for gpu, now in after.outcomes.items():
        if now.state is State.FAILED and now != before.outcomes.get(gpu):
            words = f"{names[gpu]} is not cut as layout {now.layout!r} says: {now.reason}"
            yield News(LAYOUT_FAILED, f"{gpu} {now.layout}", words)


def _applied(before: Book, after: Book, names: Names) -> Iterator[News]:
    """All GPUs of a layout together."""
    fresh = sorted(
        (now.layout, names[gpu])
        for gpu, now in after.outcomes.items()
        if now.state is State.SUCCESS and _is_other(now, before.outcomes.get(gpu))
    )
    for layout, gpus in groupby(fresh, key=lambda one: one[0]):
        words = f"cut as layout {layout!r} says: {', '.join(name for _, name in gpus)}"
        yield News(LAYOUT_APPLIED, words, words)


def _is_other(now: Outcome, before: Outcome | None) -> bool:
    """Apart from what is noted of it."""
    return before is None or (now.layout, now.state) != (before.layout, before.state)
