"""The state of MIG on this node: who has which placement of a GPU, and how far layouts are."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from api.names import MIG_CONFIG_LABEL
from dra_driver.cli.findings import Finding, abbreviated, fail, ok, warn
from dra_driver.model.gpus import (
    DeviceName,
    Gpu,
    MigInfo,
    MigInstance,
    PartitionKey,
    Placement,
    UnusableGpuInstance,
)
from dra_driver.model.mig_layouts import LayoutInstance, LayoutState, MigState
from dra_driver.model.records import Holding, HoldingsByDevice

WHOLE_GPU = "the whole GPU"


@dataclass(frozen=True, slots=True)
class OccupiedPlacement:
    """A row of memory units that belong together."""

    placement: Placement
    what: str  # "3g.20gb", or WHOLE
    whose: str  # in words, for people
    claimed: bool = False
    key: PartitionKey | None = None  # None: of no partition that can be used


def occupied_placements(
    gpu: Gpu, holdings: Iterable[Holding], laid: Collection[LayoutInstance] = ()
) -> tuple[OccupiedPlacement, ...]:
    """What of *gpu* is taken, by placement. *holdings*: of this GPU; *laid*: instances that a
    layout made. Empty for a GPU that cannot be cut."""
    if gpu.mig is None:
        return ()
    by_key: dict[PartitionKey | None, list[Holding]] = defaultdict(list)
    for holding in holdings:
        if not holding.admin:
            by_key[holding.partition].append(holding)
    found = [_claimed_placement(gpu.mig, key, its) for key, its in by_key.items()]
    found += [
        _unclaimed_placement(gpu.mig, one, laid)
        for one in gpu.mig.instances
        if one.key not in by_key
    ]
    found += [_odd_placement(gpu.mig, one) for one in gpu.mig.unusable if one.key not in by_key]
    return tuple(sorted(found, key=lambda block: (block.placement, block.what)))


def holdings_of_gpu(gpu: Gpu, held: HoldingsByDevice) -> Iterator[Holding]:
    """Everything that claims hold of *gpu*, however it was called when they got it."""
    for holdings in held.values():
        yield from (one for one in holdings if one.of_gpu in (gpu.uuid, gpu.name))


def profile_name(mig: MigInfo | None, key: PartitionKey) -> str:
    """As people call it; a board that does not know the profile leaves its number."""
    profile = mig.profile(key.profile_id) if mig else None
    return profile.name if profile else f"profile {key.profile_id}"


def _claimed_placement(
    mig: MigInfo, key: PartitionKey | None, holdings: Collection[Holding]
) -> OccupiedPlacement:
    claims = ", ".join(dict.fromkeys(str(holding.claim) for holding in holdings))
    if key is None:
        return OccupiedPlacement(Placement(0, mig.units), WHOLE_GPU, claims, claimed=True)
    there = {one.key: one.uuid for one in mig.instances}.get(key)
    known = next((one.instance.uuid for one in holdings if one.instance), None)
    state = there if known in (None, there) else f"{known} vanished"
    state = state or "not cut yet"
    return OccupiedPlacement(
        key.placement, profile_name(mig, key), f"{claims}  {state}", claimed=True, key=key
    )


def _unclaimed_placement(
    mig: MigInfo, one: MigInstance, laid: Collection[LayoutInstance]
) -> OccupiedPlacement:
    if not one.uuid:
        return OccupiedPlacement(one.key.placement, profile_name(mig, one.key), "cut by its layout")
    by_layout = any(made.key == one.key and made.uuid in ("", one.uuid) for made in laid)
    maker = "made by a layout" if by_layout else "not made by this driver"
    name = profile_name(mig, one.key)
    return OccupiedPlacement(one.key.placement, name, f"{one.uuid}  {maker}", key=one.key)


def _odd_placement(mig: MigInfo, one: UnusableGpuInstance) -> OccupiedPlacement:
    return OccupiedPlacement(
        one.key.placement, profile_name(mig, one.key), odd_instance_message(one)
    )


def odd_instance_message(one: UnusableGpuInstance) -> str:
    """What is wrong with it."""
    match one.cis:
        case 0:
            inside = "without a compute instance"
        case 1:
            inside = "with a compute instance that does not fill it"
        case number:
            inside = f"with {number} compute instances"
    return f"GPU instance {one.gi} {inside}: offered to nobody"


LAYOUTS = "MIG layouts"


@dataclass(frozen=True, slots=True)
class LayoutProgress:
    """One layout on GPUs on which it is equally far, for the same reason."""

    layout: str
    state: LayoutState
    reason: str
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.layout} on {abbreviated(self.gpus)}: {self.state}"
        return f"{text}: {self.reason}" if self.reason else text


def layout_progress(book: MigState, gpus: Iterable[Gpu]) -> Iterator[LayoutProgress]:
    """Of the *gpus* that there are."""
    found: dict[tuple[str, LayoutState, str], list[str]] = {}
    for gpu in gpus:
        if (one := book.outcomes.get(gpu.uuid)) is not None:
            found.setdefault((one.layout, one.state, one.reason), []).append(gpu.name)
    for (layout, state, reason), names in found.items():
        yield LayoutProgress(layout, state, reason, tuple(names))


def pending_layouts(book: MigState, gpus: Iterable[Gpu]) -> dict[DeviceName, str]:
    """The layouts that are yet to come, by the names of their GPUs."""
    found = ((gpu.name, book.outcomes.get(gpu.uuid)) for gpu in gpus)
    return {name: one.layout for name, one in found if one and one.state is LayoutState.PENDING}


def layout_lines(book: MigState, gpus: Iterable[Gpu]) -> Iterator[str]:
    """What ``dra-driver devices`` says of it."""
    listed = tuple(gpus)
    yield from (f"layout {one}" for one in layout_progress(book, listed))
    if book.problem:
        yield f"layout: {book.problem}"
    yield from (
        f"{g.name}: {book.mode_problems[g.uuid]}" for g in listed if g.uuid in book.mode_problems
    )


def layout_findings(book: MigState, gpus: Iterable[Gpu]) -> Iterator[Finding]:
    """What ``dra-driver doctor`` says of it; nothing, where no layout is wanted."""
    listed = tuple(gpus)
    if book.problem:
        yield fail(
            LAYOUTS,
            book.problem,
            f"mend that: {MIG_CONFIG_LABEL} of the Node, else the profile's mig.layout, names it",
        )
    for one in layout_progress(book, listed):
        match one.state:
            case LayoutState.SUCCESS:
                yield ok(LAYOUTS, str(one))
            case LayoutState.PENDING:
                yield warn(
                    LAYOUTS,
                    str(one),
                    "nothing, or end what it waits for: it is done once nothing uses the GPU",
                )
            case LayoutState.FAILED:
                yield fail(LAYOUTS, str(one), "mend that, or choose another layout")
    for gpu in listed:
        if gpu.uuid in book.mode_problems:
            yield warn(
                LAYOUTS, f"{gpu.name}: {book.mode_problems[gpu.uuid]}", ""
            )  # it says what to do
