"""Pods that set spec.nodeName and ask for GPUs are told where they get none."""

import math

import pytest

from dra_driver.base.errors import NodeError, Unreachable
from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.k8s.pods import KubeletPod, PodReader
from dra_driver.kubeletplugin.device_plugin.resources import (
    AllocatedContainer,
    DeviceId,
    ResourceName,
)
from dra_driver.model.profiles import AllocationApi
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_api import ApiChoice
from dra_driver.plugin.node_api.current import NodeApi
from dra_driver.plugin.node_api.pods import PodSources, PodsWithoutGpus
from tests.builders import allocated_record

DRA, DEVICE_PLUGIN = AllocationApi.DRA, AllocationApi.DEVICE_PLUGIN
CLAIMED = {"extendedResourceClaimStatus": {"resourceClaimName": "c", "requestMappings": []}}


def put_pod(server, name, resource="nvidia.com/gpu", count="1", **status):
    resources = {"limits": {"cpu": "1", resource: count}} if resource else {}
    server.put(
        {
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "nodeName": "node-1",
                "containers": [{"name": "main", "resources": resources}],
            },
            "status": {"phase": "Running", "startTime": "2026-01-02T03:04:05Z", **status},
        }
    )


class Scene:
    def __init__(self, server, client):
        self.server = server
        self.events = []
        self.error = None
        self.node_api = NodeApi()
        self.serve(DRA)
        reader = PodReader(client)
        self.containers = None
        self.records = ()
        sources = PodSources(
            self.listed,
            lambda: reader.on_node("node-1"),
            lambda: self.containers,
            lambda: self.records,
        )
        self.pods = PodsWithoutGpus(self.node_api, ResourceNames(), sources, self)

    def serve(self, api):
        self.node_api.set(ApiChoice(api, True, api))

    def listed(self):
        if self.error:
            raise self.error
        return tuple(
            KubeletPod(pod["metadata"]["namespace"], pod["metadata"]["name"], {})
            for pod in self.server.objects("pods")
        )

    def emit(self, event):
        self.events.append(event)

    def told(self):
        self.pods.look()
        events, self.events = self.events, []
        return [event.regarding.name for event in events]


@pytest.fixture
def scene(server, client):
    return Scene(server, client)


@pytest.mark.parametrize(
    "resource", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"]
)
def test_a_pod_without_a_claim_is_told_once_with_the_mend(scene, server, resource):
    put_pod(server, "old", resource)
    scene.pods.look()
    (event,) = scene.events
    (pod,) = server.objects("pods")
    assert (event.regarding.name, event.regarding.uid) == ("old", pod["metadata"]["uid"])
    assert event.reason == "GPUNotAllocated"
    assert "nodeSelector" in event.message
    assert "api: DevicePlugin" in event.message
    scene.events.clear()
    put_pod(server, "other", "")
    assert scene.told() == []


def test_pods_that_got_theirs_or_want_none_are_told_nothing(scene, server):
    put_pod(server, "claimed", **CLAIMED)
    put_pod(server, "none", "")
    put_pod(server, "zero", count="0")
    put_pod(server, "others", "example.com/fpga")
    put_pod(server, "ended", phase="Succeeded")
    assert scene.told() == []


def test_the_api_server_is_asked_only_where_a_pod_is_new(scene, server):
    put_pod(server, "old")
    assert scene.told() == ["old"]
    scene.told()
    assert server.count("GET", "/api/v1/pods") == 1
    put_pod(server, "new")
    assert scene.told() == ["new"]
    assert server.count("GET", "/api/v1/pods") == 2


def test_by_the_device_plugin_api_a_pod_is_told_to_which_the_kubelet_gave_nothing(scene, server):
    put_pod(server, "early")
    put_pod(server, "well")
    (uid,) = (
        p["metadata"]["uid"] for p in server.objects("pods") if p["metadata"]["name"] == "well"
    )
    ids = (DeviceId("GPU-1"),)
    scene.serve(DEVICE_PLUGIN)
    scene.error = NodeError("to list pods can make an old kubelet crash")
    assert scene.pods.look() == 5, "the kubelet knows of no device yet"
    assert server.count("GET", "/api/v1/pods") == 0

    scene.containers = (
        AllocatedContainer(PodUid(uid), "main", ResourceName("nvidia.com/gpu"), ids),
    )
    assert scene.pods.look() == 30
    (event,) = scene.events
    assert event.regarding.name == "early"
    assert "delete the pod" in event.message
    scene.events.clear()
    assert scene.told() == []


def test_a_pod_whose_devices_the_kubelet_has_forgotten_is_told_to_be_deleted(scene, server):
    put_pod(server, "lost")
    (document,) = server.objects("pods")
    pod = Pod("lost", PodUid(document["metadata"]["uid"]))
    scene.serve(DEVICE_PLUGIN)
    scene.records = (allocated_record("GPU-1", pods=[pod]),)
    scene.containers = ()
    scene.pods.look()
    (event,) = scene.events
    assert (event.regarding.name, event.reason) == ("lost", "GPUForgotten")
    assert "delete the pod" in event.message
    scene.events.clear()
    assert scene.told() == []


def test_by_the_device_plugin_api_the_api_server_is_asked_ever_more_seldom(scene):
    scene.serve(DEVICE_PLUGIN)
    scene.containers = ()
    assert [scene.pods.look() for _ in range(6)] == [30, 60, 120, 240, 480, 600]
    scene.containers = None
    scene.pods.look()
    scene.containers = ()
    assert [scene.pods.look() for _ in range(2)] == [30, 60], "the kubelet has lost what it knew"
    scene.pods.kubelet_changed()
    assert scene.pods.look() == 30


def test_where_no_api_is_chosen_yet_nobody_is_asked(scene, server):
    put_pod(server, "old")
    scene.node_api.set(ApiChoice())
    assert scene.pods.look() == math.inf
    assert server.count("GET", "/api/v1/pods") == 0


def test_what_cannot_be_asked_is_asked_again_and_logged_once(scene, server, caplog):
    caplog.set_level("INFO")
    put_pod(server, "old")
    for scene.error in (NodeError("the kubelet does not answer"), None):
        for _ in range(2):
            server.fail(503, "GET", "/api/v1/pods", times=9) if scene.error is None else None
            assert scene.told() == []
    assert len([r for r in caplog.records if "are not known now" in r.message]) == 2
    server.heal()
    assert scene.told() == ["old"]


def test_an_error_of_the_api_server_is_no_answer(scene, server):
    put_pod(server, "old")
    scene.error = Unreachable("no answer")
    assert scene.told() == []
