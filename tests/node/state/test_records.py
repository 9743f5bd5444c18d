"""Claim records as documents: all of a record comes back, and damage is never guessed at."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.codec import Undecodable
from dra_driver.model.gpus import GpuUuid, PartitionKey
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import CreatePartition, SetTimeSlice, TimeSliceInterval
from dra_driver.node.state.ledger_files import decode_record, encode_record
from tests.builders import gpu_uuid, record

st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
PREPARED = record(steps=(SetTimeSlice(gpu_uuid(), TimeSliceInterval.LONG),))


@given(st.from_type(ClaimRecord), st.text())
def test_a_record_survives_the_disk_unchanged(any_record, spec):
    whole = replace(any_record, spec=spec)

    assert decode_record(encode_record(whole)) == whole


def test_what_is_written_of_a_partition_is_new_to_nobody():
    step = CreatePartition(GpuUuid("GPU-0"), PartitionKey(19, 0, 1, 1), new=True)

    (read,) = decode_record(encode_record(record(steps=(step,)))).steps

    assert isinstance(read, CreatePartition)
    assert not read.new


def change(path, value):
    """The document of a record in which *value* stands at *path*."""
    document = json.loads(encode_record(PREPARED))
    place = document["ClaimRecord"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("colour",), "green", "ClaimRecord.colour is not known"),
        (("spec",), None, "ClaimRecord.spec is missing"),
        (("holdings", 0, "gpu"), 7, "ClaimRecord.holdings[0].gpu is 7, not a text"),
        (("holdings", 0, "shape"), {"Sphere": {}}, "ClaimRecord.holdings[0].shape is Sphere, none"),
        (("steps", 0), {"Dance": {}}, "ClaimRecord.steps[0] is Dance, none of"),
        (
            ("steps", 0, "SetTimeSlice", "gpu"),
            float("inf"),
            "ClaimRecord.steps[0].SetTimeSlice.gpu is Infinity",
        ),
        (
            ("steps",),
            [{"SetTimeSlice": {"gpu": "GPU-0", "interval": 9}}],
            "ClaimRecord.steps[0].SetTimeSlice.interval is 9, not 0, 1, 2 or 3",
        ),
        (("steps",), 7, "ClaimRecord.steps is 7, not a list"),
    ],
)
def test_damage_is_told_with_its_field(path, value, problem):
    with pytest.raises(Undecodable) as caught:
        decode_record(change(path, value))

    assert str(caught.value).startswith(problem)


@given(st.binary(max_size=60), st.integers(0, 200))
def test_any_damage_is_noticed_or_harmless(noise, at):
    text = encode_record(PREPARED)
    try:
        decode_record(text[:at] + noise + text[at + len(noise) :])
    except Undecodable as e:
        assert str(e)
