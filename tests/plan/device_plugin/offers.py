"""What nodes offer by the device-plugin API, for the tests of it."""

from collections.abc import Sequence
from typing import Any

from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.gpus import Gpu, Inventory, MigInstance
from dra_driver.model.health import Faults
from dra_driver.model.offer import DEVICE_PLUGIN_FEATURES, Offer
from dra_driver.model.profiles import GpuSelector, Profile, ProfileEntry, Rules
from dra_driver.model.records import ClaimRecord, DeviceAllocation, holdings_by_gpu
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.offer.devices import build_offer
from tests.builders import gpu
from tests.plan.mig.boards import instance, mig, mig_gpu

NAMES = ResourceNames()
GPU, SHARED = ResourceName("nvidia.com/gpu"), ResourceName("nvidia.com/gpu.shared")
BOARD = mig("a100-40")


def made(*places: tuple[str, int], minor: int = 0) -> Gpu:
    """An A100 in MIG mode with these instances: their profile and first unit."""
    instances = tuple(_instance(minor, number, *place) for number, place in enumerate(places, 1))
    return mig_gpu("a100-40", minor, on=True, instances=instances)


def _instance(minor: int, number: int, name: str, start: int) -> MigInstance:
    found = instance(BOARD, name, start, number)
    return MigInstance(found.key, number, 0, type(found.uuid)(f"{found.uuid}-of-{minor}"))


def offer_of(
    *gpus: Gpu, records: Sequence[ClaimRecord] = (), faults: Faults = (), **rules: Any
) -> Offer:
    """What these GPUs are offered as, all by the same rules."""
    entries = (ProfileEntry(GpuSelector(), Rules(**rules), "spec.gpus[0]"),)
    return build_offer(
        Inventory(gpus or (gpu(0), gpu(1))),
        Profile("p", entries),
        DEVICE_PLUGIN_FEATURES,
        holdings_by_gpu(records),
        faults=faults,
    )


def given(resource: str, *ids: str) -> DeviceAllocation:
    """What the kubelet gave to a container."""
    return DeviceAllocation(ResourceName(resource), tuple(map(DeviceId, sorted(ids))))
