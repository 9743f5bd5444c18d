"""What GPUs should look like, by the label of the Node for all of them, else by the profile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dra_driver.errors import SettingsError
from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.inventory import Inventory
from dra_driver.model.layouts import Layout, Wanted
from dra_driver.model.profiles import Profile
from dra_driver.plan.mig.layouts import places, wanted
from dra_driver.plan.profiles import rules_by_gpu


class Layouts(Protocol):
    """Where layouts come from; ``dra_driver.plugin.layout_files.Layouts`` is one."""

    def named(self, name: str, gpus: tuple[Gpu, ...]) -> Layout: ...


@dataclass(frozen=True, slots=True)
class Wishes:
    """*unknown*: GPUs of which it cannot be told."""

    by_gpu: Mapping[GpuUuid, Wanted] = field(default_factory=dict)
    unknown: frozenset[GpuUuid] = frozenset()
    problem: str = ""
    any: bool = False  # whether a layout is wanted, if only of GPUs that are not here

    @property
    def governed(self) -> frozenset[GpuUuid]:
        """The GPUs that are the business of layouts."""
        return frozenset(self.by_gpu) | self.unknown


def wishes(label: str, profile: Profile, layouts: Layouts, inventory: Inventory) -> Wishes:
    """*label*: the name of the layout of the whole node; empty: none. What the profile leaves alone
    is left alone. Where no GPU can be seen yet, no layout is judged by that."""
    if not inventory.gpus:
        return Wishes(any=bool(label) or (bool(inventory.withheld) and _names_any(profile)))
    rules, _ = rules_by_gpu(profile, inventory.gpus)
    names = {
        gpu: label or rules[gpu.uuid].mig.layout
        for gpu in inventory.gpus
        if rules[gpu.uuid].include
    }
    by_gpu: dict[GpuUuid, Wanted] = {}
    unknown: set[GpuUuid] = set()
    problems: list[str] = []
    for name in sorted({*names.values(), label} - {""}):
        gpus = [gpu for gpu, its in names.items() if its == name]
        try:
            found = _said(layouts.named(name, inventory.gpus), gpus, inventory)
        except SettingsError as e:
            problems.append(str(e))
            unknown |= {gpu.uuid for gpu in gpus}
        else:
            by_gpu |= found
    if any(rules[uuid].mig.dynamic for uuid in unknown):
        problems.append("GPUs that it may be meant for are not cut for claims meanwhile")
    is_any = bool(label) or any(names.values())
    return Wishes(by_gpu, frozenset(unknown), "; ".join(problems), is_any)


def _names_any(profile: Profile) -> bool:
    return any(entry.rules.include and entry.rules.mig.layout for entry in profile.entries)


def _said(layout: Layout, gpus: list[Gpu], inventory: Inventory) -> dict[GpuUuid, Wanted]:
    """SettingsError: it says nothing, so that whoever chose it is wrong about this node."""
    order = places(inventory)
    said = ((gpu.uuid, wanted(layout, gpu, order[gpu.uuid])) for gpu in gpus)
    found = {uuid: one for uuid, one in said if one is not None}
    if not found:
        here = ", ".join(sorted({gpu.product_name for gpu in gpus})) or "none that is offered"
        raise SettingsError(
            f"layout {layout.name!r} ({layout.where}) says nothing of any GPU of this node that "
            f"can be cut; its GPUs: {here}; choose another layout, or none"
        )
    return found
