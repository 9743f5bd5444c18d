"""Claims of PodGroups, which the scheduler makes only where its gate is on (alpha): written by the
test, and prepared over the plugin's socket as the kubelet does it."""

import uuid
from typing import Any

import grpc

from api.kubelet import dra_v1_pb2
from tests.e2e.driver import Driver
from tests.e2e.kube import Kube
from tests.e2e.manifests import CLASS

Document = dict[str, Any]

_PREPARE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
_SECONDS = 60.0


def reserve_for_group(kube: Kube, name: str, pool: str, memory: str) -> str:
    """Allocate part of gpu-0 to the claim *name*, reserved for a PodGroup; its UID."""
    result = {
        "request": "gpu",
        "driver": CLASS,
        "pool": pool,
        "device": "gpu-0",
        "shareID": str(uuid.uuid4()),
        "consumedCapacity": {"memory": memory, "cores": "0", "shares": "1"},
    }
    group = {
        "apiGroup": "scheduling.k8s.io",
        "resource": "podgroups",
        "name": f"{name}-group",
        "uid": str(uuid.uuid4()),
    }
    status = {"allocation": {"devices": {"results": [result]}}, "reservedFor": [group]}
    path = f"{kube.path('ResourceClaim', 'default')}/{name}"
    return str(kube.api.patch(f"{path}/status", {"status": status})["metadata"]["uid"])


def add_pod(kube: Kube, name: str, pod: str) -> None:
    """Reserve the claim for a pod besides, without which the kubelet lets it use no claim."""
    claim = kube.get("ResourceClaim", name)
    uid = kube.get("Pod", pod)["metadata"]["uid"]
    consumer = {"resource": "pods", "name": pod, "uid": uid}
    status = {"status": {"reservedFor": [*claim["status"]["reservedFor"], consumer]}}
    kube.api.patch(f"{kube.path('ResourceClaim', 'default')}/{name}/status", status)


def prepare(driver: Driver, name: str, uid: str) -> str:
    """Have the plugin prepare a claim; what it answers as an error."""
    (socket,) = driver.plugin_dir.glob("dra*.sock")
    claim = dra_v1_pb2.Claim(namespace="default", name=name, uid=uid)
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        ask = channel.unary_unary(
            _PREPARE,
            request_serializer=dra_v1_pb2.NodePrepareResourcesRequest.SerializeToString,
            response_deserializer=dra_v1_pb2.NodePrepareResourcesResponse.FromString,
        )
        answer = ask(dra_v1_pb2.NodePrepareResourcesRequest(claims=[claim]), timeout=_SECONDS)
    return str(answer.claims[uid].error)
