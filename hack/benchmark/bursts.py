"""A burst of pods with a claim each: how fast the scheduler places them."""

import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from api import names
from dra_driver.cluster.client import ApiServer
from hack.benchmark.errors import BenchError
from hack.benchmark.usage import cpu_seconds
from tests.e2e.kube import PATHS, wait

_CHART = Path(__file__).parents[2] / "tests/data/golden/chart/default.yaml"  # as helm renders it
_NAMESPACE = "default"
_NAME = "burst"
_PODS = PATHS["Pod"].format(namespace=_NAMESPACE)
_CLAIMS = PATHS["ResourceClaim"].format(namespace=_NAMESPACE)
_TEMPLATES = PATHS["ResourceClaimTemplate"].format(namespace=_NAMESPACE)
_REPLICA_SETS = f"/apis/apps/v1/namespaces/{_NAMESPACE}/replicasets"
_PLACED = {"fieldSelector": "spec.nodeName!="}
_BURST_SECONDS = 180
_GONE_SECONDS = 120

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Burst:
    """What one burst showed."""

    pods_per_second: float
    cpu_ms: float  # of the scheduler, a pod


class Bursts:
    """Pods, each with a whole GPU of its own by the chart's class."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        api.create(PATHS["DeviceClass"], _device_class())
        api.create(_TEMPLATES, _template())

    def burst(self, count: int, scheduler: int) -> Burst:
        """*count* pods at once, from the first placed to the last, and none of them afterwards.

        *scheduler*: its process.
        """
        since = self._api.list(_PODS)["metadata"]["resourceVersion"]
        before = cpu_seconds(scheduler)
        try:
            # The controller manager creates them faster than we could.
            self._api.create(_REPLICA_SETS, _replica_set(count))
            placed = self._placed(count, since)
            spent = cpu_seconds(scheduler) - before
        finally:
            self._clear()
        return Burst((count - 1) / (max(placed) - min(placed)), spent / count * 1000)

    def _placed(self, count: int, since: str) -> Collection[float]:
        """When each of *count* pods had a node."""
        placed: dict[str, float] = {}
        give_up_at = time.monotonic() + _BURST_SECONDS
        while len(placed) < count and time.monotonic() < give_up_at:
            # The API server may end a watch at any time; the next one goes on from there.
            query = {**_PLACED, "resourceVersion": since}
            with closing(self._api.watch(_PODS, query, _BURST_SECONDS)) as watch:
                for event in watch:
                    metadata = event["object"]["metadata"]
                    since = metadata["resourceVersion"]
                    placed.setdefault(metadata["name"], time.monotonic())
                    if len(placed) == count:
                        break
        if len(placed) < count:
            raise BenchError(f"{len(placed)} of {count} pods were placed in {_BURST_SECONDS} s")
        return placed.values()

    def _clear(self) -> None:
        self._api.delete(f"{_REPLICA_SETS}/{_NAME}")
        wait("the pods to go", self._none_of(_PODS), _GONE_SECONDS)
        wait("their claims to go", self._none_of(_CLAIMS), _GONE_SECONDS)

    def _none_of(self, path: str) -> Callable[[], bool]:
        return lambda: not self._api.get(path, {"limit": "1"})["items"]


def _device_class() -> Document:
    documents = yaml.safe_load_all(_CHART.read_text())
    found: Document = next(
        each
        for each in documents
        if each["kind"] == "DeviceClass" and each["metadata"]["name"] == names.DRIVER
    )
    return found


def _template() -> Document:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": _NAME},
        "spec": {
            "spec": {
                "devices": {
                    "requests": [{"name": "gpu", "exactly": {"deviceClassName": names.DRIVER}}]
                }
            }
        },
    }


def _replica_set(count: int) -> Document:
    labels = {"app": _NAME}
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": _NAME},
        "spec": {
            "replicas": count,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "automountServiceAccountToken": False,
                    "terminationGracePeriodSeconds": 0,  # nobody is there who would end it
                    "containers": [container],
                    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": _NAME}],
                },
            },
        },
    }
