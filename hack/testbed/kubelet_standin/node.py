"""The Node object of the stand-in, kept ready."""

import datetime
import platform
import time
from typing import Any

from dra_driver.base.errors import Conflict
from dra_driver.k8s.client import STRATEGIC_MERGE_PATCH, ApiClient

_BEAT_SECONDS = 10.0  # the node controller's patience is 40 s
_CAPACITY = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "100Gi", "pods": "110"}


def now() -> str:
    """Now, as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Node:
    """Creates the node *name* and says again and again that it is ready."""

    def __init__(self, api: ApiClient, name: str, minor: int, port: int | None = None) -> None:
        self.api = api
        self.name = name
        self._minor = minor
        self._port = port  # on loopback, where the API server asks for logs
        self._next_beat = 0.0
        self._ready_since = now()

    def register(self) -> None:
        """Create the Node; one that is there is taken over."""
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": _architecture(),
        }
        document = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": labels},
        }
        try:
            self.api.create("/api/v1/nodes", document)
        except Conflict:
            self.api.patch(f"/api/v1/nodes/{self.name}", {"metadata": {"labels": labels}})
        self.beat()
        self._untaint()

    def beat(self) -> None:
        """Renew the status when it is due."""
        if time.monotonic() < self._next_beat:
            return
        self.api.patch(
            f"/api/v1/nodes/{self.name}/status",
            {"status": self._status()},
            content_type=STRATEGIC_MERGE_PATCH,
        )
        self._next_beat = time.monotonic() + _BEAT_SECONDS

    def _untaint(self) -> None:
        """Admission taints every new node; where no node controller runs, nobody takes it off."""
        path = f"/api/v1/nodes/{self.name}"
        while True:
            node = self.api.get(path)
            taints = node["spec"].get("taints") or []
            remaining = [
                taint for taint in taints if taint["key"] != "node.kubernetes.io/not-ready"
            ]
            if remaining == taints:
                return
            version = {"resourceVersion": node["metadata"]["resourceVersion"]}
            try:
                self.api.patch(path, {"metadata": version, "spec": {"taints": remaining}})
                return
            except Conflict:  # the node controller was at it: look again
                continue

    def _status(self) -> dict[str, Any]:
        endpoint = {"kubeletEndpoint": {"Port": self._port}} if self._port else {}
        return {
            "daemonEndpoints": endpoint,
            "capacity": _CAPACITY,
            "allocatable": _CAPACITY,
            "addresses": [
                {"type": "Hostname", "address": "127.0.0.1" if self._port else self.name}
            ],
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
