"""Which strategy a part of a GPU is shared by, with which limits, and every way to ask wrongly."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.errors import ClaimError
from dra_driver.k8s import quantity
from dra_driver.k8s.claims import Claim
from dra_driver.model.gpus import Inventory, Version
from dra_driver.model.mps import ALL_CORES, MpsPriority
from dra_driver.model.offer import EXCLUSIVE, ApiFeatures, Device, Fractional, Offer, Replica
from dra_driver.model.profiles import DEFAULT_PROFILE, Rules, SharingStrategy
from dra_driver.model.steps import TimeSliceInterval
from dra_driver.plan.offer.devices import build_offer as offer_of
from dra_driver.plan.prepare.claim import plan_claim
from dra_driver.plan.prepare.sharing import DeviceGrant, MpsShared, TimeSliced
from tests.builders import MIB, POOL, SLICEABLE, allocation, config, fraction, gpu, offer, ref
from tests.fakes.pods import NOBODY

GIB = 1024 * MIB
MPS = {"strategy": "MPS"}
TURNS = {"strategy": "TimeSlicing"}
ONLY_TURNS = (SharingStrategy.TIME_SLICING,)
PATH = "fromclaim.sharing.mpsConfig"
PER_DEVICE = "defaultPerDevicePinnedMemoryLimit"


def mps(**fields):
    return {**MPS, "mpsConfig": fields}


def grants(*allocations, sharing=None, configs=(), at=None) -> tuple[DeviceGrant, ...]:
    """What a claim gets; every request of it is one container's."""
    if sharing:
        configs = (config(sharing=sharing),)
    return plan_claim(Claim(ref(), allocations, configs), at or offer(4), (), POOL, NOBODY).grants


def sharings(*allocations, **fields) -> list[Any]:
    return [grant.sharing for grant in grants(*allocations, **fields)]


def sharing_of(*allocations, **fields):
    (sharing,) = sharings(*allocations, **fields)
    return sharing


def refusal(*allocations, **fields) -> str:
    with pytest.raises(ClaimError) as refused:
        grants(*allocations, **fields)
    return str(refused.value)


@pytest.mark.parametrize("default", SharingStrategy)
def test_a_configuration_says_the_strategy_whatever_the_profile_says(default):
    node = offer(default_strategy=default)

    for part in (fraction(), allocation()):
        assert sharing_of(part, sharing=MPS, at=node).strategy is SharingStrategy.MPS
        assert sharing_of(part, sharing=TURNS, at=node).strategy is SharingStrategy.TIME_SLICING


def test_reserved_cores_mean_mps_where_no_configuration_says_otherwise():
    assert sharing_of(fraction(cores="30")) == MpsShared(30, 20 * GIB)
    assert sharing_of(fraction("81559Mi", cores="30")) == MpsShared(30), "all of its memory"


@pytest.mark.parametrize("default", SharingStrategy)
def test_a_part_of_a_gpu_without_a_configuration_is_shared_as_the_profile_says(default):
    assert sharing_of(fraction(), at=offer(default_strategy=default)).strategy is default


@pytest.mark.parametrize("shape", [EXCLUSIVE, SLICEABLE], ids=["exclusive", "sliceable"])
def test_a_whole_gpu_without_a_configuration_is_plainly_whole_whatever_the_profile_says(shape):
    node = offer(1, shape, default_strategy=SharingStrategy.MPS, strategies=(SharingStrategy.MPS,))

    (grant,) = grants(allocation(), at=node)

    assert (grant.sharing.strategy, grant.namespace) == (SharingStrategy.TIME_SLICING, None)


def test_a_configuration_without_sharing_is_as_none():
    (grant,) = grants(allocation(), configs=(config(),))
    assert grant.namespace is None
    assert sharing_of(fraction(cores="30"), configs=(config(),)) == MpsShared(30, 20 * GIB)


def test_a_replica_shares_by_mps_with_its_part_of_cores_and_memory():
    as_devices = Offer((Device(gpu(0), Replica(1, 4, 20 * GIB, cores=25)),))

    assert sharing_of(allocation("gpu-0-1"), at=as_devices) == MpsShared(25, 20 * GIB)


@pytest.mark.parametrize("strategies", [tuple(SharingStrategy), (SharingStrategy.MPS,)])
def test_a_replica_of_a_gpu_in_use_takes_turns_as_its_others_whatever_the_profile_says_now(
    strategies,
):
    rules = Rules(default_strategy=SharingStrategy.MPS, strategies=strategies)
    in_use = Offer((Device(gpu(0), Replica(1, 4, 20 * GIB, cores=0), rules),))

    assert sharing_of(allocation("gpu-0-1"), at=in_use) == TimeSliced(path=".sharing")


def test_a_share_that_is_only_booked_has_no_limit_by_mps():
    assert sharing_of(fraction(), sharing=MPS, at=offer(limited=False)) == MpsShared()
    limits = mps(defaultPinnedDeviceMemoryLimit="1Gi")
    assert sharing_of(fraction(), sharing=limits, at=offer(limited=False)) == MpsShared(
        ALL_CORES, GIB
    )


def test_who_looks_on_is_no_client_of_mps():
    assert sharing_of(allocation(admin=True), sharing=MPS) == TimeSliced()


def test_mps_without_a_configuration_of_its_own_has_no_limit_on_a_whole_gpu():
    assert sharing_of(allocation(), sharing=MPS) == MpsShared(ALL_CORES, None, MpsPriority.NORMAL)


def test_the_limits_of_nvidias_manifests_hold_on_a_whole_gpu():
    limits = mps(defaultActiveThreadPercentage=50, defaultPinnedDeviceMemoryLimit="10Gi")

    assert sharing_of(allocation(), sharing=limits) == MpsShared(50, 10 * GIB)
    assert sharing_of(allocation(), sharing=limits, at=offer(1, EXCLUSIVE)) == MpsShared(
        50, 10 * GIB
    )
    several_users = mps(defaultActiveThreadPercentage=50, multiUser=True)
    assert sharing_of(allocation(), sharing=several_users) == MpsShared(50)


def test_a_manifest_of_nvidias_with_limits_by_index_holds_on_the_gpus_sorted_by_uuid():
    limits = mps(
        defaultActiveThreadPercentage=50,
        defaultPinnedDeviceMemoryLimit="10Gi",
        **{PER_DEVICE: {"0": "5Gi", "2": "7Gi"}},
    )
    turned = [gpu(0, uuid="GPU-c"), gpu(1, uuid="GPU-a"), gpu(2, uuid="GPU-b")]
    node = Offer(tuple(Device(board, SLICEABLE) for board in turned))
    three = [allocation(f"gpu-{n}") for n in range(3)]

    shares = sharings(*three, sharing=limits, at=node)

    assert [share.memory_bytes // GIB for share in shares] == [7, 5, 10]
    assert {share.percent for share in shares} == {50}


def test_a_limit_by_uuid_stands_before_one_by_index_and_both_before_that_of_all():
    limits = mps(
        defaultPinnedDeviceMemoryLimit="4Gi",
        **{PER_DEVICE: {"0": "1Gi", gpu(0).uuid: "2Gi", "1": "3Gi"}},
    )

    shares = sharings(*(allocation(f"gpu-{n}") for n in range(3)), sharing=limits)

    assert [share.memory_bytes // GIB for share in shares] == [2, 3, 4]


def test_indexes_count_the_gpus_that_the_configuration_is_for():
    of_a = config("GpuConfig", "a", "look", sharing=mps(**{PER_DEVICE: {"0": "1Gi"}}))
    of_b = config("GpuConfig", "b", sharing=mps(**{PER_DEVICE: {"0": "2Gi", "1": "3Gi"}}))
    looks_on = allocation("gpu-0", "look", admin=True)
    requests = [("gpu-1", "a"), ("gpu-2", "b"), ("gpu-3", "b")]

    shares = sharings(
        looks_on,
        *(allocation(*request) for request in requests),
        configs=(of_a, replace(of_b, path="b")),
    )

    assert [share.memory_bytes // GIB for share in shares[1:]] == [1, 2, 3]


def test_a_key_that_cannot_be_printed_or_is_long_is_shown_such_that_it_harms_no_log():
    key = "\n\x1b[2J" + 5000 * "x"
    for limit in ("1Gi", "1"):
        message = refusal(allocation("gpu-0"), sharing=mps(**{PER_DEVICE: {key: limit}}))

        assert message.isprintable()
        assert f"{PER_DEVICE}[\\n\\x1b[2Jxxx" in message
        assert "x…]: " in message


@pytest.mark.parametrize("key", ["2", "GPU-of-another-node", "-1", "00"])
def test_a_limit_for_a_gpu_that_is_not_of_the_claim_is_refused_and_those_that_are_are_named(key):
    message = refusal(
        allocation("gpu-0"),
        allocation("gpu-1"),
        sharing=mps(**{PER_DEVICE: {key: "1Gi", "0": "1Gi"}}),
    )

    assert message == (
        f"claim default/claim: {PATH}.{PER_DEVICE}[{key}]: is no GPU of the claim; write an index "
        f"or UUID: 0 ({gpu(0).uuid}), 1 ({gpu(1).uuid})"
    )


@pytest.mark.parametrize("size", ["255Mi", "0", "1"])
def test_memory_below_that_of_a_cuda_context_is_refused_wherever_it_stands(size):
    for field, limits in (
        ("defaultPinnedDeviceMemoryLimit", mps(defaultPinnedDeviceMemoryLimit=size)),
        (f"{PER_DEVICE}[0]", mps(**{PER_DEVICE: {"0": size}})),
    ):
        assert refusal(allocation(), sharing=limits).endswith(
            f"{PATH}.{field}: {size} is less than a CUDA context takes; write 256Mi or more"
        )
    assert sharing_of(allocation(), sharing=mps(defaultPinnedDeviceMemoryLimit="256Mi"))


def test_memory_below_that_of_a_cuda_context_is_refused_in_a_configuration_that_does_not_apply():
    overridden = config(sharing=mps(defaultPinnedDeviceMemoryLimit="1Mi"), source="FromClass")

    message = refusal(allocation(), configs=(overridden, config()))

    assert "fromclass.sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: 1Mi is less" in message


@pytest.mark.parametrize("percent", [-1, 101, 50.5])
def test_a_percentage_that_is_none_is_refused_with_its_field(percent):
    message = refusal(allocation(), sharing=mps(defaultActiveThreadPercentage=percent))

    assert f"{PATH}.defaultActiveThreadPercentage: " in message


def test_all_that_is_wrong_is_said_at_once_and_once():
    limits = mps(**{PER_DEVICE: {"8": "1Gi", "9": "1Gi"}})
    both = (allocation("gpu-0"), allocation("gpu-1"))

    message = refusal(*both, sharing=limits, at=offer(strategies=ONLY_TURNS))

    assert message.count(f"{PATH}.{PER_DEVICE}[8]") == 1
    assert message.count(f"{PATH}.{PER_DEVICE}[9]") == 1
    assert message.count("fromclaim.sharing.strategy: on this node gpu-") == 2


def test_mps_on_a_board_before_volta_is_refused_with_the_board():
    old = gpu(0, compute_capability=Version(6, 1), product_name="Tesla P40")
    node = offer_of(Inventory((old,)), DEFAULT_PROFILE, ApiFeatures(), {})
    why = (
        "gpu-0 (Tesla P40) cannot be shared by MPS: MPS takes compute capability 7.0 and newer; "
        "remove it"
    )

    assert f"fromclaim.sharing.strategy: {why}" in refusal(fraction(), sharing=MPS, at=node)
    by_cores = refusal(fraction(cores="30"), at=node)
    assert "request 'gpu', capacity.requests.cores: 30 % of the cores" in by_cores
    assert why in by_cores


def test_a_strategy_that_the_profile_does_not_allow_is_refused_with_what_it_does():
    no_mps, no_turns = offer(strategies=ONLY_TURNS), offer(strategies=(SharingStrategy.MPS,))

    assert refusal(fraction(), sharing=MPS, at=no_mps) == (
        "claim default/claim: fromclaim.sharing.strategy: on this node gpu-0 is shared by "
        "TimeSlicing only; write that, or remove it"
    )
    assert "gpu-0 is shared by MPS only" in refusal(fraction(), sharing=TURNS, at=no_turns)
    assert (
        "request 'gpu', capacity.requests.cores: 30 % of the cores can be reserved under MPS"
        in (refusal(fraction(cores="30"), at=no_mps))
    )


def test_cores_and_turns_exclude_each_other():
    assert refusal(fraction(cores="30"), sharing=TURNS) == (
        "claim default/claim: request 'gpu', capacity.requests.cores: 30 % of the cores can be "
        "reserved under MPS only, and fromclaim.sharing.strategy is TimeSlicing; remove the "
        "request for cores"
    )


def test_more_cores_than_one_share_has_are_refused_where_nobody_gets_more_than_one():
    quarter = Fractional(20 * GIB, GIB, MIB, shares=4, replicas=4, cores_default=25)
    node = offer(1, quarter, one_share=True)

    assert "capacity.requests.cores: 26 % is more than one share" in (
        refusal(fraction(cores="26"), at=node)
    )
    assert sharing_of(fraction(cores="25"), at=node) == MpsShared(25, 20 * GIB)
    assert sharing_of(fraction(cores="26"), at=offer(1, quarter)) == MpsShared(26, 20 * GIB)


QUARTER = Fractional(20 * GIB, GIB, MIB, shares=4, replicas=4)


def test_a_replica_has_its_part_of_the_cores_also_where_its_claim_asks_for_none_of_them():
    for asked in ("0", "25"):
        assert sharing_of(fraction(cores=asked), sharing=MPS, at=offer(1, QUARTER)) == MpsShared(
            25, 20 * GIB
        )
    two = fraction("40Gi", shares="2", cores="0")
    assert sharing_of(two, sharing=MPS, at=offer(1, QUARTER)) == MpsShared(50, 40 * GIB)


def test_cores_that_a_claim_was_given_by_default_are_no_reason_to_refuse_it_later():
    """Its replica was allocated while the profile shared by MPS; now it takes turns."""
    taking_turns = offer(1, QUARTER, strategies=ONLY_TURNS)

    assert sharing_of(fraction(cores="25"), at=taking_turns) == TimeSliced(path=".sharing")
    assert sharing_of(fraction(cores="25"), sharing=TURNS, at=offer(1, QUARTER)) == TimeSliced(
        path="fromclaim.sharing"
    )
    assert "cores: 24 %" in refusal(fraction(cores="24"), at=taking_turns)


LONG_TURNS = {**TURNS, "timeSlicingConfig": {"interval": "Long"}}


@pytest.mark.parametrize("sharing", [LONG_TURNS, {**TURNS, "timeSlicingConfig": {}}])
def test_a_fraction_sets_no_interval_for_its_neighbours_unless_the_profile_lets_it(sharing):
    assert refusal(fraction(), sharing=sharing) == (
        "claim default/claim: fromclaim.sharing.timeSlicingConfig: gpu-0 has one interval for all "
        "claims on it, so on this node only a claim that has a whole GPU sets it "
        "(timeSliceInterval: WholeGPUs); remove timeSlicingConfig, or ask for a whole GPU, or have "
        "the node's profile say timeSliceInterval: Any"
    )
    anybody = offer(fractions_set_interval=True)
    assert sharing_of(fraction(), sharing=sharing, at=anybody).interval is not None
    assert sharing_of(fraction(), sharing=TURNS).interval is None


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        pytest.param(allocation(), EXCLUSIVE, id="a GPU that is given out whole"),
        pytest.param(allocation(), SLICEABLE, id="a claim that names no memory"),
        pytest.param(fraction("81559Mi"), SLICEABLE, id="all of the memory"),
        pytest.param(fraction(), QUARTER, id="a replica"),
        pytest.param(allocation("gpu-0-1"), Replica(1, 4, 20 * GIB), id="a replica as a device"),
    ],
)
def test_nvidias_manifests_set_the_interval_of_whole_gpus_and_of_replicas(given, shape):
    at = offer(1, shape)

    assert sharing_of(given, sharing=LONG_TURNS, at=at) == TimeSliced(
        TimeSliceInterval.LONG, "fromclaim.sharing"
    )


def test_the_priority_is_the_one_asked_for():
    assert sharing_of(allocation(), sharing=mps(clientPriority="BelowNormal")) == MpsShared(
        priority=MpsPriority.BELOW_NORMAL
    )


SIZES = st.integers(256, 100_000).map(lambda mib: f"{mib}Mi") | st.sampled_from(["1G", "300000k"])


@given(
    cores=st.integers(0, 100),
    memory=st.integers(256, 81559),
    said_percent=st.none() | st.integers(0, 100),
    said_memory=st.none() | SIZES,
    own=st.none() | SIZES,
    by=st.sampled_from(["0", gpu(0).uuid]),
)
def test_of_what_was_granted_and_what_is_written_the_smaller_counts(
    cores, memory, said_percent, said_memory, own, by
):
    fields = {
        "defaultActiveThreadPercentage": said_percent,
        "defaultPinnedDeviceMemoryLimit": said_memory,
        PER_DEVICE: {by: own} if own else None,
    }
    limits = mps(**{name: value for name, value in fields.items() if value is not None})

    (grant,) = grants(fraction(f"{memory}Mi", cores=str(cores)), sharing=limits)

    limits_of_grant: Any = grant.sharing
    assert 1 <= limits_of_grant.percent <= ALL_CORES
    assert limits_of_grant.percent == min(cores or ALL_CORES, said_percent or ALL_CORES)
    written = own or said_memory
    bounds = [quantity.rounded_up(written)] if written else []
    bounds += [] if grant.amount.whole else [memory * MIB]
    if bounds:
        assert limits_of_grant.memory_bytes % MIB == 0
        assert min(bounds) - MIB < limits_of_grant.memory_bytes <= min(bounds)
    else:
        assert limits_of_grant.memory_bytes is None
