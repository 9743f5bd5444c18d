"""What those who serve an API are told of the choice."""

from dra_driver.model.profiles import AllocationApi
from dra_driver.plan.node_api import ApiChoice, ApiState
from dra_driver.plugin.node_api.current import NodeApi

DRA, DEVICE_PLUGIN = AllocationApi.DRA, AllocationApi.DEVICE_PLUGIN


def test_nothing_is_given_out_before_anything_is_known() -> None:
    node_api = NodeApi()
    assert node_api.serving is None
    assert [node_api.state(api) for api in (DRA, DEVICE_PLUGIN)] == [ApiState.OFF, ApiState.OFF]
    assert "not known yet" in (node_api.refusal(DEVICE_PLUGIN) or "")


def test_a_refusal_says_why_an_api_gives_nothing_out() -> None:
    node_api = NodeApi()
    assert node_api.set(ApiChoice(DRA, True, DRA, "DeviceClass gpu maps nvidia.com/gpu"))
    assert node_api.refusal(DRA) is None
    assert node_api.refusal(DEVICE_PLUGIN) == (
        "this node gives its GPUs out by DRA: DeviceClass gpu maps nvidia.com/gpu"
    )
    assert node_api.set(ApiChoice(DRA, False, DEVICE_PLUGIN, "the profile says so"))
    assert node_api.refusal(DRA) == (
        "this node is about to give its GPUs out by DevicePlugin: the profile says so"
    )
    assert node_api.set(ApiChoice(DRA, True, DRA, other_plugin=""))
    assert node_api.set(ApiChoice(DRA, False, DRA, other_plugin="another device plugin is here"))
    assert node_api.refusal(DRA) == "another device plugin is here"


def test_other_words_for_the_same_choice_are_no_change_of_state() -> None:
    node_api = NodeApi()
    node_api.set(ApiChoice(DRA, True, DEVICE_PLUGIN, "first", waits_for=("default/a",)))
    assert not node_api.set(ApiChoice(DRA, True, DEVICE_PLUGIN, "then", waits_for=("default/b",)))
