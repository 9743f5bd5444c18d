"""What happens on a GPU, or a part of one, that a claim was given: strategy, interval, limits.

That follows from the opaque configuration that applies to the allocated device: the built-in
default, the class's or the claim's; the later one counts, whole and not merged (NVIDIA's driver). A
configuration that names the request must be for that type of device; one that names none applies
where it fits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import assert_never

from api import names
from api.claim_configs import (
    Config,
    GpuConfig,
    MigDeviceConfig,
    MigTimeSlicing,
    Mps,
    MpsConfig,
    TimeSlicing,
    VfioDeviceConfig,
    decode_config,
)
from api.names import CONFIG_VERSION
from api.strict import ConfigError, all_defaults, show_name
from dra_driver.base.errors import MAX_PROBLEMS, ClaimError, join_problems
from dra_driver.base.frozen import frozen
from dra_driver.k8s import quantity as quantities
from dra_driver.k8s.claims import AllocationResult, Claim, OpaqueConfig
from dra_driver.model.gpus import MigInstance
from dra_driver.model.mps import ALL_CORES, MpsNamespace, MpsPriority
from dra_driver.model.offer import AdminAccess, Device, Exclusive, Fractional, Replica, Shape
from dra_driver.model.profiles import SharingStrategy
from dra_driver.model.records import ClaimMemoryLimit
from dra_driver.model.steps import TimeSliceInterval
from dra_driver.plan.offer.slice_documents import bytes_quantity
from dra_driver.plan.prepare.amounts import Amount
from dra_driver.plan.profiles.validation import CUDA_CONTEXT_BYTES

_MIB = 1024 * 1024
_PER_DEVICE = "defaultPerDevicePinnedMemoryLimit"
DEFAULT_CONFIG = all_defaults(GpuConfig, apiVersion=CONFIG_VERSION, kind="GpuConfig")
_NO_LIMITS = all_defaults(MpsConfig)


@frozen
class DecodedConfig:
    """A configuration that a user wrote, and where."""

    origin: OpaqueConfig
    config: Config


@frozen
class AppliedConfig:
    """The configuration that applies to a device, and where it stands; empty: the default."""

    config: GpuConfig | MigDeviceConfig = DEFAULT_CONFIG
    path: str = ""


@frozen
class _ClaimConfigs:
    """Every configuration of a claim, or what is wrong with them."""

    configs: tuple[DecodedConfig, ...]
    problems: tuple[str, ...]


def with_decoded_configs(claim: Claim) -> Claim:
    """*claim*, with its configurations decoded before anything is taken that others wait for.

    What is wrong with them is said when it is planned: what it was given before stays its own.
    """
    return replace(claim, decoded=_decode_all(claim.configs)) if claim.configs else claim


def decode_configs(claim: Claim) -> tuple[DecodedConfig, ...]:
    """Every configuration of *claim*, lowest precedence first. ClaimError names the problems of all
    of them."""
    decoded = (
        claim.decoded if isinstance(claim.decoded, _ClaimConfigs) else _decode_all(claim.configs)
    )
    if decoded.problems:
        raise ClaimError(join_problems(f"claim {claim.ref}: ", decoded.problems))
    return decoded.configs


def _decode_all(configs: Sequence[OpaqueConfig]) -> _ClaimConfigs:
    decoded: list[DecodedConfig] = []
    problems: list[str] = []
    for origin in configs:
        try:
            config = decode_config(origin.parameters, origin.path)
        except ConfigError as e:
            problems.extend(e.problems)
        else:
            decoded.append(DecodedConfig(origin, config))
            problems.extend(_memory_problems(config, origin.path))
        if len(problems) > MAX_PROBLEMS:  # nobody reads more
            break
    return _ClaimConfigs(tuple(decoded), tuple(problems))


def _memory_problems(config: Config, path: str) -> Iterator[str]:
    """Limits that no GPU could keep to, whether they come to apply to one or not."""
    if isinstance(config, VfioDeviceConfig) or not isinstance(config.sharing, Mps):
        return
    mps_config, path = config.sharing.mps_config, f"{path}.sharing.mpsConfig"
    limits = [
        (f"{path}.{_PER_DEVICE}[{show_name(key)}]", value)
        for key, value in mps_config.default_per_device_pinned_memory_limit.items()
    ]
    if most := mps_config.default_pinned_device_memory_limit:
        limits.append((f"{path}.defaultPinnedDeviceMemoryLimit", most))
    for where, value in limits:
        if quantities.parse(value) < CUDA_CONTEXT_BYTES:
            yield (
                f"{where}: {value} is less than a CUDA context takes; write "
                f"{CUDA_CONTEXT_BYTES // _MIB}Mi or more"
            )


def applied_config(
    allocation: AllocationResult, configs: Sequence[DecodedConfig], device: Device
) -> AppliedConfig:
    """The configuration of what was allocated for *allocation*'s request: *device*, or a part of
    it. Who asked for a GPU and was given a partition has written of a GPU."""
    kinds = _kinds(device)
    for decoded in reversed(configs):
        if not decoded.origin.concerns(allocation.request):
            continue
        config = decoded.config
        if isinstance(config, kinds):
            return AppliedConfig(config, decoded.origin.path)
        if decoded.origin.requests:
            raise ClaimError(_wrong_type(config, decoded.origin, allocation, kinds[0].__name__))
    return AppliedConfig()


def _kinds(device: Device) -> tuple[type[GpuConfig | MigDeviceConfig], ...]:
    if device.partition is None:
        return (GpuConfig,)
    return (MigDeviceConfig, GpuConfig) if device.as_gpu else (MigDeviceConfig,)


def _wrong_type(
    config: Config, origin: OpaqueConfig, allocation: AllocationResult, right: str
) -> str:
    mismatch = f"{origin.path}: a {config.kind} for request {allocation.request!r}"
    if isinstance(config, VfioDeviceConfig):
        return (
            f"{mismatch}: passthrough to virtual machines is not offered by this driver; remove it"
        )
    kind = "a MIG partition" if right == MigDeviceConfig.__name__ else "a GPU"
    return f"{mismatch}, but {allocation.device} is {kind}: write a {right}"


_INTERVALS = {
    "Default": TimeSliceInterval.DEFAULT,
    "Short": TimeSliceInterval.SHORT,
    "Medium": TimeSliceInterval.MEDIUM,
    "Long": TimeSliceInterval.LONG,
}
_PRIORITIES = {"Normal": MpsPriority.NORMAL, "BelowNormal": MpsPriority.BELOW_NORMAL}


@frozen
class TimeSliced:
    """Processes take turns. *interval*: what the claim asks for; None: it has no opinion."""

    interval: TimeSliceInterval | None = None
    path: str = ""  # of the field "sharing" that says so

    @property
    def strategy(self) -> SharingStrategy:
        return SharingStrategy.TIME_SLICING


@frozen
class MpsShared:
    """Processes run at once, as clients of an MPS server."""

    percent: int = ALL_CORES  # of the GPU's multiprocessors that a client can use, 1 … 100
    memory_bytes: int | None = None  # that a client can have, whole MiB; None: no limit by MPS
    priority: MpsPriority = MpsPriority.NORMAL

    @property
    def strategy(self) -> SharingStrategy:
        return SharingStrategy.MPS


Sharing = TimeSliced | MpsShared


def sharing_of(
    allocation: AllocationResult,
    device: Device,
    amount: Amount,
    chosen: AppliedConfig,
    alike: Sequence[Device],
) -> tuple[Sharing, tuple[str, ...]]:
    """How *allocation* is to be used, and everything that is wrong with what was asked for.

    The strategy is what the configuration says, else MPS where cores are reserved, else for a part
    of a GPU what the profile says. *alike*: the GPUs of the claim that the configuration is for,
    sorted by UUID, as its limits by index count them.
    """
    sharing = chosen.config.sharing
    path = f"{chosen.path}.sharing"
    if allocation.admin:
        return TimeSliced(), ()  # a class's configuration is for those who compute
    if sharing is None and amount.whole and not amount.cores:
        return TimeSliced(None, path), ()  # there is nobody to share it with
    reserves = _reserves(allocation, amount, device)
    strategy = _strategy(sharing, device, amount, reserves)
    where = f"{path}.strategy" if sharing else ""
    problems = tuple(_strategy_problems(strategy, where, reserves, device))
    if isinstance(sharing, TimeSlicing) or strategy is SharingStrategy.TIME_SLICING:
        interval = _interval(sharing, device)
        if interval is not None:
            problems += tuple(_interval_problems(path, device, amount))
        return TimeSliced(interval, path), problems
    limits = sharing.mps_config if isinstance(sharing, Mps) else _NO_LIMITS
    wrong = tuple(_mps_problems(limits, f"{path}.mpsConfig", alike))
    return _by_mps(limits, device, amount, alike), (*problems, *wrong)


def _interval(
    sharing: TimeSlicing | MigTimeSlicing | Mps | None, device: Device
) -> TimeSliceInterval | None:
    """A GPU has one, which is not to be set for a partition of it: who asked for a GPU, and was
    given one, has asked for more than there is."""
    if not isinstance(sharing, TimeSlicing) or device.partition is not None:
        return None
    config = sharing.time_slicing_config
    return _INTERVALS[config.interval] if config else None


def _interval_problems(path: str, device: Device, amount: Amount) -> Iterator[str]:
    """Who has a fraction of a GPU would set the interval of everybody on it. Replicas may, as with
    NVIDIA's device plugin."""
    is_replica = not (isinstance(device.shape, Fractional) and device.shape.replicas == 1)
    if amount.whole or is_replica or device.rules.fractions_set_interval:
        return
    yield (
        f"{path}.timeSlicingConfig: {device.gpu.name} has one interval for all claims on it, so on "
        "this node only a claim that has a whole GPU sets it (timeSliceInterval: WholeGPUs); "
        "remove timeSlicingConfig, or ask for a whole GPU, or have the node's profile say "
        "timeSliceInterval: Any"
    )


def default_share_cores(shape: Shape) -> int:
    """Percent of the cores that each of several equal shares has under MPS; 0: there are none."""
    match shape:
        case Fractional(replicas=number) | Replica(of=number) if number > 1:
            return ALL_CORES // number
        case Fractional() | Replica() | Exclusive() | AdminAccess():
            return 0
        case _:
            assert_never(shape)


def share_facts(allocation: AllocationResult, amount: Amount) -> tuple[tuple[str, str], ...]:
    """What a workload is shown of its share: (capacity, quantity). A whole GPU is no share."""
    if allocation.admin or amount.whole or not amount.memory_bytes:
        return ()
    cores = ((names.CORES, str(amount.cores)),) if amount.cores else ()
    return (*cores, (names.MEMORY, bytes_quantity(amount.memory_bytes)))


def memory_limit_of(device: Device, amount: Amount) -> ClaimMemoryLimit | None:
    """What the claim may use of the GPU's memory. None: all of it, or nobody limits it."""
    rules = device.rules
    if amount.whole or not rules.limited or not amount.memory_bytes:
        return None
    return ClaimMemoryLimit(amount.memory_bytes, rules.guard, rules.strict)


def _strategy(
    sharing: TimeSlicing | MigTimeSlicing | Mps | None,
    device: Device,
    amount: Amount,
    reserves: str,
) -> SharingStrategy:
    if sharing is not None:
        return SharingStrategy(sharing.strategy)
    possible = SharingStrategy.MPS in device.rules.strategies or _reserves_cores(device.shape)
    if reserves or (amount.cores and possible):
        return SharingStrategy.MPS
    # Replicas under MPS reserve cores. Others of this GPU are held since before its profile said
    # MPS, which could promise nothing beside them: the GPU follows once it is free.
    return (
        SharingStrategy.TIME_SLICING
        if isinstance(device.shape, Replica)
        else device.rules.default_strategy
    )


def _reserves_cores(shape: Shape) -> bool:
    """Whether everyone on the GPU has a part of its cores, as replicas have that share by MPS."""
    by_fraction = isinstance(shape, Fractional) and shape.cores_default > 0
    return by_fraction or (isinstance(shape, Replica) and shape.cores > 0)


def _reserves(allocation: AllocationResult, amount: Amount, device: Device) -> str:
    """What of *allocation* takes MPS; empty: nothing. A claim did not ask for the cores that
    everyone gets where replicas share by MPS, or did when it was allocated, and can do without."""
    if amount.cores in (0, default_share_cores(device.shape)):
        return ""
    where = f"request {allocation.request!r}, capacity.requests.cores"
    return f"{where}: {amount.cores} % of the cores can be reserved under MPS only"


def _strategy_problems(
    strategy: SharingStrategy, where: str, cores: str, device: Device
) -> Iterator[str]:
    """*where*: the field that says the strategy, empty if none does; *cores*: what reserves them,
    empty if nothing does. What nobody asks for needs no leave of the profile: it may be how a GPU
    in use was shared before its profile changed."""
    gpu, rules = device.gpu, device.rules
    if not (where or cores):
        return
    if cores and strategy is not SharingStrategy.MPS:
        yield f"{cores}, and {where} is {strategy}; remove the request for cores"
    elif strategy in rules.strategies:
        return
    elif strategy is SharingStrategy.MPS and rules.without_mps:
        yield (
            f"{where or cores}: {gpu.name} ({gpu.product_name}) cannot be shared by MPS: "
            f"{rules.without_mps}; remove it, or select another GPU"
        )
    else:
        allowed = ", ".join(rules.strategies)
        ways = f"is shared by {allowed} only; write that, or" if allowed else "is not shared;"
        yield f"{where or cores}: on this node {gpu.name} {ways} remove it"


def _by_mps(
    config: MpsConfig, device: Device, amount: Amount, alike: Sequence[Device]
) -> MpsShared:
    """Of what the claim was given and what its configuration says, the smaller counts."""
    reserved = amount.cores or default_share_cores(device.shape) * amount.shares
    percents = [min(ALL_CORES, reserved), config.default_active_thread_percentage or 0]
    sizes = [_pinned(config, device, alike)]
    if not amount.whole and device.rules.limited:
        sizes.append(amount.memory_bytes)
    return MpsShared(
        min((percent for percent in percents if percent), default=ALL_CORES),
        min((size // _MIB * _MIB for size in sizes if size), default=None),
        _PRIORITIES[config.client_priority],
    )


def _pinned(config: MpsConfig, device: Device, alike: Sequence[Device]) -> int | None:
    """The limit of *device* in bytes: its own, by UUID before index, else that of all."""
    each = config.default_per_device_pinned_memory_limit
    uuid = device.uuid
    keys = (uuid, *(str(place) for place, gpu in enumerate(alike) if gpu.uuid == uuid))
    own = next((each[key] for key in keys if key in each), None)
    limit = own or config.default_pinned_device_memory_limit
    return quantities.rounded_up(limit) if limit else None


def _mps_problems(config: MpsConfig, path: str, alike: Sequence[Device]) -> Iterator[str]:
    uuids = {gpu.uuid for gpu in alike if not gpu.created_for_claims}
    known = {*uuids, *(str(place) for place in range(len(alike)))}
    gpus = ", ".join(f"{place} ({_device_label(gpu)})" for place, gpu in enumerate(alike))
    key_kinds = "an index or UUID" if uuids else "an index"
    for key in sorted(config.default_per_device_pinned_memory_limit.keys() - known):
        where = f"{path}.{_PER_DEVICE}[{show_name(key)}]"
        yield f"{where}: is no GPU of the claim; write {key_kinds}: {gpus}"


def _device_label(device: Device) -> str:
    """A partition that is yet to be created has no UUID."""
    return device.name if device.created_for_claims else device.uuid


@frozen
class DeviceGrant:
    """One device that a claim gets, how much of it, and how."""

    allocation: AllocationResult
    device: Device
    amount: Amount
    sharing: Sharing
    namespace: MpsNamespace | None = None  # of what is shared by MPS
    instance: MigInstance | None = None  # of a partition, once it is there
