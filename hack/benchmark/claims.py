"""Claims that really exist in the API server, allocated as the scheduler would."""

import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from dra_driver.k8s.claims import ClaimRef, ClaimUid
from tests.e2e.driver import DRIVER
from tests.e2e.kube import Kube, wait

NAMESPACE = "dra-bench"
_ADMIN = {"resource.kubernetes.io/admin-access": "true"}  # the namespace may have such claims
_AT_ONCE = 4
WHOLE = "81559Mi"  # all that the simulated H100s have

Document = dict[str, Any]


@contextmanager
def namespace(kube: Kube, name: str = NAMESPACE) -> Iterator[None]:
    """A namespace for claims, and none of it afterwards."""
    metadata = {"name": name, "labels": _ADMIN}
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    try:
        yield
    finally:
        kube.delete("Namespace", name)
        kube.wait_gone("Namespace", name, seconds=120)


class Claims:
    """Makes claims on the GPUs of *node*, each already allocated, in a namespace that is there."""

    def __init__(self, kube: Kube, node: str, namespace: str = NAMESPACE) -> None:
        self._api = kube.api
        self._namespace = namespace
        self._path = kube.path("ResourceClaim", namespace)
        self._node = node

    def on(
        self, devices: Sequence[str], admin: bool = False, memory: str = "", cores: str = "0"
    ) -> list[ClaimRef]:
        """One claim for each of *devices*, in their order: for so much *memory*, or all of it."""
        return self.on_several([[device] for device in devices], admin, memory, cores)

    def on_several(
        self,
        device_sets: Sequence[Sequence[str]],
        admin: bool = False,
        memory: str = "",
        cores: str = "0",
    ) -> list[ClaimRef]:
        """One claim for each of *device_sets*: for so much *memory* of each of its devices."""
        share = {} if admin else _share(memory, cores)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return list(threads.map(lambda devices: self._make(devices, admin, share), device_sets))

    def path(self, ref: ClaimRef) -> str:
        return f"{self._path}/{ref.name}"

    def delete(self) -> None:
        """Delete all of them."""
        self._api.delete(self._path)
        wait("the claims to go", lambda: not self._api.get(self._path, {"limit": "1"})["items"])

    def _make(self, devices: Sequence[str], admin: bool, share: Document) -> ClaimRef:
        made = self._api.create(self._path, _claim(len(devices), admin))
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [self._node]}]}
        made["status"] = {
            "allocation": {
                "devices": {"results": [self._result(d, share) for d in devices]},
                # Without it no plugin may write the status: from Kubernetes 1.36 on, it may only do
                # so for claims of its node.
                "nodeSelector": {"nodeSelectorTerms": [term]},
            },
            "reservedFor": [{"resource": "pods", "name": "bench", "uid": str(uuid.uuid4())}],
        }
        name = made["metadata"]["name"]
        self._api.update(f"{self._path}/{name}/status", made)
        return ClaimRef(self._namespace, name, ClaimUid(made["metadata"]["uid"]))

    def _result(self, device: str, share: Document) -> Document:
        """*share*: empty for admin access."""
        more = {**share, "shareID": str(uuid.uuid4())} if share else {"adminAccess": True}
        return {"request": "gpu", "driver": DRIVER, "pool": self._node, "device": device, **more}


def _share(memory: str, cores: str) -> Document:
    """What the scheduler adds where a device can be divided."""
    return {"consumedCapacity": {"memory": memory or WHOLE, "cores": cores, "shares": "1"}}


def _claim(count: int, admin: bool) -> Document:
    exactly: Document = {"deviceClassName": DRIVER, "count": count}
    exactly |= {"adminAccess": True} if admin else {}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"generateName": "bench-"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    }
