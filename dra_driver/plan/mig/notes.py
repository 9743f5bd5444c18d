"""What of the rules for partitions has no effect, and what of partitions is not offered."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dra_driver.model.devices import Gpu, GpuUuid, Withheld
from dra_driver.model.offer import Device, Sliceable
from dra_driver.model.profiles import MigRules, Profile, Rules, Strategy
from dra_driver.plan.mig.offered import Foreign, unmatched
from dra_driver.plan.strategies import clients


def notes(profile: Profile, gpus: Sequence[Gpu], rules: Mapping[GpuUuid, Rules]) -> Iterator[str]:
    """A line for each entry of *profile* that wants partitions where none can be, for each of its
    patterns that matches nothing, and for a strategy that nothing is there for."""
    for entry in profile.entries:
        its = entry.rules
        if not its.include or its.mig == MigRules():
            continue
        found = [gpu for gpu in gpus if rules[gpu.uuid] is its]
        where = f"profile {profile.name!r}, {entry.path}"
        solid = [gpu.name for gpu in found if gpu.mig is None]
        if solid:
            yield f"{where}: mig has no effect on {', '.join(solid)}, which cannot be cut"
        if its.mig.single:
            yield from (f"{where}.{line}" for line in _idle_single(its.mig, found))
        yield from (f"{where}.{line}" for line in unmatched(found, its.mig))


def _idle_single(rules: MigRules, gpus: Sequence[Gpu]) -> Iterator[str]:
    can_be_cut = [gpu.mig for gpu in gpus if gpu.mig is not None]
    if rules.dynamic and can_be_cut:
        yield (
            "mig.strategy: Single has no effect on partitions that are cut for claims; only those "
            "that exist serve claims for a GPU: have them cut by a layout"
        )
    elif can_be_cut and not any(mig.instances for mig in can_be_cut):
        yield (
            "mig.strategy: Single has no effect while no partitions exist; have them cut by a "
            "layout (mig.layout)"
        )


def fewer_shares(profile: Profile, partitions: Sequence[Device]) -> Iterator[str]:
    """A line for each entry of *profile* that wants more claims on a partition than MPS takes."""
    for entry in profile.entries:
        wanted = entry.rules.shares
        if wanted is None or Strategy.MPS not in entry.rules.strategies:
            continue
        found = {
            one.partition.profile.name: most
            for one in partitions
            if one.rules is entry.rules and one.partition and _divides(one)
            if (most := clients(one.gpu, one.partition.profile)) < wanted
        }
        if found:
            what = ", ".join(f"{most} in {name}" for name, most in sorted(found.items()))
            yield (
                f"profile {profile.name!r}, {entry.path}.shares: MPS takes fewer clients in a "
                f"partition, so at most so many claims share one: {what}"
            )


def as_gpus(partitions: Sequence[Device]) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """*partitions*, those marked that serve claims for a GPU as well; and why none of them do,
    where the rules want that.

    Only those that exist: each of them is something to compute on, with a UUID that selectors can
    read, and the GPU as a whole is no device beside them.
    """
    single = [one for one in partitions if _serves_as_gpu(one)]
    kinds = sorted({one.partition.profile.name for one in single if one.partition is not None})
    if len(kinds) > 1:
        return tuple(partitions), (
            f"mig.strategy: Single has no effect, since there are partitions of several kinds: "
            f"{', '.join(kinds)}; cut GPUs into one kind only",
        )
    return tuple(
        replace(one, as_gpu=True) if _serves_as_gpu(one) else one for one in partitions
    ), ()


def odd_ones(gpu: Gpu, there: Foreign) -> tuple[Withheld, ...]:
    """GPU instances that nobody can be given."""
    return tuple(
        Withheld(
            f"GPU instance {one.gi} of GPU {gpu.pci_bus_id} ({gpu.uuid})",
            f"it has {one.cis or 'no'} compute instance{'' if one.cis == 1 else 's'}, and none "
            "that fills it; give it one (nvidia-smi mig -cci), or remove it (nvidia-smi mig -dci, "
            f"-dgi with -i {gpu.pci_bus_id} -gi {one.gi})",
        )
        for one in there.odd
    )


def without_partitions(gpu: Gpu, problem: str) -> Withheld:
    """A GPU in MIG mode of which there is nothing to offer."""
    what = f"GPU {gpu.pci_bus_id} ({gpu.uuid})"
    if gpu.mig is not None and not gpu.mig.profiles:
        why = "MIG mode is on, and how it is cut cannot be read, which root alone can: see the log"
        return Withheld(what, why)
    why = problem or (
        "cut some (nvidia-smi mig -cgi), let a profile do that (mig: Dynamic), or turn MIG mode "
        f"off with nvidia-smi -i {gpu.pci_bus_id} -mig 0"
    )
    return Withheld(what, f"MIG mode is on, and it has no partitions: {why}")


def _divides(device: Device) -> bool:
    """Whether claims can have parts of it, as many as there is room for."""
    return isinstance(device.shape, Sliceable) and device.shape.replicas == 1


def _serves_as_gpu(device: Device) -> bool:
    return device.rules.mig.single and device.instance is not None
