"""What a container gets with the devices of an allocation, as the kubelet is answered.

Kubelets that hand CDI names on get these, and the runtime finds the rest in the CDI specs. The
others (Kubernetes 1.26 and 1.27 drop such names without a word) get the same edits one by one. What
only a spec can say is left out of that: hooks, and options of mounts other than read-only.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from cdi.spec import ContainerEdits, DeviceNode, Mount, Spec
from dra_driver.k8s.claims import ClaimRef, PreparedDevice
from dra_driver.kubeletplugin.device_plugin.resources import (
    ContainerResponse,
    HostDevice,
    HostMount,
)
from dra_driver.model.gpus import DeviceName
from dra_driver.plan.node_api import KubeletVersion
from dra_driver.plan.prepare.cdi_spec import cdi_device_id
from dra_driver.plan.prepare.driver_spec import driver_spec_id

_PIPE_DIRECTORY: Final = "CUDA_MPS_PIPE_DIRECTORY"
_TAKES_NAMES: Final[KubeletVersion] = (1, 29)  # DevicePluginCDIDevices is on from here


def takes_names(setting: str, kubelet: KubeletVersion | None) -> bool:
    """Whether CDI names are handed on. *setting*: "auto", "true" or "false". A kubelet of which
    nothing is known gets files, which each of them takes."""
    if setting == "auto":
        return kubelet is not None and kubelet >= _TAKES_NAMES
    return setting == "true"


def response_by_names(prepared: Sequence[PreparedDevice]) -> ContainerResponse:
    """Each device by its own CDI name, and then what all of them rely on."""
    own = (device.cdi_ids[0] for device in prepared)
    common = (cdi_id for device in prepared for cdi_id in device.cdi_ids[1:])
    return ContainerResponse(cdi_names=tuple(dict.fromkeys((*own, *common))))


def response_ahead(ref: ClaimRef, devices: int, driver: str) -> ContainerResponse:
    """The same for so many *devices* before anything is prepared: the names follow from them."""
    device = DeviceName("")  # its name is no part of it
    own = (cdi_device_id(ref.uid, device, None, driver, place) for place in range(devices))
    return ContainerResponse(cdi_names=(*own, driver_spec_id(driver)))


def response_by_files(driver: Spec, allocation: Spec) -> ContainerResponse:
    """What the CDI specs of the *driver*'s files and of an *allocation* do to a container that has
    all devices of both. Of what both set, the allocation's counts."""
    edits = _all_edits(driver) + _all_edits(allocation)
    mounts = {mount.container_path: _mount(mount) for mount in edits.mounts}
    devices = {node.path: _device(node) for node in edits.device_nodes}
    env = dict(variable.split("=", 1) for variable in edits.env)
    return ContainerResponse(
        env=tuple(env.items()), mounts=tuple(mounts.values()), devices=tuple(devices.values())
    )


def _all_edits(spec: Spec) -> ContainerEdits:
    edits = spec.container_edits
    for device in spec.devices:
        edits += device.container_edits
    return edits


def _mount(mount: Mount) -> HostMount:
    return HostMount(mount.host_path, mount.container_path, read_only="ro" in mount.options)


def _device(node: DeviceNode) -> HostDevice:
    return HostDevice(node.host_path or node.path, node.path, node.permissions or "rwm")


def kept_answer_problems(
    kept: ContainerResponse, now: ContainerResponse, is_there: Callable[[str], bool]
) -> Iterator[str]:
    """Why a container cannot start by the answer that the kubelet *kept*, file by file, while it
    would be answered *now*. *is_there*: whether a path of the host exists.

    Names stay right. A device file may be of another GPU by now, and the driver be another one.
    """
    for device in kept.devices:
        if device not in now.devices:
            yield f"{device.host_path} is not the device file any more"
    served = dict(now.env).get(_PIPE_DIRECTORY)
    if (directory := dict(kept.env).get(_PIPE_DIRECTORY)) is not None and directory != served:
        yield f"its MPS server is not at {directory} any more"
    shown = {mount.host_path for mount in now.mounts}
    for mount in kept.mounts:
        if mount.host_path not in shown and not is_there(mount.host_path):
            yield f"{mount.host_path} is gone"
