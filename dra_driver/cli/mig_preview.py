"""The node as it is once its boards are switched to MIG mode, and cut as layouts say."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from api.names import MIG_CONFIG_LABEL
from dra_driver.cli.mig_layouts import layout_lines
from dra_driver.model.devices import DeviceName, Gpu, GpuUuid
from dra_driver.model.inventory import Inventory
from dra_driver.model.layouts import Book, Outcome
from dra_driver.model.profiles import Profile
from dra_driver.plan.mig.governed import without_cutting
from dra_driver.plan.mig.offered import made
from dra_driver.plan.mig.previews import after_layout
from dra_driver.plan.mig.switches import after_switch
from dra_driver.plugin.mig.boards import Basis
from dra_driver.plugin.mig.idle import claims_on
from dra_driver.plugin.mig.wishes import Layouts, Wishes, wishes

_WHEN = "while no claim and no process uses them"
_RESET = "; whether a board can be reset for that is seen then"


@dataclass(frozen=True, slots=True)
class Preview:
    """*profile*: as it counts for what is offered. GPUs that are neither *switched* nor *cut* are
    shown as they are."""

    inventory: Inventory
    profile: Profile
    book: Book  # with what is known of layouts besides
    problem: str = ""  # why it cannot be told what GPUs should look like
    label: str = ""  # the layout that the Node's label names
    switched: tuple[DeviceName, ...] = ()
    cut: tuple[tuple[str, tuple[Gpu, ...]], ...] = ()  # by layout: the GPUs as they were before


def preview(basis: Basis, layouts: Layouts, book: Book) -> Preview:
    """*basis*: as it is now. What *book* says is wrong with a board, or with a layout, stays so:
    it is from the plugin that tried it; and so is the label of the Node that it read."""
    inventory, profile, held = basis.inventory, basis.profile, basis.held
    label = _label(book, inventory)
    wanted = wishes(label, profile, layouts, inventory)
    laid, outcomes = _after_layouts(basis, wanted, book)
    uncut = without_cutting(profile, inventory.gpus, wanted.governed)  # nor switched for that
    seen = replace(inventory, gpus=laid)
    after = after_switch(seen, uncut, basis.keeps, held, stuck=book.boards)
    others = {uuid: one for uuid, one in book.outcomes.items() if uuid not in wanted.by_gpu}
    return Preview(
        after,
        uncut,
        replace(book, outcomes=others | outcomes),
        wanted.problem,
        label,
        tuple(gpu.name for gpu in _other(after.gpus, laid)),
        _by_layout(wanted, _other(inventory.gpus, laid)),
    )


def preview_lines(found: Preview) -> Iterator[str]:
    """What is shown as it will be, and how far the rest is."""
    if found.label:
        yield (
            f"label {MIG_CONFIG_LABEL} of the Node, as its plugin read it last: {found.label}; "
            "it goes before the profile"
        )
    if found.switched:
        yield (
            f"shown as after their switch to MIG mode: {', '.join(found.switched)}; the plugin "
            f"switches them {_WHEN}{_RESET}"
        )
    later = {gpu.uuid: gpu for gpu in found.inventory.gpus}
    for layout, gpus in found.cut:
        names = ", ".join(gpu.name for gpu in gpus)
        reset = _RESET if any(_is_reset(gpu, later[gpu.uuid]) for gpu in gpus) else ""
        yield (f"shown as after layout {layout}: {names}; the plugin cuts them so {_WHEN}{reset}")
    if found.problem and found.problem != found.book.problem:
        yield f"layout: {found.problem}"
    yield from layout_lines(found.book, found.inventory.gpus)


def _is_reset(gpu: Gpu, later: Gpu) -> bool:
    """Whether it takes a reset to make *gpu* what it is *later*."""
    if gpu.mig is None or later.mig is None:
        return False
    return gpu.mig.on != later.mig.on and not gpu.mig.switches


def _label(book: Book, inventory: Inventory) -> str:
    """Empty, too, where *book* is of another node: a simulated one is looked at from anywhere."""
    known = {*book.outcomes, *book.made, *book.before, *book.switched, *book.boards}
    if known and known.isdisjoint(gpu.uuid for gpu in inventory.gpus):
        return ""
    return book.label or ""


def _after_layouts(
    basis: Basis, wanted: Wishes, book: Book
) -> tuple[tuple[Gpu, ...], dict[GpuUuid, Outcome]]:
    claimed = made(basis.held)
    gpus: list[Gpu] = []
    outcomes: dict[GpuUuid, Outcome] = {}
    for gpu in basis.inventory.gpus:
        after, outcome = gpu, None
        if (its := wanted.by_gpu.get(gpu.uuid)) is not None:
            after, outcome = after_layout(gpu, its, book, claimed, claims_on(gpu, basis.held))
        gpus.append(after)
        outcomes |= {} if outcome is None else {gpu.uuid: outcome}
    return tuple(gpus), outcomes


def _other(gpus: tuple[Gpu, ...], than: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Those of *gpus* that look otherwise."""
    return tuple(one for one, other in zip(gpus, than, strict=True) if one != other)


def _by_layout(wanted: Wishes, gpus: tuple[Gpu, ...]) -> tuple[tuple[str, tuple[Gpu, ...]], ...]:
    found: dict[str, tuple[Gpu, ...]] = {}
    for gpu in gpus:
        layout = wanted.by_gpu[gpu.uuid].layout
        found[layout] = (*found.get(layout, ()), gpu)
    return tuple(sorted(found.items()))
