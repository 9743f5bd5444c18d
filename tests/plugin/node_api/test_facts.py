"""What the choice of an API depends on, as the API server, the kubelet and the ledger have it."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import ClaimReader
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.model.profiles import AllocationApi
from dra_driver.node.state.ledger_files import DamagedRecord
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_annotation import DevicePluginHolders
from dra_driver.plugin.node_api.facts import (
    ClusterFacts,
    ClusterFactsReader,
    Holders,
)
from tests.builders import allocated_record, claim, claim_document, record, ref
from tests.plugin.conftest import put_device_class, put_node

DRA, DEVICE_PLUGIN = AllocationApi.DRA, AllocationApi.DEVICE_PLUGIN
CLASS = "gpu.nvidia.com"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def reader(client, clock):
    """The labels are not followed here: the Node is read when it is asked for."""
    labels = NodeLabels(client, "node-1")
    return ClusterFactsReader(ResourceApi(client), labels, ResourceNames(), CLASS, clock)


def test_a_node_with_dra_is_known_after_three_small_requests(server, reader):
    put_node(server)
    put_device_class(server)
    assert reader.read() == ClusterFacts(True, (1, 36), CLASS)
    assert [request.path for request in server.requests] == [
        "/apis/resource.k8s.io",
        "/api/v1/nodes/node-1",
        f"/apis/resource.k8s.io/v1/deviceclasses/{CLASS}",
    ]


def test_a_node_whose_labels_are_followed_costs_one_request_less(server, client, clock):
    put_node(server)
    put_device_class(server)
    labels = NodeLabels(client, "node-1")
    reader = ClusterFactsReader(ResourceApi(client), labels, ResourceNames(), CLASS, clock)
    with ExitStack() as stack:
        labels.start(lambda: None, 60)
        stack.callback(labels.stop)
        server.forget_requests()
        assert reader.read(again=False) == ClusterFacts(True, (1, 36), CLASS)
        assert server.count("GET", "/api/v1/nodes/") == 0
        assert reader.read(again=True).kubelet == (1, 36)
        assert server.count("GET", "/api/v1/nodes/") == 1


def test_a_cluster_without_dra_has_no_class(server, reader, caplog):
    put_node(server, kubelet="v1.28.15")
    server.served = []
    assert reader.read() == ClusterFacts(False, (1, 28), "")
    assert not caplog.records


def test_a_class_of_another_name_can_have_the_resource(server, reader):
    put_node(server)
    put_device_class(server, "")
    spec = {"extendedResourceName": "nvidia.com/gpu"}
    server.put({"kind": "DeviceClass", "metadata": {"name": "mine"}, "spec": spec})
    assert reader.read().device_class == "mine"


def test_a_class_without_the_field_says_that_the_gate_is_off(server, reader):
    put_node(server)
    put_device_class(server, "")
    assert reader.read().device_class == ""


def test_a_class_that_is_not_there_may_be_about_to_come(server, reader, clock):
    put_node(server)
    assert reader.read().device_class is None
    clock.now = 11.0
    assert reader.read().device_class == ""


def test_no_class_matters_where_no_resource_is_configured(server, client, clock):
    put_node(server)
    names = ResourceNames(gpu="")
    labels = NodeLabels(client, "node-1")
    reader = ClusterFactsReader(ResourceApi(client), labels, names, CLASS, clock)
    assert reader.read().device_class == ""
    assert server.count("GET", "deviceclasses") == 0


def test_what_nobody_answers_is_not_known_and_logged_once(server, reader, caplog):
    caplog.set_level("INFO")
    server.fail(503, times=10**6)
    assert reader.read() == reader.read() == ClusterFacts(None, None, "")
    assert [record.message for record in caplog.records] == [
        "not known now: what the API server serves",
        "not known now: the Node",
    ]


def test_classes_that_may_not_be_read_are_not_known(server, reader):
    put_node(server)
    server.deny("get", "deviceclasses")
    assert reader.read() == ClusterFacts(True, (1, 36), None)


def test_the_kubelet_that_was_read_last_counts_in_an_outage(server, reader):
    put_node(server)
    put_device_class(server)
    reader.read()
    server.fail(503, times=10**6)
    assert reader.read().kubelet == (1, 36)


def test_what_is_allocatable_of_ours_is_told(server, reader):
    put_node(server)
    put_device_class(server)
    (node,) = server.objects("nodes")
    node["status"]["allocatable"] = {
        "cpu": "8",
        "nvidia.com/gpu": "4",
        "nvidia.com/gpu.shared": "0",
        "nvidia.com/mig-1g.10gb": "7",
    }
    server.put(node)
    assert reader.read().allocatable == ("nvidia.com/gpu", "nvidia.com/mig-1g.10gb")


class HolderScene:
    def __init__(self, client):
        self.known = ()
        self.on_disk = {}
        self.damaged = {}
        self.asked_at = 100.0  # what containers have; None: they have something not recorded
        self.others = ()
        self.error = None
        claims = ClaimReader(ResourceApi(client), CLASS, "node-1")
        self.holders = Holders(
            lambda: self.known,
            self.recorded,
            claims,
            lambda since: self.asked_at is not None and self.asked_at >= since,
            lambda: self.others,
        )

    def recorded(self):
        if self.error:
            raise self.error
        return self.on_disk, self.damaged


@pytest.fixture
def scene(client):
    return HolderScene(client)


def test_claims_hold_by_dra_and_allocations_by_the_device_plugin_api(server, scene):
    scene.known = (record("train", pods=("a", "b")), allocated_record("GPU-1", pods=("old",)))
    assert scene.holders.names(DRA) == ("pod default/a", "pod default/b")
    assert scene.holders.names(DEVICE_PLUGIN) == ("pod default/old",)
    assert server.count("GET", "resourceclaims") == 0


def test_who_has_no_pod_yet_is_named_all_the_same(scene):
    scene.known = (record("train"), allocated_record("GPU-1"))
    assert scene.holders.names(DRA) == ("claim default/train",)
    assert scene.holders.names(DEVICE_PLUGIN) == ("a container with nvidia.com/gpu (GPU-1)",)


def test_what_another_process_of_ours_recorded_counts(scene):
    other = record("train")
    scene.on_disk = {other.claim.uid: other}
    assert scene.holders.names(DRA) == ("claim default/train",)


def test_a_record_that_cannot_be_read_may_hold_something_by_either(scene):
    uid = ref("lost").uid
    scene.damaged = {uid: DamagedRecord(uid, Path("/x"), "it is not JSON")}
    for api in (DRA, DEVICE_PLUGIN):
        (name,) = scene.holders.names(api)
        assert "uid-lost" in name


def test_beside_another_device_plugin_all_count_and_those_are_named_whose_pods_are_known(scene):
    scene.known = (
        record("train", pods=("by-a-claim",)),
        allocated_record("GPU-1", pods=("old",)),
        allocated_record("GPU-2"),
    )
    assert scene.holders.of_device_plugin() == DevicePluginHolders(("default/old",), 2)
    uid = ref("lost").uid
    scene.damaged = {uid: DamagedRecord(uid, Path("/x"), "it is not JSON")}
    assert scene.holders.of_device_plugin() == DevicePluginHolders(("default/old",), 3)


def test_who_has_gpus_is_not_known_while_some_that_the_kubelet_gave_out_may_be_missing(scene):
    scene.known = (allocated_record("GPU-1", pods=("old",)),)
    scene.asked_at = None
    assert scene.holders.of_device_plugin() is None
    scene.asked_at, scene.error = 100.0, NodeError("the disk fails")
    assert scene.holders.of_device_plugin() is None


def test_pods_of_another_device_plugin_hold_gpus_and_have_none_of_this_driver(scene):
    scene.others = ("pod ml/theirs",)
    assert scene.holders.names(DEVICE_PLUGIN) == ("pod ml/theirs",)
    assert scene.holders.names(DRA) == ()
    scene.known = (allocated_record("GPU-1", pods=("old",)),)
    assert scene.holders.names(DEVICE_PLUGIN) == ("pod default/old", "pod ml/theirs")
    assert scene.holders.of_device_plugin() == DevicePluginHolders(("default/old",), 1)


def test_that_nobody_has_a_gpu_is_known_from_a_look_that_began_late_enough(scene):
    assert scene.holders.names(DEVICE_PLUGIN, 100.0) == ()
    assert scene.holders.names(DEVICE_PLUGIN, 100.5) is None
    assert scene.holders.of_device_plugin() == DevicePluginHolders()
    scene.others = ("pod ml/theirs",)
    assert scene.holders.names(DEVICE_PLUGIN, 100.5) == ("pod ml/theirs",)


def test_where_it_is_not_known_what_another_device_plugin_gave_ours_are_named_all_the_same(scene):
    scene.others = None
    assert scene.holders.names(DEVICE_PLUGIN) is None
    scene.known = (allocated_record("GPU-1", pods=("old",)),)
    assert scene.holders.names(DEVICE_PLUGIN) == ("pod default/old",)


def test_a_claim_holds_from_its_allocation_on(server, scene):
    server.put(claim_document(claim("gpu-0", name="coming")))
    assert scene.holders.names(DRA) == ("claim default/coming",)
    assert scene.holders.names(DEVICE_PLUGIN) == ()


@pytest.mark.parametrize("error", [NodeError("the disk fails"), None])
def test_what_cannot_be_asked_is_no_answer(server, scene, error):
    scene.error = error
    server.fail(503, times=10**6)
    scene.asked_at = None
    assert scene.holders.names(DRA) is None
    assert scene.holders.names(DEVICE_PLUGIN) is None


def test_an_api_server_without_claims_has_none(server, scene):
    server.served = []
    assert scene.holders.names(DRA) == ()
