"""The doctor names claims that are nobody's any more and that a process keeps."""

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.cli.doctor.cluster_checks import CheckedCluster, check_claims_in_use
from dra_driver.cli.findings import Level
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.records import DeviceAllocation
from tests.builders import pod, record, ref
from tests.fakes import api_server
from tests.fakes.users import FakeUsers

A, B = ref("a"), ref("b")


class World:
    """Two claims on a node, and what the API server has of them."""

    def __init__(self, server, client):
        self.server = server
        self.users = FakeUsers()
        self.cluster = CheckedCluster(client, ResourceApi(client), "gpu.nvidia.com", "node-a")
        self.records = [
            record(claim, f"gpu-{number}", pods=(pod("train"),))
            for number, claim in enumerate((A, B))
        ]

    def put(self, claim, uid=None, reserved=True):
        pods = [{"resource": "pods", "name": "train", "uid": "uid-train"}]
        metadata = {"name": claim.name, "namespace": claim.namespace, "uid": uid or claim.uid}
        document = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": metadata,
            "spec": {},
            "status": {"reservedFor": pods if reserved else []},
        }
        self.server.put(document)

    def use(self, *claims):
        self.users.alive = {claim.uid: {pod("train")} for claim in claims}

    def found(self):
        return list(check_claims_in_use(self.cluster, self.records, self.users))


@pytest.fixture
def world(tmp_path):
    with api_server.ApiServer() as server:
        client = ApiClient(load_kubeconfig(server.kubeconfig(tmp_path / "kubeconfig")))
        yield World(server, client)
        client.close()


def test_claims_that_pods_use_are_in_order(world):
    world.put(A)
    world.use(A)

    (finding,) = world.found()

    assert (finding.level, finding.message) == (Level.OK, "none that no pod is to use any more")


@pytest.mark.parametrize(
    ("there", "why"),
    [
        pytest.param(None, "is deleted", id="gone"),
        pytest.param({"uid": "another"}, "is deleted", id="replaced"),
        pytest.param({"reserved": False}, "is reserved for no pod", id="free"),
    ],
)
def test_a_claim_that_a_process_keeps_is_named_with_pod_and_process(world, there, why):
    world.put(B)
    if there is not None:
        world.put(A, **there)
    world.use(A, B)

    (finding,) = world.found()

    assert finding.level is Level.WARN
    assert finding.message == (
        f"claim default/a {why} and holds gpu-0: pod default/train: process 7 still runs"
    )
    assert "reboot the node" in finding.remedy


def test_a_claim_that_is_gone_and_used_by_nobody_is_soon_given_back(world):
    assert [finding.level for finding in world.found()] == [Level.OK]


def test_what_cannot_be_looked_at_is_an_error_of_the_check(world):
    world.users.hidden = NodeError("too many open files")
    with pytest.raises(NodeError):
        world.found()


def test_what_a_pod_had_by_the_device_plugin_api_is_named_once_that_is_gone(world):
    given = DeviceAllocation(ResourceName("nvidia.com/gpu"), (DeviceId("GPU-0"),))
    world.records = [record(A, "gpu-0", pods=(pod("train"),), allocation=given)]
    world.use(A)
    train = {
        "kind": "Pod",
        "metadata": {"namespace": "default", "name": "train", "uid": "uid-train"},
        "spec": {"nodeName": "node-a", "containers": []},
    }
    world.server.put(train)
    assert [finding.level for finding in world.found()] == [Level.OK]

    world.server.put({**train, "status": {"phase": "Failed"}})

    (finding,) = world.found()
    assert finding.level is Level.WARN
    assert finding.message.startswith("nvidia.com/gpu is of no pod any more and holds gpu-0: ")
