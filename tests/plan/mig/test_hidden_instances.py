"""A GPU of which it cannot be read how it is cut offers nothing, and says why."""

from dataclasses import replace

import pytest

from dra_driver.model.gpus import Inventory, MigInfo
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import DEFAULT_PROFILE
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plugin.publish.profiles import bundled_profiles
from tests.fakes.mig import mig_gpu


@pytest.mark.parametrize("profile", [DEFAULT_PROFILE, bundled_profiles()["mig"]])
def test_who_may_not_see_what_is_cut_is_told_so_and_not_to_cut(profile):
    gpu = replace(mig_gpu(on=True), mig=MigInfo(on=True, pending=True, switches=False))
    offer = build_offer(Inventory((gpu,)), profile, ApiFeatures(), {})
    (unavailable,) = offer.unavailable
    assert "its partitions cannot be read: root alone can, see the log" in unavailable.reason
    assert not [device for device in offer.devices if device.partition]


def test_what_nvml_said_instead_of_the_profiles_is_told():
    gpu = replace(
        mig_gpu(on=True),
        mig=MigInfo(on=True, pending=True, switches=False),
        mig_problem="it is old",
    )
    (unavailable,) = build_offer(
        Inventory((gpu,)), bundled_profiles()["mig"], ApiFeatures(), {}
    ).unavailable
    assert unavailable.reason == "MIG mode is on, and its partitions cannot be read: it is old"
