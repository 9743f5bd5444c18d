"""What of the rules for partitions has no effect, and what of partitions is not offered."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dra_driver.model.devices import Gpu, GpuUuid, Withheld
from dra_driver.model.offer import Device
from dra_driver.model.profiles import Profile, Rules
from dra_driver.plan.mig.offered import Foreign, unmatched


def notes(profile: Profile, gpus: Sequence[Gpu], rules: Mapping[GpuUuid, Rules]) -> Iterator[str]:
    """A line for each entry of *profile* that wants partitions where none can be, and for each of
    its patterns that matches nothing."""
    for entry in profile.entries:
        its = entry.rules
        if not (its.include and its.mig.dynamic):
            continue
        found = [gpu for gpu in gpus if rules[gpu.uuid] is its]
        where = f"profile {profile.name!r}, {entry.path}"
        if solid := [gpu.name for gpu in found if gpu.mig is None]:
            yield f"{where}: mig has no effect on {', '.join(solid)}, which cannot be cut"
        yield from (f"{where}.{line}" for line in unmatched(found, its.mig))


def as_gpus(partitions: Sequence[Device]) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """*partitions*, those marked that serve claims for a GPU as well; and why none of them do,
    where the rules want that."""
    single = [device for device in partitions if device.rules.mig.single]
    kinds = sorted({one.partition.profile.name for one in single if one.partition is not None})
    if len(kinds) > 1:
        return tuple(partitions), (
            f"mig.strategy: Single has no effect, since partitions of several kinds are offered: "
            f"{', '.join(kinds)}; allow one profile only",
        )
    return tuple(
        replace(one, as_gpu=True) if one.rules.mig.single else one for one in partitions
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
    why = problem or (
        "cut some (nvidia-smi mig -cgi), let a profile do that (mig: Dynamic), or turn MIG mode "
        f"off with nvidia-smi -i {gpu.pci_bus_id} -mig 0"
    )
    return Withheld(
        f"GPU {gpu.pci_bus_id} ({gpu.uuid})", f"MIG mode is on, and it has no partitions: {why}"
    )
