"""A claim, an inventory and what others hold become a Plan, or a complete refusal."""

from collections.abc import Iterable
from dataclasses import dataclass

from api.v1beta1 import GpuConfig
from dra_driver.errors import ClaimError, DeviceHeld, UnknownDevice
from dra_driver.kubeletplugin.claims import Allocation, Claim
from dra_driver.model.devices import Device, DeviceName
from dra_driver.model.holdings import Held, Holding
from dra_driver.model.inventory import Inventory
from dra_driver.model.steps import MakeDeviceNodes, Step
from dra_driver.plan.configs import config_of, decode_configs

_MOST_NAMES_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Grant:
    """One device that a claim gets, and how."""

    allocation: Allocation
    device: Device
    config: GpuConfig


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do for a claim. Nothing was touched yet."""

    claim: Claim
    grants: tuple[Grant, ...]
    steps: tuple[Step, ...]

    @property
    def holdings(self) -> tuple[Holding, ...]:
        return tuple(
            Holding(
                claim=self.claim.ref,
                device=grant.device.name,
                share=grant.allocation.share,
                consumed=grant.allocation.consumed,
                admin=grant.allocation.admin,
            )
            for grant in self.grants
        )


def plan_claim(claim: Claim, inventory: Inventory, held: Held, pool: str) -> Plan:
    """What preparing *claim* takes, on the node whose pool is *pool*.

    ClaimError: it can never work like this. UnknownDevice: a device is not (or no longer) here.
    DeviceHeld: another claim has to go first. A message names every such problem of its kind.
    """
    configs = decode_configs(claim)
    devices = _lookup(claim, inventory, pool)
    _refuse_held(claim, held)
    grants = tuple(
        Grant(allocation, devices[allocation], config_of(allocation, configs))
        for allocation in claim.allocations
    )
    minors = sorted({grant.device.minor for grant in grants})
    return Plan(claim, grants, (MakeDeviceNodes(tuple(minors)),))


def _lookup(claim: Claim, inventory: Inventory, pool: str) -> dict[Allocation, Device]:
    found: dict[Allocation, Device] = {}
    problems: list[str] = []
    for allocation in claim.allocations:
        device = inventory.by_name.get(DeviceName(allocation.device))
        if allocation.pool != pool:
            problems.append(
                f"{allocation.device!r} of pool {allocation.pool!r}, but this node serves {pool!r}"
            )
        elif device is None:
            problems.append(f"{allocation.device!r}, but this node has: {_names(inventory)}")
        else:
            found[allocation] = device
    if problems:
        raise UnknownDevice(
            f"claim {claim.ref} was allocated "
            + "; ".join(problems)
            + _withheld(inventory)
            + "; delete the pod (and a claim that is not from a template) to have it allocated anew"
        )
    return found


def _names(inventory: Inventory) -> str:
    names = [device.name for device in inventory.devices]
    more = len(names) - _MOST_NAMES_SHOWN
    return (", ".join(names[:_MOST_NAMES_SHOWN]) or "no device") + (
        f" and {more} more" if more > 0 else ""
    )


def _withheld(inventory: Inventory) -> str:
    reasons = [f"{withheld.what}: {withheld.reason}" for withheld in inventory.withheld]
    return f" (not offered: {'; '.join(reasons)})" if reasons else ""


def _refuse_held(claim: Claim, held: Held) -> None:
    """The last guard against a device in two hands, whatever the scheduler said (a force-deleted
    pod, say)."""
    problems = []
    taken: set[str] = set()
    for allocation in claim.allocations:
        if allocation.admin:
            continue
        holders = _others(held.get(DeviceName(allocation.device), ()), claim)
        if holders:
            problems.append(f"{allocation.device} is held by claim {', '.join(holders)}")
        if allocation.device in taken:
            raise ClaimError(
                f"claim {claim.ref} was allocated {allocation.device} twice: "
                "a whole GPU is given out once"
            )
        taken.add(allocation.device)
    if problems:
        raise DeviceHeld(
            f"claim {claim.ref} cannot have its devices yet: "
            + "; ".join(problems)
            + "; it is served once the pod that uses that claim has ended on this node"
        )


def _others(holdings: Iterable[Holding], claim: Claim) -> list[str]:
    return sorted(
        {
            f"{h.claim} (UID {h.claim.uid})"
            for h in holdings
            if h.claim.uid != claim.ref.uid and not h.admin
        }
    )
