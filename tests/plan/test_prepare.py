"""What a claim gets, and when it is refused: decisions only, nothing is touched."""

from dataclasses import replace

import pytest

from dra_driver.base.errors import ClaimError, DeviceHeldByClaim, UnknownDevice
from dra_driver.k8s.claims import Claim, ShareId
from dra_driver.model.gpus import UnavailableGpu
from dra_driver.model.offer import AdminAccess, Device, Exclusive, Fractional, Offer, Replica
from dra_driver.model.profiles import GuardPolicy, GuardRules, SharingStrategy
from dra_driver.model.records import ClaimMemoryLimit, ClaimRecord
from dra_driver.model.steps import (
    ComputeMode,
    PodMemoryLimit,
    ServeMpsNamespace,
    SetComputeMode,
    SetMemoryLimits,
    SetTimeSlice,
    TimeSliceInterval,
)
from dra_driver.plan.mps.namespaces import PodsNeeded
from dra_driver.plan.prepare.amounts import NO_AMOUNT
from dra_driver.plan.prepare.claim import plan_claim
from dra_driver.plan.prepare.gpu_settings import with_previous_values
from tests.builders import (
    MIB,
    POOL,
    SLICEABLE,
    allocation,
    claim,
    config,
    fraction,
    gpu,
    holding,
    offer,
    pod,
    ref,
)

GIB = 1024 * MIB
SHORT = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}}
MPS = {"strategy": "MPS"}
LONG = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}
ANY = offer(fractions_set_interval=True)


def held_by(other, device="gpu-0", **fields):
    return (ClaimRecord(ref(other), (holding(other, device, **fields),)),)


def prepared(*allocations, name="other", at=None, **fields):
    """The record of a claim that was prepared already."""
    served = Claim(ref(name), allocations, **fields)
    return plan_claim(served, at or offer(), (), POOL).record


def test_a_whole_gpu_is_granted_as_it_is():
    plan = plan_claim(claim("gpu-1"), offer(), (), POOL)

    assert [grant.device.gpu for grant in plan.grants] == [gpu(1)]
    assert plan.steps == ()
    (holding,) = plan.record.holdings
    assert (holding.device, holding.gpu, holding.limit) == ("gpu-1", gpu(1).uuid, None)


@pytest.mark.point(28)
def test_every_result_becomes_one_grant_in_the_order_of_the_allocation():
    plan = plan_claim(claim("gpu-1", "gpu-0"), offer(), (), POOL)

    assert [grant.device.name for grant in plan.grants] == ["gpu-1", "gpu-0"]
    assert plan.steps == ()


@pytest.mark.point(32)
def test_an_unknown_device_is_refused_with_what_the_node_has_and_withholds():
    sick = UnavailableGpu("GPU 0000:1b:00.0", "NVML: GPU is lost; reset it")
    node = Offer((Device(gpu(0)),), (sick,))

    with pytest.raises(UnknownDevice) as refused:
        plan_claim(claim("gpu-3"), node, (), POOL)

    message = str(refused.value)
    assert "'gpu-3', but this node has: gpu-0" in message
    assert "GPU is lost; reset it" in message
    assert "allocated anew" in message


@pytest.mark.point(81)
def test_admin_access_takes_nothing_away():
    looking_on = Claim(ref(), (allocation(admin=True),))

    assert plan_claim(looking_on, offer(), held_by("other"), POOL).record.holdings[0].admin
    assert plan_claim(claim("gpu-0"), offer(), held_by("monitor", admin=True), POOL).grants

    parts = (
        replace(fraction("0", "gpu-0"), admin=True),
        replace(fraction("20Gi", "gpu-1"), admin=True),
    )
    plan = plan_claim(Claim(ref(), parts), offer(2, QUARTERS, one_share=True), (), POOL)
    assert {grant.amount for grant in plan.grants} == {NO_AMOUNT}


@pytest.mark.point(29)
def test_a_prioritized_list_is_known_by_its_main_request():
    listed = Claim(ref(), (allocation(request="gpu/large"),))

    assert plan_claim(listed, offer(), (), POOL).grants[0].allocation.base_request == "gpu"


@pytest.mark.point(30)
def test_a_share_id_is_kept_in_the_holding():
    share = ShareId("0b5a7e8c-0000-4000-8000-000000000000")
    shared = Claim(ref(), (allocation(share=share),))

    assert plan_claim(shared, offer(), (), POOL).record.holdings[0].share == share


@pytest.mark.point(46)
def test_all_that_is_wrong_with_the_configs_is_said_at_once():
    wrong = (config("Nonsense"), config("GpuConfig", colour=1))

    with pytest.raises(ClaimError) as refused:
        plan_claim(claim("gpu-0", configs=wrong), offer(), (), POOL)

    assert "'Nonsense' is unknown" in str(refused.value)
    assert "fromclaim.colour: unknown field" in str(refused.value)


def test_a_fraction_is_granted_beside_others_with_a_limit_on_its_memory():
    other = prepared(fraction("40Gi"))

    plan = plan_claim(Claim(ref(), (fraction("20Gi"),), pods=(pod(),)), offer(), (other,), POOL)

    (holding,) = plan.record.holdings
    assert holding.limit == ClaimMemoryLimit(20 * GIB, GuardRules(GuardPolicy.KILL, 10.0))
    limit = SetMemoryLimits(gpu(0).uuid, (PodMemoryLimit(pod().uid, 20 * GIB),))
    assert plan.steps == (limit,)


def test_a_strict_limit_for_pods_that_nobody_knows_is_refused():
    """The claim is reserved for a PodGroup, or for nobody."""
    strict = offer(strict=True)
    nobodys = Claim(ref(), (fraction("20Gi"),))

    with pytest.raises(ClaimError, match="claim default/claim: its part of gpu-0 is to be limited"):
        plan_claim(nobodys, strict, (), POOL)

    assert plan_claim(replace(nobodys, pods=(pod(),)), strict, (), POOL).grants
    assert plan_claim(nobodys, offer(), (), POOL).grants, "the guard sees who they are"
    assert plan_claim(Claim(ref(), (allocation(),)), strict, (), POOL).grants, "a whole GPU"


def test_a_claim_for_all_the_memory_has_the_whole_gpu():
    plan = plan_claim(Claim(ref(), (fraction("81559Mi"),)), offer(), (), POOL)

    assert plan.grants[0].amount.whole
    assert plan.record.holdings[0].limit is None


def test_two_fractions_of_one_gpu_in_one_claim_are_both_held():
    two = Claim(ref(), (fraction("20Gi"), fraction("10Gi", request="more")), pods=(pod(),))

    plan = plan_claim(two, offer(), (), POOL)

    assert [h.limit.memory_bytes // GIB for h in plan.record.holdings if h.limit] == [20, 10]
    assert plan.steps == (SetMemoryLimits(gpu(0).uuid, (PodMemoryLimit(pod().uid, 30 * GIB),)),)


@pytest.mark.parametrize("shape", [Exclusive(), SLICEABLE], ids=["exclusive", "sliceable"])
def test_a_fraction_of_an_exclusive_gpu_is_all_of_it(shape):
    given = fraction("20Gi") if isinstance(shape, Exclusive) else allocation()

    plan = plan_claim(Claim(ref(), (given,)), offer(1, shape), (), POOL)

    assert plan.grants[0].amount.whole
    assert plan.record.holdings[0].limit is None


def test_replicas_as_devices_lie_on_one_gpu_and_exclude_the_whole_of_it():
    def replica(place):
        return Device(gpu(0), Replica(place, 2, 39 * GIB))

    node = Offer((replica(0), replica(1)))
    first = prepared(allocation("gpu-0-0"), at=node)

    second = plan_claim(Claim(ref(), (allocation("gpu-0-1"),)), node, (first,), POOL)
    assert second.record.holdings[0].limit == ClaimMemoryLimit(
        39 * GIB, GuardRules(GuardPolicy.KILL)
    )
    with pytest.raises(DeviceHeldByClaim):
        plan_claim(Claim(ref(), (allocation("gpu-0"),)), offer(1), (first,), POOL)
    with pytest.raises(DeviceHeldByClaim, match="gpu-0-0 is held by claim default/other"):
        plan_claim(Claim(ref(), (allocation("gpu-0-0"),)), node, (first,), POOL)


def test_a_monitor_device_without_admin_access_is_refused():
    node = Offer((Device(gpu(0), AdminAccess()),))

    with pytest.raises(ClaimError, match="request 'gpu': gpu-0-mon is for monitoring only"):
        plan_claim(claim("gpu-0-mon"), node, (), POOL)
    looking_on = Claim(ref(), (allocation("gpu-0-mon", admin=True),))
    assert plan_claim(looking_on, node, held_by("other"), POOL).grants


def test_a_part_by_mps_is_limited_by_the_driver_as_well_and_served_last():
    asked = Claim(ref(), (fraction("20Gi", cores="30"),), pods=(pod(),))

    plan = plan_claim(asked, offer(), (), POOL)

    limit, serve = plan.steps
    assert limit == SetMemoryLimits(gpu(0).uuid, (PodMemoryLimit(pod().uid, 20 * GIB),))
    assert isinstance(serve, ServeMpsNamespace)
    assert (serve.namespace.percent, serve.namespace.memory_bytes) == (30, (20 * GIB,))
    assert serve.namespace == plan.grants[0].namespace


def test_parts_by_mps_and_parts_that_take_turns_go_on_one_gpu_at_once():
    turns = prepared(fraction("20Gi"), name="turns", configs=(config(sharing=SHORT),), at=ANY)
    clients = prepared(fraction("20Gi", cores="60"), name="clients")

    plan = plan_claim(Claim(ref(), (fraction(cores="40"),)), offer(), (turns, clients), POOL)
    assert [type(step) for step in plan.steps] == [ServeMpsNamespace]
    with pytest.raises(DeviceHeldByClaim, match="41 % of the cores, of which 40 are free"):
        plan_claim(Claim(ref(), (fraction(cores="41"),)), offer(), (turns, clients), POOL)


def test_a_compute_mode_is_set_beside_an_interval_of_another_gpu():
    """Of a claim with both, every setting comes before its server."""
    by_mps = config("GpuConfig", "a", sharing=MPS)
    short = config("GpuConfig", "b", sharing=SHORT)
    asked = Claim(ref(), (allocation("gpu-0", "a"), allocation("gpu-1", "b")), (by_mps, short))

    with pytest.raises(PodsNeeded):
        plan_claim(asked, offer(), (), POOL)
    steps = plan_claim(asked, offer(), (), POOL, ()).steps

    assert steps[:2] == (
        SetTimeSlice(gpu(1).uuid, TimeSliceInterval.SHORT),
        SetComputeMode(gpu(0).uuid, ComputeMode.EXCLUSIVE_PROCESS),
    )
    assert isinstance(steps[2], ServeMpsNamespace)


def test_a_later_claim_takes_over_the_compute_mode_that_the_first_one_found():
    node = offer(strategies=(SharingStrategy.MPS,))
    first = prepared(fraction(cores="30"), name="first", at=node)
    mode = SetComputeMode(gpu(0).uuid, ComputeMode.EXCLUSIVE_PROCESS)
    completed = replace(
        first, steps=with_previous_values(first.steps, {mode: ComputeMode.PROHIBITED})
    )

    plan = plan_claim(Claim(ref(), (fraction(cores="30"),)), node, (completed,), POOL)

    assert replace(mode, before=ComputeMode.PROHIBITED) in plan.steps


def test_an_interval_is_set_for_a_whole_gpu_and_for_a_part_where_the_profile_lets_any():
    for given, node in ((allocation(), offer()), (fraction(), ANY)):
        asked = Claim(ref(), (given,), (config(sharing=SHORT),))
        steps = plan_claim(asked, node, (), POOL).steps
        assert SetTimeSlice(gpu(0).uuid, TimeSliceInterval.SHORT) in steps


def test_an_empty_configuration_means_the_default_interval_and_none_means_no_opinion():
    def steps(sharing):
        asked = Claim(ref(), (allocation(),), (config(sharing=sharing),))
        planned = plan_claim(asked, offer(), (), POOL).steps
        return [step.interval for step in planned if isinstance(step, SetTimeSlice)]

    assert steps({"strategy": "TimeSlicing", "timeSlicingConfig": {}}) == [
        TimeSliceInterval.DEFAULT
    ]
    assert steps({"strategy": "TimeSlicing"}) == []


def test_who_looks_on_is_not_concerned_by_how_others_share():
    looking_on = Claim(
        ref(), (allocation(admin=True),), (config(sharing={"strategy": "MPS"}, source="FromClass"),)
    )

    assert plan_claim(looking_on, offer(), (), POOL).steps == ()


def test_a_share_that_is_only_booked_has_no_limit():
    plan = plan_claim(Claim(ref(), (fraction(),), pods=(pod(),)), offer(limited=False), (), POOL)

    assert plan.record.holdings[0].limit is None
    assert plan.steps == ()


TURNS_ONLY = offer(strategies=(SharingStrategy.TIME_SLICING,))
TWO_SHARES = offer(1, Fractional(81559 * MIB, GIB, MIB, shares=2))
QUARTERS = Fractional(20 * GIB, GIB, MIB, shares=4, replicas=4)
BOTH = (fraction("1Gi"), fraction("1Gi", request="more"))
BOTH_INTERVALS = (
    config("GpuConfig", "gpu", sharing=SHORT),
    config("GpuConfig", "more", sharing=LONG),
)


@pytest.mark.parametrize(
    ("asked", "node", "message"),
    [
        ((allocation(), allocation(request="more")), offer(), "gpu-0 twice"),
        ((fraction("60Gi"), fraction("60Gi", request="more")), offer(), "gpu-0 twice"),
        ((fraction("0"),), offer(), r"capacity.requests.memory: 0 was allocated"),
        (
            (fraction("100Gi"),),
            offer(1, Fractional(200 * GIB, GIB, MIB, shares=4)),
            "too much of gpu-0: it needs 102400Mi of memory",
        ),
        (
            (fraction("81559Mi", cores="30"),),
            TURNS_ONLY,
            "'gpu', capacity.requests.cores: 30 % of the cores",
        ),
        (
            (fraction("20Gi", "gpu-0"), fraction("20Gi", "gpu-1")),
            offer(2, QUARTERS, one_share=True),
            "failRequestsGreaterThanOne",
        ),
        (
            (fraction("20Gi", shares="2"),),
            offer(2, QUARTERS, one_share=True),
            "failRequestsGreaterThanOne",
        ),
    ],
)
def test_what_nothing_can_serve_is_refused(asked, node, message):
    with pytest.raises(ClaimError, match=message) as refused:
        plan_claim(Claim(ref(), asked), node, (), POOL)
    assert not isinstance(refused.value, DeviceHeldByClaim)


def test_more_than_one_share_is_granted_where_the_profile_does_not_refuse_it():
    for asked in (
        (fraction("20Gi", "gpu-0"), fraction("20Gi", "gpu-1")),
        (fraction("20Gi", shares="2"),),
    ):
        assert plan_claim(Claim(ref(), asked), offer(2, QUARTERS), (), POOL).grants


def test_a_configuration_of_another_type_is_refused_with_the_claim_it_is_of():
    wrong = Claim(ref(), (allocation(),), (config("MigDeviceConfig", "gpu"),))

    with pytest.raises(ClaimError, match=r"claim default/claim: fromclaim: a MigDeviceConfig for"):
        plan_claim(wrong, offer(), (), POOL)


@pytest.mark.parametrize(
    ("device", "pool", "node", "message"),
    [
        ("gpu-0", "node-2", offer(), "of pool 'node-2', but this node serves 'node-1'"),
        ("gpu-77", POOL, offer(40), "and 24 more"),
    ],
)
def test_a_device_that_is_not_here_is_refused_with_what_is(device, pool, node, message):
    with pytest.raises(UnknownDevice, match=message):
        plan_claim(Claim(ref(), (allocation(device, pool=pool),)), node, (), POOL)


@pytest.mark.point(33, 82)
@pytest.mark.parametrize(
    ("asked", "node", "others", "message"),
    [
        (
            allocation(),
            offer(),
            (prepared(allocation()),),
            r"gpu-0 is held by claim default/other \(UID uid-other\)",
        ),
        (allocation(), offer(), (prepared(fraction("1Gi")),), "it needs all of it"),
        (fraction("1Gi"), offer(), (prepared(allocation()),), "all of which is taken"),
        (
            fraction("20Gi"),
            offer(),
            (prepared(fraction("70Gi")),),
            "needs 20480Mi of memory, of which 9879Mi are free",
        ),
        (
            fraction("1Gi"),
            TWO_SHARES,
            [prepared(fraction("1Gi"), name=name, at=TWO_SHARES) for name in ("a", "b")],
            "1 of 2 shares, of which 0 are free",
        ),
        pytest.param(
            allocation("gpu-1"),
            Offer((Device(gpu(1, uuid=gpu(0).uuid), SLICEABLE),)),
            (prepared(allocation()),),
            "gpu-1 is held by claim default/other",
            id="a GPU is known by its UUID, whatever it is called now",
        ),
    ],
)
def test_what_others_hold_is_refused_until_they_go(asked, node, others, message):
    with pytest.raises(DeviceHeldByClaim, match=message):
        plan_claim(Claim(ref(), (asked,)), node, others, POOL)


@pytest.mark.parametrize("interval", TimeSliceInterval)
@pytest.mark.parametrize("set_by_other", [*TimeSliceInterval, None])
def test_two_claims_on_one_gpu_have_the_same_interval_or_one_has_no_opinion(interval, set_by_other):
    def configs(interval):
        config_of = {"interval": str(interval)}
        sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": config_of}
        return (config(sharing=sharing),) if interval is not None else ()

    def plan(device, *others):
        asked = Claim(ref(), (fraction("1Gi", device),), configs(interval))
        return plan_claim(asked, ANY, others, POOL)

    other = prepared(fraction("1Gi"), configs=configs(set_by_other), at=ANY)
    silent = prepared(fraction("1Gi"), name="silent", at=ANY)

    assert plan("gpu-1", other, silent).grants, "another GPU"
    if set_by_other in (interval, None):
        assert plan("gpu-0", other, silent).grants
        return
    field = f"fromclaim.sharing.timeSlicingConfig.interval: {interval} on gpu-0"
    with pytest.raises(DeviceHeldByClaim) as refused:
        plan("gpu-0", other, silent)
    assert f"{field}, but claim default/other (UID uid-other) has set {set_by_other}; write" in str(
        refused.value
    )


@pytest.mark.parametrize(
    "others", [(), (prepared(*BOTH[:1], configs=(config(sharing=LONG),), at=ANY),)]
)
def test_two_intervals_on_one_gpu_in_one_claim_are_refused_whatever_others_have(others):
    with pytest.raises(ClaimError, match=r"interval: Long on gpu-0, .* another request says Short"):
        plan_claim(Claim(ref(), BOTH, BOTH_INTERVALS), ANY, others, POOL)
