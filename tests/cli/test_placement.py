"""Which claims can never be placed: what is told, and above all what is not."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.cli.doctor.scheduling.pending_claims import Verdict, judge, of_nothing, of_verdict
from dra_driver.cli.doctor.scheduling.published_devices import fits
from dra_driver.cli.findings import Level
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import GpuSelector, Profile, ProfileEntry, Rules, SharingStrategy
from tests.builders import gpu
from tests.cli import scheduling
from tests.cli.findings import levels
from tests.cli.scheduling import (
    DRIVER,
    GPU_CLASS,
    OURS,
    A,
    capacity,
    claim,
    device_class,
    request,
    slices,
)

WHOLE = "81559Mi"
PATH = "spec.devices.requests[0].exactly"
CLASSES = (
    GPU_CLASS,
    device_class(f"shared.{DRIVER}", f"{OURS} && {A}.type == 'gpu-shared'"),
    device_class(
        f"monitor.{DRIVER}",
        f"{OURS} && ({A}.type == 'gpu-monitor' || "
        f"{A}.type in ['gpu', 'gpu-shared'] && !('shares' in device.capacity['{DRIVER}']))",
    ),
    device_class("any"),
    device_class("big", OURS, f"{A}.productName.matches('H100')"),
)


def profile(**rules):
    return Profile("test", (ProfileEntry(GpuSelector(), Rules(**rules), "spec.gpus[0]"),))


published = partial(scheduling.published, classes=CLASSES)


def why(*requests, on=None):
    """Why a claim for *requests* can never be placed; empty: it may be."""
    verdict = judge([claim(*requests)], on or published(slices()))
    return verdict.problems[0][1] if verdict.problems else ""


@pytest.mark.parametrize(
    "requested",
    [
        pytest.param(request(), id="a whole GPU"),
        pytest.param(request(count=2), id="two"),
        pytest.param(request(allocationMode="All"), id="all of a node"),
        pytest.param(request(**capacity(memory=WHOLE)), id="all the memory of one"),
        pytest.param(request(**capacity(memory="0")), id="nothing is rounded up to the least"),
        pytest.param(request(**capacity(memory="-1")), id="below nothing, too"),
        pytest.param(request(**capacity(memory="10Gi", cores="100")), id="all cores"),
        pytest.param(request(**capacity(memory="10Gi", cores="12.5")), id="half a percent"),
        pytest.param(request("big", **capacity(memory="79Gi")), id="a selector nobody reads here"),
        pytest.param(
            request(
                f"monitor.{DRIVER}",
                adminAccess=True,
                tolerations=[{"key": "gpu.nvidia.com/monitor", "operator": "Exists"}],
            ),
            id="a monitor",
        ),
        pytest.param(
            request(f"monitor.{DRIVER}", adminAccess=True, tolerations=[{"operator": "Exists"}]),
            id="a monitor, and whatever taints",
        ),
        pytest.param([request(**capacity(memory="200Gi")), request()], id="else a whole one"),
    ],
)
def test_what_may_be_placed_is_not_told(requested):
    assert why(requested) == ""


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        pytest.param(
            request(**capacity(memory="100Gi")),
            f"{PATH}.capacity.requests[memory]: asks for 100Gi, but the most that one claim can "
            f"have of a device is {WHOLE} (gpu-0 on n1)",
            id="more memory than any GPU has",
        ),
        pytest.param(
            request(**capacity(memory="10Gi", cores="150")),
            f"{PATH}.capacity.requests[cores]: asks for 150, but the most that one claim can have "
            "of a device is 100 percent of the cores of a GPU (gpu-0 on n1)",
            id="a percentage above 100",
        ),
        pytest.param(
            request(**capacity(memory="10Gi", shares="1000")),
            f"{PATH}.capacity.requests[shares]: asks for 1000, but the most that one claim can "
            "have of a device is 48 (gpu-0 on n1)",
            id="more shares than a GPU has",
        ),
        pytest.param(
            request(**capacity(vram="10Gi")),
            f"{PATH}.capacity.requests[vram]: no device has a capacity of this name, they have "
            "cores, memory, shares",
            id="a capacity that nobody knows",
        ),
        pytest.param(
            request(capacity={"requests": {f"{DRIVER}/memory": "10Gi"}}),
            f"{PATH}.capacity.requests[{DRIVER}/memory]: no device has a capacity of this name, "
            "they have cores, memory, shares; write memory, without the driver's name",
            id="a capacity with the driver's name",
        ),
        pytest.param(
            request(f"shared.{DRIVER}"),
            f"{PATH}.deviceClassName: no node publishes a device that DeviceClass shared.{DRIVER} "
            "selects; there are devices of type gpu, gpu-monitor",
            id="replicas that nobody offers",
        ),
        pytest.param(
            request(DRIVER, f"{A}.type == 'mig'"),
            f"{PATH}.selectors: none of the 2 devices of its class match them",
            id="a selector of the claim",
        ),
        pytest.param(
            request(f"monitor.{DRIVER}"),
            f"{PATH}.adminAccess: only monitor devices match, which are for claims with "
            "adminAccess: true in a namespace with the label "
            'resource.kubernetes.io/admin-access: "true"',
            id="a monitor without admin access",
        ),
        pytest.param(
            request(f"monitor.{DRIVER}", adminAccess=True),
            f"{PATH}.tolerations: monitor devices have the taint gpu.nvidia.com/monitor; "
            "add a toleration with key: gpu.nvidia.com/monitor and operator: Exists",
            id="a monitor without a toleration",
        ),
        pytest.param(
            request(count=3),
            f"{PATH}.count: asks for 3, but no node has more than 2 such (n1)",
            id="more GPUs than a node has",
        ),
        pytest.param(
            request(f"lost.{DRIVER}"),
            f"{PATH}.deviceClassName: there is no DeviceClass lost.{DRIVER}",
            id="a class of ours that is not there",
        ),
    ],
)
def test_what_can_never_be_placed_is_told_with_its_path(requested, expected):
    assert why(requested) == expected


def test_everything_that_is_wrong_is_told_at_once():
    reason = why(request(**capacity(memory="100Gi", vram="1")), request(count=9))

    assert [part.partition(": ")[0] for part in reason.split("; ")] == [
        f"{PATH}.capacity.requests[memory]",
        f"{PATH}.capacity.requests[vram]",
        "spec.devices.requests[1].exactly.count",
    ]


def test_of_alternatives_every_one_has_to_be_hopeless():
    reason = why([request(count=9), request(**capacity(memory="1Ti"))])

    assert "requests[0].firstAvailable[0].count: asks for 9" in reason
    assert "requests[0].firstAvailable[1].capacity.requests[memory]: asks for 1Ti" in reason


def test_an_alternative_of_another_driver_is_a_way_out():
    assert why([request(count=9), request("any")]) == ""


def test_amounts_that_no_one_device_has_together_are_told():
    small = slices(gpu(0, memory_bytes=16 << 30), node="small")
    no_cores = slices(gpu(0), rules=profile(strategies=()), node="big")

    reason = why(request(**capacity(memory="40Gi", cores="10")), on=published(small, no_cores))

    assert (
        reason == f"{PATH}.capacity.requests: no one device has all of it (cores: 10, memory: 40Gi)"
    )


def test_the_largest_gpu_of_any_node_counts():
    small = slices(gpu(0, memory_bytes=16 << 30), node="small")

    assert why(request(**capacity(memory="40Gi")), on=published(small, slices())) == ""
    assert "(gpu-0 on small)" in why(request(**capacity(memory="40Gi")), on=published(small))


def test_a_fraction_of_gpus_that_are_all_exclusive_is_served_with_a_whole_one():
    exclusive = published(slices(rules=profile(fractions=False)))

    assert why(request(**capacity(memory="10Gi")), on=exclusive) == ""
    assert "they have memory" in why(request(**capacity(cores="10")), on=exclusive)
    assert "asks for 1Ti" in why(request(**capacity(memory="1Ti")), on=exclusive)


def test_admin_access_reaches_gpus_that_have_no_monitor_devices():
    exclusive = published(slices(rules=profile(fractions=False)))

    assert why(request(f"monitor.{DRIVER}", adminAccess=True), on=exclusive) == ""


def test_replicas_are_found_by_their_class_and_a_share_is_the_most():
    replicas = published(slices(rules=profile(replicas=4, rename=True)))

    assert why(request(f"shared.{DRIVER}"), on=replicas) == ""
    assert why(request(f"shared.{DRIVER}", count=2), on=replicas) == ""
    assert why(request(f"shared.{DRIVER}", **capacity(memory="40Gi")), on=replicas)
    assert why(request(), on=replicas)


@pytest.mark.parametrize("status", [{}, {"status": {"allocation": {}}}], ids=str)
def test_a_claim_that_waits_is_judged(status):
    assert judge([claim(request(count=9), **status)], published(slices())).judged == 1


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(
            claim(request(count=9), status={"allocation": {"devices": {}}}), id="it has devices"
        ),
        pytest.param(claim(request("any", count=9)), id="any driver can serve it"),
        pytest.param(claim(request("unknown", count=9)), id="a class that nobody knows"),
        pytest.param(claim(), id="it asks for nothing"),
        pytest.param(
            {**claim(request(count=9)), "metadata": {"name": "a", "deletionTimestamp": "now"}},
            id="it is on its way out",
        ),
        pytest.param({"metadata": {"name": "a"}}, id="an empty one"),
    ],
)
def test_a_claim_that_is_not_ours_or_does_not_wait_is_not_judged(given):
    assert judge([given], published(slices())) == Verdict(0, ())


def test_a_selector_of_the_claim_can_make_a_class_of_all_drivers_ours():
    requested = request("any", f"device.driver == '{DRIVER}'", count=9)

    assert "no node has more than 2" in why(
        requested, on=published(slices(features=ApiFeatures(device_taints=False)))
    )


def test_slices_of_other_drivers_are_no_help():
    theirs = [{**part, "spec": {**part["spec"], "driver": "other"}} for part in slices()]

    assert published(theirs).devices == ()


def config(strategy, *requests, driver=DRIVER, kind="GpuConfig"):
    sharing = {"sharing": {"strategy": strategy}} if strategy else {}
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, **sharing}
    named = {"requests": list(requests)} if requests else {}
    return {**named, "opaque": {"driver": driver, "parameters": parameters}}


def configured(*configs, request_=None, on=None):
    """Why a claim with these configurations can never be served."""
    verdict = judge([claim(request_ or request(), config=configs)], on or published(slices()))
    return verdict.problems[0][1] if verdict.problems else ""


TURNS = profile(strategies=(SharingStrategy.TIME_SLICING,))
BY_MPS = profile(strategies=(SharingStrategy.MPS,), default_strategy=SharingStrategy.MPS)
MPS_CLASS = device_class(
    f"mps.{DRIVER}",
    f"{OURS} && {A}.type in ['gpu', 'gpu-shared'] && 'mps' in {A} && {A}.mps",
    config=[config("MPS")],
)
WHERE = "spec.devices.config[{}].opaque.parameters.sharing.strategy"


def test_a_claim_that_names_mps_where_no_gpu_offers_it_is_told_with_the_field():
    reason = configured(config("MPS"), on=published(slices(rules=TURNS)))

    assert reason == (
        f"{WHERE.format(0)}: none of the 2 devices that it could have is shared by MPS, for which "
        "a node has an MPS agent, a GPU compute capability 7.0 or above, and a profile does not "
        "forbid it"
    )
    assert configured(config("MPS"), on=published(slices(rules=TURNS), slices(node="n2"))) == ""


def test_so_is_one_that_names_time_slicing_where_a_profile_allows_mps_alone():
    reason = configured(config("TimeSlicing"), on=published(slices(rules=BY_MPS)))

    assert reason.endswith("is shared by TimeSlicing, as the profiles of their nodes have it")
    assert configured(config("TimeSlicing")) == ""


def test_a_device_that_an_older_plugin_published_is_shared_by_taking_turns():
    older = slices()
    for device in older[0]["spec"]["devices"]:
        del device["attributes"]["mps"], device["attributes"]["timeSlicing"]

    assert configured(config("TimeSlicing"), on=published(older)) == ""
    assert "is shared by MPS" in configured(config("MPS"), on=published(older))


@pytest.mark.parametrize(
    "configs",
    [
        pytest.param([config("MPS"), config("TimeSlicing")], id="a later one counts"),
        pytest.param([config("MPS"), config(None)], id="also one that leaves it open"),
        pytest.param([config("MPS", "other")], id="it is for another request"),
        pytest.param([config("MPS", driver="other.example")], id="it is for another driver"),
        pytest.param([config("MPS", kind="MigDeviceConfig")], id="it is for other devices"),
        pytest.param([{"opaque": {"driver": DRIVER}}], id="it is empty"),
    ],
)
def test_what_does_not_count_asks_for_nothing(configs):
    assert configured(*configs, on=published(slices(rules=TURNS))) == ""


def test_a_configuration_for_the_request_counts_for_its_alternatives_too():
    turns = published(slices(rules=TURNS))
    either = [{"name": "a", **request(count=9)}, {"name": "b", **request()}]

    both = configured(config("MPS", "r0"), request_=either, on=turns)
    assert both.count(WHERE.format(0)) == 2
    second = configured(config("MPS", "r0/b"), request_=either, on=turns)
    assert "firstAvailable[0].count: asks for 9" in second and second.count(WHERE.format(0)) == 1
    assert configured(config("MPS", "r0/a"), request_=either, on=turns) == ""


def test_the_class_for_mps_is_served_where_a_gpu_offers_it_and_else_says_what_is_missing():
    classes = (*CLASSES, MPS_CLASS)
    requested = request(f"mps.{DRIVER}", **capacity(memory="10Gi", cores="30"))

    assert why(requested, on=published(slices(), classes=classes)) == ""
    reason = why(requested, on=published(slices(rules=TURNS), classes=classes))
    assert reason.startswith(
        f"{PATH}.deviceClassName: no node publishes a device that DeviceClass mps.{DRIVER} "
        f"selects; there are devices of type gpu, gpu-monitor; DeviceClass mps.{DRIVER}, "
        "spec.config[0].opaque.parameters.sharing.strategy: none of the 4 devices"
    )


def test_admin_access_shares_nothing():
    exclusive = profile(fractions=False, strategies=(SharingStrategy.TIME_SLICING,))
    requested = request(f"monitor.{DRIVER}", adminAccess=True)

    node = published(slices(rules=exclusive))
    assert configured(config("MPS"), request_=requested, on=node) == ""


QUANTITIES = st.one_of(
    st.integers(-10, 200_000).map(lambda n: f"{n}Mi"), st.integers(-1, 90).map(lambda n: f"{n}Gi")
)


@given(QUANTITIES, st.integers(-5, 150), st.integers(-1, 60), st.integers(1, 4))
def test_what_fits_on_an_empty_node_is_never_told(memory, cores, shares, count):
    """Whatever an allocator that does the scheduler's sums would place on empty GPUs."""
    on = published(slices())
    amounts = {"memory": memory, "cores": str(cores), "shares": str(shares)}

    mib = int(memory[:-2]) * (1024 if memory.endswith("Gi") else 1)
    placeable = mib <= 81559 and cores <= 100 and shares <= 48 and count <= 2

    assert bool(why(request(count=count, **capacity(**amounts)), on=on)) is not placeable


@pytest.mark.parametrize(
    ("amount", "policy", "expected"),
    [
        pytest.param("3", {"validValues": ["2", "4"]}, True, id="the next value that there is"),
        pytest.param("5", {"validValues": ["2", "4"]}, False, id="above the last value"),
        pytest.param("7", {"validRange": {"min": "1", "max": "8", "step": "3"}}, True, id="7"),
        pytest.param("8", {"validRange": {"min": "1", "max": "8", "step": "3"}}, False, id="10"),
        pytest.param("9", {"validRange": {"min": "1"}}, True, id="up to the capacity itself"),
        pytest.param("11", {"validRange": {"min": "1"}}, False, id="above the capacity itself"),
        pytest.param("11", {}, False, id="no policy"),
        pytest.param("0", {"validRange": {"min": "1", "max": "8"}}, True, id="the least"),
    ],
)
def test_amounts_are_rounded_up_as_the_policy_says(amount, policy, expected):
    assert fits(amount, {"value": "10", "requestPolicy": policy}) is expected


def test_findings_name_the_claim_and_are_no_fault_of_the_node():
    verdict = Verdict(25, tuple((f"ns/{n:02}", "spec.x: too much") for n in range(22)))

    findings = list(of_verdict(verdict))

    assert levels(findings) == [Level.WARN] * 21 + [Level.OK]
    assert findings[0].message == "ns/00 can never be served as it is: spec.x: too much"
    assert findings[20].message == "2 more can never be served"
    assert findings[21].message.startswith("3 wait")


def test_no_claim_that_waits_is_in_order():
    (finding,) = of_verdict(Verdict(0, ()))

    assert finding.level is Level.OK


def test_without_any_device_it_is_the_plugin_that_is_looked_for():
    assert of_nothing(3, DRIVER).level is Level.WARN
    assert of_nothing(0, DRIVER).level is Level.OK
