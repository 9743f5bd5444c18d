"""Which configuration applies: the claim's after the class's, and it must fit the device."""

import contextlib
import json
from typing import Any

import pytest

from api.claim_configs import decode_config
from dra_driver.base.errors import ClaimError
from dra_driver.k8s.claims import ClaimRef, ClaimUid, parse_claim
from dra_driver.model.offer import Device
from dra_driver.plan.prepare.claim import plan_claim
from dra_driver.plan.prepare.sharing import (
    AppliedConfig,
    applied_config,
    decode_configs,
    with_decoded_configs,
)
from tests.builders import POOL, allocation, claim, config, gpu, offer, ref
from tests.fakes.configs import LONGEST, MOST, TOO_DEEP, claim_text, shapes
from tests.fakes.work import calls

SHARED: dict[str, Any] = {"sharing": {"strategy": "TimeSlicing"}}


def chosen(*configs, request="gpu"):
    decoded = decode_configs(claim("gpu-0", configs=configs))
    return applied_config(allocation(request=request), decoded, Device(gpu(0)))


def test_without_a_config_the_gpu_is_whole():
    assert chosen() == AppliedConfig()


@pytest.mark.point(44)
def test_the_claim_overrides_the_class():
    overridden = config(source="FromClass", **SHARED)

    assert chosen(overridden, config()).config.sharing is None


@pytest.mark.point(44)
def test_a_config_for_another_request_does_not_count():
    assert chosen(config("GpuConfig", "other", **SHARED)) == AppliedConfig()


@pytest.mark.point(44)
@pytest.mark.parametrize("named", ["gpu", "gpu/large"])
def test_a_config_counts_for_a_subrequest_by_either_name(named):
    choice = chosen(config("GpuConfig", named, **SHARED), request="gpu/large")

    assert choice.config.sharing is not None
    assert choice.path == "fromclaim"


def test_a_config_for_one_subrequest_does_not_count_for_another():
    assert (
        chosen(config("GpuConfig", "gpu/small", **SHARED), request="gpu/large") == AppliedConfig()
    )


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

    read = parse_claim(document, ClaimRef("ns", "name", ClaimUid("1")), "y")

    assert [c.parameters for c in read.configs] == [{"b": 2}]
    assert read.configs[0].path == "status.allocation.devices.config[1].opaque.parameters"
    assert [a.device for a in read.allocations] == ["e"]


def wrong(number):
    """A configuration with so many problems."""
    fields: dict[str, Any] = {f"colour{n}": n for n in range(number)}
    return config(**fields)


def refused(asked):
    with pytest.raises(ClaimError) as error:
        decode_configs(asked)
    return str(error.value)


def test_a_claim_is_told_of_all_configurations_that_are_wrong():
    first = config(source="FromClass", colour=1)
    message = refused(claim("gpu-0", configs=(first, config(), wrong(1))))

    assert message == (
        "claim default/claim: fromclass.colour: unknown field; remove it; "
        "fromclaim.colour0: unknown field; remove it"
    )


@pytest.mark.parametrize("problems", [(16,), (8, 8)])
def test_sixteen_problems_are_all_told(problems):
    message = refused(claim("gpu-0", configs=tuple(map(wrong, problems))))

    assert message.count("unknown field") == max(problems)
    assert not message.endswith("and more")


@pytest.mark.parametrize("problems", [(17,), (1200,), (16, 1200)])
def test_of_more_problems_than_sixteen_that_many_are_told(problems):
    message = refused(claim("gpu-0", configs=tuple(map(wrong, problems))))

    assert message.count("unknown field") <= 16
    assert message.endswith("… and more")


@pytest.mark.parametrize("shape", sorted(set(shapes()) - TOO_DEEP))
def test_an_error_has_a_kibibyte_of_text_whatever_was_written(shape):
    document = json.loads(claim_text(shapes()[shape]))

    with contextlib.suppress(ClaimError):
        plan_claim(parse_claim(document, ref("worst"), "gpu.nvidia.com"), offer(), (), POOL)
        return
    message = refused(parse_claim(document, ref("worst"), "gpu.nvidia.com"))

    assert len(message.encode()) <= 1024


def test_a_message_can_be_sent_whatever_characters_it_has():
    fields: dict[str, Any] = {"\udc80" * 40: 1}

    message = refused(claim("gpu-0", configs=(config(**fields), wrong(1))))

    assert message.encode()


def test_each_configuration_is_decoded_once_however_often_the_claim_is_planned():
    asked = claim("gpu-0", configs=(config(), config(**SHARED), config("MigDeviceConfig")))
    known = with_decoded_configs(asked)

    assert calls(lambda: with_decoded_configs(asked), decode_config) == 3
    assert calls(lambda: plan_claim(known, offer(), (), POOL), decode_config) == 0
    assert plan_claim(known, offer(), (), POOL) == plan_claim(asked, offer(), (), POOL)


def test_what_is_wrong_is_said_when_the_claim_is_planned():
    known = with_decoded_configs(claim("gpu-0", configs=(wrong(1),)))

    with pytest.raises(ClaimError, match="colour0: unknown field"):
        plan_claim(known, offer(), (), POOL)


def test_decoding_ends_where_nobody_reads_on():
    asked = claim("gpu-0", configs=(wrong(1200),) * MOST)

    assert calls(lambda: with_decoded_configs(asked), decode_config) == 1


@pytest.mark.exhaustive
def test_a_claim_with_as_many_configurations_as_there_can_be_is_as_much_work_as_they_are():
    def work(shape, count):
        document = json.loads(claim_text(shapes(LONGEST)[shape], count))
        asked = parse_claim(document, ref("worst"), "gpu.nvidia.com")
        return calls(lambda: with_decoded_configs(asked))

    for shape in sorted(set(shapes()) - TOO_DEEP):
        work(shape, 1)
        assert work(shape, MOST) <= MOST * work(shape, 1), shape
