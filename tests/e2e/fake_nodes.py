"""Nodes that nobody runs: the scheduler alone sees them, and what they publish."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from api import names
from dra_driver.kubeletplugin.slices.reconcile import Pool, SliceOwner, plan_writes
from tests.e2e.kube import Kube
from tests.e2e.manifests import container, pod_of

Document = dict[str, Any]

TAINT = "dra.test/nobody-runs-it"
_NODES = "/api/v1/nodes"
_AT_ONCE = 8


@contextlib.contextmanager
def fake_nodes(kube: Kube, pools: Iterable[Pool]) -> Iterator[None]:
    """A node for each of *pools*, of its name. They go, and whatever was scheduled to them."""
    known_pools = list(pools)
    slices = kube.path("ResourceSlice")

    def make(pool: Pool) -> list[str]:
        uid = kube.api.create(_NODES, _document(pool.name))["metadata"]["uid"]
        documents = plan_writes(pool, (), SliceOwner(names.DRIVER, pool.name, uid)).create
        made = [kube.api.create(slices, dict(document)) for document in documents]
        return [document["metadata"]["name"] for document in made]

    try:
        made = at_once(make, known_pools)
        yield
    finally:
        kube.clean_up()
        at_once(lambda pool: kube.api.delete(f"{_NODES}/{pool.name}"), known_pools)
        at_once(lambda name: kube.delete("ResourceSlice", name), itertools.chain(*made))


def at_once(act: Callable[[Any], Any], these: Iterable[Any]) -> list[Any]:
    """What *act* answers for each of *these*, several at a time."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(act, these))


def pod_for(node: str, name: str, claim: str) -> Document:
    """A pod that can go to *node* alone."""
    affinity = {"key": "metadata.name", "operator": "In", "values": [node]}
    required = {"nodeSelectorTerms": [{"matchFields": [affinity]}]}
    return pod_of(
        name,
        [container(uses=({"name": "gpu"},))],
        [{"name": "gpu", "resourceClaimName": claim}],
        affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
        tolerations=[{"operator": "Exists"}],
        terminationGracePeriodSeconds=0,
    )


def _document(name: str) -> Document:
    amounts = {"cpu": "128", "memory": "1Ti", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "spec": {"taints": [{"key": TAINT, "effect": "NoSchedule"}]},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Told"}],
        },
    }
