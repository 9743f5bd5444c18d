"""A plan that was carried out, as the kubelet, the container runtime and the workload see it.

The workload reads about each device of its claim in metadata documents (KEP-5304).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from api import names
from dra_driver.k8s.claims import PreparedDevice
from dra_driver.kubeletplugin.device_metadata import (
    MetadataDevice,
    MetadataDocument,
    render_metadata_documents,
)
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsNamespaceName, ServedNamespace
from dra_driver.model.records import AllocationClaim
from dra_driver.plan.offer.slice_documents import attributes_of
from dra_driver.plan.prepare.amounts import NO_AMOUNT, Amount
from dra_driver.plan.prepare.cdi_spec import ContainerDevice, cdi_device_id
from dra_driver.plan.prepare.claim import ClaimPlan
from dra_driver.plan.prepare.driver_spec import driver_spec_id
from dra_driver.plan.prepare.sharing import DeviceGrant, share_facts


def metadata_documents(
    plan: ClaimPlan, driver: str, directory: str
) -> tuple[MetadataDocument, ...]:
    """One document for each request, to be kept in *directory* of the host.

    It has every device with the attributes that it is published with, and the share that was
    granted: ``memory`` (a quantity), ``cores`` (percent) and ``strategy``, where it is one.
    ClaimError: as `render_metadata_documents` says.
    """
    devices = tuple(
        MetadataDevice(
            grant.allocation.request,
            grant.allocation.pool,
            grant.allocation.device,
            {**attributes_of(grant.device), **_instance(grant), **_share(grant)},
        )
        for grant in plan.grants
    )
    return render_metadata_documents(plan.claim, devices, driver, directory)


def _instance(grant: DeviceGrant) -> dict[str, dict[str, Any]]:
    """A partition that was created for claims is published without a UUID."""
    return {names.UUID: {"string": grant.instance.uuid}} if grant.instance else {}


def _share(grant: DeviceGrant) -> dict[str, dict[str, Any]]:
    share = dict(share_facts(grant.allocation, grant.amount))
    if not share:
        return {}
    attributes: dict[str, dict[str, Any]] = {
        names.MEMORY: {"string": share[names.MEMORY]},
        names.STRATEGY: {"string": str(grant.sharing.strategy)},
    }
    if names.CORES in share:
        attributes[names.CORES] = {"int": int(share[names.CORES])}
    return attributes


MONITOR_CAPABILITY = "mig/monitor"


def container_devices(
    plan: ClaimPlan,
    documents: Sequence[MetadataDocument],
    served: Mapping[MpsNamespaceName, ServedNamespace],
) -> tuple[ContainerDevice, ...]:
    """What the containers get, and what they are shown of their share.

    *served*: what the MPS agent answered for each namespace of the plan.

    A container that gets a request gets all devices of it. So the first of them brings the
    document along, which it must have once; and each tells what the request has of its GPU in all.
    """
    documents_to_mount = {document.request: document for document in documents}
    claim = plan.claim.pod_claim_name or plan.claim.ref.name
    together: dict[tuple[GpuUuid, str], Amount] = defaultdict(lambda: NO_AMOUNT)
    for grant in plan.grants:
        together[grant.device.uuid, grant.allocation.base_request] += grant.amount
    return tuple(
        ContainerDevice(
            grant.device.gpu,
            grant.allocation.share,
            share_facts(grant.allocation, grant.amount),
            grant.device.name,
            _place(plan, index),
            documents_to_mount.pop(grant.allocation.base_request, None),
            f"{claim}-{grant.allocation.base_request}",
            share_facts(
                grant.allocation,
                together[grant.device.uuid, grant.allocation.base_request],
            ),
            served[grant.namespace.name] if grant.namespace else None,
            grant.instance,
            driver_capabilities(grant),
            grant.device.unit,
        )
        for index, grant in enumerate(plan.grants)
    )


def _place(plan: ClaimPlan, index: int) -> int | None:
    """By which the device of a grant is known to container runtimes; None: by its name."""
    return index if isinstance(plan.claim, AllocationClaim) else None


def driver_capabilities(grant: DeviceGrant) -> tuple[str, ...]:
    """What of the driver's capabilities a container needs for *grant*: names below
    ``/proc/driver/nvidia/capabilities``.

    An instance takes those of its GPU instance and its compute instance; admin access
    where instances can be takes the one to monitor them.
    """
    gpu, instance = grant.device.gpu, grant.instance
    gi = f"gpu{gpu.minor}/mig/gi{instance.gi}" if instance else ""
    return (
        *((gi, f"{gi}/ci{instance.ci}") if instance else ()),
        *((MONITOR_CAPABILITY,) if grant.allocation.admin and gpu.mig is not None else ()),
    )


def prepared_devices(plan: ClaimPlan, driver: str) -> tuple[PreparedDevice, ...]:
    """One device for each result of the scheduler, in its order."""
    uid = plan.claim.ref.uid
    return tuple(
        PreparedDevice(
            requests=(grant.allocation.base_request,),
            pool=grant.allocation.pool,
            device=grant.allocation.device,
            # The kubelet tells a device's health by its first name, which is of no other one.
            cdi_ids=(
                cdi_device_id(
                    uid, grant.device.name, grant.allocation.share, driver, _place(plan, index)
                ),
                driver_spec_id(driver),
            ),
            share=grant.allocation.share,
        )
        for index, grant in enumerate(plan.grants)
    )
