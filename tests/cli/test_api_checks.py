"""By which API a node gives its GPUs out, as ``doctor`` explains it."""

import socket
from dataclasses import replace

import pytest

from api.kubelet import device_plugin_v1beta1_pb2 as messages
from dra_driver.cli.doctor.api_checks import API, api_findings, check_api, check_pods
from dra_driver.cli.doctor.cluster_checks import CheckedCluster
from dra_driver.cli.findings import Level
from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.model.profiles import AllocationApi, Profile
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.ledger import Ledger
from dra_driver.node.state.node_api_file import ServedApi, ServedApiFile
from dra_driver.node.state.profile_files import LastProfileFile
from dra_driver.plan.node_api import ApiChoice
from dra_driver.settings import DoctorSettings
from tests.builders import POOL, allocated_record, claim, claim_document
from tests.fakes.connected import client, server
from tests.fakes.poison import own_host
from tests.kubeletplugin.device_plugin.test_checkpoint import encoded
from tests.kubeletplugin.device_plugin.test_checkpoint import entry as given_to
from tests.kubeletplugin.device_plugin.test_checkpoint import write as write_checkpoint
from tests.plugin.conftest import home, put_device_class, put_node
from tests.plugin.node_api.test_pods import put_pod

__all__ = ["client", "home", "server"]

DRA, DEVICE_PLUGIN = AllocationApi.DRA, AllocationApi.DEVICE_PLUGIN


class Scene:
    def __init__(self, server, client, home):
        self.cluster = CheckedCluster(client, ResourceApi(client), "gpu.nvidia.com", POOL)
        (home / "device-plugins").mkdir()
        self.settings = DoctorSettings.model_validate(
            {
                "node_name": POOL,
                "kubelet_dir": home / "kubelet",
                "host_root": own_host(home / "host"),
                "device_plugin_dir": home / "device-plugins",
            }
        )
        put_node(server)
        put_device_class(server)
        self.served(DRA)
        self.profile(AllocationApi.AUTO)

    def served(self, api):
        ServedApiFile(self.settings.served_api).write(ServedApi(api))

    def profile(self, api):
        LastProfileFile(self.settings.last_profile).keep(Profile("mine", api=api))

    def findings(self):
        return [
            (finding.level, finding.message)
            for finding in check_api(self.settings, self.cluster)
            if finding.subject == API
        ]


@pytest.fixture
def scene(server, client, home):
    return Scene(server, client, home)


def test_the_api_is_told_with_the_reason(scene):
    because = "DeviceClass gpu.nvidia.com maps nvidia.com/gpu"
    assert scene.findings() == [(Level.OK, f"GPUs are given out by DRA: {because}")]


def test_without_dra_it_is_the_device_plugin_api(scene, server):
    server.served = []
    scene.served(DEVICE_PLUGIN)
    [(level, message)] = scene.findings()
    assert level is Level.OK
    assert "by DevicePlugin: the API server does not serve resource.k8s.io" in message


def test_what_a_node_waits_for_is_named(scene, server):
    scene.profile(DEVICE_PLUGIN)
    server.put(claim_document(claim("gpu-0", name="train")))
    [(level, message)] = scene.findings()
    assert level is Level.WARN
    assert "DevicePlugin is to come: the profile says api: DevicePlugin" in message
    assert "waits for claim default/train" in message


def test_pods_of_another_device_plugin_that_a_node_waits_for_are_named(scene, server):
    put_pod(server, "theirs")
    (pod,) = server.objects("pods")
    scene.served(DEVICE_PLUGIN)
    nvidias = messages.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": "GPU-0"})
    given = given_to(pod["metadata"]["uid"]) | {"AllocResp": encoded(nvidias)}
    write_checkpoint(scene.settings.device_plugin_dir, given)
    [(level, message)] = scene.findings()
    assert level is Level.WARN
    assert "DRA is to come" in message
    assert "waits for pod default/theirs" in message

    server.deny("list", "pods")
    [(_, message)] = scene.findings()
    assert "waits for an answer to who holds GPUs" in message


def test_before_the_kubelet_has_written_who_has_devices_that_is_what_a_node_waits_for(scene):
    scene.served(DEVICE_PLUGIN)
    [(_, message)] = scene.findings()
    assert "waits for an answer to who holds GPUs" in message

    write_checkpoint(scene.settings.device_plugin_dir)
    [(_, message)] = scene.findings()
    assert "waits for" not in message


def test_a_wish_that_cannot_be_followed_is_told(scene, server):
    server.served = []
    scene.served(DEVICE_PLUGIN)
    scene.profile(DRA)
    [(level, message)] = scene.findings()
    assert level is Level.WARN
    assert "the profile says api: DRA, but the API server does not serve" in message


def test_another_device_plugin_is_a_failure(scene):
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(scene.settings.device_plugin_dir / "nvidia-gpu.sock"))
        theirs.listen()
        levels = [level for level, _ in scene.findings()]
        messages = [message for _, message in scene.findings()]
    assert Level.FAIL in levels
    assert any("nothing is offered: another device plugin" in message for message in messages)


def test_what_the_plugin_says_of_another_one_that_is_gone_is_a_failure(scene, server):
    left = "another device plugin is gone, but pods have GPUs by it: pod ml/train"
    (node,) = server.objects("nodes")
    condition = {"type": "GPUsAllocatedBy", "reason": "OtherDevicePlugin", "message": left}
    other = {"type": "Ready"}
    server.put(node | {"status": node["status"] | {"conditions": [other, condition]}})
    assert (Level.FAIL, f"nothing is offered: {left} (so the plugin said last)") in scene.findings()


def test_a_node_that_has_not_chosen_yet_is_told(scene):
    scene.settings.served_api.unlink()
    [(level, message)] = scene.findings()
    assert level is Level.WARN
    assert "has not chosen yet" in message


def test_an_outage_leaves_what_is_known(scene, server):
    server.fail(503, times=10**6)
    [(level, message)] = scene.findings()
    assert level is Level.OK
    assert "by DRA: the API server does not say what it serves" in message


def test_each_state_of_a_choice_is_one_finding_and_another_plugin_leaves_none_in_order():
    choice = ApiChoice(DRA, True, DRA, "why")
    assert [finding.level for finding in api_findings(choice)] == [Level.OK]
    other = replace(choice, other_plugin="another device plugin is here", offering=False)
    [finding] = api_findings(other)
    assert finding.level is Level.FAIL
    assert "remove the other device plugin from this node" in finding.remedy
    waiting = replace(other, wanted=DEVICE_PLUGIN)
    assert [finding.level for finding in api_findings(waiting)] == [Level.FAIL, Level.WARN]


def pods_of(scene):
    return [(each.level, each.message) for each in check_pods(scene.settings, scene.cluster)]


def test_pods_that_run_without_their_gpu_are_named_with_the_mend(scene, server):
    assert [level for level, _ in pods_of(scene)] == [Level.OK]
    put_pod(server, "old")
    [finding] = check_pods(scene.settings, scene.cluster)
    assert finding.level is Level.WARN
    assert "default/old" in finding.message
    assert "nodeSelector" in finding.remedy


def test_by_the_device_plugin_api_pods_to_which_the_kubelet_gave_nothing_are_named(scene, server):
    put_pod(server, "early")
    scene.served(DEVICE_PLUGIN)
    [(level, message)] = pods_of(scene)
    assert (level, "has not written" in message) == (Level.SKIP, True)
    write_checkpoint(scene.settings.device_plugin_dir)
    [finding] = check_pods(scene.settings, scene.cluster)
    assert finding.level is Level.WARN
    assert "default/early" in finding.message
    assert "delete the pod" in finding.remedy


def test_pods_whose_devices_the_kubelet_has_forgotten_are_named_with_the_mend(scene, server):
    put_pod(server, "lost")
    (document,) = server.objects("pods")
    pod = Pod("lost", PodUid(document["metadata"]["uid"]))
    scene.served(DEVICE_PLUGIN)
    ledger = Ledger(scene.settings.ledger_dir, boot_id(scene.settings.host_root))
    ledger.write(allocated_record("GPU-1", pods=[pod]))
    write_checkpoint(scene.settings.device_plugin_dir)
    [finding] = check_pods(scene.settings, scene.cluster)
    assert finding.level is Level.WARN
    assert finding.message == "the kubelet has lost which devices these have: default/lost"
    assert "delete the pod" in finding.remedy


def test_a_wrong_directory_of_device_plugins_is_named_with_its_flag(scene):
    scene.served(DEVICE_PLUGIN)
    scene.settings.device_plugin_dir.rmdir()
    [finding] = check_pods(scene.settings, scene.cluster)
    assert finding.level is Level.WARN
    assert "--device-plugin-dir" in finding.remedy


def test_before_an_api_is_chosen_no_pod_is_looked_at(scene, server):
    put_pod(server, "early")
    scene.settings.served_api.unlink()
    assert [level for level, _ in pods_of(scene)] == [Level.SKIP]


def test_pods_that_may_not_be_listed_are_skipped(scene, server):
    server.deny("list", "pods")
    assert [level for level, _ in pods_of(scene)] == [Level.SKIP]
