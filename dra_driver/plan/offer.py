"""What becomes of each GPU: in which shape it is offered, and by which rules.

A GPU keeps its shape as long as a claim holds it, since the scheduler counts what is left by what
is published.
"""

from dataclasses import replace
from typing import assert_never

from dra_driver.model.devices import Gpu, Withheld
from dra_driver.model.holdings import Held
from dra_driver.model.inventory import Inventory
from dra_driver.model.mps import ALL_CORES
from dra_driver.model.offer import (
    EXCLUSIVE,
    Device,
    Exclusive,
    Keeps,
    Monitor,
    Offer,
    Pending,
    Replica,
    Shape,
    Sliceable,
)
from dra_driver.model.profiles import Profile, Rules, Strategy
from dra_driver.plan.profiles import CUDA_CONTEXT_BYTES, rules_by_gpu
from dra_driver.plan.strategies import clients, possible
from dra_driver.plan.strategies import notes as strategy_notes

_MIB = 1024 * 1024
_MOST_REPLICAS = 64  # of a GPU, where each is a device: eight such GPUs fill four slices


def offer(
    inventory: Inventory, profile: Profile, keeps: Keeps, held: Held, mps: bool = True
) -> Offer:
    """The devices of the node, in publishing order: GPUs by minor number, then monitors.

    No GPU's rules can spoil the others': what cannot be published as the profile says is published
    whole, and ``pending`` says why. *mps*: the node has an MPS agent; without one no GPU is shared
    by MPS. The rules of a device allow only strategies that work on it.
    """
    rules, idle = rules_by_gpu(profile, inventory.gpus)
    shapes = _held_shapes(held)
    devices: list[Device] = []
    monitors: list[Device] = []
    withheld = list(inventory.withheld)
    pending: list[Pending] = []
    for gpu in inventory.gpus:
        its, problem = possible(gpu, rules[gpu.uuid], mps)
        now = shapes.get(gpu.uuid) or shapes.get(gpu.name)
        if not its.include and now is None:
            withheld.append(_left_out(gpu, profile))
            continue
        wanted, problem = (EXCLUSIVE, problem) if problem else _shape(gpu, its, keeps)
        shape = wanted if now is None else _kept(now, its)
        if _one(shape) != _one(wanted) or not its.include:
            pending.append(Pending(gpu.name, described(wanted) if its.include else "left out"))
        elif problem:
            where = _where(profile, rules[gpu.uuid])
            pending.append(Pending(gpu.name, described(wanted), f"{where}{problem}"))
        devices += [Device(gpu, each, its) for each in _all(shape)]
        if isinstance(shape, Sliceable) and keeps.taints:
            monitors.append(Device(gpu, Monitor(), its))
    notes = (*profile.notes, *idle, *strategy_notes(profile, inventory.gpus, rules, mps))
    devices.sort(key=_place)
    return Offer((*devices, *monitors), tuple(withheld), tuple(pending), notes)


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


def _replicas(number: int, renamed: bool, cores: int) -> str:
    more = [
        *(["gpu-shared"] if renamed else []),
        *([f"MPS, {cores} % of the cores each"] if cores else []),
    ]
    return f"{number} replicas ({', '.join(more)})" if more else f"{number} replicas"


def _where(profile: Profile, rules: Rules) -> str:
    """Where in the profile *rules* stand."""
    paths = [entry.path for entry in profile.entries if entry.rules is rules]
    return f"profile {profile.name!r}, {paths[0]}: " if paths else ""


def _held_shapes(held: Held) -> dict[str, Shape]:
    """The shape of every GPU that a claim holds; all claims on a GPU saw the same one."""
    shapes: dict[str, Shape] = {}
    for holdings in held.values():
        holding = next((h for h in holdings if not h.admin), None)
        if holding is not None:
            shapes[holding.of_gpu] = holding.shape
    return shapes


def _kept(shape: Shape, rules: Rules) -> Shape:
    """The *shape* of a GPU that a claim holds, for the next claim: where MPS is not possible any
    more, no cores are reserved for a claim that does not ask for them, or it would be refused."""
    if Strategy.MPS in rules.strategies:
        return shape
    match shape:
        case Sliceable():
            return replace(shape, cores_default=0)
        case Replica():
            return replace(shape, cores=0)
        case _:
            return shape


def _shape(gpu: Gpu, rules: Rules, keeps: Keeps) -> tuple[Shape, str]:
    """How *gpu* is to be offered, and what keeps it from being offered as *rules* say."""
    if not rules.fractions:
        return Exclusive(), ""
    total = gpu.memory_bytes
    if rules.default_strategy is Strategy.MPS and rules.replicas > (most := clients(gpu)):
        return Exclusive(), (
            f"{rules.replicas} replicas share by MPS, which takes {most} clients on this GPU; "
            f"lower replicas to {most} at most, or let TimeSlicing be the default strategy"
        )
    if not keeps.capacity:
        if rules.replicas == 1:
            return Exclusive(), ""
        if rules.replicas > _MOST_REPLICAS:
            return Exclusive(), (
                f"{rules.replicas} replicas would be as many devices, because the API server keeps "
                f"no consumable capacity; lower replicas to {_MOST_REPLICAS} at most"
            )
        part = None if total is None else total // rules.replicas // _MIB * _MIB
        return Replica(0, rules.replicas, part, rules.rename, _cores(rules)), ""
    if total is None:
        return Exclusive(), "NVML does not report its memory, so no part of it can be given out"
    return _sliceable(gpu, total, rules)


def _sliceable(gpu: Gpu, total: int, rules: Rules) -> tuple[Shape, str]:
    step = rules.memory_step
    default = total // rules.replicas // step * step
    least = min(-(-rules.memory_least // step) * step, default)
    if default == 0:
        return Exclusive(), (
            f"one of {rules.replicas} replicas of its {total // _MIB}Mi is less than a step of "
            f"{step // _MIB}Mi; lower replicas or memory.step"
        )
    if least + step > total:  # validateRequestPolicy wants room for one step
        return Exclusive(), (
            f"the least share of {least // _MIB}Mi leaves no room for another in its "
            f"{total // _MIB}Mi; lower memory.least"
        )
    if rules.replicas > 1 and rules.limited and default < CUDA_CONTEXT_BYTES:
        return Exclusive(), (
            f"one of {rules.replicas} replicas has {default // _MIB}Mi, less than a CUDA context "
            f"takes ({CUDA_CONTEXT_BYTES // _MIB}Mi); lower replicas"
        )
    return (
        Sliceable(
            memory_default=default,
            memory_least=least,
            memory_step=step,
            shares=rules.replicas if rules.replicas > 1 else rules.shares or clients(gpu),
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


def _all(shape: Shape) -> tuple[Shape, ...]:
    """The devices that make up a GPU of this shape."""
    if isinstance(shape, Replica):
        return tuple(replace(shape, place=place) for place in range(shape.of))
    return (shape,)


def _place(device: Device) -> int:
    """Replicas stand by place and then by GPU: two of one request are of different GPUs, as long as
    there are some."""
    return device.shape.place if isinstance(device.shape, Replica) else 0


def _one(shape: Shape) -> Shape:
    return replace(shape, place=0) if isinstance(shape, Replica) else shape


def _left_out(gpu: Gpu, profile: Profile) -> Withheld:
    return Withheld(
        f"GPU {gpu.pci_bus_id} ({gpu.uuid})",
        f"profile {profile.name} leaves it out; remove include: false to offer it",
    )
