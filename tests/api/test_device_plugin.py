"""Configuration files of NVIDIA's device plugin are read as they are, every field of them."""

from pathlib import Path
from types import UnionType
from typing import get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from api.device_plugin import DevicePluginConfig, unused
from api.strict import ConfigError, validated

FILES = Path(__file__).parents[1] / "data/device-plugin"


def load(name):
    return yaml.safe_load((FILES / f"{name}.yaml").read_text())


def read(**document):
    return validated(DevicePluginConfig, document)


def problems(**document):
    with pytest.raises(ConfigError) as refused:
        read(**document)
    return refused.value.problems


def shared(**resource):
    return {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 2, **resource}]}}


def fields(document, path=""):
    """The path of every field in *document* that has no fields below it."""
    if isinstance(document, dict):
        return [each for key in document for each in fields(document[key], f"{path}.{key}")]
    return [path.removeprefix(".")]


def all_fields(model, path=""):
    """The path of every field that *model* knows and that has no fields below it."""
    for name, about in model.model_fields.items():
        inner = about.annotation
        choices = get_args(inner) if get_origin(inner) is UnionType else (inner,)
        models = [each for each in choices if is_model(each)]
        where = f"{path}.{about.alias or name}".removeprefix(".")
        if models:
            yield from all_fields(models[0], where)
        else:
            yield where


def is_model(kind):
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@pytest.mark.parametrize("file", sorted(FILES.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_file_written_for_the_device_plugin_is_read(file):
    assert read(**yaml.safe_load(file.read_text())).version == "v1"


def test_the_file_with_everything_has_every_field_that_is_known():
    document = load("everything")
    # The two ways to share exclude each other, so that one of them cannot be in it.
    known = {each for each in all_fields(DevicePluginConfig) if not each.startswith("sharing.mps")}

    assert known == set(fields(document))


def test_every_field_but_those_that_share_or_partition_is_told_to_have_no_meaning_here():
    document = load("everything")
    notes = dict(unused(read(**document)))

    meant = (
        *("sharing", "version", "flags.migStrategy"),
        "flags.plugin.sharedDevicesAllocationPolicy",
    )
    without_meaning = {each for each in fields(document) if not each.startswith(meant)}
    resource = "sharing.timeSlicing.resources[0]"
    assert set(notes) == without_meaning | {f"{resource}.rename", f"{resource}.devices"}
    assert all(notes.values())


def test_what_a_file_does_not_have_is_not_told():
    assert list(unused(read(version="v1", sharing=shared(devices="all")))) == []


def test_a_device_list_strategy_may_be_one_word():
    config = read(flags={"plugin": {"deviceListStrategy": "envvar"}})

    assert config.flags.plugin is not None
    assert config.flags.plugin.device_list_strategy == ["envvar"]


@pytest.mark.parametrize("interval", ["60s", 60, 1.5])
def test_a_sleep_interval_may_be_text_or_a_number(interval):
    assert read(flags={"gfd": {"sleepInterval": interval}}).flags.gfd is not None


@pytest.mark.parametrize("devices", ["all", 3, [0, "1:0", "GPU-1"]])
def test_devices_are_all_or_so_many_or_these(devices):
    sharing = read(sharing=shared(devices=devices)).sharing.time_slicing

    assert sharing is not None
    assert sharing.resources[0].devices == devices


@pytest.mark.parametrize("xids", ["all", "ALL", [13, 31]])
def test_critical_xids_are_all_or_a_list(xids):
    assert read(health={"criticalXIDs": xids}).health.critical_xids == xids


def test_everything_that_is_wrong_is_said_at_once_with_its_path():
    messages = problems(
        version="v2",
        flags={
            "migStrategy": "some",
            "renameByDefault": True,
            "deviceListStrategy": "envvar",
            "plugin": {"deviceListStrategy": ["cdi"]},
            "gfd": {"sleepInterval": True},
        },
        resources=[],
        sharing={
            "timeSlicing": {"resources": []},
            "mps": {"resources": [{"replicas": 1, "devices": "some"}, {"name": "gpu"}]},
        },
        imex={"channelIDs": [1]},
        health={"criticalXIDs": "most", "ignoredXIDs": ["13"]},
        config={},
    )

    assert sorted(messages) == [
        "config: unknown field; remove it",
        "flags.deviceListStrategy: unknown field; it belongs elsewhere: "
        "flags.plugin.deviceListStrategy",
        "flags.gfd.sleepInterval: True should be a duration, like 60s",
        "flags.migStrategy: 'some' should be 'none', 'single' or 'mixed'",
        "flags.plugin.deviceListStrategy[0]: 'cdi' should be 'envvar', 'volume-mounts', "
        "'cdi-annotations' or 'cdi-cri'",
        "flags.renameByDefault: unknown field; it belongs elsewhere: "
        "sharing.timeSlicing.renameByDefault or sharing.mps.renameByDefault",
        "health.criticalXIDs: 'most' should be all, or a list of numbers",
        "health.ignoredXIDs[0]: '13' should be a valid integer",
        "imex.channelIDs[0]: 1 should be 0",
        "resources: [] should be a mapping",
        "sharing.mps.resources[0].devices: 'some' should be all, a number, or a list of indices "
        "and UUIDs",
        "sharing.mps.resources[0].name: missing",
        "sharing.mps.resources[0].replicas: 1 should be greater than or equal to 2",
        "sharing.mps.resources[1].replicas: missing",
        "sharing.timeSlicing.resources: is empty; say what is meant, or leave it out",
        "version: 'v2' should be 'v1'",
    ]


@pytest.mark.parametrize("devices", [0, -1, True, [True], [1.5], {}])
def test_devices_that_are_none_of_it_are_refused(devices):
    (problem,) = problems(sharing=shared(devices=devices))

    assert problem.startswith("sharing.timeSlicing.resources[0].devices: ")
