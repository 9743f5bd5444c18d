"""The devices that are partitions of one GPU, and what keeps all its devices apart.

What becomes of a GPU that can be cut: by its rules, by its mode, and by what claims hold.

Which boards are switched to MIG mode before anything is cut: those that need a reset for it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dra_driver.model.gpus import (
    Gpu,
    GpuUuid,
    GuestRestriction,
    Inventory,
    MigInfo,
    MigProfile,
    PartitionKey,
    guest_mode_problem,
)
from dra_driver.model.offer import ApiFeatures, CounterSet, Device, Replica, Shape, counter_set_name
from dra_driver.model.profiles import MigRules, Profile, Rules
from dra_driver.model.records import HoldingsByDevice
from dra_driver.plan.mig.counters import CounterAmounts
from dra_driver.plan.mig.partitions import (
    HeldShape,
    OfferedPartitions,
    UnmanagedInstances,
    dynamic_partitions,
    dynamic_profiles,
    existing_partitions,
    held_partitions,
)
from dra_driver.plan.offer.shapes import held_shape, shape_of, shape_of_partitions
from dra_driver.plan.profiles.rules import rules_by_gpu

NEEDS_COUNTERS = (
    "the API server keeps no counters (KEP-4815, feature DRAPartitionableDevices, Kubernetes 1.35 "
    "and newer), and nothing else keeps partitions apart that are cut for claims"
)


@dataclass(frozen=True, slots=True)
class MigOffer:
    """What of a GPU is offered: partitions of *profiles* that are cut for claims, or none, and the
    GPU as a *whole* or not."""

    profiles: tuple[MigProfile, ...] = ()
    whole: bool = True
    problem: str = ""  # why no partitions are cut, though the rules say so

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(profile.name for profile in self.profiles)


def desired_offer(
    gpu: Gpu, rules: MigRules, shape: Shape, features: ApiFeatures, there: UnmanagedInstances
) -> MigOffer:
    """By the *rules*, while no claim holds *gpu*; *shape*: of the GPU as a whole."""
    mig = gpu.mig
    if mig is None:
        return MigOffer()
    profiles = dynamic_profiles(mig, rules) if rules.dynamic else ()
    problem = _problem(gpu, mig, profiles, shape, features) if rules.dynamic else ""
    if problem or not profiles:
        return MigOffer((), not mig.on, problem)
    return MigOffer(profiles, mig.switches and not there.keys)


def held_offer(
    mig: MigInfo, holds: Sequence[HeldShape], features: ApiFeatures, there: UnmanagedInstances
) -> MigOffer:
    """As it is while claims hold it: they were prepared beside what was offered then."""
    names = holds[0].offered
    cut = held_partitions(mig, holds)
    held_whole = any(hold.partition is None for hold in holds)
    # Without counters nothing keeps a free device from overlapping another: what is held stays.
    listed = mig.profiles if features.counters else ()
    profiles = tuple(one for one in listed if one.name in names and one.placements)
    if profiles:
        return MigOffer(profiles, held_whole or (mig.switches and not there.keys))
    return MigOffer((), held_whole or not (cut or mig.on))


def offer_once_free(gpu: Gpu, holds: Sequence[HeldShape], there: UnmanagedInstances) -> Gpu:
    """*gpu* as it is when no claim holds it any more: its mode goes with the last partition where
    it can, and nobody else has cut it."""
    mig = gpu.mig
    if mig is None or not mig.switches or there.keys or not any(hold.cut for hold in holds):
        return gpu
    return replace(gpu, mig=replace(mig, on=False, pending=False))


def describe_mig_offer(cutting: MigOffer, whole: str) -> str:
    """In a few words, for people; *whole*: what becomes of the GPU as a whole."""
    said = [whole] if cutting.whole else []
    if cutting.profiles:
        said.append(f"partitions cut for claims ({', '.join(cutting.names)})")
    return " and ".join(said) or "the partitions that exist"


def needs_reset_for_mig(gpu: Gpu, rules: MigRules, shape: Shape, features: ApiFeatures) -> bool:
    """Whether nothing but its mode, which needs a reset, keeps *gpu* from being cut for claims."""
    mig = gpu.mig
    if mig is None or mig.switches or mig.on or mig.fixed is not GuestRestriction.NOTHING:
        return False
    if not rules.dynamic:
        return False
    return not _never(gpu, dynamic_profiles(mig, rules), shape, features)


def _problem(
    gpu: Gpu, mig: MigInfo, profiles: Sequence[MigProfile], shape: Shape, features: ApiFeatures
) -> str:
    if never := _never(gpu, profiles, shape, features):
        return never
    if mig.switches or mig.on:
        return ""
    if mig.fixed is GuestRestriction.MODE:
        if mig.pending:
            return "MIG mode is off, and goes on when the virtual machine is rebooted"
        return f"MIG mode is off: {guest_mode_problem(mig.fixed, gpu.pci_bus_id, on=True)}"
    return (
        "MIG mode is off and is being switched, which takes a reset: it is tried again and again "
        "while no claim and no process uses the GPU"
    )


def _never(gpu: Gpu, profiles: Sequence[MigProfile], shape: Shape, features: ApiFeatures) -> str:
    """What keeps *gpu* from being cut for claims whatever its mode is."""
    if not profiles:
        return f"{gpu.product_name} has none of the profiles that are allowed (mig.profiles)"
    if not features.counters:
        return NEEDS_COUNTERS
    if gpu.mig is not None and gpu.mig.fixed is GuestRestriction.ALL:
        return guest_mode_problem(gpu.mig.fixed, gpu.pci_bus_id, on=True)
    if isinstance(shape, Replica):
        return (
            f"its {shape.of} replicas are devices of their own, because the API server keeps no "
            "consumable capacity, and partitions cannot be kept apart from those; remove replicas"
        )
    return ""


def gpus_to_switch(
    inventory: Inventory, profile: Profile, features: ApiFeatures, held: HoldingsByDevice
) -> tuple[GpuUuid, ...]:
    """The GPUs that are offered in partitions once their MIG mode is on, and that no claim holds.

    Those too of which the mode is pending: whoever set it did not have the reset that it takes.
    """
    rules, _ = rules_by_gpu(profile, inventory.gpus)
    used = {holding.gpu for holdings in held.values() for holding in holdings if not holding.admin}
    return tuple(
        gpu.uuid
        for gpu in inventory.gpus
        if gpu.uuid not in used and _waits(gpu, rules[gpu.uuid], features)
    )


def after_switch(
    inventory: Inventory,
    profile: Profile,
    features: ApiFeatures,
    held: HoldingsByDevice,
    stuck: Collection[GpuUuid] = (),
) -> Inventory:
    """*inventory* as it is when every such switch succeeded, but for GPUs that are *stuck*."""
    chosen = set(gpus_to_switch(inventory, profile, features, held)) - set(stuck)
    return replace(inventory, gpus=tuple(_switched(gpu, chosen) for gpu in inventory.gpus))


def _waits(gpu: Gpu, rules: Rules, features: ApiFeatures) -> bool:
    if gpu.mig is None:
        return False
    shape, _ = shape_of(gpu, rules, features)
    return rules.include and needs_reset_for_mig(gpu, rules.mig, shape, features)


def _switched(gpu: Gpu, chosen: Collection[GpuUuid]) -> Gpu:
    if gpu.mig is None or gpu.uuid not in chosen:
        return gpu
    return replace(gpu, mig=replace(gpu.mig, on=True, pending=True))


@dataclass(frozen=True, slots=True)
class PartitionDevices:
    """What a GPU is offered as, beside the whole of it."""

    devices: tuple[Device, ...] = ()
    of_whole: CounterAmounts = ()  # what the GPU as a whole takes of the counters
    counter_sets: tuple[CounterSet, ...] = ()  # one, or none
    problems: tuple[str, ...] = ()  # what keeps partitions from being offered as the rules say


@dataclass(frozen=True, slots=True)
class GpuContext:
    """A GPU and what holds for it: the rules, the API server, and the claims."""

    gpu: Gpu
    rules: Rules
    features: ApiFeatures
    holds: Sequence[HeldShape]  # of claims that do more than look on
    there: UnmanagedInstances


def partition_devices(board: GpuContext, cutting: MigOffer) -> PartitionDevices:
    """The partitions of *board*, as they are tried."""
    found = _offered(board, cutting)
    shapes = _Shapes(board)
    devices = tuple(
        Device(
            board.gpu,
            shapes.of(place.partition.profile, place.partition.key),
            board.rules,
            place.partition,
            place.instance,
            takes=place.takes,
            offered=cutting.names,
        )
        for place in found.places
    )
    sets = (CounterSet(counter_set_name(board.gpu), found.counters),) if found.counters else ()
    return PartitionDevices(devices, found.of_whole, sets, tuple(shapes.problems))


def _offered(board: GpuContext, cutting: MigOffer) -> OfferedPartitions:
    mig = board.gpu.mig
    if mig is None or (cutting.whole and not cutting.profiles):
        return OfferedPartitions()  # nothing would keep them from the GPU as a whole
    held = held_partitions(mig, board.holds)
    if cutting.profiles:
        return dynamic_partitions(
            mig, cutting.profiles, board.there, whole=cutting.whole, held=held
        )
    return existing_partitions(mig, board.there, held)


class _Shapes:
    """The shape of every partition: as a claim that holds it found it, else as the rules say."""

    def __init__(self, board: GpuContext) -> None:
        self._board = board
        self._held = {h.partition: h.shape for h in board.holds if h.partition is not None}
        self._wanted: dict[MigProfile, Shape] = {}
        self.problems: list[str] = []

    def of(self, profile: MigProfile, key: PartitionKey) -> Shape:
        board = self._board
        if key in self._held:
            return held_shape(self._held[key], board.rules)
        if profile not in self._wanted:
            shape, problem = shape_of_partitions(board.gpu, profile, board.rules, board.features)
            self._wanted[profile] = shape
            self.problems += [f"partitions {profile.name}: {problem}"] if problem else []
        return self._wanted[profile]
