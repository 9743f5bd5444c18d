"""What commands read of a Node on which pods get GPUs by the device-plugin API: an annotation.

The condition ``GPUsAllocatedBy`` says beside it by which API the node gives its GPUs out; its
message is for people.
"""

import re
from typing import Final

from dra_driver.base.codec import Codec
from dra_driver.base.frozen import frozen
from dra_driver.plan.device_plugin.resources import ResourceNames

MOST_NAMED: Final = 20  # pods, so that all of it takes 8 KiB at most
_MOST_COUNTED: Final = 1_000_000  # more than a node has devices
_POD: Final = re.compile(r"[a-z0-9-]{1,63}/[a-z0-9.-]{1,253}")


@frozen
class DevicePluginHolders:
    """Pods that have GPUs of this driver."""

    pods: tuple[str, ...] = ()  # namespace/name, of the first ones that are known
    count: int = 0  # of all

    @property
    def problem(self) -> str:
        """Why the driver has not written this; empty: it may have. Who can patch the Node can."""
        if not len(self.pods) <= self.count <= _MOST_COUNTED:
            return "`holders.count` is no number of pods, or is less than `holders.pods` names"
        if not all(map(_POD.fullmatch, self.pods)):
            return "`holders.pods` has a name that is not namespace/name"
        return ""


@frozen
class DevicePluginUse:
    """How pods of a node get GPUs by the device-plugin API."""

    resources: ResourceNames
    # Beside another device plugin: else those have GPUs that ask for them. None: it is not known.
    holders: DevicePluginHolders | None = None


DEVICE_PLUGIN_USES: Final = Codec[DevicePluginUse](DevicePluginUse)
