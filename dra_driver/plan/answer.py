"""A plan that was carried out, as the kubelet and the container runtime are told of it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from dra_driver.kubeletplugin.claims import PreparedDevice
from dra_driver.kubeletplugin.device_metadata import Document
from dra_driver.model.devices import GpuUuid
from dra_driver.model.mps import Served, SpaceName
from dra_driver.plan.amounts import NOTHING, Amount
from dra_driver.plan.edits import Granted, device_id
from dra_driver.plan.mps import Grant
from dra_driver.plan.prepare import Plan
from dra_driver.plan.sharing import told

MONITOR_CAPABILITY = "mig/monitor"


def granted(
    plan: Plan, documents: Sequence[Document], served: Mapping[SpaceName, Served]
) -> tuple[Granted, ...]:
    """What the containers get, and what they are told of their share.

    *served*: what the MPS agent answered for each space of the plan.

    A container that gets a request gets all devices of it. So the first of them brings the
    document along, which it must have once; and each tells what the request has of its GPU in all.
    """
    left = {document.request: document for document in documents}
    claim = plan.claim.pod_claim_name or plan.claim.ref.name
    together: dict[tuple[GpuUuid, str], Amount] = defaultdict(lambda: NOTHING)
    for grant in plan.grants:
        together[grant.device.uuid, grant.allocation.base_request] += grant.amount
    return tuple(
        Granted(
            grant.device.gpu,
            grant.allocation.share,
            told(grant.allocation, grant.amount),
            grant.device.name,
            left.pop(grant.allocation.base_request, None),
            f"{claim}-{grant.allocation.base_request}",
            told(
                grant.allocation,
                together[grant.device.uuid, grant.allocation.base_request],
            ),
            served[grant.space.name] if grant.space else None,
            grant.instance,
            capabilities(grant),
        )
        for grant in plan.grants
    )


def capabilities(grant: Grant) -> tuple[str, ...]:
    """What of the driver's capabilities a container needs for *grant*: names below
    ``/proc/driver/nvidia/capabilities``.

    An instance takes those of its GPU instance and its compute instance; to look on where
    instances can be takes the one to monitor them.
    """
    gpu, instance = grant.device.gpu, grant.instance
    gi = f"gpu{gpu.minor}/mig/gi{instance.gi}" if instance else ""
    return (
        *((gi, f"{gi}/ci{instance.ci}") if instance else ()),
        *((MONITOR_CAPABILITY,) if grant.allocation.admin and gpu.mig is not None else ()),
    )


def answer(plan: Plan, driver: str) -> tuple[PreparedDevice, ...]:
    """One device for each result of the scheduler, in its order."""
    uid = plan.claim.ref.uid
    return tuple(
        PreparedDevice(
            requests=(grant.allocation.base_request,),
            pool=grant.allocation.pool,
            device=grant.allocation.device,
            cdi_ids=(device_id(uid, grant.device.name, grant.allocation.share, driver),),
            share=grant.allocation.share,
        )
        for grant in plan.grants
    )
