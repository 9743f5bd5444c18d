"""The state of MIG on this node: who has which placement of a GPU, and how far layouts are."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from api.names import MIG_CONFIG_LABEL
from dra_driver.base.frozen import frozen
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
from dra_driver.model.mig_layouts import LayoutInstance, LayoutOutcome, LayoutState, MigState
from dra_driver.model.records import Holding

WHOLE_GPU = "the whole GPU"


@frozen
class OccupiedPlacement:
    """A row of memory units that belong together."""

    placement: Placement
    title: str  # "3g.20gb", or WHOLE_GPU
    owner: str  # in words, for people
    claimed: bool = False
    key: PartitionKey | None = None  # None: of no partition that can be used


def occupied_placements(
    gpu: Gpu, holdings: Iterable[Holding], layout_instances: Collection[LayoutInstance] = ()
) -> tuple[OccupiedPlacement, ...]:
    """What of *gpu* is taken, by placement. *holdings*: of this GPU; *layout_instances*: made by
    layouts. Empty for a GPU without MIG."""
    if gpu.mig is None:
        return ()
    by_key: dict[PartitionKey | None, list[Holding]] = defaultdict(list)
    for holding in holdings:
        if not holding.admin:
            by_key[holding.partition].append(holding)
    occupied = [
        _claimed_placement(gpu.mig, key, key_holdings) for key, key_holdings in by_key.items()
    ]
    occupied += [
        _unclaimed_placement(gpu.mig, instance, layout_instances)
        for instance in gpu.mig.instances
        if instance.key not in by_key
    ]
    occupied += [
        _unusable_placement(gpu.mig, instance)
        for instance in gpu.mig.unusable
        if instance.key not in by_key
    ]
    return tuple(sorted(occupied, key=lambda block: (block.placement, block.title)))


def profile_name(mig: MigInfo | None, key: PartitionKey) -> str:
    """Its name, or its number where the GPU does not list the profile."""
    profile = mig.profile(key.profile_id) if mig else None
    return profile.name if profile else f"profile {key.profile_id}"


def _claimed_placement(
    mig: MigInfo, key: PartitionKey | None, holdings: Collection[Holding]
) -> OccupiedPlacement:
    claims = ", ".join(dict.fromkeys(str(holding.claim) for holding in holdings))
    if key is None:
        return OccupiedPlacement(Placement(0, mig.units), WHOLE_GPU, claims, claimed=True)
    existing_uuid = {each.key: each.uuid for each in mig.instances}.get(key)
    recorded_uuid = next((each.instance.uuid for each in holdings if each.instance), None)
    state = existing_uuid if recorded_uuid in (None, existing_uuid) else f"{recorded_uuid} vanished"
    state = state or "not created yet"
    return OccupiedPlacement(
        key.placement, profile_name(mig, key), f"{claims}  {state}", claimed=True, key=key
    )


def _unclaimed_placement(
    mig: MigInfo, instance: MigInstance, layout_instances: Collection[LayoutInstance]
) -> OccupiedPlacement:
    key = instance.key
    if not instance.uuid:
        owner = "to be created by its layout"
        return OccupiedPlacement(key.placement, profile_name(mig, key), owner)
    by_layout = any(
        made.key == instance.key and made.uuid in ("", instance.uuid) for made in layout_instances
    )
    maker = "made by a layout" if by_layout else "not made by this driver"
    owner = f"{instance.uuid}  {maker}"
    return OccupiedPlacement(key.placement, profile_name(mig, key), owner, key=key)


def _unusable_placement(mig: MigInfo, instance: UnusableGpuInstance) -> OccupiedPlacement:
    return OccupiedPlacement(
        instance.key.placement, profile_name(mig, instance.key), unusable_instance_message(instance)
    )


def unusable_instance_message(instance: UnusableGpuInstance) -> str:
    match instance.cis:
        case 0:
            inside = "without a compute instance"
        case 1:
            inside = "with a compute instance that does not fill it"
        case number:
            inside = f"with {number} compute instances"
    return f"GPU instance {instance.gi} {inside}: offered to nobody"


LAYOUTS = "MIG layouts"


def layout_progress(mig_state: MigState, gpus: Iterable[Gpu]) -> list[tuple[LayoutState, str]]:
    """How far layouts are, in words; GPUs that are equally far are told together."""
    names: dict[LayoutOutcome, list[str]] = defaultdict(list)
    for gpu in gpus:
        if (outcome := mig_state.outcomes.get(gpu.uuid)) is not None:
            names[outcome].append(gpu.name)
    return [
        (
            outcome.state,
            f"{outcome.layout} on {abbreviated(on)}: {outcome.state}"
            + (f": {outcome.reason}" if outcome.reason else ""),
        )
        for outcome, on in names.items()
    ]


def pending_layouts(mig_state: MigState, gpus: Iterable[Gpu]) -> dict[DeviceName, str]:
    """The layouts that are yet to come, by the names of their GPUs."""
    outcomes = ((gpu.name, mig_state.outcomes.get(gpu.uuid)) for gpu in gpus)
    return {
        name: outcome.layout
        for name, outcome in outcomes
        if outcome and outcome.state is LayoutState.PENDING
    }


def layout_lines(mig_state: MigState, gpus: Collection[Gpu]) -> Iterator[str]:
    """What ``dra-driver devices`` says of layouts."""
    yield from (f"layout {text}" for _, text in layout_progress(mig_state, gpus))
    if mig_state.problem:
        yield f"layout: {mig_state.problem}"
    yield from (
        f"{g.name}: {mig_state.mode_problems[g.uuid]}"
        for g in gpus
        if g.uuid in mig_state.mode_problems
    )


def layout_findings(mig_state: MigState, gpus: Collection[Gpu]) -> Iterator[Finding]:
    """What ``dra-driver doctor`` says of layouts; nothing, where there is none."""
    if mig_state.problem:
        yield fail(
            LAYOUTS,
            mig_state.problem,
            f"mend that: {MIG_CONFIG_LABEL} of the Node, else the profile's mig.layout, names it",
        )
    for state, text in layout_progress(mig_state, gpus):
        match state:
            case LayoutState.SUCCESS:
                yield ok(LAYOUTS, text)
            case LayoutState.PENDING:
                remedy = "nothing, or end what it waits for: it is done once nothing uses the GPU"
                yield warn(LAYOUTS, text, remedy)
            case LayoutState.FAILED:
                yield fail(LAYOUTS, text, "mend that, or choose another layout")
    for gpu in gpus:
        if gpu.uuid in mig_state.mode_problems:
            # it says what to do
            yield warn(LAYOUTS, f"{gpu.name}: {mig_state.mode_problems[gpu.uuid]}", "")
