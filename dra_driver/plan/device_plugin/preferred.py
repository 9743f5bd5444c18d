"""Which devices a container should get by the device-plugin API."""

from collections.abc import Sequence

from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.offer import Offer
from dra_driver.plan.device_plugin.resources import ResourceNames


def preferred(  # noqa: PLR0913 - what the kubelet asks, and of whom
    offer: Offer,
    resource: ResourceName,
    available: Sequence[DeviceId],
    must_include: Sequence[DeviceId],
    size: int,
    names: ResourceNames,
) -> tuple[DeviceId, ...]:
    """*size* of the *available* devices, *must_include* among them; sorted. Never an error."""
    included = set(must_include) & set(available)
    others = sorted(set(available) - included)
    return tuple(sorted([*sorted(included), *others][: max(size, 0)]))
