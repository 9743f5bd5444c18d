"""What users write in an opaque configuration, and what they are told when it is wrong."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.claim_configs import (
    GpuConfig,
    MigDeviceConfig,
    Mps,
    TimeSlicing,
    TimeSlicingConfig,
    VfioDeviceConfig,
    decode_config,
)
from api.strict import ConfigError
from tests.fakes.configs import LONGEST, TOO_DEEP, shapes
from tests.fakes.work import calls

VERSION = "resource.nvidia.com/v1beta1"


def config(kind="GpuConfig", **fields):
    return {"apiVersion": VERSION, "kind": kind, **fields}


def mps(kind="GpuConfig", **fields):
    return config(kind, sharing={"strategy": "MPS", "mpsConfig": fields})


def test_a_config_without_sharing_is_a_whole_gpu():
    decoded = decode_config(config())

    assert isinstance(decoded, GpuConfig)
    assert decoded.sharing is None


def test_an_empty_time_slicing_config_means_the_default_interval():
    sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {}}

    decoded = decode_config(config(sharing=sharing))

    assert isinstance(decoded, GpuConfig)
    assert isinstance(decoded.sharing, TimeSlicing)
    assert decoded.sharing.time_slicing_config == TimeSlicingConfig(interval="Default")


def test_null_is_the_same_as_absent():
    decoded = decode_config(config(sharing={"strategy": "MPS", "mpsConfig": None}))

    assert isinstance(decoded, GpuConfig)
    assert decoded.sharing == Mps(strategy="MPS")


def test_every_field_of_mps_is_read():
    fields = {
        "defaultActiveThreadPercentage": 40,
        "defaultPinnedDeviceMemoryLimit": "10Gi",
        "defaultPerDevicePinnedMemoryLimit": {"0": "5Gi", "GPU-1": "6G"},
        "multiUser": True,
        "clientPriority": "BelowNormal",
    }

    decoded = decode_config(mps("MigDeviceConfig", **fields))

    assert isinstance(decoded, MigDeviceConfig)
    assert isinstance(decoded.sharing, Mps)
    assert decoded.sharing.mps_config.model_dump(by_alias=True) == fields


def test_a_passthrough_config_is_read():
    decoded = decode_config(config("VfioDeviceConfig", iommu={"enableAPIDevice": True}))

    assert isinstance(decoded, VfioDeviceConfig)
    assert decoded.iommu.enable_api_device


@pytest.mark.point(46)
def test_clients_have_the_normal_priority_where_nothing_is_said():
    decoded = decode_config(mps(multiUser=False))

    assert isinstance(decoded, GpuConfig) and isinstance(decoded.sharing, Mps)
    assert decoded.sharing.mps_config.client_priority == "Normal"


@pytest.mark.parametrize("percent", [0, 1, 100])
def test_every_percentage_that_nvidias_driver_takes_is_taken(percent):
    decoded = decode_config(mps(defaultActiveThreadPercentage=percent))

    assert isinstance(decoded, GpuConfig) and isinstance(decoded.sharing, Mps)
    assert decoded.sharing.mps_config.default_active_thread_percentage == percent


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        (3, "p: must be an object"),
        ({"kind": "GpuConfig"}, "p.apiVersion: None is unknown"),
        (
            {"apiVersion": "gpu.nvidia.com/v1", "kind": "GpuConfig"},
            "the group of this API is resource.nvidia.com",
        ),
        (config("Gpu"), "p.kind: 'Gpu' is unknown; write one of GpuConfig"),
        (config(["GpuConfig"]), "p.kind: ['GpuConfig'] is unknown"),
        (config(colour=1), "p.colour: unknown field"),
        (config(sharing={}), "p.sharing.strategy: missing"),
        (
            config(sharing={"strategy": "Fair"}),
            "p.sharing.strategy: 'Fair' is unknown; write TimeSlicing or MPS",
        ),
        (
            config(sharing={"strategy": "TimeSlicing", "mpsConfig": {}}),
            "p.sharing.mpsConfig: unknown field with strategy TimeSlicing",
        ),
        (
            config("MigDeviceConfig", sharing={"strategy": "MPS", "timeSlicingConfig": {}}),
            "p.sharing.timeSlicingConfig: unknown field with strategy MPS: remove it, or change",
        ),
        (
            config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "long"}}),
            "p.sharing.timeSlicingConfig.interval: 'long'",
        ),
        (
            mps(defaultPinnedDeviceMemoryLimit="x"),
            "p.sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: 'x' is not a quantity",
        ),
        (
            mps(defaultPinnedDeviceMemoryLimit="1" * 65),
            "p.sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: '1111",
        ),
        (
            mps(defaultPerDevicePinnedMemoryLimit={str(n): "1Gi" for n in range(65)}),
            "p.sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit: has more entries than",
        ),
        (config(sharing=["MPS"]), "p.sharing: ['MPS'] should be an object with a strategy"),
        (
            config(sharing={"strategy": ["MPS"]}),
            "p.sharing.strategy: ['MPS'] is unknown; write TimeSlicing or MPS",
        ),
        (config(**{"col\nour": 1, "\ud800": 2}), "should be a valid string"),
        (config(**{"col\nour": 1}), "p.col\\nour: unknown field"),
        (config(**{"x" * 5000: 1}), f"p.{'x' * 80}…: unknown field; remove"),
        (config(colour=float("nan")), "p.colour: unknown field"),
        (config(sharing=10**4400), "p.sharing: a number that is too long"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said_with_its_path(parameters, problem):
    with pytest.raises(ConfigError) as refused:
        decode_config(parameters, "p")

    assert problem in str(refused.value)


def test_a_field_that_partitions_lack_is_not_blamed_on_the_strategy():
    sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}

    with pytest.raises(ConfigError) as refused:
        decode_config(config("MigDeviceConfig", sharing=sharing), "p")

    assert refused.value.problems == (
        "p.sharing.timeSlicingConfig: unknown field with strategy TimeSlicing: remove it",
    )


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as refused:
        decode_config(mps(defaultActiveThreadPercentage=120, multiUser="yes") | {"colour": 1}, "p")

    assert [problem.split(":")[0] for problem in refused.value.problems] == [
        "p.sharing.mpsConfig.defaultActiveThreadPercentage",
        "p.sharing.mpsConfig.multiUser",
        "p.colour",
    ]


def test_a_huge_value_does_not_flood_the_message():
    with pytest.raises(ConfigError) as refused:
        decode_config(config(sharing={"strategy": "x" * 9000}), "p")

    assert len(str(refused.value)) < 300


def deep(levels, *, lists):
    value: object = 1
    for _ in range(levels):
        value = [value] if lists else {"a": value}
    return value


@pytest.mark.parametrize("levels", [900, 5000])
@pytest.mark.parametrize("lists", [True, False], ids=["lists", "maps"])
@pytest.mark.parametrize(
    "place",
    [
        lambda value: config(x=value),
        lambda value: config(sharing=value),
        lambda value: config(sharing={"strategy": value}),
        lambda value: config(sharing={"strategy": "MPS", "mpsConfig": value}),
        lambda value: value,
        lambda value: config(value),
        lambda value: {"apiVersion": value},
    ],
    ids=["a field", "sharing", "strategy", "limits", "all of it", "kind", "version"],
)
def test_nesting_without_end_is_refused_like_anything_else(place, lists, levels):
    with pytest.raises(ConfigError) as refused:
        decode_config(place(deep(levels, lists=lists)), "p")

    assert len(str(refused.value)) < 1000


def decoding(text):
    """The work of decoding the configuration in *text*."""
    parameters = json.loads(text)

    def decode_it():
        with contextlib.suppress(ConfigError):
            decode_config(parameters)

    return calls(decode_it)


@pytest.mark.parametrize("shape", sorted(shapes(LONGEST // 20)))
def test_twice_as_long_a_configuration_is_no_more_than_twice_the_work(shape):
    half, whole = (shapes(length)[shape] for length in (LONGEST // 20, LONGEST // 10))
    decoding(half)  # what is made once is made now

    assert decoding(whole) <= 2 * decoding(half) + 200


@pytest.mark.parametrize("shape", sorted(set(shapes()) - TOO_DEEP))
def test_no_legal_configuration_is_much_work(shape):
    decoding(shapes()[shape])

    assert decoding(shapes()[shape]) < 20_000  # one schema alone takes 15,000


TEXT = st.text(st.characters(), max_size=5) | st.sampled_from(
    ["strategy", "mpsConfig", "defaultPerDevicePinnedMemoryLimit", "MPS", "TimeSlicing", "\ud800"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.just(10**4000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


PLACES = [
    lambda name, value: {name: value},
    lambda name, value: {"sharing": value},
    lambda name, value: {"sharing": {"strategy": value}},
    lambda name, value: {"sharing": {"strategy": "MPS", "mpsConfig": value}},
    lambda name, value: {
        "sharing": {
            "strategy": "MPS",
            "mpsConfig": {"defaultPerDevicePinnedMemoryLimit": {name: value}},
        }
    },
]


@given(
    st.sampled_from(["GpuConfig", "MigDeviceConfig", "VfioDeviceConfig"]),
    st.sampled_from(PLACES),
    TEXT,
    JSON,
)
def test_whatever_is_written_is_decoded_or_refused_with_a_reason(kind, place, name, value):
    try:
        decode_config({**config(kind), **place(name, value)}, "p")
    except ConfigError as refused:
        assert refused.problems
        assert all(problem.startswith("p") for problem in refused.problems)
