"""What a node lists by the device-plugin API, by value."""

from dra_driver.kubeletplugin.device_plugin.resources import (
    DeviceId,
    ListedDevice,
    Resource,
    ResourceName,
)
from dra_driver.model.gpus import Inventory
from dra_driver.model.offer import DEVICE_PLUGIN_FEATURES
from dra_driver.model.profiles import DEFAULT_PROFILE
from dra_driver.plan.device_plugin.resources import ResourceNames, resources
from dra_driver.plan.offer.devices import build_offer
from tests.builders import gpu

NAMES = ResourceNames()


def test_whole_gpus_are_listed_by_their_uuid():
    offer = build_offer(Inventory((gpu(0), gpu(1))), DEFAULT_PROFILE, DEVICE_PLUGIN_FEATURES, {})

    (resource,) = resources(offer, NAMES, ()).resources

    assert resource == Resource(
        ResourceName("nvidia.com/gpu"),
        tuple(ListedDevice(DeviceId(gpu(minor).uuid), True, 0) for minor in (0, 1)),
    )
