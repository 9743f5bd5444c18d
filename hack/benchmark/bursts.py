"""A burst of pods with a claim each: how fast the scheduler places them."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from api import names
from dra_driver.k8s.client import ApiClient
from hack.benchmark.errors import BenchError
from hack.benchmark.usage import cpu_seconds
from tests.e2e.kube import PATHS, wait

_CHART = Path(__file__).parents[2] / "tests/data/golden/chart/default.yaml"  # as helm renders it
_NAMESPACE = "default"
_PARTITIONS = "mig.nvidia.com"  # the class
_PODS = PATHS["Pod"].format(namespace=_NAMESPACE)
_CLAIMS = PATHS["ResourceClaim"].format(namespace=_NAMESPACE)
_TEMPLATES = PATHS["ResourceClaimTemplate"].format(namespace=_NAMESPACE)
_REPLICA_SETS = f"/apis/apps/v1/namespaces/{_NAMESPACE}/replicasets"
_PLACED = {"fieldSelector": "spec.nodeName!="}
_BURST_SECONDS = 180
_GONE_SECONDS = 120

Document = dict[str, Any]
Mix = Mapping[str, int]
"""Of so many pods together, how many claim what: ``GPU``, or a partition of this profile."""

GPU = "gpu"
WHOLE: Mix = {GPU: 1}


@dataclass(frozen=True, slots=True)
class Burst:
    """What one burst showed."""

    pods_per_second: float
    cpu_ms: float  # of the scheduler, a pod


class Bursts:
    """Pods, each with a claim of its own by the chart's classes."""

    def __init__(self, api: ApiClient, mixes: Iterable[Mix] = (WHOLE,)) -> None:
        """*mixes*: all that there will be bursts of."""
        self._api = api
        kinds = {kind for mix in mixes for kind in mix}
        for name in sorted({_class_of(kind) for kind in kinds}):
            api.create(PATHS["DeviceClass"], _device_class(name))
        for kind in sorted(kinds):
            api.create(_TEMPLATES, _template(kind))

    def burst(self, mix: Mix, count: int, scheduler: int) -> Burst:
        """*count* pods at once, from the first placed to the last, and none of them afterwards.

        *scheduler*: its process.
        """
        since = self._api.list(_PODS)["metadata"]["resourceVersion"]
        before = cpu_seconds(scheduler)
        counts = parts(mix, count)
        try:
            # The controller manager creates them faster than we could, and all kinds at once.
            for kind in counts:
                self._api.create(_REPLICA_SETS, _replica_set(kind, counts[kind]))
            placed = self._placed(count, since)
            spent = cpu_seconds(scheduler) - before
        finally:
            self._clear(counts)
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

    def _clear(self, kinds: Iterable[str]) -> None:
        for kind in kinds:
            self._api.delete(f"{_REPLICA_SETS}/{_name(kind)}")
        wait("the pods to go", self._none_of(_PODS), _GONE_SECONDS)
        wait("their claims to go", self._none_of(_CLAIMS), _GONE_SECONDS)

    def _none_of(self, path: str) -> Callable[[], bool]:
        return lambda: not self._api.get(path, {"limit": "1"})["items"]


def parts(mix: Mix, count: int) -> dict[str, int]:
    """*count* pods by what they claim, as near to *mix* as whole pods can be.

    >>> parts({"gpu": 6, "1g.10gb": 1, "3g.40gb": 1}, 12)
    {'gpu': 9, '1g.10gb': 1, '3g.40gb': 2}
    """
    total, done, numbers = sum(mix.values()), 0, {}
    for kind, share in mix.items():
        numbers[kind] = (done + share) * count // total - done * count // total
        done += share
    return {kind: number for kind, number in numbers.items() if number}


def _name(kind: str) -> str:
    return f"burst-{kind.replace('.', '-')}"


def _class_of(kind: str) -> str:
    return names.DRIVER if kind == GPU else _PARTITIONS


def _device_class(name: str) -> Document:
    documents = yaml.safe_load_all(_CHART.read_text())
    device_class: Document = next(
        each
        for each in documents
        if each["kind"] == "DeviceClass" and each["metadata"]["name"] == name
    )
    return device_class


def _template(kind: str) -> Document:
    exactly: Document = {"deviceClassName": _class_of(kind)}
    if kind != GPU:
        profile = f"device.attributes['{names.DRIVER}'].profile == '{kind}'"
        exactly["selectors"] = [{"cel": {"expression": profile}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": _name(kind)},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
    }


def _replica_set(kind: str, count: int) -> Document:
    name = _name(kind)
    labels = {"app": name}
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": count,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "automountServiceAccountToken": False,
                    "terminationGracePeriodSeconds": 0,  # nobody is there who would end it
                    "containers": [container],
                    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": name}],
                },
            },
        },
    }
