"""In which shapes the GPUs of a fleet are published by this driver, and as plain devices."""

from dra_driver.kubeletplugin.slices.reconcile import Pool, split_into_slices
from dra_driver.model.gpus import Inventory
from dra_driver.model.offer import ApiFeatures, Device, Offer
from dra_driver.model.profiles import (
    DEFAULT_PROFILE,
    GpuSelector,
    MigRules,
    Profile,
    ProfileEntry,
    Rules,
)
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.slice_documents import published_counters, published_devices
from hack.benchmark.fleet_nodes import FleetNode

_PARTITIONED = Profile(
    "mig", (ProfileEntry(GpuSelector(), Rules(mig=MigRules(dynamic=True)), "spec.gpus[0]"),)
)


def ours(node: FleetNode) -> Pool:
    """What a node without a profile publishes."""
    return _offered(node, DEFAULT_PROFILE)


def ours_partitioned(node: FleetNode) -> Pool:
    """The same, but for nodes whose GPUs are partitioned: they have the profile ``mig``."""
    return _offered(node, _PARTITIONED if node.partitioned else DEFAULT_PROFILE)


def plain(node: FleetNode) -> Pool:
    """One exclusive device for each GPU, with the same attributes."""
    return split_into_slices(
        node.name, published_devices(Offer(tuple(Device(gpu) for gpu in node.gpus)))
    )


def _offered(node: FleetNode, profile: Profile) -> Pool:
    offer = build_offer(Inventory(node.gpus), profile, ApiFeatures(), {})
    return split_into_slices(node.name, published_devices(offer), published_counters(offer))
