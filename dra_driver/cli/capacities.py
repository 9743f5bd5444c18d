"""How much of a device one claim can have, by the rules of consumable capacity (KEP-5075)."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from api import names
from dra_driver.cli.market import Published
from dra_driver.kubeletplugin import quantity

Document = Mapping[str, Any]


def most(capacity: Document) -> str:
    policy = capacity.get("requestPolicy") or {}
    values = policy.get("validValues") or ()
    ranged = (policy.get("validRange") or {}).get("max")
    return str(values[-1] if values else ranged or capacity["value"])


def fits(amount: str, capacity: Document | None) -> bool:
    """Whether an empty device with this *capacity* would be given to a claim for *amount*: the
    scheduler rounds up to what the policy of the device allows (KEP-5075)."""
    if capacity is None:
        return False
    return _consumed(amount, capacity.get("requestPolicy") or {}) <= quantity.parse(most(capacity))


def lacking(name: str, amount: str, devices: Sequence[Published], driver: str) -> str:
    """Why no device has this *amount*; empty: some device has."""
    having = [device for device in devices if name in device.capacity]
    if not having:
        known = sorted({each for device in devices for each in device.capacity})
        bare = name.removeprefix(f"{driver}/")
        hint = (
            f"; write {bare}, without the driver's name" if bare in known and bare != name else ""
        )
        return f"no device has a capacity of this name, they have {', '.join(known)}{hint}"
    if any(fits(amount, device.capacity[name]) for device in having):
        return ""
    best = max(having, key=lambda device: quantity.parse(most(device.capacity[name])))
    unit = " percent of the cores of a GPU" if name == names.CORES else ""
    return (
        f"asks for {amount}, but the most that one claim can have of a device is "
        f"{most(best.capacity[name])}{unit} ({best.place})"
    )


def _consumed(amount: str, policy: Document) -> Fraction:
    asked = quantity.parse(amount)
    if values := policy.get("validValues"):
        above = [value for each in values if (value := quantity.parse(str(each))) >= asked]
        return above[0] if above else asked
    ranged = policy.get("validRange")
    if not ranged:
        return asked
    least = quantity.parse(str(ranged["min"]))
    if asked <= least or not ranged.get("step"):
        return max(asked, least)
    step = quantity.parse(str(ranged["step"]))
    return least + -(-(asked - least) // step) * step
