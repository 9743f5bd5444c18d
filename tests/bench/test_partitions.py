"""Partitions in the API server, as the benchmark finds them."""

import pytest

from hack.benchmark.errors import BenchError
from hack.benchmark.partitions import partitions
from hack.benchmark.publishing import is_whole, number_of_static


def device(name, profile="", **attributes):
    all_attributes = {"type": {"string": "mig" if profile else "gpu"}, **attributes}
    if profile:
        all_attributes["profile"] = {"string": profile}
    return {"name": name, "attributes": all_attributes, "capacity": {"memory": {"value": "9984Mi"}}}


def slice_of(*devices, generation=1, count=1, counter_sets=0):
    sets = [{"name": f"gpu-{number}-counter-set"} for number in range(counter_sets)]
    more = ({"devices": list(devices)} if devices else {}) | (
        {"sharedCounters": sets} if sets else {}
    )
    pool = {"generation": generation, "resourceSliceCount": count}
    return {"spec": {"pool": pool, **more}}


SMALL = device("gpu-1-mig-1g10gb-19-2", "1g.10gb")
OTHER = device("gpu-1-mig-1g10gb-19-0", "1g.10gb")
LARGE = device("gpu-1-mig-3g40gb-9-4", "3g.40gb")
ELSEWHERE = device("gpu-12-mig-1g10gb-19-0", "1g.10gb")


def test_partitions_are_those_of_the_gpu_and_the_profile_by_name():
    slices = [slice_of(device("gpu-1"), SMALL, ELSEWHERE), slice_of(LARGE, OTHER), slice_of()]

    result = partitions(slices, "gpu-1", "1g.10gb")

    assert result == (["gpu-1-mig-1g10gb-19-0", "gpu-1-mig-1g10gb-19-2"], "9984Mi")


def test_a_gpu_without_such_partitions_cannot_be_measured():
    with pytest.raises(BenchError, match=r"gpu-1 is published without partitions 1g\.10gb"):
        partitions([slice_of(device("gpu-1"), LARGE, ELSEWHERE)], "gpu-1", "1g.10gb")


COUNTERS = slice_of(generation=2, count=2, counter_sets=8)
DEVICES = slice_of(SMALL, generation=2, count=2)


@pytest.mark.parametrize(
    ("slices", "whole"),
    [
        pytest.param([COUNTERS, DEVICES], True, id="all of them"),
        pytest.param([COUNTERS], False, id="one is missing"),
        pytest.param([DEVICES, DEVICES], False, id="without counters"),
        pytest.param([], False, id="none"),
        pytest.param(
            [slice_of(), COUNTERS, DEVICES], True, id="beside one of the generation before"
        ),
        pytest.param(
            [COUNTERS, DEVICES, slice_of(generation=3, count=2)], False, id="the next one begins"
        ),
    ],
)
def test_a_pool_is_whole_with_all_slices_of_its_newest_generation(slices, whole):
    assert is_whole(slices, counter_sets=8) is whole


def test_partitions_that_exist_have_a_uuid_of_their_own():
    partition = device("gpu-0-mig-1g10gb-19-0", "1g.10gb", uuid={"string": "MIG-1"})
    gpu = device("gpu-0", uuid={"string": "GPU-1"})

    assert number_of_static([slice_of(partition, SMALL), slice_of(gpu), COUNTERS]) == 1
