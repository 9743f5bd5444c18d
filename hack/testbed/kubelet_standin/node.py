"""The Node object of the stand-in, kept ready."""

import datetime
import platform
import time
from typing import Any

from dra_driver.cluster.client import STRATEGIC_MERGE_PATCH, ApiServer
from dra_driver.errors import Conflict

_BEAT_SECONDS = 10.0  # the node controller's patience is 40 s
_CAPACITY = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "100Gi", "pods": "110"}


def now() -> str:
    """Now, as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Node:
    """Creates the node *name* and says again and again that it is ready."""

    def __init__(self, api: ApiServer, name: str, minor: int) -> None:
        self._api = api
        self._name = name
        self._minor = minor
        self._next_beat = 0.0
        self._ready_since = now()

    def register(self) -> None:
        """Create the Node; one that is there is taken over."""
        labels = {
            "kubernetes.io/hostname": self._name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": _architecture(),
        }
        document = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self._name, "labels": labels},
        }
        try:
            self._api.create("/api/v1/nodes", document)
        except Conflict:
            self._api.patch(f"/api/v1/nodes/{self._name}", {"metadata": {"labels": labels}})
        self.beat()
        # Admission taints every new node; where no node controller runs, nobody takes it off.
        self._api.patch(
            f"/api/v1/nodes/{self._name}",
            {"spec": {"taints": [{"key": "node.kubernetes.io/not-ready", "$patch": "delete"}]}},
            content_type=STRATEGIC_MERGE_PATCH,
        )

    def beat(self) -> None:
        """Renew the status when it is due."""
        if time.monotonic() < self._next_beat:
            return
        self._api.patch(
            f"/api/v1/nodes/{self._name}/status",
            {"status": self._status()},
            content_type=STRATEGIC_MERGE_PATCH,
        )
        self._next_beat = time.monotonic() + _BEAT_SECONDS

    def _status(self) -> dict[str, Any]:
        return {
            "capacity": _CAPACITY,
            "allocatable": _CAPACITY,
            "addresses": [{"type": "Hostname", "address": self._name}],
            "nodeInfo": {
                "architecture": _architecture(),
                "bootID": "",
                "containerRuntimeVersion": "standin://1",
                "kernelVersion": platform.release(),
                "kubeProxyVersion": "",
                "kubeletVersion": f"v1.{self._minor}.0-standin",
                "machineID": "",
                "operatingSystem": "linux",
                "osImage": "none",
                "systemUUID": "",
            },
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "KubeletReady",
                    "message": "the stand-in kubelet runs",
                    "lastHeartbeatTime": now(),
                    "lastTransitionTime": self._ready_since,
                }
            ],
        }


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
