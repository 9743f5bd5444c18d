"""What happens on a GPU, or a part of one, that a claim was given: strategy, interval, limits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from api import names
from api.strict import show_name
from api.v1beta1 import MigTimeSlicing, Mps, MpsConfig, TimeSlicing
from dra_driver.kubeletplugin import quantity as quantities
from dra_driver.kubeletplugin.claims import Allocation
from dra_driver.model.holdings import Limit
from dra_driver.model.mps import ALL_CORES, Priority
from dra_driver.model.offer import Device, Exclusive, Monitor, Replica, Shape, Sliceable
from dra_driver.model.profiles import Strategy
from dra_driver.model.steps import Interval
from dra_driver.plan.amounts import Amount
from dra_driver.plan.configs import Chosen
from dra_driver.plan.profiles import CUDA_CONTEXT_BYTES
from dra_driver.plan.publish import quantity

_MIB = 1024 * 1024
_INTERVALS = {
    "Default": Interval.DEFAULT,
    "Short": Interval.SHORT,
    "Medium": Interval.MEDIUM,
    "Long": Interval.LONG,
}
_PRIORITIES = {"Normal": Priority.NORMAL, "BelowNormal": Priority.BELOW_NORMAL}
_PER_DEVICE = "defaultPerDevicePinnedMemoryLimit"


@dataclass(frozen=True, slots=True)
class TimeSliced:
    """Processes take turns. *interval*: what the claim asks for; None: it has no opinion."""

    interval: Interval | None = None
    path: str = ""  # of the field "sharing" that says so

    @property
    def strategy(self) -> Strategy:
        return Strategy.TIME_SLICING


@dataclass(frozen=True, slots=True)
class ByMps:
    """Processes run at once, as clients of an MPS server."""

    percent: int = ALL_CORES  # of the GPU's multiprocessors that a client can use, 1 … 100
    memory_bytes: int | None = None  # that a client can have, whole MiB; None: no limit by MPS
    priority: Priority = Priority.NORMAL

    @property
    def strategy(self) -> Strategy:
        return Strategy.MPS


Sharing = TimeSliced | ByMps


def sharing_of(
    allocation: Allocation,
    device: Device,
    amount: Amount,
    chosen: Chosen,
    alike: Sequence[Device],
) -> tuple[Sharing, tuple[str, ...]]:
    """How *allocation* is to be used, and everything that is wrong with what was asked for.

    The strategy is what the configuration says, else MPS where cores are reserved, else for a part
    of a GPU what the profile says. *alike*: the GPUs of the claim that the configuration is for,
    sorted by UUID, as its limits by index count them.
    """
    asked = chosen.config.sharing
    path = f"{chosen.path}.sharing"
    if allocation.admin:
        return TimeSliced(), ()  # it looks on: a class's configuration is for those who compute
    if asked is None and amount.whole and not amount.cores:
        return TimeSliced(None, path), ()  # there is nobody to share it with
    reserves = _reserves(allocation, amount, device)
    wanted = _strategy(asked, device, amount, reserves)
    where = f"{path}.strategy" if asked else ""
    problems = tuple(_strategy_problems(wanted, where, reserves, device))
    if isinstance(asked, TimeSlicing) or wanted is Strategy.TIME_SLICING:
        interval = _interval(asked, device)
        if interval is not None:
            problems += tuple(_interval_problems(path, device, amount))
        return TimeSliced(interval, path), problems
    limits = asked.mps_config if isinstance(asked, Mps) else MpsConfig()
    wrong = tuple(_mps_problems(limits, f"{path}.mpsConfig", alike))
    return _by_mps(limits, device, amount, alike), (*problems, *wrong)


def _interval(asked: TimeSlicing | MigTimeSlicing | Mps | None, device: Device) -> Interval | None:
    """A GPU has one, which is not to be set for a partition of it: who asked for a GPU, and was
    given one, has asked for more than there is."""
    if not isinstance(asked, TimeSlicing) or device.partition is not None:
        return None
    config = asked.time_slicing_config
    return _INTERVALS[config.interval] if config else None


def _interval_problems(path: str, device: Device, amount: Amount) -> Iterator[str]:
    """Who has a fraction of a GPU would set the interval of everybody on it. Replicas may, as with
    NVIDIA's device plugin."""
    is_replica = not (isinstance(device.shape, Sliceable) and device.shape.replicas == 1)
    if amount.whole or is_replica or device.rules.fractions_set_interval:
        return
    yield (
        f"{path}.timeSlicingConfig: {device.gpu.name} has one interval for all claims on it, so on "
        "this node only a claim that has a whole GPU sets it (timeSliceInterval: WholeGPUs); "
        "remove timeSlicingConfig, or ask for a whole GPU, or have the node's profile say "
        "timeSliceInterval: Any"
    )


def cores_of_share(shape: Shape) -> int:
    """Percent of the cores that each of several equal shares has under MPS; 0: there are none."""
    match shape:
        case Sliceable(replicas=number) | Replica(of=number) if number > 1:
            return ALL_CORES // number
        case Sliceable() | Replica() | Exclusive() | Monitor():
            return 0
        case _:
            assert_never(shape)


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


def _strategy(
    asked: TimeSlicing | MigTimeSlicing | Mps | None, device: Device, amount: Amount, reserves: str
) -> Strategy:
    if asked is not None:
        return Strategy(asked.strategy)
    possible = amount.cores and Strategy.MPS in device.rules.strategies
    return Strategy.MPS if reserves or possible else device.rules.default_strategy


def _reserves(allocation: Allocation, amount: Amount, device: Device) -> str:
    """What of *allocation* takes MPS; empty: nothing. A claim did not ask for the cores that
    everyone gets where replicas share by MPS, or did when it was allocated, and can do without."""
    if amount.cores in (0, cores_of_share(device.shape)):
        return ""
    where = f"request {allocation.request!r}, capacity.requests.cores"
    return f"{where}: {amount.cores} % of the cores can be reserved under MPS only"


def _strategy_problems(wanted: Strategy, where: str, cores: str, device: Device) -> Iterator[str]:
    """*where*: the field that says the strategy, empty if none does; *cores*: what reserves them,
    empty if nothing does."""
    gpu, rules = device.gpu, device.rules
    if cores and wanted is not Strategy.MPS:
        yield f"{cores}, and {where} is {wanted}; remove the request for cores"
    elif wanted in rules.strategies:
        return
    elif wanted is Strategy.MPS and rules.without_mps:
        yield (
            f"{where or cores}: {gpu.name} ({gpu.product_name}) cannot be shared by MPS: "
            f"{rules.without_mps}; remove it, or select another GPU"
        )
    else:
        allowed = ", ".join(rules.strategies)
        ways = f"is shared by {allowed} only; write that, or" if allowed else "is not shared;"
        yield f"{where or cores}: on this node {gpu.name} {ways} remove it"


def _by_mps(config: MpsConfig, device: Device, amount: Amount, alike: Sequence[Device]) -> ByMps:
    """Of what the claim was given and what its configuration says, the smaller counts."""
    reserved = amount.cores or cores_of_share(device.shape) * amount.shares
    percents = [min(ALL_CORES, reserved), config.default_active_thread_percentage or 0]
    sizes = [_pinned(config, device, alike)]
    if not amount.whole and device.rules.limited:
        sizes.append(amount.memory_bytes)
    return ByMps(
        min((percent for percent in percents if percent), default=ALL_CORES),
        min((size // _MIB * _MIB for size in sizes if size), default=None),
        _PRIORITIES[config.client_priority],
    )


def _pinned(config: MpsConfig, device: Device, alike: Sequence[Device]) -> int | None:
    """The limit of *device* in bytes: its own, by UUID before index, else that of all."""
    each = config.default_per_device_pinned_memory_limit
    its = device.uuid
    keys = (its, *(str(place) for place, one in enumerate(alike) if one.uuid == its))
    own = next((each[key] for key in keys if key in each), None)
    said = own or config.default_pinned_device_memory_limit
    return quantities.whole(said) if said else None


def _mps_problems(config: MpsConfig, path: str, alike: Sequence[Device]) -> Iterator[str]:
    limits = [
        (f"{path}.{_PER_DEVICE}[{show_name(key)}]", value)
        for key, value in config.default_per_device_pinned_memory_limit.items()
    ]
    if most := config.default_pinned_device_memory_limit:
        limits.append((f"{path}.defaultPinnedDeviceMemoryLimit", most))
    for where, value in limits:
        if quantities.whole(value) < CUDA_CONTEXT_BYTES:
            yield (
                f"{where}: {value} is less than a CUDA context takes; write "
                f"{CUDA_CONTEXT_BYTES // _MIB}Mi or more"
            )
    uuids = {one.uuid for one in alike if not one.cut_for_claims}
    known = {*uuids, *(str(place) for place in range(len(alike)))}
    gpus = ", ".join(f"{place} ({_called(one)})" for place, one in enumerate(alike))
    what = "an index or UUID" if uuids else "an index"
    for key in sorted(config.default_per_device_pinned_memory_limit.keys() - known):
        where = f"{path}.{_PER_DEVICE}[{show_name(key)}]"
        yield f"{where}: is no GPU of the claim; write {what}: {gpus}"


def _called(device: Device) -> str:
    """A partition that is yet to be cut has no UUID."""
    return device.name if device.cut_for_claims else device.uuid
