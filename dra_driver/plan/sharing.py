"""What happens on a GPU, or a part of one, that a claim was given: strategy, interval, limit."""

from dataclasses import dataclass

from api import names
from api.v1beta1 import Mps, TimeSlicing
from dra_driver.kubeletplugin.claims import Allocation
from dra_driver.model.holdings import Limit
from dra_driver.model.offer import Device
from dra_driver.model.profiles import Strategy
from dra_driver.model.steps import Interval
from dra_driver.plan.amounts import Amount
from dra_driver.plan.configs import Chosen
from dra_driver.plan.publish import quantity

_INTERVALS = {
    "Default": Interval.DEFAULT,
    "Short": Interval.SHORT,
    "Medium": Interval.MEDIUM,
    "Long": Interval.LONG,
}


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a claim uses its device. *interval*: what it asks for; None: it has no opinion."""

    strategy: Strategy = Strategy.TIME_SLICING
    interval: Interval | None = None
    path: str = ""  # of the field "sharing" that says so


def sharing_of(
    allocation: Allocation, device: Device, amount: Amount, chosen: Chosen
) -> tuple[Sharing, tuple[str, ...]]:
    """How *allocation* is to be used, and everything that is wrong with what was asked for."""
    asked = chosen.config.sharing
    path = f"{chosen.path}.sharing"
    if allocation.admin:
        return Sharing(), ()  # it looks on: a class's configuration is for those who compute
    problems: list[str] = []
    if isinstance(asked, Mps):
        problems.append(
            f"{path}.strategy: MPS is not offered by this node; remove it, or write TimeSlicing"
        )
    elif asked is not None and Strategy.TIME_SLICING not in device.rules.strategies:
        allowed = ", ".join(device.rules.strategies)
        problems.append(f"{path}.strategy: this node's profile allows {allowed} only")
    if amount.cores and not isinstance(asked, Mps):
        problems.append(_cores_refused(allocation, amount, asked, path))
    interval = None
    if isinstance(asked, TimeSlicing) and asked.time_slicing_config is not None:
        interval = _INTERVALS[asked.time_slicing_config.interval]
    return Sharing(Strategy.TIME_SLICING, interval, path), tuple(problems)


def told(allocation: Allocation, amount: Amount) -> tuple[tuple[str, str], ...]:
    """What the workload is told of its share: (capacity, quantity). A whole GPU is no share."""
    if allocation.admin or amount.whole or not amount.memory_bytes:
        return ()
    cores = ((names.CORES, str(amount.cores)),) if amount.cores else ()
    return (*cores, (names.MEMORY, quantity(amount.memory_bytes)))


def limit_of(device: Device, amount: Amount) -> Limit | None:
    """What the claim may use of the GPU's memory. None: all of it, or nobody limits it."""
    rules = device.rules
    if amount.whole or not rules.limited or not amount.memory_bytes:
        return None
    return Limit(amount.memory_bytes, rules.guard, rules.strict)


def _cores_refused(
    allocation: Allocation, amount: Amount, asked: TimeSlicing | None, path: str
) -> str:
    request = (
        f"request {allocation.request!r}, capacity.requests.cores: {amount.cores} % of the cores "
        "can be reserved under MPS only"
    )
    if asked is not None:
        return f"{request}, and {path}.strategy is TimeSlicing; remove the request for cores"
    return f"{request}, which this node does not offer; remove the request for cores"
