"""What a thousand nodes ask of etcd, counted over hours of one node's loops."""

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dra_driver.k8s.claims import ClaimReader, ClaimUid
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.kubeletplugin.slices.features import probe_device_features
from dra_driver.model.gpus import DeviceName, GpuUuid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimMemoryLimit, ClaimRecord, Holding
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.node.state.ledger import Ledger
from dra_driver.plugin.claims.reconciler import ClaimReconciler
from dra_driver.plugin.memory.pod_limits import PodLimits
from dra_driver.plugin.memory.start import PODS_SECONDS
from dra_driver.plugin.publish.offers import PROBE_SECONDS, ApiFeatureProbe
from dra_driver.settings import PluginSettings
from tests.builders import POOL, pod, ref

DRIVER = "gpu.nvidia.com"
NODES, CLAIMS, HOURS = 1000, 8, 2
MOST_A_SECOND = 10
LIMIT = ClaimMemoryLimit(1, GuardRules(GuardPolicy.KILL))


class Api:
    """An API server with the claims of this node, of which each is used by its one pod. It counts
    what it has to ask etcd for: all but what is in its memory, and what it is itself."""

    def __init__(self):
        self.asked = 0
        self.quorum_reads = 0
        self.gone = set()

    def get(self, path, query=None):
        if path == "/apis/resource.k8s.io":
            return {"versions": [{"version": "v1"}]}
        self.asked += 1
        self.quorum_reads += (query or {}).get("resourceVersion") != "0"
        return self.claim(path.rpartition("/")[2])

    def create(self, path, document, query):
        assert query == {"dryRun": "All"}
        self.quorum_reads += 1
        return document

    def claim(self, name):
        results = [{"request": "gpu", "driver": DRIVER, "pool": POOL, "device": "gpu-0"}]
        uid = "another" if name in self.gone else ref(name).uid
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": "default", "uid": uid},
            "spec": {"devices": {"requests": [{"name": "gpu"}]}},
            "status": {
                "allocation": {"devices": {"results": results}},
                "reservedFor": [{"resource": "pods", "name": name, "uid": pod(name).uid}],
            },
        }


def record(number):
    """Half of them can be joined by their name; the others are from templates, and under MPS."""
    name = f"claim-{number}"
    gpu = GpuUuid("GPU-0")
    holding = Holding(ref(name), DeviceName("gpu-0"), gpu=gpu, limit=LIMIT)
    limited = ClaimRecord(ref(name), (holding,), prepared=(), spec="{}", pods=(pod(name),))
    if number % 2:
        return limited
    namespace = MpsNamespace(MpsNamespaceName(f"c_{number}"), ref(name).uid, (gpu,))
    return replace(limited, steps=(ServeMpsNamespace(namespace),), pod_claim_name="gpu")


class Node:
    """The loops of one node that ask the API server, on a clock of their own."""

    def __init__(self, directory):
        self.api = Api()
        api: Any = self.api  # it cannot do all that ResourceApi may ask for
        self.on_owners_unknown: Callable[[], None] = lambda: None
        self.ledger = Ledger(directory, "boot")
        self.ledger.reload()
        for number in range(CLAIMS):
            self.ledger.write(record(number))
        self.taken_back: list[ClaimUid] = []
        claims = ClaimReader(ResourceApi(api), DRIVER, POOL)
        me: Any = self
        reconciler = ClaimReconciler(self.ledger, claims, me, POOL, tuple)
        limits = PodLimits(self.ledger.records, claims, me, me)
        keeping = ApiFeatureProbe(
            lambda: ApiFeatures(*probe_device_features(api, "v1", DRIVER, POOL))
        )
        between = PluginSettings.model_fields["reconcile_interval"].default
        limits.wake(lambda: None, lambda: None)
        limits.settle()
        self.loops = (
            (reconciler.look, between),
            (limits.update_pods, PODS_SECONDS),
            (keeping.probe, PROBE_SECONDS),
        )

    def run(self, seconds):
        """As ``base.threads`` does each of them."""
        due = [(0.0, number) for number in range(len(self.loops))]
        while due[0][0] < seconds:
            now, number = heapq.heappop(due)
            step, between = self.loops[number]
            answer = step()
            soon = answer if isinstance(answer, float) else between
            heapq.heappush(due, (now + min(between, soon), number))

    def prepare(self, ref):
        raise AssertionError("nothing is prepared here")

    def take_back_if(self, ref, gone):
        if gone():
            self.taken_back.append(ref.uid)
            self.ledger.forget(ref.uid)
            return True
        return False

    def note_pods(self, claim):
        return False

    def settle(self, read, joinable):
        assert read(())
        assert joinable

    def report_new_pods(self, on_new_pod):
        return on_new_pod is not None


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_a_thousand_nodes_with_eight_claims_each_ask_etcd_less_than_ten_times_a_second(node):
    seconds = HOURS * 3600
    node.run(seconds)

    assert node.api.asked / seconds * NODES > 10 * MOST_A_SECOND, "they do look at their claims"
    assert node.api.quorum_reads / seconds * NODES < MOST_A_SECOND
    assert node.taken_back == []


def test_a_claim_that_went_is_still_taken_back_at_the_second_look(node):
    node.api.gone.add("claim-3")

    node.run(200)

    assert node.taken_back == [ref("claim-3").uid]
