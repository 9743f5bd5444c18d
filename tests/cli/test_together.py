"""Which requests of a claim can be served together, where partitions are in each other's way."""

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.cli.doctor.scheduling.pending_claims import Candidate, fit_together, judge
from dra_driver.model.profiles import (
    GpuSelector,
    MigRules,
    Profile,
    ProfileEntry,
    Rules,
    SharingStrategy,
)
from tests.cli.scheduling import (
    DRIVER,
    GPU_CLASS,
    MIG_CLASS,
    A,
    capacity,
    claim,
    published,
    request,
    slices,
)
from tests.fakes.mig import mig_gpu

SIZES = {"1g.5gb": (1, range(7)), "2g.10gb": (2, (0, 2, 4)), "3g.20gb": (4, (0, 4))}


def string(text):
    return {"string": text}


def value(number):
    return {"value": str(number)}


def board(minor=0, whole=False, shared=False):
    """The devices of an A100 and its counters, one for each memory unit."""
    devices = []
    if whole:
        devices.append(device(f"gpu-{minor}", minor, "gpu", range(8)))
    for profile, (size, starts) in SIZES.items():
        for start in starts:
            name = f"gpu-{minor}-mig-{profile.replace('.', '')}-{start}"
            partition = device(name, minor, "mig", range(start, start + size))
            partition["attributes"] |= {
                "profile": string(profile),
                "parentUUID": string(f"GPU-{minor}"),
            }
            if shared:
                partition["allowMultipleAllocations"] = True
            devices.append(partition)
    counters = {f"unit-{unit}": value(1) for unit in range(8)}
    return devices, {"name": f"set-{minor}", "counters": counters}


def device(name, minor, kind, units):
    taken = {f"unit-{unit}": value(1) for unit in units}
    return {
        "name": name,
        "attributes": {"type": string(kind)},
        "consumesCounters": [{"counterSet": f"set-{minor}", "counters": taken}],
    }


def node(*boards, name="n1"):
    """The slices of a node, as they are published: counters apart from devices."""
    spec = {"driver": DRIVER, "nodeName": name}
    return [
        {"spec": {**spec, "sharedCounters": [counters for _, counters in boards]}},
        {"spec": {**spec, "devices": [each for devices, _ in boards for each in devices]}},
    ]


CLASSES = (GPU_CLASS, MIG_CLASS)


def asks(profile="", count=1, **fields):
    """A partition of *profile*, or any."""
    selectors = [f"{A}.profile == '{profile}'"] if profile else []
    return request(f"mig.{DRIVER}", *selectors, count=count, **fields)


def why(*requests, on=None, constraints=()):
    """Why a claim for *requests* can never be placed; empty: it may be."""
    node_slices = node(board()) if on is None else on
    verdict = judge(
        [claim(*requests, constraints=constraints)], published(node_slices, classes=CLASSES)
    )
    assert verdict.judged == 1
    return verdict.problems[0][1] if verdict.problems else ""


def same_gpu(*requests):
    constraint = {"matchAttribute": f"{DRIVER}/parentUUID"}
    return {**constraint, "requests": list(requests)} if requests else constraint


@pytest.mark.parametrize(
    "requested",
    [
        pytest.param([asks("3g.20gb", 2)], id="two halves"),
        pytest.param([asks("3g.20gb"), asks("2g.10gb"), asks("1g.5gb")], id="one of each"),
        pytest.param([asks("1g.5gb", 7)], id="as many of the smallest as there are"),
        pytest.param([asks(count=7)], id="seven of any kind"),
        pytest.param([[asks("3g.20gb", 3), asks("1g.5gb")]], id="the second alternative"),
        pytest.param([asks(allocationMode="All"), asks("3g.20gb", 2)], id="all: nobody asks"),
    ],
)
def test_what_fits_beside_each_other_is_not_told(requested):
    assert why(*requested) == ""


@pytest.mark.parametrize(
    "requested",
    [
        pytest.param([asks("3g.20gb", 2), asks("1g.5gb")], id="nothing is free beside two halves"),
        pytest.param([asks(count=8)], id="eight of any kind"),
        pytest.param([asks("1g.5gb", 6), asks("2g.10gb")], id="one unit too few"),
        pytest.param(
            [asks("3g.20gb", 2), [asks("2g.10gb"), asks("1g.5gb")]], id="no alternative fits either"
        ),
    ],
)
def test_what_never_fits_beside_each_other_is(requested):
    reason = why(*requested)

    assert reason.startswith("spec.devices: on no node can it have all of that at once")


def test_a_second_gpu_makes_room_and_a_second_node_does_not():
    requested = (asks("3g.20gb", 2), asks("1g.5gb"))

    assert why(*requested, on=node(board(0), board(1))) == ""
    assert why(*requested, on=[*node(board(0)), *node(board(0), name="n2")]) != ""


def test_a_gpu_as_a_whole_leaves_nothing_for_partitions():
    whole = request()
    boards = [board(0, whole=True), board(1, whole=True)]

    assert why(whole, asks("1g.5gb"), on=node(boards[0])) != ""
    assert why(whole, asks("1g.5gb"), on=node(*boards)) == ""
    assert why({**whole, "count": 2}, asks("1g.5gb"), on=node(*boards)) != ""


def test_partitions_that_have_to_be_of_one_gpu_are_looked_for_there():
    two = node(board(0), board(1))
    halves = (asks("3g.20gb", 2), asks("1g.5gb"))

    assert why(*halves, on=two, constraints=[same_gpu()]) != ""
    assert why(*halves, on=two, constraints=[same_gpu("r0")]) == ""
    assert why(*halves, on=two, constraints=[same_gpu("r0", "r1")]) != ""
    assert why(*halves, on=two, constraints=[{"distinctAttribute": "x"}]) == ""


def test_a_constraint_on_a_request_is_one_on_its_alternatives():
    two = node(board(0), board(1))
    either = [{"name": "small", **asks("1g.5gb")}]

    assert why(asks("3g.20gb", 2), either, on=two, constraints=[same_gpu("r0", "r1")]) != ""
    assert why(asks("3g.20gb", 2), either, on=two, constraints=[same_gpu("r0", "r1/small")]) != ""
    assert why(asks("3g.20gb", 2), either, on=two, constraints=[same_gpu("r0", "r1/x")]) == ""


def test_attributes_that_are_lists_are_not_compared():
    two = node(board(0), board(1))
    for each in two[1]["spec"]["devices"]:
        each["attributes"]["parentUUID"] = {"strings": [each["name"]]}

    assert why(asks("3g.20gb", 2), on=two, constraints=[same_gpu()]) == ""


def test_a_partition_that_can_be_shared_serves_two_requests_but_not_one_twice():
    shared = node(board(0, shared=True))

    assert why(*[asks("3g.20gb")] * 5, on=shared) == ""
    assert why(*[asks("3g.20gb")] * 3) != ""
    assert why(asks("3g.20gb", 2), asks("1g.5gb"), on=shared) != ""


def test_admin_access_takes_nothing():
    watcher = asks("1g.5gb", adminAccess=True)

    assert why(asks("3g.20gb", 2), watcher) == ""


def test_a_selector_that_nothing_matches_says_which_profiles_there_are():
    reason = why(asks("4g.20gb"))

    assert reason.endswith(
        "none of the 12 devices of its class match them; "
        "their MIG profiles are 1g.5gb, 2g.10gb, 3g.20gb"
    )


def test_what_takes_too_long_to_find_out_is_not_told():
    """Eight boards: more choices than anybody waits for, and none that is right."""
    boards = [board(minor) for minor in range(8)]

    assert why(asks("1g.5gb", 50), asks("3g.20gb", 3), on=node(*boards)) == ""


PLACES = [(profile, start) for profile, (_, starts) in SIZES.items() for start in starts]


@settings(max_examples=40)
@given(st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4))
def test_the_answer_is_that_of_every_choice_there_is(profiles):
    def units(place):
        profile, start = place
        return set(range(start, start + SIZES[profile][0]))

    def works(places):
        apart = all(not units(a) & units(b) for a, b in combinations(places, 2))
        return apart and sorted(profile for profile, _ in places) == sorted(profiles)

    possible = any(works(places) for places in combinations(PLACES, len(profiles)))

    assert (why(*(asks(each) for each in profiles)) == "") is possible


def test_a_counter_that_no_slice_has_serves_nobody():
    devices = published(node(board()), classes=CLASSES).devices

    assert not fit_together([[Candidate("r0", 1, devices)]], {})
    assert fit_together([[Candidate("r0", 1, devices)]], {"n1": {("set-0", "unit-0"): Fraction(1)}})


def published_node(**rules):
    """An H100 as the plugin publishes it under ``mig: Dynamic``."""
    gpu_rules = Rules(**{"mig": MigRules(dynamic=True), **rules})
    profile = Profile("test", (ProfileEntry(GpuSelector(), gpu_rules, "spec.gpus[0]"),))
    return slices(mig_gpu(), rules=profile)


def test_what_the_plugin_publishes_is_counted_as_the_scheduler_does():
    on = published_node()
    quarter = request(**capacity(memory="20Gi"))

    assert why(asks("1g.10gb", 7), on=on) == ""
    assert why(asks("3g.40gb", 2), on=on) == ""
    assert why(asks("4g.40gb"), asks("3g.40gb"), on=on) == ""
    assert why(quarter, on=on) == ""
    assert why(asks("4g.40gb"), asks("3g.40gb"), asks("1g.10gb"), on=on) != ""
    assert why(quarter, asks("1g.10gb"), on=on) != ""


MPS = {"sharing": {"strategy": "MPS"}}


@pytest.mark.parametrize(
    ("device_class", "kind", "counts"),
    [
        pytest.param(f"mig.{DRIVER}", "MigDeviceConfig", True, id="a partition, by its own kind"),
        pytest.param(f"mig.{DRIVER}", "GpuConfig", False, id="a partition, by the kind of GPUs"),
        pytest.param(DRIVER, "GpuConfig", True, id="a GPU, by its own kind"),
        pytest.param(DRIVER, "MigDeviceConfig", False, id="a GPU, by the kind of partitions"),
    ],
)
def test_a_strategy_counts_for_the_kind_of_device_that_its_configuration_is_for(
    device_class, kind, counts
):
    turns = published_node(strategies=(SharingStrategy.TIME_SLICING,))
    config = {"opaque": {"driver": DRIVER, "parameters": {"kind": kind, **MPS}}}

    problems = judge(
        [claim(request(device_class), config=[config])], published(turns, classes=CLASSES)
    ).problems

    assert bool(problems) is counts
    assert not counts or "is shared by MPS" in problems[0][1]
