"""How claims can share a GPU: as its profile allows, less what its board or its node cannot do."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dra_driver.model.devices import Gpu, GpuUuid, Version
from dra_driver.model.mig import MigProfile
from dra_driver.model.profiles import Profile, Rules, Strategy

# Clients of one MPS server (NVIDIA's MPS guide): 60 from CUDA 13.1 on, 48 before; 16 before Volta,
# whose clients cannot be limited and of which only one user at a time is served.
_VOLTA = Version(7, 0)
_CLIENTS_NEWEST, _CLIENTS, _CLIENTS_BEFORE_VOLTA = 60, 48, 16


def clients(gpu: Gpu, profile: MigProfile | None = None) -> int:
    """The most clients that MPS takes at once: on *gpu*, or on a partition of *profile*."""
    if gpu.compute_capability.major < _VOLTA.major:
        return _CLIENTS_BEFORE_VOLTA
    cuda = gpu.cuda_driver_version
    most = _CLIENTS_NEWEST if (cuda.major, cuda.minor) >= (13, 1) else _CLIENTS
    if profile is None or gpu.mig is None:
        return most
    # As many of them as it has of the compute slices (NVIDIA's MIG user guide, "CUDA MPS").
    board = max(one.slices for one in gpu.mig.profiles)
    return max(1, most * profile.slices // board)


def without_mps(gpu: Gpu, agent: bool) -> str:
    """Why claims cannot share *gpu* by MPS; empty: they can. *agent*: the node has one."""
    if gpu.compute_capability.major < _VOLTA.major:
        return f"MPS takes compute capability {_VOLTA.major}.{_VOLTA.minor} and newer"
    return "" if agent else "this node runs no MPS agent (--mps-socket is empty)"


def possible(gpu: Gpu, rules: Rules, agent: bool) -> tuple[Rules, str]:
    """*rules* with only those strategies that work on *gpu*, and the default one among them.

    With none at all the GPU can be taken whole only, and the second value says why.
    """
    why = without_mps(gpu, agent)
    if not why:
        return rules, ""
    left = tuple(each for each in rules.strategies if each is not Strategy.MPS)
    found = replace(rules, strategies=left, without_mps=why)
    if Strategy.MPS not in rules.strategies:
        return found, ""
    found = replace(found, default_strategy=Strategy.TIME_SLICING)
    return found, "" if left else f"only MPS is allowed, and {why}; add TimeSlicing to strategies"


def notes(
    profile: Profile, gpus: Sequence[Gpu], rules: Mapping[GpuUuid, Rules], agent: bool
) -> Iterator[str]:
    """A line for each entry of *profile* whose default strategy is MPS where another has to do."""
    for entry in profile.entries:
        if entry.rules.default_strategy is not Strategy.MPS:
            continue
        found: dict[str, list[str]] = {}
        for gpu in gpus:
            its = rules[gpu.uuid]
            if its is entry.rules and its.include and Strategy.TIME_SLICING in its.strategies:
                found.setdefault(without_mps(gpu, agent), []).append(gpu.name)
        for why, names in sorted(found.items()):
            if why:
                yield (
                    f"profile {profile.name!r}, {entry.path}: the default strategy is MPS, and on "
                    f"{', '.join(names)} processes take turns instead: {why}"
                )
