"""What a container that is given a claim's GPUs gets to see: the claim's CDI spec.

What it gets of the driver, whichever GPU it has, is in a spec of its own (``driver_spec``).

The environment belongs to the devices, so that a container learns of what it has and of no more; N
is the minor number, of a MIG partition with its name (``0_MIG_1G10GB_19_0``)::

    GPU_DEVICE_<N>_UUID=GPU-…             as NVML and CUDA_VISIBLE_DEVICES know it
    GPU_DEVICE_<N>_CLAIM=<namespace>/<name>  the claim that gives it, if it is one
    GPU_DEVICE_<N>_<CAPACITY>=<quantity>  of a share: how much it is ("MEMORY=20Gi", "CORES=50")
    GPU_DEVICE_<N>_<CAPACITY>_<CLAIM>_<REQUEST>=<quantity>  the same, for each request of a claim

A runtime keeps one variable of a name: of two shares of one GPU in one container the first three
tell the later one. The last has the names of the device metadata files' paths, in capitals, with an
underscore for whatever is no letter and no digit (``GPU_DEVICE_0_MEMORY_GPU_CACHE=8Gi``).

Clients of MPS get CUDA's variables, too. With protocol 3 the server holds the limits, and the
variables show them; with protocol 2 they are the limits, of each process. A limit for a GPU that a
program does not see makes a server of protocol 3 forget all of them: so there it is shown for a
single GPU only, which is number 0 whatever a program hides from itself.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from api import names
from cdi.spec import CdiDevice, ContainerEdits, DeviceNode, Mount, Spec, qualify
from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import ClaimRef, ClaimUid, ShareId
from dra_driver.kubeletplugin.device_metadata import MetadataDocument
from dra_driver.model.driver_files import DeviceFile, DeviceFiles
from dra_driver.model.gpus import DeviceName, Gpu, MigInstance
from dra_driver.model.mps import MpsPriority, ServedNamespace

_MIB: Final = 1024 * 1024
_NAMESPACES: Final = 3  # the protocol from which on the server holds the limits
_NOTHING_ODD: Final = ("nosuid", "nodev", "noexec", "rbind", "rprivate")
_READ_WRITE: Final = ("rw", *_NOTHING_ODD)
# Sockets are connected to and named pipes written to all the same. What root in a container could
# make there would be in the host's memory.
_READ_ONLY_MOUNT: Final = ("ro", *_NOTHING_ODD)


def mps_edits(served: ServedNamespace) -> ContainerEdits:
    """The same for every device of the namespace, since a container can have any of them."""
    namespace = served.namespace
    env = [
        f"CUDA_MPS_PIPE_DIRECTORY={served.pipe_directory}",
        f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={namespace.percent}",
    ]
    limits = {place: size for place, size in enumerate(namespace.memory_bytes) if size is not None}
    if limits and (served.protocol < _NAMESPACES or len(namespace.gpus) == 1):
        each = ",".join(f"{place}={size // _MIB}M" for place, size in limits.items())
        env.append(f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={each}")
    if namespace.priority is not MpsPriority.NORMAL:
        env.append(f"CUDA_MPS_CLIENT_PRIORITY={namespace.priority.value}")
    # With protocol 2 it is a small file system of its own: clients may make files in it.
    options = _READ_WRITE if served.protocol < _NAMESPACES else _READ_ONLY_MOUNT
    mounts = [Mount(served.pipe_directory, served.pipe_directory, options=options)]
    if served.shm_directory:
        mounts.append(Mount(served.shm_directory, "/dev/shm", options=_READ_WRITE))
    return ContainerEdits(env=tuple(env), mounts=tuple(mounts))


_DOCUMENT: Final = ("ro", "bind")  # as Kubernetes' own helper mounts it


@frozen
class ContainerDevice:
    """One device of a claim: a GPU and, where several claims may be on it, which share of it.

    Admin access makes no difference: monitoring needs all that a workload needs.
    """

    gpu: Gpu
    share: ShareId | None = None
    consumed: tuple[tuple[str, str], ...] = ()  # (capacity, quantity): what of it may be used
    device: DeviceName | None = None  # where it is not called as its GPU is: "gpu-0-mon"
    place: int | None = None  # among the devices of an allocation; None: of a claim
    document: MetadataDocument | None = None  # that containers with this device can read
    request: str = ""  # with its claim, as the pod knows them: "gpu-cache"
    requested: tuple[tuple[str, str], ...] = ()  # what *request* has of the GPU in all
    served: ServedNamespace | None = None  # by an MPS server
    instance: MigInstance | None = None  # of the GPU, which is all that is granted of it
    capabilities: tuple[str, ...] = ()  # of the driver, as ``DeviceFiles`` names them
    unit: DeviceName | None = None  # of a replica of a partition: the partition


def claim_spec(
    claim: ClaimRef,
    granted: Iterable[ContainerDevice],
    nodes: DeviceFiles,
    driver: str = names.DRIVER,
) -> Spec:
    """The CDI spec of *claim*, whose devices are *granted*, each in *nodes*.

    The same arguments in any order give the same spec.
    """
    by_name: dict[str, list[ContainerDevice]] = defaultdict(list)
    for granted_device in sorted(granted, key=_order):
        device = granted_device.device or granted_device.gpu.name
        name = cdi_device_name(claim.uid, device, granted_device.share, granted_device.place)
        by_name[name].append(granted_device)
    return Spec(
        kind=f"{cdi_vendor(driver)}/{names.CDI_CLASS}",
        devices=tuple(
            CdiDevice(
                name,
                container_edits=_of_device(claim, same[-1], nodes)
                + _edits_of_mps(same)
                + _shown(same),
            )
            for name, same in by_name.items()
        ),
        container_edits=_common_edits(nodes.common),
    )


def _order(device: ContainerDevice) -> tuple[object, ...]:
    return (device.gpu.minor, device.share or "", device.consumed, device.request)


def cdi_vendor(driver: str = names.DRIVER) -> str:
    """The CDI vendor of a DRA driver, as NVIDIA's driver has it."""
    return f"k8s.{driver}"


def cdi_device_name(
    uid: ClaimUid, device: DeviceName, share: ShareId | None = None, place: int | None = None
) -> str:
    """The CDI name of one device of one claim: unique, since runtimes keep what they have read.

    Of an allocation it is known by its *place*: the kubelet keeps the answer, also while the node
    reboots, and GPUs may be numbered otherwise after that.
    """
    if place is not None:
        return f"{uid}-{place}"
    return "-".join((uid, device) if share is None else (uid, device, share))


def cdi_device_id(
    uid: ClaimUid,
    device: DeviceName,
    share: ShareId | None = None,
    driver: str = names.DRIVER,
    place: int | None = None,
) -> str:
    """The CDI name in full, which the kubelet hands on to the container runtime.

    >>> cdi_device_id(ClaimUid("0b7e"), DeviceName("gpu-0"))
    'k8s.gpu.nvidia.com/claim=0b7e-gpu-0'
    """
    name = cdi_device_name(uid, device, share, place)
    return str(qualify(cdi_vendor(driver), names.CDI_CLASS, name))


def _of_device(claim: ClaimRef, device: ContainerDevice, nodes: DeviceFiles) -> ContainerEdits:
    prefix = f"GPU_DEVICE_{_called(device)}"
    shares = (
        f"{prefix}_{_variable(name)}={quantity}" for name, quantity in sorted(device.consumed)
    )
    requested = (
        f"{prefix}_{_variable(name)}_{_variable(device.request)}={quantity}"
        for name, quantity in sorted(device.requested)
    )
    uuid = device.instance.uuid if device.instance else device.gpu.uuid
    # A driver without MIG has nothing to monitor it with.
    capabilities = [nodes.capabilities[c] for c in device.capabilities if c in nodes.capabilities]
    claims = (f"{prefix}_CLAIM={claim}",) if claim.namespace else ()
    return ContainerEdits(
        env=(f"{prefix}_UUID={uuid}", *claims, *shares, *requested),
        device_nodes=(_node(nodes.gpus[device.gpu.minor]), *map(_node, capabilities)),
    )


def _called(device: ContainerDevice) -> str:
    """In the names of variables: the minor number, with the partition where it is one."""
    if device.instance is None or device.device is None:
        return str(device.gpu.minor)
    return _variable((device.unit or device.device).removeprefix("gpu-"))


def _edits_of_mps(same: Iterable[ContainerDevice]) -> ContainerEdits:
    served = next((device.served for device in same if device.served), None)
    return mps_edits(served) if served else ContainerEdits()


def _shown(same: Iterable[ContainerDevice]) -> ContainerEdits:
    """Of two requests for one device (to monitor it), a container with either sees both
    documents."""
    documents = {device.document for device in same if device.document}
    mounts = (Mount(d.host_path, d.container_path, options=_DOCUMENT) for d in documents)
    return ContainerEdits(mounts=tuple(sorted(mounts, key=lambda mount: mount.container_path)))


def _variable(name: str) -> str:
    """A name as a part of a variable's: "memory" is MEMORY; a capacity's domain is left out."""
    bare = name.rpartition("/")[2]
    return "".join(c if c.isalnum() else "_" for c in bare).upper()


# Every claim has these again. The same objects are also quickly compared where they are written.
@functools.lru_cache(maxsize=8)
def _common_edits(files: tuple[DeviceFile, ...]) -> ContainerEdits:
    return ContainerEdits(device_nodes=tuple(map(_node, files)))


@functools.lru_cache(maxsize=256)
def _node(file: DeviceFile) -> DeviceNode:
    # Without its numbers: the runtime reads them when a container starts, so that a container that
    # is restarted after the driver was reloaded gets nvidia-uvm under its new major number.
    moved = file.host_path != file.container_path
    return DeviceNode(file.container_path, file.host_path if moved else "", permissions="rw")
