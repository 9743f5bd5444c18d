"""What becomes of each GPU: in which shape it is offered, in which parts, and by which rules.

A GPU keeps its shape and its parts as long as a claim holds it, since the scheduler counts what is
left by what is published.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import Gpu, GpuUuid, Inventory, UnavailableGpu
from dra_driver.model.health import Faults, faults_by_gpu
from dra_driver.model.offer import (
    EXCLUSIVE,
    AdminAccess,
    ApiFeatures,
    CounterSet,
    Device,
    Fractional,
    Offer,
    PendingChange,
    Replica,
    Shape,
)
from dra_driver.model.profiles import Profile, Rules
from dra_driver.model.records import HoldingsByGpu
from dra_driver.plan.health.taints import device_taints, few_taints
from dra_driver.plan.mig import dynamic
from dra_driver.plan.mig.dynamic import GpuContext, MigOffer, PartitionDevices, partition_devices
from dra_driver.plan.mig.partitions import (
    CreatedPartitions,
    HeldShape,
    created_partitions,
    unmanaged_instances,
)
from dra_driver.plan.mig.warnings import (
    mig_warnings,
    no_partitions_problem,
    serve_as_gpus,
    unusable_instances,
)
from dra_driver.plan.offer.shapes import (
    describe_shape,
    device_shapes,
    held_shape,
    policy_warnings,
    possible_rules,
    same_shape,
    shape_of,
    strategy_warnings,
)
from dra_driver.plan.profiles.rules import rules_by_gpu


@frozen
class _GpuOffer:
    """What becomes of one GPU."""

    whole: tuple[Device, ...] = ()
    partitions: tuple[Device, ...] = ()
    monitors: tuple[Device, ...] = ()
    counter_sets: tuple[CounterSet, ...] = ()
    unavailable: tuple[UnavailableGpu, ...] = ()
    pending: tuple[PendingChange, ...] = ()


def build_offer(  # noqa: PLR0913 - the node in four parts, and what one of them does not say
    inventory: Inventory,
    profile: Profile,
    features: ApiFeatures,
    holdings: HoldingsByGpu,
    mps: bool = True,
    *,
    ours: CreatedPartitions = frozenset(),
    faults: Faults = (),
) -> Offer:
    """The devices of the node, in publishing order: GPUs by minor number, then partitions, first
    of GPUs that cannot be taken whole, then monitors.

    No GPU's rules can spoil the others': what cannot be published as the profile says is published
    whole, and ``pending`` says why. *mps*: the node has an MPS agent; without one no GPU is shared
    by MPS. The rules of a device allow only strategies that work on it. *ours*: the partitions that
    claims had when the inventory was looked at, beside those of *holdings*. *faults*: what is wrong
    with GPUs, whose devices have taints then; they are withdrawn where taints are not kept.
    """
    rules, idle = rules_by_gpu(profile, inventory.gpus)
    gpu_features = replace(features, gpus=len(inventory.gpus)) if inventory.gpus else features
    held, claimed = dict(held_shapes(holdings)), ours | created_partitions(holdings)
    gpu_offers = [
        _of_gpu(
            gpu,
            rules[gpu.uuid],
            _where(profile, rules[gpu.uuid]),
            gpu_features,
            mps,
            held.get(gpu.uuid, ()),
            frozenset(key for key in claimed if key[0] == gpu.uuid),
        )
        for gpu in inventory.gpus
    ]
    by_wholeness = sorted(gpu_offers, key=lambda gpu_offer: bool(gpu_offer.whole))
    partitions = serve_as_gpus(
        sorted(
            (device for gpu_offer in by_wholeness for device in gpu_offer.partitions), key=_place
        )
    )
    devices, withdrawn = _with_taints(
        (
            *sorted((device for gpu_offer in gpu_offers for device in gpu_offer.whole), key=_place),
            *partitions,
            *(device for gpu_offer in gpu_offers for device in gpu_offer.monitors),
        ),
        faults,
        features,
    )
    return Offer(
        devices,
        (
            *inventory.unavailable,
            *(item for gpu_offer in gpu_offers for item in gpu_offer.unavailable),
            *withdrawn,
        ),
        tuple(item for gpu_offer in gpu_offers for item in gpu_offer.pending),
        (
            *profile.warnings,
            *idle,
            *strategy_warnings(profile, inventory.gpus, rules, mps),
            *policy_warnings(profile, features),
            *mig_warnings(profile, inventory.gpus, rules, partitions, features),
        ),
        tuple(item for gpu_offer in gpu_offers for item in gpu_offer.counter_sets),
    )


def _with_taints(
    devices: tuple[Device, ...], faults: Faults, features: ApiFeatures
) -> tuple[tuple[Device, ...], tuple[UnavailableGpu, ...]]:
    """*devices* with their taints. Where those are not kept, the devices that would have some are
    withdrawn, one by one."""
    by_gpu = faults_by_gpu(faults)
    if not by_gpu:
        return devices, ()
    # Who keeps counters of other slices takes more taints, too: both came with Kubernetes 1.35.
    fitting = few_taints if not features.counters else tuple
    tainted = [
        replace(device, taints=fitting(device_taints(device, faults_of_gpu)))
        if (faults_of_gpu := by_gpu.get(device.gpu.uuid))
        else device
        for device in devices
    ]
    if features.device_taints:
        return tuple(tainted), ()
    withdrawn = {
        _what(device): "; ".join(taint.reason for taint in device.taints)
        for device in tainted
        if device.taints
    }
    healthy = tuple(device for device in tainted if not device.taints)
    return healthy, tuple(UnavailableGpu(what, reason) for what, reason in withdrawn.items())


def _what(device: Device) -> str:
    if device.partition is not None:
        return device.name
    return f"GPU {device.gpu.pci_bus_id} ({device.gpu.uuid})"


HeldShapes = tuple[tuple[GpuUuid, tuple[HeldShape, ...]], ...]


def held_shapes(holdings: HoldingsByGpu) -> HeldShapes:
    """What claims without admin access hold of each GPU, each shape once: all that matters of
    *holdings* to what is offered."""
    shapes: dict[GpuUuid, dict[HeldShape, None]] = {}
    for holding in itertools.chain.from_iterable(holdings.values()):
        if not holding.admin:
            shape = HeldShape(
                holding.shape, holding.partition, holding.created_for_claims, holding.offered
            )
            shapes.setdefault(holding.gpu, {})[shape] = None
    return tuple((gpu, tuple(shapes[gpu])) for gpu in sorted(shapes))


@functools.lru_cache(maxsize=256)  # every claim asks anew, and changes one GPU at most
def _of_gpu(  # noqa: PLR0913 - all that decides what becomes of one GPU
    gpu: Gpu,
    gpu_rules: Rules,
    where: str,
    features: ApiFeatures,
    mps: bool,
    holds: tuple[HeldShape, ...],
    ours: CreatedPartitions,
) -> _GpuOffer:
    """*where*: the place of its rules in the profile, for messages."""
    rules, problem = possible_rules(gpu, gpu_rules, mps)
    if not rules.include and not holds:
        reason = f"{where}include: false leaves it out; remove that to offer it"
        left_out = UnavailableGpu(f"GPU {gpu.pci_bus_id} ({gpu.uuid})", reason, by_profile=True)
        return _GpuOffer(unavailable=(left_out,))
    context = GpuContext(gpu, rules, features, holds, unmanaged_instances(gpu, ours))
    shape, problem = (EXCLUSIVE, problem) if problem else shape_of(gpu, rules, features)
    free = dynamic.offer_once_free(gpu, holds, context.unmanaged)
    desired = _GpuShapes(
        shape, dynamic.desired_offer(free, rules.mig, shape, features, context.unmanaged)
    )
    shapes = _kept(context, desired)
    partitions = partition_devices(context, shapes.mig)
    whole = _whole(context, shapes, partitions)
    unusable = unusable_instances(gpu, context.unmanaged)
    if not whole and not partitions.devices:
        return _GpuOffer(unavailable=(no_partitions_problem(gpu, desired.mig.problem), *unusable))
    problems = [text for text in (problem, desired.mig.problem, *partitions.problems) if text]
    message = f"{where}{'; '.join(problems)}" if problems else ""
    return _GpuOffer(
        whole,
        partitions.devices,
        _monitors(context, shapes, partitions),
        partitions.counter_sets,
        unusable,
        tuple(_pending(context, desired, shapes, message)),
    )


@frozen
class _GpuShapes:
    """How a GPU is offered: the shape of it as a whole, and its partitions."""

    shape: Shape
    mig: MigOffer

    def looks_like(self, other: "_GpuShapes") -> bool:
        return same_shape(self.shape, other.shape) and self.mig.names == other.mig.names


def _kept(context: GpuContext, desired: _GpuShapes) -> _GpuShapes:
    """*desired*, as far as no claim holds the GPU."""
    if not context.holds:
        return desired
    whole = next((h.shape for h in context.holds if h.partition is None), None)
    shape = desired.shape if whole is None else held_shape(whole, context.rules)
    mig = context.gpu.mig
    if mig is None:
        return _GpuShapes(shape, MigOffer())
    return _GpuShapes(
        shape, dynamic.held_offer(mig, context.holds, context.features, context.unmanaged)
    )


def _whole(
    context: GpuContext, shapes: _GpuShapes, partitions: PartitionDevices
) -> tuple[Device, ...]:
    if not shapes.mig.whole:
        return ()
    device = Device(
        context.gpu, rules=context.rules, takes=partitions.of_whole, offered=shapes.mig.names
    )
    return tuple(replace(device, shape=shape) for shape in device_shapes(shapes.shape))


def _monitors(
    context: GpuContext, shapes: _GpuShapes, partitions: PartitionDevices
) -> tuple[Device, ...]:
    """A device for admin access, where the other devices can be used up and would refuse it."""
    shared = shapes.mig.whole and isinstance(shapes.shape, Fractional)
    if not context.features.device_taints or not (shared or partitions.devices):
        return ()
    return (Device(context.gpu, AdminAccess(), context.rules, offered=shapes.mig.names),)


def _pending(
    context: GpuContext, desired: _GpuShapes, shapes: _GpuShapes, problem: str
) -> Iterator[PendingChange]:
    name, include = context.gpu.name, context.rules.include
    text = (
        dynamic.describe_mig_offer(desired.mig, describe_shape(desired.shape))
        if include
        else "left out"
    )
    if not shapes.looks_like(desired) or not include:
        yield PendingChange(name, text)
    elif problem:
        yield PendingChange(name, text, problem)


def _where(profile: Profile, rules: Rules) -> str:
    """Where in the profile *rules* stand."""
    paths = [entry.path for entry in profile.entries if entry.rules is rules]
    return f"profile {profile.name!r}, {paths[0]}: " if paths else ""


def _place(device: Device) -> int:
    """Replicas stand by place and then by GPU or partition: two of one request are of different
    ones, as long as there are some."""
    return device.shape.place if isinstance(device.shape, Replica) else 0
