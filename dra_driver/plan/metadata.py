"""What the workload can read about each device of its claim (KEP-5304)."""

from typing import Any

from api import names
from dra_driver.kubeletplugin.device_metadata import Document, MetadataDevice, documents
from dra_driver.plan.mps import Grant
from dra_driver.plan.prepare import Plan
from dra_driver.plan.publish import attributes_of
from dra_driver.plan.sharing import told


def documents_of(plan: Plan, driver: str, directory: str) -> tuple[Document, ...]:
    """One document for each request, to be kept in *directory* of the host.

    It has every device with the attributes that it is published with, and the share that was
    granted: ``memory`` (a quantity), ``cores`` (percent) and ``strategy``, where it is one.
    ClaimError: as `documents` says.
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
    return documents(plan.claim, devices, driver, directory)


def _instance(grant: Grant) -> dict[str, dict[str, Any]]:
    """A partition that was cut for claims is published without a UUID."""
    return {names.UUID: {"string": grant.instance.uuid}} if grant.instance else {}


def _share(grant: Grant) -> dict[str, dict[str, Any]]:
    share = dict(told(grant.allocation, grant.amount))
    if not share:
        return {}
    found: dict[str, dict[str, Any]] = {
        names.MEMORY: {"string": share[names.MEMORY]},
        names.STRATEGY: {"string": str(grant.sharing.strategy)},
    }
    if names.CORES in share:
        found[names.CORES] = {"int": int(share[names.CORES])}
    return found
