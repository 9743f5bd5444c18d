"""Which configuration applies: the claim's after the class's, and it must fit the device."""

from typing import Any

import pytest

from dra_driver.errors import ClaimError
from dra_driver.kubeletplugin.claims import ClaimRef, ClaimUid, read_claim
from dra_driver.model.offer import Device
from dra_driver.plan.configs import Chosen, config_of, decode_configs
from tests.fakes.values import allocation, claim, config, gpu

SHARED: dict[str, Any] = {"sharing": {"strategy": "TimeSlicing"}}


def chosen(*configs, request="gpu"):
    decoded = decode_configs(claim("gpu-0", configs=configs))
    return config_of(allocation(request=request), decoded, Device(gpu(0)))


def test_without_a_config_the_gpu_is_whole():
    assert chosen() == Chosen()


@pytest.mark.point(44)
def test_the_claim_overrides_the_class():
    overridden = config(source="FromClass", **SHARED)

    assert chosen(overridden, config()).config.sharing is None


@pytest.mark.point(44)
def test_a_config_for_another_request_does_not_count():
    assert chosen(config("GpuConfig", "other", **SHARED)) == Chosen()


@pytest.mark.point(44)
@pytest.mark.parametrize("named", ["gpu", "gpu/large"])
def test_a_config_counts_for_a_subrequest_by_either_name(named):
    found = chosen(config("GpuConfig", named, **SHARED), request="gpu/large")

    assert found.config.sharing is not None
    assert found.path == "fromclaim"


def test_a_config_for_one_subrequest_does_not_count_for_another():
    assert chosen(config("GpuConfig", "gpu/small", **SHARED), request="gpu/large") == Chosen()


def test_a_config_of_another_type_is_refused_when_it_names_the_request():
    with pytest.raises(ClaimError, match="a MigDeviceConfig for request 'gpu', but gpu-0 is a GPU"):
        chosen(config("MigDeviceConfig", "gpu"))


def test_a_config_of_another_type_is_passed_over_when_it_names_no_request():
    assert chosen(config(), config("MigDeviceConfig")).path == "fromclaim"


def test_passthrough_is_refused_in_plain_words():
    with pytest.raises(ClaimError, match="passthrough to virtual machines is not offered"):
        chosen(config("VfioDeviceConfig", "gpu"))


@pytest.mark.point(45)
def test_configs_of_other_drivers_are_not_even_read():
    document = {
        "metadata": {"uid": "1"},
        "status": {
            "allocation": {
                "devices": {
                    "results": [
                        {"request": "a", "driver": "x", "pool": "n", "device": "d"},
                        {"request": "b", "driver": "y", "pool": "n", "device": "e"},
                    ],
                    "config": [
                        {"source": "FromClaim", "opaque": {"driver": "x", "parameters": {"a": 1}}},
                        {"source": "FromClaim", "opaque": {"driver": "y", "parameters": {"b": 2}}},
                    ],
                }
            }
        },
    }

    read = read_claim(document, ClaimRef("ns", "name", ClaimUid("1")), "y")

    assert [c.parameters for c in read.configs] == [{"b": 2}]
    assert read.configs[0].path == "status.allocation.devices.config[1].opaque.parameters"
    assert [a.device for a in read.allocations] == ["e"]
