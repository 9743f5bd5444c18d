"""In which shape a GPU or a partition is offered: whole only, or to many claims at once.

A profile decides, as far as the board and the node allow it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import assert_never

from dra_driver.model.gpus import Gpu, GpuUuid, MigProfile, Version
from dra_driver.model.mps import ALL_CORES
from dra_driver.model.offer import (
    EXCLUSIVE,
    AdminAccess,
    ApiFeatures,
    Exclusive,
    Fractional,
    Replica,
    Shape,
)
from dra_driver.model.profiles import AllocationPolicy, Profile, Rules, SharingStrategy
from dra_driver.plan.device_plugin.resources import MOST_LISTED, most_replicas
from dra_driver.plan.profiles.validation import CUDA_CONTEXT_BYTES

# Clients of one MPS server (NVIDIA's MPS guide): 60 from CUDA 13.1 on, 48 before; 16 before Volta,
# whose clients cannot be limited and of which only one user at a time is served.
_VOLTA = Version(7, 0)
_CLIENTS_NEWEST, _CLIENTS, _CLIENTS_BEFORE_VOLTA = 60, 48, 16


def max_mps_clients(gpu: Gpu, profile: MigProfile | None = None) -> int:
    """The most clients that MPS takes at once: on *gpu*, or on a partition of *profile*."""
    if gpu.compute_capability.major < _VOLTA.major:
        return _CLIENTS_BEFORE_VOLTA
    cuda = gpu.cuda_driver_version
    most = _CLIENTS_NEWEST if (cuda.major, cuda.minor) >= (13, 1) else _CLIENTS
    if profile is None or gpu.mig is None:
        return most
    # As many of them as it has of the compute slices (NVIDIA's MIG user guide, "CUDA MPS").
    board = max(other.slices for other in gpu.mig.profiles)
    return max(1, most * profile.slices // board)


def mps_problem(gpu: Gpu, agent: bool) -> str:
    """Why claims cannot share *gpu* by MPS; empty: they can. *agent*: the node has one."""
    if gpu.compute_capability.major < _VOLTA.major:
        return f"MPS takes compute capability {_VOLTA.major}.{_VOLTA.minor} and newer"
    return "" if agent else "this node runs no MPS agent (--mps-socket is empty)"


def possible_rules(gpu: Gpu, rules: Rules, agent: bool) -> tuple[Rules, str]:
    """*rules* with only those strategies that work on *gpu*, and the default one among them.

    With none at all the GPU can be taken whole only, and the second value says why.
    """
    why = mps_problem(gpu, agent)
    if not why:
        return rules, ""
    strategies = tuple(
        strategy for strategy in rules.strategies if strategy is not SharingStrategy.MPS
    )
    possible = replace(rules, strategies=strategies, without_mps=why)
    if SharingStrategy.MPS not in rules.strategies:
        return possible, ""
    possible = replace(possible, default_strategy=SharingStrategy.TIME_SLICING)
    if strategies:
        return possible, ""
    return possible, f"only MPS is allowed, and {why}; add TimeSlicing to strategies"


def strategy_warnings(
    profile: Profile, gpus: Sequence[Gpu], rules: Mapping[GpuUuid, Rules], agent: bool
) -> Iterator[str]:
    """A line for each entry of *profile* whose default strategy is MPS where another has to do."""
    for entry in profile.entries:
        if entry.rules.default_strategy is not SharingStrategy.MPS:
            continue
        gpus_by_problem: dict[str, list[str]] = {}
        for gpu in gpus:
            gpu_rules = rules[gpu.uuid]
            if (
                gpu_rules is entry.rules
                and gpu_rules.include
                and SharingStrategy.TIME_SLICING in gpu_rules.strategies
            ):
                gpus_by_problem.setdefault(mps_problem(gpu, agent), []).append(gpu.name)
        for why, names in sorted(gpus_by_problem.items()):
            if why:
                yield (
                    f"profile {profile.name!r}, {entry.path}: the default strategy is MPS, and on "
                    f"{', '.join(names)} processes take turns instead: {why}"
                )


def policy_warnings(profile: Profile, features: ApiFeatures) -> Iterator[str]:
    """A line for each entry that says which replicas are given out where the scheduler does."""
    for entry in profile.entries:
        if (
            entry.rules.allocation_policy is not AllocationPolicy.AUTO
            and not features.device_plugin
        ):
            yield (
                f"profile {profile.name!r}, {entry.where('allocationPolicy')}: has no effect by "
                "DRA, where the scheduler takes the first that is free; constraints of a claim "
                "spread or join"
            )


_MIB = 1024 * 1024
_MOST_REPLICAS = 64  # of a GPU, where each is a device: eight such GPUs fill four slices


def shape_of(gpu: Gpu, rules: Rules, features: ApiFeatures) -> tuple[Shape, str]:
    """How *gpu* is to be offered, and what keeps it from being offered as *rules* say."""
    if not rules.fractions:
        return EXCLUSIVE, ""
    if problem := _too_many_clients(max_mps_clients(gpu), "this GPU", rules):
        return EXCLUSIVE, problem
    total = gpu.memory_bytes
    if not features.capacity:
        return _replica(total, rules, features)
    if total is None:
        return EXCLUSIVE, "NVML does not report its memory, so no part of it can be given out"
    return _sliceable(total, rules.shares or max_mps_clients(gpu), rules)


def shape_of_partitions(
    gpu: Gpu, profile: MigProfile, rules: Rules, features: ApiFeatures, *, fixed: bool
) -> tuple[Shape, str]:
    """The same for the partitions of *profile* that *gpu* has.

    *fixed*: those that exist while none is created for claims. They take of no counter, so that
    each can be several devices. By DRA, what pods ask for follows from their profile alone.
    """
    matching = (n for pattern, n in rules.mig.replicas if fnmatchcase(profile.name, pattern))
    rename = rules.rename and features.device_plugin
    partition_rules = replace(rules, replicas=next(matching, 1), rename=rename)
    # No driver limits a part of a partition (``plan.memory.pod_limits``).
    if not partition_rules.fractions or partition_rules.strict:
        return EXCLUSIVE, ""
    most = max_mps_clients(gpu, profile)
    if problem := _too_many_clients(most, f"partitions of {profile.name}", partition_rules):
        return EXCLUSIVE, problem
    if not features.capacity and partition_rules.replicas > 1 and not fixed:
        return EXCLUSIVE, (
            "replicas of a partition need consumable capacity, which the API server does not keep, "
            "where partitions are created for claims"
        )
    if not features.capacity:
        return _replica(profile.memory_bytes, partition_rules, features, profile.most)
    shares = partition_rules.shares or most
    # ``shares`` is said of GPUs: a small partition has fewer, or its last claims would be refused.
    by_mps = min(shares, most) if SharingStrategy.MPS in partition_rules.strategies else shares
    return _sliceable(profile.memory_bytes, by_mps, partition_rules)


def _replica(
    total: int | None, rules: Rules, features: ApiFeatures, units: int = 1
) -> tuple[Shape, str]:
    """The first of its replicas. *units*: such as this one that a GPU can have."""
    if rules.replicas == 1:
        return EXCLUSIVE, ""
    most = advised = _MOST_REPLICAS // units
    why = "the API server keeps no consumable capacity"
    if features.device_plugin:
        # What fits with all others is known when everything is listed; the advice has to work.
        most, advised = MOST_LISTED, most_replicas(features.gpus * units)
        why = "the kubelet knows nothing else"
    if rules.replicas > most:
        return EXCLUSIVE, (
            f"{rules.replicas} replicas would be as many devices, because {why}; lower replicas to "
            f"{advised} at most"
        )
    part = None if total is None else total // rules.replicas // _MIB * _MIB
    return Replica(0, rules.replicas, part, rules.rename, _cores(rules)), ""


def held_shape(shape: Shape, rules: Rules) -> Shape:
    """The *shape* of what a claim holds, for the next claim: where MPS is not possible any more, no
    cores are reserved for a claim that does not ask for them, or it would be refused. A profile
    that does not allow MPS any more changes nothing of a GPU in use."""
    if not rules.without_mps:
        return shape
    match shape:
        case Fractional():
            return replace(shape, cores_default=0)
        case Replica():
            return replace(shape, cores=0)
        case _:
            return shape


def describe_shape(shape: Shape) -> str:
    """What becomes of a GPU of this *shape*, in a few words, for people."""
    match shape:
        case Exclusive():
            return "exclusive"
        case Fractional(replicas=1):
            return "sliceable"
        case Fractional(replicas=number, renamed=renamed, cores_default=cores):
            return _replicas(number, renamed, cores)
        case Replica(of=number, renamed=renamed, cores=cores):
            return _replicas(number, renamed, cores)
        case AdminAccess():
            return "monitor"
        case _:
            assert_never(shape)


def device_shapes(shape: Shape) -> tuple[Shape, ...]:
    """The shapes of the devices that make up a GPU of this one."""
    if isinstance(shape, Replica):
        return tuple(replace(shape, place=place) for place in range(shape.of))
    return (shape,)


def same_shape(shape: Shape, other: Shape) -> bool:
    """Whether a GPU looks alike in both, whichever of its replicas they are."""
    return device_shapes(shape)[0] == device_shapes(other)[0]


def _replicas(number: int, renamed: bool, cores: int) -> str:
    details = [
        *(["gpu-shared"] if renamed else []),
        *([f"MPS, {cores} % of the cores each"] if cores else []),
    ]
    return f"{number} replicas ({', '.join(details)})" if details else f"{number} replicas"


def _too_many_clients(most: int, where: str, rules: Rules) -> str:
    if rules.default_strategy is not SharingStrategy.MPS or rules.replicas <= most:
        return ""
    return (
        f"{rules.replicas} replicas share by MPS, which takes {most} clients on {where}; "
        f"lower replicas to {most} at most, or let TimeSlicing be the default strategy"
    )


def _sliceable(total: int, shares: int, rules: Rules) -> tuple[Shape, str]:
    step = rules.memory_step
    default = total // rules.replicas // step * step
    minimum = -(-rules.memory_least // step) * step
    least = min(minimum, default)
    if default == 0:
        part = f"one of {rules.replicas} replicas of its" if rules.replicas > 1 else "all of its"
        return EXCLUSIVE, (
            f"{part} {total // _MIB}Mi is less than a step of {step // _MIB}Mi; lower "
            f"{'replicas or ' if rules.replicas > 1 else ''}memory.step"
        )
    if least + step > total:  # validateRequestPolicy wants room for one step
        return EXCLUSIVE, (
            f"the least share of {minimum // _MIB}Mi leaves no room for another in its "
            f"{total // _MIB}Mi; lower memory.least"
        )
    if rules.replicas > 1 and rules.limited and default < CUDA_CONTEXT_BYTES:
        return EXCLUSIVE, (
            f"one of {rules.replicas} replicas has {default // _MIB}Mi, less than a CUDA context "
            f"takes ({CUDA_CONTEXT_BYTES // _MIB}Mi); lower replicas"
        )
    shape = Fractional(
        memory_default=default,
        memory_least=least,
        memory_step=step,
        shares=rules.replicas if rules.replicas > 1 else shares,
        cores=SharingStrategy.MPS in rules.strategies,
        replicas=rules.replicas,
        renamed=rules.rename and rules.replicas > 1,
        cores_default=_cores(rules),
    )
    return shape, ""


def _cores(rules: Rules) -> int:
    """What is reserved for a claim that names none, in percent: replicas that share by MPS divide
    the cores as they divide the memory."""
    by_mps = rules.replicas > 1 and rules.default_strategy is SharingStrategy.MPS
    return ALL_CORES // rules.replicas if by_mps else 0
