"""What of the rules for partitions has no effect, and what of partitions is not offered."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from api.names import MIG_CONFIG_LABEL
from dra_driver.model.gpus import Gpu, GpuUuid, GuestRestriction, UnavailableGpu, guest_mode_problem
from dra_driver.model.offer import Device, Fractional
from dra_driver.model.profiles import MigRules, Profile, ProfileEntry, Rules, SharingStrategy
from dra_driver.plan.mig.partitions import UnmanagedInstances, dynamic_profiles, unmatched_patterns
from dra_driver.plan.offer.shapes import max_mps_clients

_Line = tuple[str, str]
"""Which field, and what there is to say of it."""

_LABEL = f"the node's label {MIG_CONFIG_LABEL}"


def mig_warnings(
    profile: Profile,
    gpus: Sequence[Gpu],
    rules: Mapping[GpuUuid, Rules],
    partitions: Sequence[Device],
) -> tuple[str, ...]:
    """A line for all that entries of *profile* say of partitions and that has no effect, or another
    one than is to be expected. *partitions*: those that are offered."""
    lines: list[str] = []
    for entry in profile.entries:
        if not entry.rules.include:
            continue
        its = {gpu.uuid: gpu for gpu in gpus if rules[gpu.uuid] is entry.rules}
        found = [partition for partition in partitions if partition.gpu.uuid in its]
        said = (
            *_of_mig(entry, [*its.values()]),
            *_idle_replicas(entry, [*its.values()], found),
            *_whole_only(entry, [*its.values()], found),
            *_fewer_shares(entry, found),
            *_fewer_clients(entry, found),
            *_several_kinds(entry, found, partitions),
        )
        lines += [f"profile {profile.name!r}, {where}: {line}" for where, line in said]
    return tuple(lines)


def serve_as_gpus(partitions: Sequence[Device]) -> tuple[Device, ...]:
    """*partitions*, those marked that serve claims for a GPU as well: where the rules want that,
    and all are of one kind.

    Only those that exist: each of them is something to compute on, with a UUID that selectors can
    read, and the GPU as a whole is no device beside them.
    """
    if len(_kinds(partitions)) > 1:
        return tuple(partitions)
    return tuple(
        replace(partition, as_gpu=True) if _serves_as_gpu(partition) else partition
        for partition in partitions
    )


def _of_mig(entry: ProfileEntry, gpus: Sequence[Gpu]) -> Iterator[_Line]:
    """Partitions where none can be, patterns that match nothing, and a strategy that nothing is
    there for."""
    its = entry.rules.mig
    if its == MigRules():
        return
    solid: dict[str, list[str]] = {}
    for gpu in gpus:
        if gpu.mig is None:
            solid.setdefault(gpu.mig_problem, []).append(gpu.name)
    for problem, names in solid.items():
        why = f": {problem}" if problem else ""
        yield entry.where("mig"), f"has no effect on {', '.join(names)}, which cannot be cut{why}"
    if its.single:
        yield from ((entry.where("mig.strategy"), line) for line in _idle_single(its, gpus))
    yield from (
        (entry.where(field, pattern), line)
        for field, pattern, line in unmatched_patterns(gpus, its)
    )


def _idle_single(rules: MigRules, gpus: Sequence[Gpu]) -> Iterator[str]:
    can_be_cut = [gpu.mig for gpu in gpus if gpu.mig is not None]
    if rules.dynamic and can_be_cut:
        yield (
            "Single has no effect on partitions that are cut for claims; only those that exist "
            "serve claims for a GPU: have them cut by a layout"
        )
    elif can_be_cut and not any(mig.instances for mig in can_be_cut):
        yield (
            "Single has no effect while no partitions exist; have them cut by a layout "
            f"(mig.layout, or {_LABEL})"
        )


def _idle_replicas(
    entry: ProfileEntry, gpus: Sequence[Gpu], partitions: Sequence[Device]
) -> Iterator[_Line]:
    """Kinds that the boards have and that are not cut for claims: nothing is divided."""
    its = entry.rules.mig
    cut = [gpu.mig for gpu in gpus if gpu.mig is not None] if its.dynamic else []
    offered = {profile.name for mig in cut for profile in dynamic_profiles(mig, its)}
    offered |= {partition.partition.profile.name for partition in partitions if partition.partition}
    there = {profile.name for mig in cut for profile in mig.profiles}
    for name, _ in its.replicas:
        if name in there - offered:
            yield (
                entry.where("mig.replicas", name),
                f"{name!r} is divided nowhere, since no such partitions are cut; add it to "
                "mig.profiles, which names what is cut, or remove it here",
            )


def _whole_only(
    entry: ProfileEntry, gpus: Sequence[Gpu], partitions: Sequence[Device]
) -> Iterator[_Line]:
    rules = entry.rules
    can_be_cut = any(gpu.mig is not None for gpu in gpus)
    if rules.strict and rules.fractions and (partitions or (rules.mig.dynamic and can_be_cut)):
        yield (
            entry.where("memoryLimit"),
            "Strict has each partition given out whole, since the GPU's driver limits no part of "
            "one; to share partitions, write BestEffort",
        )


def _fewer_shares(entry: ProfileEntry, partitions: Sequence[Device]) -> Iterator[_Line]:
    """More claims are wanted on a partition than MPS takes."""
    wanted = entry.rules.shares
    found = {
        name: most
        for one, name, most in _by_mps(partitions)
        if wanted is not None and one.replicas == 1 and most < wanted
    }
    if found:
        what = ", ".join(f"{most} in {name}" for name, most in sorted(found.items()))
        yield (
            entry.where("shares"),
            "MPS takes fewer clients in a partition, so at most so many claims share one: " + what,
        )


def _fewer_clients(entry: ProfileEntry, partitions: Sequence[Device]) -> Iterator[_Line]:
    """More replicas take turns on a partition than MPS takes clients, which each may ask for."""
    found = {
        name: (most, one.replicas) for one, name, most in _by_mps(partitions) if most < one.replicas
    }
    for name, (most, replicas) in sorted(found.items()):
        patterns = (each for each, _ in entry.rules.mig.replicas if fnmatchcase(name, each))
        yield (
            entry.where("mig.replicas", next(patterns, "")),
            f"{replicas} replicas of {name} can take turns, and MPS, which claims may ask for, "
            f"takes {most} clients there; lower them to {most}, or leave MPS out of strategies",
        )


def _several_kinds(
    entry: ProfileEntry, partitions: Sequence[Device], all_partitions: Sequence[Device]
) -> Iterator[_Line]:
    kinds = _kinds(all_partitions)
    if len(kinds) < 2 or not any(_serves_as_gpu(partition) for partition in partitions):
        return
    there = ", ".join(f"{name} on {', '.join(gpus)}" for name, gpus in sorted(kinds.items()))
    layout = entry.rules.mig.layout
    now = f" (now {layout!r})" if layout else ""
    yield (
        entry.where("mig.strategy"),
        f"Single has no effect, since there are partitions of several kinds: {there}; have GPUs "
        f"cut into one kind only, by mig.layout{now} or {_LABEL}: for example "
        f"all-{min(kinds).replace('+', '.')}",
    )


def unusable_instances(gpu: Gpu, there: UnmanagedInstances) -> tuple[UnavailableGpu, ...]:
    """GPU instances that nobody can be given."""
    return tuple(
        UnavailableGpu(
            f"GPU instance {one.gi} of GPU {gpu.pci_bus_id} ({gpu.uuid})",
            f"it has {one.cis or 'no'} compute instance{'' if one.cis == 1 else 's'}, and none "
            f"that fills it{' and has a name' if one.cis == 1 else ''}; give it one "
            "(nvidia-smi mig -cci), or remove it (nvidia-smi mig -dci, "
            f"-dgi with -i {gpu.pci_bus_id} -gi {one.gi})",
        )
        for one in there.unusable
    )


def no_partitions_problem(gpu: Gpu, problem: str) -> UnavailableGpu:
    """A GPU in MIG mode of which there is nothing to offer."""
    what = f"GPU {gpu.pci_bus_id} ({gpu.uuid})"
    if gpu.mig is not None and not gpu.mig.profiles:
        why = gpu.mig_problem or "root alone can, see the log"
        return UnavailableGpu(what, f"MIG mode is on, and how it is cut cannot be read: {why}")
    why = problem or _to_have_some(gpu)
    return UnavailableGpu(what, f"MIG mode is on, and it has no partitions: {why}")


def _to_have_some(gpu: Gpu) -> str:
    fixed = GuestRestriction.NOTHING if gpu.mig is None else gpu.mig.fixed
    if fixed is GuestRestriction.ALL:
        return guest_mode_problem(fixed, gpu.pci_bus_id, on=False)
    reboot = " and a reboot" if fixed is GuestRestriction.MODE else ""
    return (
        "cut some (nvidia-smi mig -cgi), let a profile do that (mig: Dynamic), or turn MIG mode "
        f"off with nvidia-smi -i {gpu.pci_bus_id} -mig 0{reboot}"
    )


def _by_mps(partitions: Iterable[Device]) -> Iterator[tuple[Fractional, str, int]]:
    """Of those that claims may share by MPS: the shape, what the kind is called, and how many
    clients MPS takes."""
    for partition in partitions:
        by_mps = SharingStrategy.MPS in partition.rules.strategies
        if by_mps and partition.partition and isinstance(partition.shape, Fractional):
            profile = partition.partition.profile
            yield partition.shape, profile.name, max_mps_clients(partition.gpu, profile)


def _kinds(partitions: Iterable[Device]) -> dict[str, list[str]]:
    """Of those that are to serve claims for a GPU: of each kind, the GPUs that have some."""
    found: dict[str, dict[str, None]] = {}
    for partition in partitions:
        if partition.partition is not None and _serves_as_gpu(partition):
            found.setdefault(partition.partition.profile.name, {})[partition.gpu.name] = None
    return {name: sorted(gpus) for name, gpus in found.items()}


def _serves_as_gpu(device: Device) -> bool:
    return device.rules.mig.single and device.instance is not None
