"""What the choice of an API depends on, asked of the API server, the kubelet and the ledger."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from dra_driver.base.errors import ApiServerError, DriverError, NotServed
from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import ClaimReader, ClaimUid
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import ClaimRecord
from dra_driver.node.state.ledger_files import DamagedRecord
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_annotation import DevicePluginHolders
from dra_driver.plan.node_api import (
    KubeletVersion,
    device_plugin_holders,
    holder_names,
    kubelet_version,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_CLASS_SECONDS: Final = 10.0  # Helm installs DeviceClasses last: they may come after the plugin


@frozen
class ClusterFacts:
    """What the API server says. None: it does not say."""

    dra_served: bool | None = None
    kubelet: KubeletVersion | None = None
    device_class: str | None = None  # with the extended resource of ours; empty: none has it
    allocatable: tuple[str, ...] = ()  # the resources of ours of which the node has any


class ClusterFactsReader:
    """Asks the API server. For one thread; an outage is logged when it begins."""

    def __init__(
        self,
        resources: ResourceApi,
        node: NodeLabels,
        names: ResourceNames,
        device_class: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*device_class*: the name of that which probably has the extended resource."""
        self._resources = resources
        self._node = node
        self._names = names
        self._device_class = device_class
        self._clock = clock
        self.class_expected_until = clock() + _CLASS_SECONDS
        self._logged: dict[str, str] = {}  # by what was asked for: the last error

    def read(self, again: bool = True) -> ClusterFacts:
        """Ask now. *again*: also for the Node, although its labels are followed and it was read."""
        dra_served = self._asked("what the API server serves", self._resources.is_served)
        status = self._node.status
        if status is None or again:
            status = self._asked("the Node", self._node.read_status) or status
        device_class = self._asked("the DeviceClasses", self._mapped) if dra_served else ""
        if status is None:
            return ClusterFacts(dra_served, None, device_class)
        allocatable = sorted(
            name
            for name, quantity in status.allocatable.items()
            if self._names.include(name) and quantity != "0"
        )
        kubelet = kubelet_version(status.kubelet_version)
        return ClusterFacts(dra_served, kubelet, device_class, tuple(allocatable))

    def _mapped(self) -> str | None:
        """None: the class is about to be installed, perhaps."""
        resource = self._names.gpu
        if not resource:
            return ""
        mapped = self._resources.extended_resource(self._device_class)
        if mapped == resource:
            return self._device_class
        if other := self._resources.extended_resources().get(resource):
            return other
        is_expected = mapped is None and self._clock() < self.class_expected_until
        return None if is_expected else ""

    def _asked(self, what: str, ask: Callable[[], T]) -> T | None:
        try:
            answer = ask()
        except NotServed:  # it changed between two questions
            return None
        except ApiServerError as e:
            if self._logged.get(what) != str(e):
                log.info("not known now: %s", what, extra={"error": str(e)})
            self._logged[what] = str(e)
            return None
        self._logged.pop(what, None)
        return answer


Records = tuple[Mapping[ClaimUid, ClaimRecord], Mapping[ClaimUid, DamagedRecord]]


class Holders:
    """Knows who holds GPUs by an API. For one thread."""

    def __init__(
        self,
        records: Callable[[], tuple[ClaimRecord, ...]],
        recorded: Callable[[], Records],
        claims: ClaimReader,
        allocations_known: Callable[[float], bool],
        others: Callable[[], tuple[str, ...] | None],
    ) -> None:
        """*records*: what this process knows. *recorded*: what is on the disk, also by another
        process of ours. *allocations_known*: whether the ledger has all of ours that the kubelet
        gave out by the device-plugin API, by a look that began at a monotonic time or later.
        *others*: pods that have GPUs by another device plugin, as was known then; None:
        that is not known."""
        self._records = records
        self._recorded = recorded
        self._claims = claims
        self._allocations_known = allocations_known
        self._others = others

    def names(self, api: AllocationApi, since: float = float("-inf")) -> tuple[str, ...] | None:
        """Pods and claims, by name; None: it is not known now. That nobody holds anything by the
        device-plugin API is known if the kubelet was asked at *since*, a monotonic time, or later.
        The cluster's claims are listed only where no record tells of any."""
        are_known = self._allocations_known(since)  # first: what is asked next is as new
        known = self._known()
        if known is None:
            return None
        records, damaged = known
        names = [*holder_names(records.values(), api)]
        names += (f"the claim with UID {uid}, whose record cannot be read" for uid in damaged)
        if api is not AllocationApi.DEVICE_PLUGIN:
            return tuple(names) or self._claim_names()
        others = self._others()
        names += others or ()
        return tuple(names) if names or (are_known and others is not None) else None

    def _claim_names(self) -> tuple[str, ...] | None:
        try:
            return tuple(f"claim {name}" for name in self._claims.on_this_node())
        except ApiServerError as e:
            log.info("which claims are allocated is not known now", extra={"error": str(e)})
            return None

    def of_device_plugin(self) -> DevicePluginHolders | None:
        """Who has GPUs of this driver by the device-plugin API; None: not all of them are known
        now."""
        known = self._known() if self._allocations_known(float("-inf")) else None
        return device_plugin_holders(known[0].values(), len(known[1])) if known else None

    def _known(self) -> Records | None:
        try:
            on_disk, damaged = self._recorded()
        except DriverError as e:
            log.info("who holds GPUs is not known now", extra={"error": str(e)})
            return None
        records = {record.claim.uid: record for record in self._records()}
        return records | dict(on_disk), damaged
