"""In which shapes the GPUs of a fleet are published by this driver, and as plain devices."""

from dra_driver.kubeletplugin.slices import Pool, split
from dra_driver.model.inventory import Inventory
from dra_driver.model.offer import Device, Keeps, Offer
from dra_driver.model.profiles import DEFAULT_PROFILE, Entry, MigRules, Profile, Rules, Selection
from dra_driver.plan.offer import offer
from dra_driver.plan.publish import published, published_counters
from hack.benchmark.fleet_nodes import FleetNode

_CUT = Profile("mig", (Entry(Selection(), Rules(mig=MigRules(dynamic=True)), "spec.gpus[0]"),))


def ours(node: FleetNode) -> Pool:
    """What a node without a profile publishes."""
    return _offered(node, DEFAULT_PROFILE)


def ours_cut(node: FleetNode) -> Pool:
    """The same, but for nodes whose GPUs are cut: they have the profile ``mig``."""
    return _offered(node, _CUT if node.cut else DEFAULT_PROFILE)


def plain(node: FleetNode) -> Pool:
    """One exclusive device for each GPU, with the same attributes."""
    return split(node.name, published(Offer(tuple(Device(gpu) for gpu in node.gpus))))


def _offered(node: FleetNode, profile: Profile) -> Pool:
    found = offer(Inventory(node.gpus), profile, Keeps(), {})
    return split(node.name, published(found), published_counters(found))
