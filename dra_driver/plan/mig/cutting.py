"""What becomes of a GPU that can be cut: by its rules, by its mode, and by what claims hold."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dra_driver.model.devices import Gpu
from dra_driver.model.mig import Fixed, Mig, MigProfile
from dra_driver.model.offer import Keeps, Replica, Shape
from dra_driver.model.profiles import MigRules
from dra_driver.model.resets import outside
from dra_driver.plan.mig.offered import Foreign, Hold, allowed, held_partitions

NEEDS_COUNTERS = (
    "the API server keeps no counters (KEP-4815, feature DRAPartitionableDevices, Kubernetes 1.35 "
    "and newer), and nothing else keeps partitions apart that are cut for claims"
)


@dataclass(frozen=True, slots=True)
class Cutting:
    """What of a GPU is offered: partitions of *profiles* that are cut for claims, or none, and the
    GPU as a *whole* or not."""

    profiles: tuple[MigProfile, ...] = ()
    whole: bool = True
    problem: str = ""  # why no partitions are cut, though the rules say so

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(profile.name for profile in self.profiles)


def wanted(gpu: Gpu, rules: MigRules, shape: Shape, keeps: Keeps, there: Foreign) -> Cutting:
    """By the *rules*, while no claim holds *gpu*; *shape*: of the GPU as a whole."""
    mig = gpu.mig
    if mig is None:
        return Cutting()
    profiles = allowed(mig, rules) if rules.dynamic else ()
    problem = _problem(gpu, mig, profiles, shape, keeps) if rules.dynamic else ""
    if problem or not profiles:
        return Cutting((), not mig.on, problem)
    return Cutting(profiles, mig.switches and not there.keys)


def kept(mig: Mig, holds: Sequence[Hold], keeps: Keeps, there: Foreign) -> Cutting:
    """As it is while claims hold it: they were prepared beside what was offered then."""
    names = holds[0].offered
    cut = held_partitions(mig, holds)
    held_whole = any(one.partition is None for one in holds)
    # Without counters nothing keeps a free device from overlapping another: what is held stays.
    listed = mig.profiles if keeps.counters else ()
    profiles = tuple(one for one in listed if one.name in names and one.placements)
    if profiles:
        return Cutting(profiles, held_whole or (mig.switches and not there.keys))
    return Cutting((), held_whole or not (cut or mig.on))


def once_free(gpu: Gpu, holds: Sequence[Hold], there: Foreign) -> Gpu:
    """*gpu* as it is when no claim holds it any more: its mode goes with the last partition where
    it can, and nobody else has cut it."""
    mig = gpu.mig
    if mig is None or not mig.switches or there.keys or not any(one.cut for one in holds):
        return gpu
    return replace(gpu, mig=replace(mig, on=False, pending=False))


def described(cutting: Cutting, whole: str) -> str:
    """In a few words, for people; *whole*: what becomes of the GPU as a whole."""
    said = [whole] if cutting.whole else []
    if cutting.profiles:
        said.append(f"partitions cut for claims ({', '.join(cutting.names)})")
    return " and ".join(said) or "the partitions that exist"


def switches_with_a_reset(gpu: Gpu, rules: MigRules, shape: Shape, keeps: Keeps) -> bool:
    """Whether nothing but its mode, which needs a reset, keeps *gpu* from being cut for claims."""
    mig = gpu.mig
    if mig is None or mig.switches or mig.on or mig.fixed is not Fixed.NOTHING:
        return False
    if not rules.dynamic:
        return False
    return not _never(gpu, allowed(mig, rules), shape, keeps)


def _problem(gpu: Gpu, mig: Mig, profiles: Sequence[MigProfile], shape: Shape, keeps: Keeps) -> str:
    if never := _never(gpu, profiles, shape, keeps):
        return never
    if mig.switches or mig.on:
        return ""
    if mig.fixed is Fixed.MODE:
        if mig.pending:
            return "MIG mode is off, and goes on when the virtual machine is rebooted"
        return f"MIG mode is off: {outside(mig.fixed, gpu.pci_bus_id, on=True)}"
    return (
        "MIG mode is off and is being switched, which takes a reset: it is tried again and again "
        "while no claim and no process uses the GPU"
    )


def _never(gpu: Gpu, profiles: Sequence[MigProfile], shape: Shape, keeps: Keeps) -> str:
    """What keeps *gpu* from being cut for claims whatever its mode is."""
    if not profiles:
        return f"{gpu.product_name} has none of the profiles that are allowed (mig.profiles)"
    if not keeps.counters:
        return NEEDS_COUNTERS
    if gpu.mig is not None and gpu.mig.fixed is Fixed.ALL:
        return outside(gpu.mig.fixed, gpu.pci_bus_id, on=True)
    if isinstance(shape, Replica):
        return (
            f"its {shape.of} replicas are devices of their own, because the API server keeps no "
            "consumable capacity, and partitions cannot be kept apart from those; remove replicas"
        )
    return ""
