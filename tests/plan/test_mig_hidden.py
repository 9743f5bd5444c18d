"""A GPU of which it cannot be read how it is cut offers nothing, and says why."""

from dataclasses import replace

import pytest

from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import Mig
from dra_driver.model.offer import Keeps
from dra_driver.model.profiles import DEFAULT_PROFILE
from dra_driver.plan.offer import offer
from dra_driver.plugin.profiles import bundled
from tests.fakes.mig import mig_gpu


@pytest.mark.parametrize("profile", [DEFAULT_PROFILE, bundled()["mig"]])
def test_who_may_not_see_what_is_cut_is_told_so_and_not_to_cut(profile):
    gpu = replace(mig_gpu(on=True), mig=Mig(on=True, pending=True, switches=False))
    found = offer(Inventory((gpu,)), profile, Keeps(), {})
    (withheld,) = found.withheld
    assert "how it is cut cannot be read: root alone can, see the log" in withheld.reason
    assert not [device for device in found.devices if device.partition]


def test_what_nvml_said_instead_of_the_profiles_is_told():
    gpu = replace(
        mig_gpu(on=True), mig=Mig(on=True, pending=True, switches=False), mig_problem="it is old"
    )
    (withheld,) = offer(Inventory((gpu,)), bundled()["mig"], Keeps(), {}).withheld
    assert withheld.reason == "MIG mode is on, and how it is cut cannot be read: it is old"
