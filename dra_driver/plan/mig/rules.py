"""What a profile's document says of partitions, as rules."""

from collections.abc import Iterator

from api.node_profile import GpuRules, Mig
from dra_driver.model.profiles import MigRules


def mig_problems(entry: GpuRules, path: str) -> Iterator[str]:
    """What is wrong with the field ``mig`` of *entry*, each value of which is of the right type."""
    if entry.include is False:  # said for all of it already
        return
    said = entry.mig
    if said.profiles and said.mode != "Dynamic":
        yield f"{path}.profiles: has no effect without mode: Dynamic; add it, or remove this"
    if said.layout and said.mode == "Dynamic":
        yield (
            f"{path}.layout: has no effect with mode: Dynamic, which cuts what claims need; remove "
            "one of them"
        )
    if said.replicas and entry.fractions == "Never":
        yield f"{path}.replicas: has no effect with fractions: Never; remove one of them"
    elif said.replicas and entry.memory_limit == "Strict":
        yield (
            f"{path}.replicas: has no effect with memoryLimit: Strict, since the GPU's driver "
            "limits no part of a partition; remove one of them"
        )


def mig_rules(said: Mig) -> MigRules:
    """What it does not say is as without a profile."""
    return MigRules(
        dynamic=said.mode == "Dynamic",
        profiles=tuple(dict.fromkeys(said.profiles or ())),
        layout=said.layout or "",
        single=said.strategy == "Single",
        replicas=tuple(sorted((said.replicas or {}).items())),
    )
