"""Builders of the values that tests are about: write only what the test is about.

``record("a", "gpu-0")`` is a claim that was prepared with a whole GPU, ``holding("a", limit=...)``
what it holds of one device, ``claim("gpu-0")`` a claim that the scheduler has allocated. Simulated
nodes are built by ``tests.fakes.simulated``, partitions by ``tests.fakes.mig``.
"""

from collections.abc import Iterable
from typing import Any

from dra_driver.k8s.claims import (
    AllocationResult,
    Claim,
    ClaimRef,
    ClaimUid,
    OpaqueConfig,
    Pod,
    PodUid,
    PreparedDevice,
    ShareId,
)
from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.gpus import DeviceName, Gpu, GpuUuid, Inventory, Topology, Version
from dra_driver.model.offer import Device, Fractional, Offer, Shape
from dra_driver.model.profiles import Rules
from dra_driver.model.records import ClaimRecord, DeviceAllocation, Holding

POOL = "node-1"
VERSION = "resource.nvidia.com/v1beta1"


def gpu_uuid(minor: int = 0) -> GpuUuid:
    """Of ``gpu(minor)``."""
    return GpuUuid(f"GPU-00000000-0000-0000-0000-00000000000{minor}")


def ref(name: str = "claim", uid: str | None = None, namespace: str = "default") -> ClaimRef:
    return ClaimRef(namespace, name, ClaimUid(uid or f"uid-{name}"))


def gpu(minor: int = 0, **fields: Any) -> Gpu:
    """An H100 as NVML reports it."""
    values: dict[str, Any] = {
        "minor": minor,
        "uuid": gpu_uuid(minor),
        "pci_bus_id": f"0000:{0x18 + minor:02x}:00.0",
        "product_name": "NVIDIA H100 80GB HBM3",
        "brand": "Nvidia",
        "architecture": "Hopper",
        "compute_capability": Version(9, 0),
        "driver_version": Version(580, 95, 5),
        "cuda_driver_version": Version(13, 0),
        "memory_bytes": 81559 * 1024 * 1024,
        "topology": Topology(pcie_root="pci0000:15", numa_node=0),
    }
    return Gpu(**values | fields)


def inventory(count: int = 2) -> Inventory:
    return Inventory(tuple(gpu(minor) for minor in range(count)))


MIB = 1024 * 1024
SLICEABLE = Fractional(
    memory_default=81559 * MIB, memory_least=1024 * MIB, memory_step=MIB, shares=48
)


def offer(count: int = 2, shape: Shape = SLICEABLE, **rules: Any) -> Offer:
    """What a node with so many H100s offers, each in this shape."""
    return Offer(tuple(Device(gpu(minor), shape, Rules(**rules)) for minor in range(count)))


def fraction(
    memory: str = "20Gi", device: str = "gpu-0", request: str = "gpu", **capacity: str
) -> AllocationResult:
    """A part of a GPU, as the scheduler says it."""
    consumed = {"cores": "0", "memory": memory, "shares": "1"} | capacity
    share = ShareId(f"{request}-{device}-{memory}")
    return allocation(device, request, share=share, consumed=tuple(sorted(consumed.items())))


def pod(name: str = "pod") -> Pod:
    return Pod(name, PodUid(f"uid-{name}"))


def allocation(device: str = "gpu-0", request: str = "gpu", **fields: Any) -> AllocationResult:
    return AllocationResult(**{"request": request, "pool": POOL, "device": device} | fields)


def claim(*devices: str, name: str = "claim", configs: tuple[OpaqueConfig, ...] = ()) -> Claim:
    """A claim that was allocated *devices*, one request each: gpu, gpu-1, gpu-2, …"""
    allocations = tuple(
        allocation(device, f"gpu-{index}" if index else "gpu")
        for index, device in enumerate(devices)
    )
    return Claim(ref(name), allocations, configs)


def config(
    kind: str = "GpuConfig", *requests: str, source: str = "FromClaim", **fields: Any
) -> OpaqueConfig:
    return OpaqueConfig(
        source, requests, {"apiVersion": VERSION, "kind": kind, **fields}, f"{source.lower()}"
    )


def holding(of: str | ClaimRef = "claim", device: str = "gpu-0", **fields: Any) -> Holding:
    """What the claim *of* holds of a device: of a whole GPU, where *fields* say nothing else."""
    minor = device.removeprefix("gpu-").partition("-")[0]
    values = {"gpu": gpu_uuid(int(minor)) if minor.isdecimal() else gpu_uuid()}
    return Holding(_ref(of), DeviceName(device), **values | fields)


def record(
    of: str | ClaimRef = "claim",
    *devices: str | Holding,
    completed: bool = True,
    pods: Iterable[str | Pod] = (),
    **fields: Any,
) -> ClaimRecord:
    """The record of the claim *of*, prepared with *devices* (whole GPUs, or these holdings;
    "gpu-0" where none is named). With *completed* false its preparation has begun."""
    held = tuple(
        device if isinstance(device, Holding) else holding(of, device)
        for device in devices or ("gpu-0",)
    )
    prepared = tuple(prepared_device(each.device, each.request or "gpu") for each in held)
    values: dict[str, Any] = {"prepared": prepared, "spec": "{}"} if completed else {}
    values["pods"] = tuple(pod(user) if isinstance(user, str) else user for user in pods)
    return ClaimRecord(_ref(of), held, **values | fields)


def allocated_record(
    *ids: str, resource: str = "nvidia.com/gpu", pods: Iterable[str | Pod] = (), **fields: Any
) -> ClaimRecord:
    """The record of what a container was given by the device-plugin API; its pod is not known yet
    where none is named."""
    allocation = DeviceAllocation(ResourceName(resource), tuple(map(DeviceId, sorted(ids))))
    of = ref("-".join(allocation.ids), f"dp-{'-'.join(allocation.ids)}", "default" if pods else "")
    return record(of, pods=pods, allocation=allocation, **fields)


def prepared_device(device: str = "gpu-0", request: str = "gpu", *cdi_ids: str) -> PreparedDevice:
    return PreparedDevice((request,), POOL, device, cdi_ids)


def _ref(of: str | ClaimRef) -> ClaimRef:
    return ref(of) if isinstance(of, str) else of


def claim_document(claim: Claim, driver: str = "gpu.nvidia.com") -> dict[str, Any]:
    """*claim* as the API server would give it, in v1."""
    results = []
    for a in claim.allocations:
        result: dict[str, Any] = {
            "request": a.request,
            "driver": driver,
            "pool": a.pool,
            "device": a.device,
        }
        if a.admin:
            result["adminAccess"] = True
        if a.share:
            result["shareID"] = a.share
        if a.consumed:
            result["consumedCapacity"] = dict(a.consumed)
        results.append(result)
    configs = [
        {
            "source": c.source,
            "requests": list(c.requests),
            "opaque": {"driver": driver, "parameters": c.parameters},
        }
        for c in claim.configs
    ]
    devices: dict[str, Any] = {"results": results}
    if configs:
        devices["config"] = configs
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "namespace": claim.ref.namespace,
            "name": claim.ref.name,
            "uid": claim.ref.uid,
        },
        "spec": {
            "devices": {
                "requests": [
                    {"name": name, "exactly": {"deviceClassName": "gpu.nvidia.com"}}
                    for name in sorted({a.base_request for a in claim.allocations})
                ]
            }
        },
        "status": {
            "allocation": {"devices": devices},
            "reservedFor": [
                {"resource": "pods", "name": pod.name, "uid": pod.uid} for pod in claim.pods
            ],
        },
    }
