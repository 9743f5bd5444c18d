"""Which boards are switched to MIG mode before anything is cut: those that need a reset for it."""

from collections.abc import Collection
from dataclasses import replace

from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.holdings import Held
from dra_driver.model.inventory import Inventory
from dra_driver.model.offer import Keeps
from dra_driver.model.profiles import Profile, Rules
from dra_driver.plan.mig.cutting import switches_with_a_reset
from dra_driver.plan.profiles import rules_by_gpu
from dra_driver.plan.shapes import shape_of


def to_switch(
    inventory: Inventory, profile: Profile, keeps: Keeps, held: Held
) -> tuple[GpuUuid, ...]:
    """The GPUs that are offered in partitions once their MIG mode is on, and that no claim holds.

    Those too of which the mode is pending: whoever set it did not have the reset that it takes.
    """
    rules, _ = rules_by_gpu(profile, inventory.gpus)
    used = {one.of_gpu for holdings in held.values() for one in holdings if not one.admin}
    return tuple(
        gpu.uuid
        for gpu in inventory.gpus
        if not used & {gpu.uuid, gpu.name} and _waits(gpu, rules[gpu.uuid], keeps)
    )


def after_switch(
    inventory: Inventory,
    profile: Profile,
    keeps: Keeps,
    held: Held,
    stuck: Collection[GpuUuid] = (),
) -> Inventory:
    """*inventory* as it is when every such switch succeeded, but for GPUs that are *stuck*."""
    chosen = set(to_switch(inventory, profile, keeps, held)) - set(stuck)
    return replace(inventory, gpus=tuple(_switched(gpu, chosen) for gpu in inventory.gpus))


def _waits(gpu: Gpu, rules: Rules, keeps: Keeps) -> bool:
    if gpu.mig is None:
        return False
    shape, _ = shape_of(gpu, rules, keeps)
    return rules.include and switches_with_a_reset(gpu, rules.mig, shape, keeps)


def _switched(gpu: Gpu, chosen: Collection[GpuUuid]) -> Gpu:
    if gpu.mig is None or gpu.uuid not in chosen:
        return gpu
    return replace(gpu, mig=replace(gpu.mig, on=True, pending=True))
