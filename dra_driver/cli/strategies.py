"""Which sharing strategy a request that waits asks for, and on which devices it can be had."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api import names
from dra_driver.cli.market import Published
from dra_driver.kubeletplugin.claims import OpaqueConfig
from dra_driver.model.profiles import Strategy

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """A strategy, and the field that asks for it."""

    strategy: str
    path: str

    def offered_by(self, device: Published) -> bool:
        """An older plugin does not say: it knows no MPS, and lets processes take turns."""
        attributes = device.document.get("attributes") or {}
        if self.strategy == Strategy.MPS:
            return bool((attributes.get(names.MPS) or {}).get("bool"))
        return bool((attributes.get(names.TIME_SLICING) or {}).get("bool", True))

    def refused(self, number: int) -> str:
        """Why none of *number* devices will do."""
        text = f"{self.path}: none of the {number} devices that it could have is shared by "
        if self.strategy == Strategy.MPS:
            return (
                f"{text}MPS, for which a node has an MPS agent, a GPU compute capability 7.0 or "
                "above, and a profile does not forbid it"
            )
        return f"{text}{self.strategy}, as the profiles of their nodes have it"


def strategy_of(
    request: str,
    driver: str,
    device_class: Document,
    claim: Sequence[Document],
    partition: bool = False,
) -> Asked | None:
    """What the configuration that counts for *request* asks for: the last of its class and its
    *claim* that is for GPUs, or for a MIG *partition*. None: it asks for nothing."""
    kind = "MigDeviceConfig" if partition else "GpuConfig"
    spec = device_class.get("spec") or {}
    name = (device_class.get("metadata") or {}).get("name")
    of_class = _configs(spec.get("config") or (), driver, f"DeviceClass {name}, spec.config")
    of_claim = _configs(claim, driver, "spec.devices.config")
    for config in reversed([*of_class, *of_claim]):
        if config.concerns(request) and config.parameters.get("kind") == kind:
            strategy = (config.parameters.get("sharing") or {}).get("strategy")
            return Asked(str(strategy), f"{config.path}.sharing.strategy") if strategy else None
    return None


def _configs(listed: Sequence[Document], driver: str, path: str) -> Iterator[OpaqueConfig]:
    for index, config in enumerate(listed):
        opaque = config.get("opaque") or {}
        parameters = opaque.get("parameters")
        if opaque.get("driver") == driver and isinstance(parameters, dict):
            where = f"{path}[{index}].opaque.parameters"
            yield OpaqueConfig("", tuple(config.get("requests") or ()), parameters, where)
