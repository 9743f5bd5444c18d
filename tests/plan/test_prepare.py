"""What a claim gets, and when it is refused: decisions only, nothing is touched."""

import pytest

from dra_driver.errors import ClaimError, DeviceHeld, UnknownDevice
from dra_driver.kubeletplugin.claims import Claim, ShareId
from dra_driver.model.devices import DeviceName, Withheld
from dra_driver.model.holdings import Holding
from dra_driver.model.inventory import Inventory
from dra_driver.model.steps import MakeDeviceNodes
from dra_driver.plan.prepare import plan_claim
from tests.fakes.values import POOL, allocation, claim, config, gpu, inventory, ref


def held_by(other, device="gpu-0", **fields):
    return {DeviceName(device): (Holding(ref(other), DeviceName(device), **fields),)}


def test_a_whole_gpu_is_granted_with_its_device_files():
    plan = plan_claim(claim("gpu-1"), inventory(), {}, POOL)

    assert [grant.device for grant in plan.grants] == [gpu(1)]
    assert plan.steps == (MakeDeviceNodes((1,)),)
    assert plan.holdings == (Holding(ref(), DeviceName("gpu-1")),)


@pytest.mark.point(28)
def test_every_result_becomes_one_grant_in_the_order_of_the_allocation():
    plan = plan_claim(claim("gpu-1", "gpu-0"), inventory(), {}, POOL)

    assert [grant.device.name for grant in plan.grants] == ["gpu-1", "gpu-0"]
    assert plan.steps == (MakeDeviceNodes((0, 1)),)


@pytest.mark.point(32)
def test_an_unknown_device_is_refused_with_what_the_node_has_and_withholds():
    sick = Withheld("GPU 0000:1b:00.0", "NVML: GPU is lost; reset it")
    node = Inventory((gpu(0),), (sick,))

    with pytest.raises(UnknownDevice) as refused:
        plan_claim(claim("gpu-3"), node, {}, POOL)

    message = str(refused.value)
    assert "'gpu-3', but this node has: gpu-0" in message
    assert "GPU is lost; reset it" in message
    assert "allocated anew" in message


def test_a_device_of_another_pool_is_refused():
    other = Claim(ref(), (allocation(pool="node-2"),))

    with pytest.raises(UnknownDevice, match="of pool 'node-2', but this node serves 'node-1'"):
        plan_claim(other, inventory(), {}, POOL)


def test_a_node_with_many_gpus_does_not_flood_the_message():
    node = Inventory(tuple(gpu(minor) for minor in range(40)))

    with pytest.raises(UnknownDevice, match="and 24 more"):
        plan_claim(claim("gpu-77"), node, {}, POOL)


@pytest.mark.point(33)
def test_a_device_held_by_another_claim_is_refused():
    with pytest.raises(DeviceHeld, match=r"gpu-0 is held by claim default/other \(UID uid-other\)"):
        plan_claim(claim("gpu-0"), inventory(), held_by("other"), POOL)


def test_what_a_claim_holds_itself_does_not_stand_in_its_way():
    assert plan_claim(claim("gpu-0"), inventory(), held_by("claim"), POOL).grants


@pytest.mark.point(81)
def test_admin_access_takes_nothing_away():
    looking_on = Claim(ref(), (allocation(admin=True),))

    assert plan_claim(looking_on, inventory(), held_by("other"), POOL).holdings[0].admin
    assert plan_claim(claim("gpu-0"), inventory(), held_by("monitor", admin=True), POOL).grants


def test_one_device_twice_in_one_claim_is_refused():
    with pytest.raises(ClaimError, match="gpu-0 twice"):
        plan_claim(claim("gpu-0", "gpu-0"), inventory(), {}, POOL)


@pytest.mark.point(29)
def test_a_prioritized_list_is_known_by_its_main_request():
    listed = Claim(ref(), (allocation(request="gpu/large"),))

    assert plan_claim(listed, inventory(), {}, POOL).grants[0].allocation.base_request == "gpu"


@pytest.mark.point(30)
def test_a_share_id_is_kept_in_the_holding():
    share = ShareId("0b5a7e8c-0000-4000-8000-000000000000")
    shared = Claim(ref(), (allocation(share=share),))

    assert plan_claim(shared, inventory(), {}, POOL).holdings[0].share == share


@pytest.mark.point(46)
def test_all_that_is_wrong_with_the_configs_is_said_at_once():
    wrong = (config("Nonsense"), config("GpuConfig", colour=1))

    with pytest.raises(ClaimError) as refused:
        plan_claim(claim("gpu-0", configs=wrong), inventory(), {}, POOL)

    assert "'Nonsense' is unknown" in str(refused.value)
    assert "fromclaim.colour: unknown field" in str(refused.value)
