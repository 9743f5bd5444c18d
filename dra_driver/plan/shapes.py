"""In which shape a GPU or a partition is offered: whole only, or many claims at once."""

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import assert_never

from dra_driver.model.devices import Gpu
from dra_driver.model.mig import MigProfile
from dra_driver.model.mps import ALL_CORES
from dra_driver.model.offer import EXCLUSIVE, Exclusive, Keeps, Monitor, Replica, Shape, Sliceable
from dra_driver.model.profiles import Rules, Strategy
from dra_driver.plan.profiles import CUDA_CONTEXT_BYTES
from dra_driver.plan.strategies import clients

_MIB = 1024 * 1024
_MOST_REPLICAS = 64  # of a GPU, where each is a device: eight such GPUs fill four slices


def shape_of(gpu: Gpu, rules: Rules, keeps: Keeps) -> tuple[Shape, str]:
    """How *gpu* is to be offered, and what keeps it from being offered as *rules* say."""
    if not rules.fractions:
        return EXCLUSIVE, ""
    if problem := _too_many_clients(clients(gpu), "this GPU", rules):
        return EXCLUSIVE, problem
    total = gpu.memory_bytes
    if not keeps.capacity:
        if rules.replicas == 1:
            return EXCLUSIVE, ""
        if rules.replicas > _MOST_REPLICAS:
            return EXCLUSIVE, (
                f"{rules.replicas} replicas would be as many devices, because the API server keeps "
                f"no consumable capacity; lower replicas to {_MOST_REPLICAS} at most"
            )
        part = None if total is None else total // rules.replicas // _MIB * _MIB
        return Replica(0, rules.replicas, part, rules.rename, _cores(rules)), ""
    if total is None:
        return EXCLUSIVE, "NVML does not report its memory, so no part of it can be given out"
    return _sliceable(total, rules.shares or clients(gpu), rules)


def shape_of_partitions(
    gpu: Gpu, profile: MigProfile, rules: Rules, keeps: Keeps
) -> tuple[Shape, str]:
    """The same for the partitions of *profile* that *gpu* has."""
    matching = (n for pattern, n in rules.mig.replicas if fnmatchcase(profile.name, pattern))
    its = replace(rules, replicas=next(matching, 1), rename=False)
    if not its.fractions or its.strict:  # no driver limits a part of a partition (``plan.limits``)
        return EXCLUSIVE, ""
    most = clients(gpu, profile)
    if problem := _too_many_clients(most, f"partitions of {profile.name}", its):
        return EXCLUSIVE, problem
    if not keeps.capacity:
        why = "replicas of a partition need consumable capacity, which the API server does not keep"
        return EXCLUSIVE, why if its.replicas > 1 else ""
    shares = its.shares or most
    # ``shares`` is said of GPUs: a small partition has fewer, or its last claims would be refused.
    by_mps = min(shares, most) if Strategy.MPS in its.strategies else shares
    return _sliceable(profile.memory_bytes, by_mps, its)


def kept(shape: Shape, rules: Rules) -> Shape:
    """The *shape* of what a claim holds, for the next claim: where MPS is not possible any more, no
    cores are reserved for a claim that does not ask for them, or it would be refused."""
    if Strategy.MPS in rules.strategies:
        return shape
    match shape:
        case Sliceable():
            return replace(shape, cores_default=0)
        case Replica():
            return replace(shape, cores=0)
        case _:
            return shape


def described(shape: Shape) -> str:
    """What becomes of a GPU of this *shape*, in a few words, for people."""
    match shape:
        case Exclusive():
            return "exclusive"
        case Sliceable(replicas=1):
            return "sliceable"
        case Sliceable(replicas=number, renamed=renamed, cores_default=cores):
            return _replicas(number, renamed, cores)
        case Replica(of=number, renamed=renamed, cores=cores):
            return _replicas(number, renamed, cores)
        case Monitor():
            return "monitor"
        case _:
            assert_never(shape)


def devices_of(shape: Shape) -> tuple[Shape, ...]:
    """The shapes of the devices that make up a GPU of this one."""
    if isinstance(shape, Replica):
        return tuple(replace(shape, place=place) for place in range(shape.of))
    return (shape,)


def same(shape: Shape, other: Shape) -> bool:
    """Whether a GPU looks alike in both, whichever of its replicas they are."""
    return devices_of(shape)[0] == devices_of(other)[0]


def _replicas(number: int, renamed: bool, cores: int) -> str:
    more = [
        *(["gpu-shared"] if renamed else []),
        *([f"MPS, {cores} % of the cores each"] if cores else []),
    ]
    return f"{number} replicas ({', '.join(more)})" if more else f"{number} replicas"


def _too_many_clients(most: int, where: str, rules: Rules) -> str:
    if rules.default_strategy is not Strategy.MPS or rules.replicas <= most:
        return ""
    return (
        f"{rules.replicas} replicas share by MPS, which takes {most} clients on {where}; "
        f"lower replicas to {most} at most, or let TimeSlicing be the default strategy"
    )


def _sliceable(total: int, shares: int, rules: Rules) -> tuple[Shape, str]:
    step = rules.memory_step
    default = total // rules.replicas // step * step
    asked = -(-rules.memory_least // step) * step
    least = min(asked, default)
    if default == 0:
        part = f"one of {rules.replicas} replicas of its" if rules.replicas > 1 else "all of its"
        return EXCLUSIVE, (
            f"{part} {total // _MIB}Mi is less than a step of {step // _MIB}Mi; lower "
            f"{'replicas or ' if rules.replicas > 1 else ''}memory.step"
        )
    if least + step > total:  # validateRequestPolicy wants room for one step
        return EXCLUSIVE, (
            f"the least share of {asked // _MIB}Mi leaves no room for another in its "
            f"{total // _MIB}Mi; lower memory.least"
        )
    if rules.replicas > 1 and rules.limited and default < CUDA_CONTEXT_BYTES:
        return EXCLUSIVE, (
            f"one of {rules.replicas} replicas has {default // _MIB}Mi, less than a CUDA context "
            f"takes ({CUDA_CONTEXT_BYTES // _MIB}Mi); lower replicas"
        )
    return (
        Sliceable(
            memory_default=default,
            memory_least=least,
            memory_step=step,
            shares=rules.replicas if rules.replicas > 1 else shares,
            cores=Strategy.MPS in rules.strategies,
            replicas=rules.replicas,
            renamed=rules.rename and rules.replicas > 1,
            cores_default=_cores(rules),
        ),
        "",
    )


def _cores(rules: Rules) -> int:
    """What is reserved for a claim that names none, in percent: replicas that share by MPS divide
    the cores as they divide the memory."""
    by_mps = rules.replicas > 1 and rules.default_strategy is Strategy.MPS
    return ALL_CORES // rules.replicas if by_mps else 0
