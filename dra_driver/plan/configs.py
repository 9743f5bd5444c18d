"""Which opaque configuration applies to which allocated device.

Built-in defaults, then the class's, then the claim's; the later one counts, whole and not merged
(NVIDIA's driver). A configuration that names the request must be for that type of device; one that
names none applies where it fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from api.decode import ConfigError, decode
from api.names import CONFIG_VERSION
from api.v1beta1 import Config, GpuConfig, MigDeviceConfig, VfioDeviceConfig
from dra_driver.errors import MOST_PROBLEMS, ClaimError, one_text
from dra_driver.kubeletplugin.claims import Allocation, Claim, OpaqueConfig
from dra_driver.model.offer import Device

DEFAULT = GpuConfig.model_validate({"apiVersion": CONFIG_VERSION, "kind": "GpuConfig"})


@dataclass(frozen=True, slots=True)
class Decoded:
    """A configuration that a user wrote, and where."""

    origin: OpaqueConfig
    config: Config


@dataclass(frozen=True, slots=True)
class Chosen:
    """The configuration that applies to a device, and where it stands; empty: the default."""

    config: GpuConfig | MigDeviceConfig = DEFAULT
    path: str = ""


@dataclass(frozen=True, slots=True)
class _All:
    """Every configuration of a claim, or what is wrong with them."""

    configs: tuple[Decoded, ...]
    problems: tuple[str, ...]


def with_decoded(claim: Claim) -> Claim:
    """*claim*, with its configurations decoded before anything is taken that others wait for.

    What is wrong with them is said when it is planned: what it was given before stays its own.
    """
    return replace(claim, decoded=_all(claim.configs))


def decode_configs(claim: Claim) -> tuple[Decoded, ...]:
    """Every configuration of *claim*, lowest precedence first. ClaimError names the problems of all
    of them."""
    found = claim.decoded if isinstance(claim.decoded, _All) else _all(claim.configs)
    if found.problems:
        raise ClaimError(one_text(f"claim {claim.ref}: ", found.problems))
    return found.configs


def _all(configs: Sequence[OpaqueConfig]) -> _All:
    decoded: list[Decoded] = []
    problems: list[str] = []
    for origin in configs:
        try:
            decoded.append(Decoded(origin, decode(origin.parameters, origin.path)))
        except ConfigError as e:
            problems.extend(e.problems)
        if len(problems) > MOST_PROBLEMS:  # nobody reads more
            break
    return _All(tuple(decoded), tuple(problems))


def config_of(allocation: Allocation, configs: Sequence[Decoded], device: Device) -> Chosen:
    """The configuration of what was allocated for *allocation*'s request: *device*, or a part of
    it. Who asked for a GPU and was given a partition has written of a GPU."""
    kinds = _kinds(device)
    for decoded in reversed(configs):
        if not decoded.origin.concerns(allocation.request):
            continue
        config = decoded.config
        if isinstance(config, kinds):
            return Chosen(config, decoded.origin.path)
        if decoded.origin.requests:
            raise ClaimError(_wrong_type(config, decoded.origin, allocation, kinds[0].__name__))
    return Chosen()


def _kinds(device: Device) -> tuple[type[GpuConfig | MigDeviceConfig], ...]:
    if device.partition is None:
        return (GpuConfig,)
    return (MigDeviceConfig, GpuConfig) if device.as_gpu else (MigDeviceConfig,)


def _wrong_type(config: Config, origin: OpaqueConfig, allocation: Allocation, right: str) -> str:
    what = f"{origin.path}: a {config.kind} for request {allocation.request!r}"
    if isinstance(config, VfioDeviceConfig):
        return f"{what}: passthrough to virtual machines is not offered by this driver; remove it"
    kind = "a MIG partition" if right == MigDeviceConfig.__name__ else "a GPU"
    return f"{what}, but {allocation.device} is {kind}: write a {right}"
