"""What commands read of a Node on which pods get GPUs by the device-plugin API: an annotation.

The condition ``GPUsAllocatedBy`` says beside it by which API the node gives its GPUs out; its
message is for people.
"""

from dataclasses import dataclass
from typing import Final

from dra_driver.base.codec import Codec
from dra_driver.plan.device_plugin.resources import ResourceNames

MOST_NAMED: Final = 20  # pods, so that all of it takes 8 KiB at most


@dataclass(frozen=True, slots=True)
class DevicePluginHolders:
    """Pods that have GPUs of this driver."""

    pods: tuple[str, ...] = ()  # namespace/name, of the first ones that are known
    count: int = 0  # of all


@dataclass(frozen=True, slots=True)
class DevicePluginUse:
    """How pods of a node get GPUs by the device-plugin API."""

    resources: ResourceNames
    # Beside another device plugin: else those have GPUs that ask for them. None: it is not known.
    holders: DevicePluginHolders | None = None


DEVICE_PLUGIN_USES: Final = Codec[DevicePluginUse](DevicePluginUse)
