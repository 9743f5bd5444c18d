"""Who holds what: one holding per claim and device, or per share of a device."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Final

from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import Claim, ClaimRef, ClaimUid, Pod, PreparedDevice, ShareId
from dra_driver.kubeletplugin.device_metadata import MetadataDocument
from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.gpus import DeviceName, GpuUuid, MigInstance, PartitionKey, placeholder_uuid
from dra_driver.model.mps import MpsNamespace
from dra_driver.model.offer import EXCLUSIVE, Device, Replica, Shape, gpu_name_of
from dra_driver.model.profiles import GuardRules, MpsTenants
from dra_driver.model.steps import ServeMpsNamespace, Step


@frozen
class ClaimMemoryLimit:
    """How much memory a claim may use of one GPU, and who sees to it."""

    memory_bytes: int
    guard: GuardRules
    strict: bool = False  # the driver's own limit or nothing


@frozen
class Holding:
    """What one claim holds of one device.

    It says all that has to hold until the claim is given back, whatever becomes of the profile.
    """

    claim: ClaimRef
    device: DeviceName
    gpu: GpuUuid
    share: ShareId | None = None
    consumed: tuple[tuple[str, str], ...] = ()  # (capacity, quantity); empty: all of it
    admin: bool = False  # admin access: it takes nothing away
    shape: Shape = EXCLUSIVE  # as the device was offered when it was prepared
    limit: ClaimMemoryLimit | None = None  # None: all of the GPU, or nobody limits it
    request: str = ""  # without its subrequest
    tenants: MpsTenants = MpsTenants.ANY  # whose pods may use it, under MPS
    partition: PartitionKey | None = None  # of the GPU; None: it is of the GPU as a whole
    created_for_claims: bool = False  # the partition, which goes with the last of them
    instance: MigInstance | None = None  # of a partition, once it was found or created
    offered: tuple[str, ...] = ()  # the profiles whose partitions its GPU creates for claims

    @property
    def memory_of(self) -> GpuUuid | None:
        """Whose memory it is a part of: the GPU's, or the instance's; None: not known (yet)."""
        if self.partition is None:
            return self.gpu
        return self.instance.uuid if self.instance else None

    @property
    def uuid(self) -> GpuUuid | None:
        """What programs compute on: as ``Device.uuid``, also in the namespaces of MPS."""
        if self.partition is None or self.instance is not None:
            return self.memory_of
        return placeholder_uuid(self.gpu, self.partition)

    @property
    def gpu_name(self) -> DeviceName:
        """What its GPU was called when it was prepared; for people to read."""
        return gpu_name_of(self.device)

    @property
    def unit(self) -> DeviceName:
        """The name of what it is a part of: the partition's, or the GPU's."""
        if self.partition is None:
            return self.gpu_name
        place = _replica(self.shape)
        return self.device if place is None else DeviceName(self.device.removesuffix(f"-{place}"))

    def is_of(self, device: Device) -> bool:
        """Whether it is of *device*, whatever that was called when it was prepared."""
        same_part = (self.gpu, self.partition) == (device.gpu.uuid, device.key)
        return same_part and _replica(self.shape) == _replica(device.shape)


def _replica(shape: Shape) -> int | None:
    return shape.place if isinstance(shape, Replica) else None


HoldingsByGpu = Mapping[GpuUuid, Sequence[Holding]]


@frozen
class DeviceAllocation:
    """Which devices of a resource the kubelet gave to a container, by the device-plugin API.

    Nobody says when they are given back: they are held until the container's pod has ended.
    """

    resource: ResourceName
    ids: tuple[DeviceId, ...]  # sorted


ALLOCATION_UID_PREFIX: Final = "dp-"  # a UID of Kubernetes has no letter p


@frozen
class AllocationClaim(Claim):
    """What *allocation* amounts to, with one result for each id, in their order. Its namespace is
    empty and it has no pods: these are known once the container is about to start."""

    allocation: DeviceAllocation = field(kw_only=True)


def is_allocation(uid: ClaimUid) -> bool:
    """Whether the UID is of an allocation, and of no claim of the API server."""
    return uid.startswith(ALLOCATION_UID_PREFIX)


@frozen
class ClaimRecord:
    """What the ledger knows of a claim.

    *allocation*: it is no claim of the API server, but what a container has by the device-plugin
    API. Its UID follows from the devices. Its pod is known once the container is about to start:
    from then on the namespace is the pod's.

    *prepared*, *spec* (the text of its CDI file) and *documents* (its device metadata) are there
    once the claim is completed; a record without them is of a claim whose preparation began and may
    have touched the node.
    """

    claim: ClaimRef
    holdings: tuple[Holding, ...]
    steps: tuple[Step, ...] = ()
    prepared: tuple[PreparedDevice, ...] | None = None
    spec: str | None = None
    documents: tuple[MetadataDocument, ...] = ()
    pods: tuple[Pod, ...] = ()  # that use it, as far as is known
    pod_claim_name: str = ""  # empty: it is not from a template, and pods are meant to join
    allocation: DeviceAllocation | None = None  # None: a claim

    @property
    def completed(self) -> bool:
        return self.prepared is not None

    @property
    def known_as(self) -> str:
        """What people know it by: the claim, or the resource that their pod asks for."""
        return self.allocation.resource if self.allocation else str(self.claim)

    def used_in(self, namespace: str) -> "ClaimRecord":
        """The record of an allocation whose pod is in *namespace*."""
        if namespace == self.claim.namespace:
            return self
        claim = replace(self.claim, namespace=namespace)
        holdings = tuple(replace(holding, claim=claim) for holding in self.holdings)
        return replace(self, claim=claim, holdings=holdings)

    @property
    def namespaces(self) -> tuple[MpsNamespace, ...]:
        """What the MPS agent serves for it; empty: it is not under MPS."""
        return tuple(step.namespace for step in self.steps if isinstance(step, ServeMpsNamespace))

    @property
    def created_partitions(self) -> frozenset[tuple[GpuUuid, PartitionKey]]:
        """The partitions that are there for it."""
        return frozenset(
            (holding.gpu, holding.partition)
            for holding in self.holdings
            if holding.created_for_claims and holding.partition is not None
        )

    @property
    def computes(self) -> bool:
        """Whether it holds more than admin access."""
        return any(not holding.admin for holding in self.holdings)

    @property
    def limited(self) -> bool:
        """Whether somebody sees to how much memory it uses."""
        return any(holding.limit is not None for holding in self.holdings)

    @property
    def gpus(self) -> frozenset[GpuUuid]:
        """The GPUs that it holds anything of."""
        return frozenset(holding.gpu for holding in self.holdings)


def holdings_by_gpu(records: Iterable[ClaimRecord]) -> dict[GpuUuid, tuple[Holding, ...]]:
    """What claims hold of each GPU, by namespace and name of the claims."""
    held: dict[GpuUuid, list[Holding]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.claim):
        for holding in record.holdings:
            held[holding.gpu].append(holding)
    return {gpu: tuple(held[gpu]) for gpu in sorted(held)}
