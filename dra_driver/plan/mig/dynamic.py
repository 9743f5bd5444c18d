"""What a GPU with MIG is offered as: whole, in partitions, or both.

That follows from its rules, its mode, and what claims hold. Boards that need a reset for MIG mode
are switched to it before any partition is created.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import (
    Gpu,
    GpuUuid,
    GuestRestriction,
    Inventory,
    MigInfo,
    MigProfile,
    guest_mode_problem,
)
from dra_driver.model.offer import ApiFeatures, CounterSet, Device, Replica, Shape, counter_set_name
from dra_driver.model.profiles import MigRules, Profile, Rules
from dra_driver.model.records import HoldingsByGpu
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
from dra_driver.plan.offer.shapes import (
    device_shapes,
    held_shape,
    shape_of,
    shape_of_partitions,
)
from dra_driver.plan.profiles.rules import rules_by_gpu

NEEDS_COUNTERS = (
    "the API server keeps no counters (KEP-4815, feature DRAPartitionableDevices, Kubernetes 1.35 "
    "and newer), and nothing else keeps partitions apart that are created for claims"
)

NOT_CREATED = (
    "by the device-plugin API no partitions are created for pods; have them created by a layout "
    "(mig.layout)"
)


@frozen
class MigOffer:
    """What is offered of a GPU: partitions of *profiles* that are created for claims, or none, and
    the GPU as a *whole* or not."""

    profiles: tuple[MigProfile, ...] = ()
    whole: bool = True
    problem: str = ""  # why no partitions are created, though the rules say so

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(profile.name for profile in self.profiles)


def desired_offer(
    gpu: Gpu, rules: MigRules, shape: Shape, features: ApiFeatures, unmanaged: UnmanagedInstances
) -> MigOffer:
    """What the *rules* say, for a *gpu* that no claim holds; *shape*: of the GPU as a whole."""
    mig = gpu.mig
    if mig is None:
        return MigOffer()
    profiles = dynamic_profiles(mig, rules) if rules.dynamic else ()
    problem = _problem(gpu, mig, profiles, shape, features) if rules.dynamic else ""
    if problem or not profiles:
        return MigOffer((), not mig.on, problem)
    return MigOffer(profiles, mig.switches and not unmanaged.keys)


def held_offer(
    mig: MigInfo,
    held_shapes: Sequence[HeldShape],
    features: ApiFeatures,
    unmanaged: UnmanagedInstances,
) -> MigOffer:
    """What is offered of a GPU that claims hold: what was offered when they were prepared."""
    names = held_shapes[0].offered
    created = held_partitions(mig, held_shapes)
    held_whole = any(held_shape.partition is None for held_shape in held_shapes)
    # Without counters nothing keeps a free device from overlapping another: what is held stays.
    profiles_of_board = mig.profiles if features.counters else ()
    profiles = tuple(
        profile for profile in profiles_of_board if profile.name in names and profile.placements
    )
    if profiles:
        return MigOffer(profiles, held_whole or (mig.switches and not unmanaged.keys))
    return MigOffer((), held_whole or not (created or mig.on))


def offer_once_free(
    gpu: Gpu, held_shapes: Sequence[HeldShape], unmanaged: UnmanagedInstances
) -> Gpu:
    """*gpu* as it is when no claim holds it any more: with its last partition MIG mode is turned
    off, where that needs no reset and nobody else partitioned it."""
    mig = gpu.mig
    if (
        mig is None
        or not mig.switches
        or unmanaged.keys
        or not any(held_shape.created_for_claims for held_shape in held_shapes)
    ):
        return gpu
    return replace(gpu, mig=replace(mig, on=False, pending=False))


def describe_mig_offer(mig_offer: MigOffer, whole: str) -> str:
    """In a few words, for people; *whole*: what becomes of the GPU as a whole."""
    parts = [whole] if mig_offer.whole else []
    if mig_offer.profiles:
        parts.append(f"partitions created for claims ({', '.join(mig_offer.names)})")
    return " and ".join(parts) or "the partitions that exist"


def needs_reset_for_mig(gpu: Gpu, rules: MigRules, shape: Shape, features: ApiFeatures) -> bool:
    """Whether only its mode, which needs a reset, keeps *gpu* from being partitioned."""
    mig = gpu.mig
    if mig is None or mig.switches or mig.on or mig.fixed is not GuestRestriction.NOTHING:
        return False
    return rules.dynamic and not _never(gpu, dynamic_profiles(mig, rules), shape, features)


def _problem(
    gpu: Gpu, mig: MigInfo, profiles: Sequence[MigProfile], shape: Shape, features: ApiFeatures
) -> str:
    if problem := _never(gpu, profiles, shape, features):
        return problem
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
    """What keeps *gpu* from being partitioned for claims whatever its mode is."""
    if not profiles:
        return f"{gpu.product_name} has none of the profiles that are allowed (mig.profiles)"
    if features.device_plugin:
        return NOT_CREATED
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
    inventory: Inventory, profile: Profile, features: ApiFeatures, held: HoldingsByGpu
) -> tuple[GpuUuid, ...]:
    """The GPUs that no claim holds, and that are offered in partitions once their MIG mode is on.
    The mode may be pending already, without the reset that it takes."""
    rules, _ = rules_by_gpu(profile, inventory.gpus)
    used = {gpu for gpu, holdings in held.items() if not all(h.admin for h in holdings)}
    return tuple(
        gpu.uuid
        for gpu in inventory.gpus
        if gpu.uuid not in used and _waits(gpu, rules[gpu.uuid], features)
    )


def after_switch(
    inventory: Inventory,
    profile: Profile,
    features: ApiFeatures,
    held: HoldingsByGpu,
    stuck: Collection[GpuUuid] = (),
) -> Inventory:
    """*inventory* as it is when all these GPUs were switched, except those that are *stuck*."""
    to_switch = set(gpus_to_switch(inventory, profile, features, held)) - set(stuck)
    gpus = (
        replace(gpu, mig=replace(gpu.mig, on=True, pending=True))
        if gpu.mig is not None and gpu.uuid in to_switch
        else gpu
        for gpu in inventory.gpus
    )
    return replace(inventory, gpus=tuple(gpus))


def _waits(gpu: Gpu, rules: Rules, features: ApiFeatures) -> bool:
    if gpu.mig is None:
        return False
    shape, _ = shape_of(gpu, rules, features)
    return rules.include and needs_reset_for_mig(gpu, rules.mig, shape, features)


@frozen
class PartitionDevices:
    """What a GPU is offered as, beside the whole of it."""

    devices: tuple[Device, ...] = ()
    of_whole: CounterAmounts = ()  # what the GPU as a whole takes of the counters
    counter_sets: tuple[CounterSet, ...] = ()  # one, or none
    problems: tuple[str, ...] = ()  # what keeps partitions from being offered as the rules say


@frozen
class GpuContext:
    """A GPU and what holds for it: the rules, the API server, and the claims."""

    gpu: Gpu
    rules: Rules
    features: ApiFeatures
    holds: Sequence[HeldShape]  # without those with admin access
    unmanaged: UnmanagedInstances


def partition_devices(context: GpuContext, mig_offer: MigOffer) -> PartitionDevices:
    """The partitions of *context*, in the order in which they are tried. A partition that a claim
    holds keeps its shape, the others have that of the rules."""
    gpu, rules = context.gpu, context.rules
    offered = _offered(context, mig_offer)
    held = {held.partition: held_shape(held.shape, rules) for held in context.holds}
    kinds = {
        place: (place.partition.profile, place.instance is not None and not mig_offer.profiles)
        for place in offered.places
    }
    shapes = {
        kind: shape_of_partitions(gpu, kind[0], rules, context.features, fixed=kind[1])
        for kind in dict.fromkeys(
            kinds[place] for place in offered.places if place.partition.key not in held
        )
    }
    devices = tuple(
        Device(
            gpu,
            shape,
            rules,
            place.partition,
            place.instance,
            takes=place.takes,
            offered=mig_offer.names,
        )
        for place in offered.places
        for shape in device_shapes(held.get(place.partition.key) or shapes[kinds[place]][0])
    )
    counter_sets = (
        (CounterSet(counter_set_name(gpu), offered.counters),) if offered.counters else ()
    )
    problems = (
        f"partitions {profile.name}: {problem}"
        for (profile, _), (_, problem) in shapes.items()
        if problem
    )
    return PartitionDevices(devices, offered.of_whole, counter_sets, tuple(dict.fromkeys(problems)))


def _offered(context: GpuContext, mig_offer: MigOffer) -> OfferedPartitions:
    mig = context.gpu.mig
    if mig is None or (mig_offer.whole and not mig_offer.profiles):
        return OfferedPartitions()  # nothing would keep them from the GPU as a whole
    held_by_claims = held_partitions(mig, context.holds)
    if mig_offer.profiles:
        return dynamic_partitions(
            mig, mig_offer.profiles, context.unmanaged, whole=mig_offer.whole, held=held_by_claims
        )
    return existing_partitions(mig, context.unmanaged, held_by_claims)
