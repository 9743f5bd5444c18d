"""Which rules for partitions have no effect, and which partitions are not offered."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from api.names import MIG_CONFIG_LABEL
from dra_driver.model.gpus import (
    Gpu,
    GpuUuid,
    GuestRestriction,
    UnavailableGpu,
    UnusableGpuInstance,
    guest_mode_problem,
)
from dra_driver.model.offer import ApiFeatures, Device, Fractional, Replica
from dra_driver.model.profiles import MigRules, Profile, ProfileEntry, Rules, SharingStrategy
from dra_driver.plan.mig.partitions import UnmanagedInstances, dynamic_profiles, unmatched_patterns
from dra_driver.plan.offer.shapes import max_mps_clients

_Line = tuple[str, str]
"""A field, and what is wrong with it."""

_LABEL = f"the node's label {MIG_CONFIG_LABEL}"


def mig_warnings(
    profile: Profile,
    gpus: Sequence[Gpu],
    rules: Mapping[GpuUuid, Rules],
    partitions: Sequence[Device],
    features: ApiFeatures,
) -> tuple[str, ...]:
    """A line for each rule for partitions in *profile* that has no effect, or not the expected one:
    a single one where it is the same for several entries. *partitions*: those that are offered."""
    lines: list[_Line] = []
    for entry in profile.entries:
        if not entry.rules.include:
            continue
        entry_gpus = [gpu for gpu in gpus if rules[gpu.uuid] is entry.rules]
        entry_partitions = [
            partition for partition in partitions if rules[partition.gpu.uuid] is entry.rules
        ]
        lines += [
            *_of_mig(entry, entry_gpus),
            *_idle_replicas(entry, entry_gpus, entry_partitions),
            *_whole_only(entry, entry_gpus, entry_partitions),
            *_fewer_shares(entry, entry_partitions),
            *_fewer_clients(entry, entry_partitions),
            *_several_kinds(entry, entry_partitions, partitions),
            *([] if features.device_plugin else _not_renamed(entry, entry_partitions)),
        ]
    fields_by_line: dict[str, list[str]] = {}
    for field, line in lines:
        fields_by_line.setdefault(line, []).append(field)
    return tuple(
        f"profile {profile.name!r}, {_few(fields)}: {line}"
        for line, fields in fields_by_line.items()
    )


def _few(fields: Sequence[str]) -> str:
    """*fields*, the first of which stands for the others: 'spec.gpus[0].mig and 2 more'."""
    return f"{fields[0]} and {len(fields) - 1} more" if len(fields) > 1 else fields[0]


def serve_as_gpus(partitions: Sequence[Device]) -> tuple[Device, ...]:
    """*partitions*, with a mark on those that also serve claims for a GPU, where the rules want
    that and all are of one kind.

    Only partitions that exist do so: they have a UUID that selectors can read, and the GPU as a
    whole is no device beside them.
    """
    if len(_kinds(partitions)) > 1:
        return tuple(partitions)
    return tuple(
        replace(partition, as_gpu=True) if _serves_as_gpu(partition) else partition
        for partition in partitions
    )


def _of_mig(entry: ProfileEntry, gpus: Sequence[Gpu]) -> Iterator[_Line]:
    """Rules for GPUs without MIG, patterns that match nothing, and a strategy without effect."""
    mig_rules = entry.rules.mig
    if mig_rules == MigRules():
        return
    without_mig: dict[str, list[str]] = {}
    for gpu in gpus:
        if gpu.mig is None:
            without_mig.setdefault(gpu.mig_problem, []).append(gpu.name)
    for problem, names in without_mig.items():
        reason = f": {problem}" if problem else ""
        yield (
            entry.where("mig"),
            f"has no effect on {', '.join(names)}, which cannot be partitioned{reason}",
        )
    if mig_rules.single:
        yield from ((entry.where("mig.strategy"), line) for line in _idle_single(mig_rules, gpus))
    yield from (
        (entry.where(field, pattern), line)
        for field, pattern, line in unmatched_patterns(gpus, mig_rules)
    )


def _idle_single(rules: MigRules, gpus: Sequence[Gpu]) -> Iterator[str]:
    migs = [gpu.mig for gpu in gpus if gpu.mig is not None]
    if rules.dynamic and migs:
        yield (
            "Single has no effect on partitions that are created for claims; only those that exist "
            "serve claims for a GPU: have them created by a layout"
        )
    elif migs and not any(mig.instances for mig in migs):
        yield (
            "Single has no effect while no partitions exist; have them created by a layout "
            f"(mig.layout, or {_LABEL})"
        )


def _idle_replicas(
    entry: ProfileEntry, gpus: Sequence[Gpu], partitions: Sequence[Device]
) -> Iterator[_Line]:
    """Replicas of profiles that the boards have and that are not created for claims."""
    mig_rules = entry.rules.mig
    migs = [gpu.mig for gpu in gpus if gpu.mig is not None] if mig_rules.dynamic else []
    offered = {profile.name for mig in migs for profile in dynamic_profiles(mig, mig_rules)}
    offered |= {partition.partition.profile.name for partition in partitions if partition.partition}
    known = {profile.name for mig in migs for profile in mig.profiles}
    for name, _ in mig_rules.replicas:
        if name in known - offered:
            yield (
                entry.where("mig.replicas", name),
                f"{name!r} is divided nowhere, since no such partitions are created; add it to "
                "mig.profiles, which names what is created, or remove it here",
            )


def _whole_only(
    entry: ProfileEntry, gpus: Sequence[Gpu], partitions: Sequence[Device]
) -> Iterator[_Line]:
    rules = entry.rules
    has_mig = any(gpu.mig is not None for gpu in gpus)
    if rules.strict and rules.fractions and (partitions or (rules.mig.dynamic and has_mig)):
        yield (
            entry.where("memoryLimit"),
            "Strict has each partition given out whole, since the GPU's driver limits no part of "
            "one; to share partitions, write BestEffort",
        )


def _fewer_shares(entry: ProfileEntry, partitions: Sequence[Device]) -> Iterator[_Line]:
    """Partitions that take fewer claims by MPS than the rules say."""
    shares = entry.rules.shares
    limits = {
        name: most
        for replicas, name, most in _by_mps(partitions)
        if shares is not None and replicas == 1 and most < shares
    }
    if limits:
        listed = ", ".join(f"{most} in {name}" for name, most in sorted(limits.items()))
        yield (
            entry.where("shares"),
            "MPS takes fewer clients in a partition, so at most so many claims share one: "
            + listed,
        )


def _fewer_clients(entry: ProfileEntry, partitions: Sequence[Device]) -> Iterator[_Line]:
    """Partitions on which more replicas take turns than MPS, which a claim may ask for, allows."""
    limits = {
        name: (most, replicas) for replicas, name, most in _by_mps(partitions) if most < replicas
    }
    for name, (most, replicas) in sorted(limits.items()):
        patterns = (
            pattern for pattern, _ in entry.rules.mig.replicas if fnmatchcase(name, pattern)
        )
        yield (
            entry.where("mig.replicas", next(patterns, "")),
            f"{replicas} replicas of {name} can take turns, and MPS, which claims may ask for, "
            f"takes {most} clients there; lower them to {most}, or leave MPS out of strategies",
        )


def _not_renamed(entry: ProfileEntry, partitions: Sequence[Device]) -> Iterator[_Line]:
    """By DRA. By the device-plugin API they are."""
    if entry.rules.rename and any(replicas > 1 for replicas, _ in _divided(partitions)):
        yield (
            entry.where("rename"),
            "has no effect on partitions by DRA: pods ask for them by the name that their "
            "DeviceClass has, without .shared",
        )


def _several_kinds(
    entry: ProfileEntry, partitions: Sequence[Device], all_partitions: Sequence[Device]
) -> Iterator[_Line]:
    kinds = _kinds(all_partitions)
    if len(kinds) < 2 or not any(_serves_as_gpu(partition) for partition in partitions):
        return
    listed = ", ".join(f"{name} on {', '.join(gpus)}" for name, gpus in sorted(kinds.items()))
    layout = entry.rules.mig.layout
    current = f" (now {layout!r})" if layout else ""
    yield (
        entry.where("mig.strategy"),
        f"Single has no effect, since there are partitions of several kinds: {listed}; have GPUs "
        f"partitioned into one kind only, by mig.layout{current} or {_LABEL}: for example "
        f"all-{min(kinds).replace('+', '.')}",
    )


def unusable_instances(gpu: Gpu, unmanaged: UnmanagedInstances) -> tuple[UnavailableGpu, ...]:
    """The GPU instances that no claim can have."""

    def computes(instance: UnusableGpuInstance) -> str:
        if instance.cis == 1:
            return "1 compute instance, and none that fills it and has a name"
        return f"{instance.cis or 'no'} compute instances, and none that fills it"

    return tuple(
        UnavailableGpu(
            f"GPU instance {instance.gi} of GPU {gpu.pci_bus_id} ({gpu.uuid})",
            f"it has {computes(instance)}; give it one "
            "(nvidia-smi mig -cci), or remove it (nvidia-smi mig -dci, "
            f"-dgi with -i {gpu.pci_bus_id} -gi {instance.gi})",
        )
        for instance in unmanaged.unusable
    )


def no_partitions_problem(gpu: Gpu, problem: str) -> UnavailableGpu:
    """A GPU in MIG mode of which nothing is offered."""
    what = f"GPU {gpu.pci_bus_id} ({gpu.uuid})"
    if gpu.mig is not None and not gpu.mig.profiles:
        reason = gpu.mig_problem or "root alone can, see the log"
        return UnavailableGpu(what, f"MIG mode is on, and its partitions cannot be read: {reason}")
    reason = problem or _how_to_create_some(gpu)
    return UnavailableGpu(what, f"MIG mode is on, and it has no partitions: {reason}")


def _how_to_create_some(gpu: Gpu) -> str:
    fixed = GuestRestriction.NOTHING if gpu.mig is None else gpu.mig.fixed
    if fixed is GuestRestriction.ALL:
        return guest_mode_problem(fixed, gpu.pci_bus_id, on=False)
    reboot = " and a reboot" if fixed is GuestRestriction.MODE else ""
    return (
        "create some (nvidia-smi mig -cgi), let a profile do that (mig: Dynamic), or turn MIG mode "
        f"off with nvidia-smi -i {gpu.pci_bus_id} -mig 0{reboot}"
    )


def _by_mps(partitions: Iterable[Device]) -> Iterator[tuple[int, str, int]]:
    """The replicas of each partition that claims may share by MPS, the name of its profile, and how
    many clients MPS takes."""
    for replicas, partition in _divided(partitions):
        if partition.partition and SharingStrategy.MPS in partition.rules.strategies:
            profile = partition.partition.profile
            yield replicas, profile.name, max_mps_clients(partition.gpu, profile)


def _divided(partitions: Iterable[Device]) -> Iterator[tuple[int, Device]]:
    """The replicas of each partition that is shared; 1: parts of any size."""
    for partition in partitions:
        match partition.shape:
            case Fractional(replicas=replicas) | Replica(of=replicas):
                yield replicas, partition


def _kinds(partitions: Iterable[Device]) -> dict[str, list[str]]:
    """The GPUs with partitions of each profile, of partitions that are to serve claims for a
    GPU."""
    gpus_by_kind: dict[str, dict[str, None]] = {}
    for partition in partitions:
        if partition.partition is not None and _serves_as_gpu(partition):
            gpus_by_kind.setdefault(partition.partition.profile.name, {})[partition.gpu.name] = None
    return {name: sorted(gpus) for name, gpus in gpus_by_kind.items()}


def _serves_as_gpu(device: Device) -> bool:
    return device.rules.mig.single and device.instance is not None
