"""How much of a device one claim can have, by the rules of consumable capacity (KEP-5075)."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

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
