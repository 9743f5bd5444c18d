"""How the devices of the node are, as the kubelet and the owners of claims are told."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from dra_driver.kubeletplugin.serve.health import DeviceHealth, HealthStatus
from dra_driver.model.gpus import Inventory
from dra_driver.model.health import (
    DEFAULT_HEALTH_RULES,
    DeviceTaint,
    Effect,
    Fault,
    Faults,
    Problem,
)
from dra_driver.model.offer import AdminAccess, Device, Offer
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.plan.health.messages import describe_faults
from dra_driver.plan.health.problems import effect_of, problem_of
from dra_driver.plan.health.taints import share_memory


class NodeDevices:
    """What is published and what claims hold, with the health of each device.

    Any thread may ask. ApiServerError, NodeError, SettingsError: what is offered is not known yet.
    """

    def __init__(
        self,
        pool: str,
        offer: Callable[[], Offer],
        inventory: Callable[[], Inventory],
        records: Callable[[], tuple[ClaimRecord, ...]],
        faults: Callable[[], Faults],
    ) -> None:
        """*faults*: what is wrong with GPUs whose devices are not published for that reason."""
        self._pool = pool
        self._offer = offer
        self._inventory = inventory
        self._records = records
        self._faults = faults

    def health(self) -> tuple[DeviceHealth, ...]:
        """Of every device that is published or that a claim holds, in that order."""
        offer = self._offer()
        known = {device.name: self._of_device(device) for device in offer.devices}
        for record in self._records():
            for holding in record.holdings:
                if holding.device not in known:
                    known[holding.device] = self._of_holding(holding, offer)
        return tuple(known.values())

    def of_claim(self, record: ClaimRecord) -> Iterator[DeviceHealth]:
        """Of the devices of a claim, in the order of its holdings."""
        offer = self._offer()
        for holding in record.holdings:
            yield self._of_holding(holding, offer)

    def _of_holding(self, holding: Holding, offer: Offer) -> DeviceHealth:
        for device in offer.devices:
            if device.name == holding.device and holding.is_of(device):
                return self._of_device(device)
        status, message = self._unpublished(holding, offer)
        return DeviceHealth(self._pool, holding.device, status, message)

    def _of_device(self, device: Device) -> DeviceHealth:
        status, message = _of_taints(device.taints)
        return DeviceHealth(self._pool, device.name, status, message)

    def _unpublished(self, holding: Holding, offer: Offer) -> tuple[HealthStatus, str]:
        """Of a device that is withdrawn for its health, or whose GPU is gone."""
        if faults := tuple(fault for fault in self._faults() if _takes_away(fault, holding)):
            return _status(fault.problem for fault in faults), describe_faults(faults)
        for unavailable in offer.unavailable:
            is_it = unavailable.what == holding.device or f"({holding.gpu})" in unavailable.what
            if is_it and not unavailable.by_profile:
                return HealthStatus.UNHEALTHY, unavailable.reason
        if any(gpu.uuid == holding.gpu for gpu in self._inventory().gpus):
            return HealthStatus.HEALTHY, ""  # its GPU is offered in another shape by now
        return HealthStatus.UNHEALTHY, f"the node does not see {holding.gpu_name} any more"


def _of_taints(taints: Sequence[DeviceTaint]) -> tuple[HealthStatus, str]:
    if not taints:
        return HealthStatus.HEALTHY, ""
    reasons = dict.fromkeys(taint.reason or taint.key for taint in taints)
    return _status(problem_of(taint.key) for taint in taints), "; ".join(reasons)


def _status(problems: Iterable[Problem | None]) -> HealthStatus:
    """Nobody looks at a GPU that is released: it may be well."""
    released = all(problem is Problem.RELEASED for problem in problems)
    return HealthStatus.UNKNOWN if released else HealthStatus.UNHEALTHY


def _takes_away(fault: Fault, holding: Holding) -> bool:
    """Whether the device of *holding* is withdrawn for *fault*, by the rules of most profiles."""
    if fault.gpu != holding.gpu or isinstance(holding.shape, AdminAccess):
        return False
    if not share_memory(fault.partition, holding.partition):
        return False
    return effect_of(fault.problem, fault.value, DEFAULT_HEALTH_RULES) is not Effect.NONE
