"""What a server grants, and what is wrong with it."""

from dataclasses import replace

import pytest

from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import (
    MpsLimits,
    MpsNamespace,
    MpsNamespaceName,
    ServedNamespace,
    mps_server_name,
)
from dra_driver.plan.mps.servers import (
    NamespaceDifferences,
    compare_namespaces,
    default_limits,
    describe_limits,
    least_limits,
    protocol_over,
    served_ahead,
)

GIB = 1 << 30


def namespace(name="c_1", percent=50, memory=None, **more):
    sizes = () if memory is None else (memory,)
    return MpsNamespace(
        MpsNamespaceName(name), ClaimUid("uid"), (GpuUuid("GPU-1"),), percent, sizes, **more
    )


def test_a_server_grants_what_any_of_its_namespaces_has_or_can_have():
    small = namespace(percent=30, memory=GIB, default_limits=MpsLimits(40, 8 * GIB))
    large = namespace(percent=60, memory=2 * GIB, default_limits=MpsLimits(40, 4 * GIB))

    assert default_limits([small]) == MpsLimits(40, 8 * GIB)
    assert default_limits([small, large]) == MpsLimits(60, 8 * GIB)


def test_every_gpu_of_a_namespace_counts_for_what_it_needs():
    gpus = (GpuUuid("GPU-1"), GpuUuid("GPU-2"))
    two = MpsNamespace(MpsNamespaceName("c_1"), ClaimUid("uid"), gpus, 50, (GIB, 2 * GIB))

    assert least_limits(two) == MpsLimits(50, 2 * GIB)
    assert least_limits(replace(two, memory_bytes=(GIB, None))) == MpsLimits(50, None)


def test_one_namespace_without_a_limit_of_memory_leaves_the_server_without():
    assert default_limits(
        [namespace(memory=GIB, default_limits=MpsLimits(50, GIB)), namespace()]
    ) == MpsLimits(100, None)


@pytest.mark.parametrize(
    ("limits", "other", "more"),
    [
        pytest.param(MpsLimits(50, GIB), MpsLimits(50, GIB), False, id="the same"),
        pytest.param(MpsLimits(51, GIB), MpsLimits(50, None), True, id="more multiprocessors"),
        pytest.param(MpsLimits(50, GIB + 1), MpsLimits(50, GIB), True, id="more memory"),
        pytest.param(MpsLimits(50, GIB), MpsLimits(50, None), False, id="less than all memory"),
        pytest.param(MpsLimits(50, None), MpsLimits(50, GIB), True, id="all memory"),
        pytest.param(MpsLimits(50, None), MpsLimits(50, None), False, id="both all memory"),
    ],
)
def test_an_allowance_exceeds_another_in_anything(limits, other, more):
    assert limits.exceed(other) is more


def test_what_is_there_is_compared_with_what_should_be():
    right, gone = namespace("c_1", 50, GIB), namespace("c_2")
    loose, tight = namespace("c_3", 30), namespace("c_4", 30)
    actual = {
        MpsNamespaceName("c_1"): MpsLimits(50, GIB),
        MpsNamespaceName("c_3"): MpsLimits(31),
        MpsNamespaceName("c_4"): MpsLimits(29),
        MpsNamespaceName("x"): MpsLimits(),
    }

    assert compare_namespaces([tight, loose, gone, right], actual) == NamespaceDifferences(
        unwanted=(MpsNamespaceName("x"),), missing=(gone,), loose=((loose, MpsLimits(31)),)
    )


def test_a_size_that_is_written_rounded_is_no_other():
    expected = namespace(memory=5000 << 20)

    assert (
        compare_namespaces([expected], {expected.name: MpsLimits(50, round(4.89 * GIB))})
        == NamespaceDifferences()
    )
    assert compare_namespaces([expected], {expected.name: MpsLimits(50, 5 * GIB)}).loose


def test_it_is_said_in_percent_and_mib():
    assert describe_limits(MpsLimits(30, None)) == "30 % and all memory"
    assert describe_limits(MpsLimits(30, 5 * GIB)) == "30 % and 5120 MiB"


@pytest.mark.parametrize("newest", [2, 3])
def test_a_mig_instance_is_served_with_protocol_2_and_a_gpu_with_the_newest(newest):
    assert protocol_over([GpuUuid("MIG-1")], newest) == 2
    assert protocol_over([GpuUuid("GPU-1"), GpuUuid("GPU-2")], newest) == newest


@pytest.mark.parametrize(
    ("gpu", "tenant", "mps_dir", "driver", "known"),
    [
        ("GPU-0", "", "/run/mps", 580, True),
        ("MIG-0", "", "/run/mps", 615, True),
        ("GPU-0", "", "/run/mps", 615, False),
        ("GPU-0", "ml", "/run/mps", 580, False),
        ("GPU-0", "", "", 580, False),
    ],
    ids=["protocol 2", "an instance", "protocol 3", "a tenant's own", "no agent"],
)
def test_where_a_server_of_protocol_2_will_be_is_known_before_it_starts(
    gpu, tenant, mps_dir, driver, known
):
    namespace = MpsNamespace(
        MpsNamespaceName("c_1"), ClaimUid("dp-1"), (GpuUuid(gpu),), tenant=tenant
    )

    served = served_ahead(namespace, mps_dir, driver)

    server = f"/run/mps/{mps_server_name([GpuUuid(gpu)])}"
    expected = ServedNamespace(namespace, 2, f"{server}/pipe", f"{server}/shm")
    assert served == (expected if known else None)
