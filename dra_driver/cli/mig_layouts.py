"""How far layouts are: what the plugin last wrote down of GPUs that are cut by name."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from api.names import MIG_CONFIG_LABEL
from dra_driver.cli.findings import Finding, fail, ok, some, warn
from dra_driver.model.devices import DeviceName, Gpu
from dra_driver.model.layouts import Book, State

LAYOUTS = "MIG layouts"


@dataclass(frozen=True, slots=True)
class Progress:
    """One layout on GPUs on which it is equally far, for the same reason."""

    layout: str
    state: State
    reason: str
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.layout} on {some(self.gpus)}: {self.state}"
        return f"{text}: {self.reason}" if self.reason else text


def progress(book: Book, gpus: Iterable[Gpu]) -> Iterator[Progress]:
    """Of the *gpus* that there are."""
    found: dict[tuple[str, State, str], list[str]] = {}
    for gpu in gpus:
        if (one := book.outcomes.get(gpu.uuid)) is not None:
            found.setdefault((one.layout, one.state, one.reason), []).append(gpu.name)
    for (layout, state, reason), names in found.items():
        yield Progress(layout, state, reason, tuple(names))


def waiting(book: Book, gpus: Iterable[Gpu]) -> dict[DeviceName, str]:
    """The layouts that are yet to come, by the names of their GPUs."""
    found = ((gpu.name, book.outcomes.get(gpu.uuid)) for gpu in gpus)
    return {name: one.layout for name, one in found if one and one.state is State.PENDING}


def layout_lines(book: Book, gpus: Iterable[Gpu]) -> Iterator[str]:
    """What ``dra-driver devices`` says of it."""
    listed = tuple(gpus)
    yield from (f"layout {one}" for one in progress(book, listed))
    if book.problem:
        yield f"layout: {book.problem}"
    yield from (f"{g.name}: {book.boards[g.uuid]}" for g in listed if g.uuid in book.boards)


def layouts(book: Book, gpus: Iterable[Gpu]) -> Iterator[Finding]:
    """What ``dra-driver doctor`` says of it; nothing, where no layout is wanted."""
    listed = tuple(gpus)
    if book.problem:
        yield fail(
            LAYOUTS,
            book.problem,
            f"mend that: {MIG_CONFIG_LABEL} of the Node, else the profile's mig.layout, names it",
        )
    for one in progress(book, listed):
        match one.state:
            case State.SUCCESS:
                yield ok(LAYOUTS, str(one))
            case State.PENDING:
                yield warn(
                    LAYOUTS,
                    str(one),
                    "nothing, or end what it waits for: it is done once nothing uses the GPU",
                )
            case State.FAILED:
                yield fail(LAYOUTS, str(one), "mend that, or choose another layout")
    for gpu in listed:
        if gpu.uuid in book.boards:
            yield warn(LAYOUTS, f"{gpu.name}: {book.boards[gpu.uuid]}", "")  # it says what to do
