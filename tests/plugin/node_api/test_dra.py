"""Claims get GPUs only while the node gives them out by DRA, and keep them until they end."""

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.profiles import AllocationApi
from dra_driver.plan.node_api import ApiChoice
from dra_driver.plugin.node_api.current import NodeApi
from dra_driver.plugin.node_api.dra import OfferedClaims
from tests.builders import prepared_device, record, ref

DRA, DEVICE_PLUGIN = AllocationApi.DRA, AllocationApi.DEVICE_PLUGIN
ANSWER = (prepared_device(),)


class Handler:
    def __init__(self):
        self.unprepared = []

    def prepare(self, ref):
        return ANSWER

    def unprepare(self, ref):
        self.unprepared.append(ref)


class Scene:
    def __init__(self):
        self.node_api = NodeApi()
        self.records = {}
        self.handler = Handler()
        self.claims = OfferedClaims(self.handler, self.node_api, self.records.get)


@pytest.fixture
def scene():
    return Scene()


OTHERWISE = [
    ApiChoice(),
    ApiChoice(DEVICE_PLUGIN, True, DEVICE_PLUGIN, "no DeviceClass maps nvidia.com/gpu"),
    ApiChoice(DRA, False, DEVICE_PLUGIN, "the profile says api: DevicePlugin"),
    ApiChoice(DRA, False, DRA, other_plugin="another device plugin gives out the GPUs"),
]


def test_while_the_node_gives_gpus_out_by_dra_claims_are_prepared(scene):
    scene.node_api.set(ApiChoice(DRA, True, DRA))
    assert scene.claims.prepare(ref()) == ANSWER


@pytest.mark.parametrize("choice", OTHERWISE)
def test_otherwise_a_claim_is_refused_with_the_reason(scene, choice):
    scene.node_api.set(choice)
    with pytest.raises(NodeError) as refused:
        scene.claims.prepare(ref("train"))
    assert "default/train" in str(refused.value)
    assert (choice.other_plugin or choice.why) in str(refused.value)


@pytest.mark.parametrize("choice", OTHERWISE)
def test_a_claim_that_is_prepared_is_answered_again(scene, choice):
    scene.node_api.set(choice)
    scene.records[ref("train").uid] = record("train")
    assert scene.claims.prepare(ref("train")) == ANSWER


@pytest.mark.parametrize("choice", OTHERWISE)
def test_a_claim_whose_preparation_only_began_is_refused(scene, choice):
    scene.node_api.set(choice)
    scene.records[ref("train").uid] = record("train", completed=False)
    with pytest.raises(NodeError):
        scene.claims.prepare(ref("train"))


@pytest.mark.parametrize("choice", OTHERWISE)
def test_every_claim_can_be_given_back(scene, choice):
    scene.node_api.set(choice)
    scene.claims.unprepare(ref("train"))
    assert scene.handler.unprepared == [ref("train")]
