"""Which devices a container should get by the device-plugin API."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given as given_any
from hypothesis import strategies as st

from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.gpus import Inventory, Topology
from dra_driver.model.health import Fault, Problem
from dra_driver.model.offer import DEVICE_PLUGIN_FEATURES, Device, Offer, Replica
from dra_driver.model.profiles import (
    AllocationPolicy,
    GpuSelector,
    MigRules,
    Profile,
    ProfileEntry,
    Rules,
    SharingStrategy,
)
from dra_driver.plan.device_plugin.preferred import preferred
from dra_driver.plan.device_plugin.resources import ResourceNames, listed_devices, uuid_of
from dra_driver.plan.device_plugin.topology import closest_gpus
from dra_driver.plan.offer.devices import build_offer
from tests.builders import gpu
from tests.plan.device_plugin.offers import GPU, NAMES, made, offer_of

AUTO, PACKED, DISTRIBUTED = AllocationPolicy
MIG = ResourceName("nvidia.com/mig-1g.5gb")


def uuid(minor):
    return DeviceId(gpu(minor).uuid)


def replica(minor, place):
    return DeviceId(f"{uuid(minor)}::{place}")


def choose(offer, available, size, must=(), resource=GPU):
    return preferred(offer, resource, list(available), list(must), size, NAMES)


def places(chosen):
    """Replicas by the number of their GPU and their place."""
    return [(int(uuid_of(id_)[-1]), int(id_.rpartition("::")[2])) for id_ in chosen]


def replicas(free_by_gpu):
    """The last replicas of each GPU, as many as are free."""
    return [
        replica(minor, 3 - place) for minor, free in enumerate(free_by_gpu) for place in range(free)
    ]


def shared(number=4, **rules):
    return offer_of(*(gpu(minor) for minor in range(4)), replicas=number, **rules)


# Replicas.


@pytest.mark.parametrize(
    ("policy", "free", "size", "expected"),
    [
        # Of GPU 1 most is given out, GPU 3 is full.
        pytest.param(AUTO, (4, 1, 3, 0), 1, {1: 1}, id="auto: one of the fullest"),
        pytest.param(AUTO, (4, 1, 3, 0), 2, {1: 1, 2: 1}, id="auto: two of different ones"),
        pytest.param(AUTO, (4, 1, 3, 0), 4, {0: 1, 1: 1, 2: 2}, id="auto: while there are some"),
        pytest.param(AUTO, (4, 4, 4, 4), 1, {0: 1}, id="auto: the first of equal ones"),
        pytest.param(DISTRIBUTED, (4, 1, 3, 0), 1, {0: 1}, id="distributed: of the emptiest"),
        pytest.param(DISTRIBUTED, (4, 1, 3, 0), 2, {0: 1, 2: 1}, id="distributed: of two"),
        pytest.param(DISTRIBUTED, (2, 0, 1, 0), 3, {0: 2, 2: 1}, id="distributed: what there is"),
        pytest.param(PACKED, (4, 1, 3, 0), 1, {1: 1}, id="packed: one where it just fits"),
        pytest.param(PACKED, (4, 1, 3, 0), 2, {2: 2}, id="packed: two where they just fit"),
        pytest.param(PACKED, (4, 1, 3, 0), 4, {0: 4}, id="packed: all of one"),
        pytest.param(PACKED, (4, 1, 3, 0), 5, {0: 4, 1: 1}, id="packed: of two"),
        pytest.param(PACKED, (3, 3, 0, 0), 4, {0: 3, 1: 1}, id="packed: the first of equal ones"),
    ],
)
def test_replicas_are_chosen_as_the_profile_says(policy, free, size, expected):
    chosen = choose(shared(allocation_policy=policy), replicas(free), size)

    assert Counter(minor for minor, _ in places(chosen)) == expected


@pytest.mark.parametrize(("policy", "minor"), [(AUTO, 0), (DISTRIBUTED, 1)])
def test_of_gpus_with_different_replicas_the_part_counts_that_is_given_out(policy, minor):
    """A half of GPU 0 is more than three tenths of GPU 1."""
    rules = Rules(allocation_policy=policy)
    parts = [Device(gpu(0), Replica(place, 2, None), rules) for place in range(2)]
    tenths = [Device(gpu(1), Replica(place, 10, None), rules) for place in range(10)]
    free = [replica(0, 1), *(replica(1, place) for place in range(3, 10))]

    assert places(choose(Offer((*parts, *tenths)), free, 1))[0][0] == minor


def test_of_one_gpu_the_first_replicas_are_taken():
    offer = offer_of(gpu(0), replicas=12, limited=False)
    free = [replica(0, place) for place in (11, 10, 2, 9)]

    assert places(choose(offer, free, 2)) == [(0, 2), (0, 9)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(AUTO, {2: 2, 3: 1}), (DISTRIBUTED, {2: 2, 0: 1}), (PACKED, {2: 3})],
)
def test_what_must_be_included_counts_for_what_goes_with_it(policy, expected):
    offer = shared(allocation_policy=policy)
    must = [replica(2, 1), replica(2, 3)]
    free = [*replicas((4, 0, 0, 2)), *must, replica(2, 0)]

    chosen = choose(offer, free, 3, must)

    assert set(must) <= set(chosen)
    assert Counter(minor for minor, _ in places(chosen)) == expected


def test_the_policy_is_that_of_the_gpu_with_the_lowest_number():
    def entry(minor, policy):
        rules = Rules(replicas=4, allocation_policy=policy)
        return ProfileEntry(GpuSelector(minors=frozenset({minor})), rules, "")

    profile = Profile("p", (entry(1, AUTO), entry(0, PACKED)))
    offer = build_offer(Inventory((gpu(0), gpu(1))), profile, DEVICE_PLUGIN_FEATURES, {})

    chosen = choose(offer, [replica(minor, place) for minor in (0, 1) for place in range(4)], 2)

    assert places(chosen) == [(0, 0), (0, 1)]


def test_what_is_sick_is_taken_last():
    """The kubelet offers none; it may not have heard of it yet."""
    offer = shared(faults=(Fault(gpu(0).uuid, Problem.LOST),))
    free = [replica(0, 0), replica(0, 1), replica(1, 0)]

    assert places(choose(offer, free, 1)) == [(1, 0)]
    assert len(choose(offer, free, 3)) == 3


def test_of_ids_that_nobody_knows_the_first_are_taken_and_all_where_all_are_asked_for():
    unknown = [DeviceId(f"GPU-{letter}") for letter in "cab"]

    assert choose(Offer(), unknown, 2) == ("GPU-a", "GPU-b")
    assert choose(Offer(), unknown, 3) == ("GPU-a", "GPU-b", "GPU-c")
    assert choose(Offer(), unknown, 1, must=["GPU-c"]) == ("GPU-c",)


def test_whole_gpus_and_replicas_in_one_list_go_by_the_policy():
    whole = Device(gpu(0), rules=Rules(allocation_policy=DISTRIBUTED))
    parts = [Device(gpu(1), Replica(place, 2, None)) for place in (0, 1)]
    offer = Offer((whole, *parts))
    free = [uuid(0), replica(1, 1)]

    assert choose(offer, free, 1) == (uuid(0),)
    assert choose(offer, free, 2) == (uuid(0), replica(1, 1))


# MIG instances.


def instances(*minors, **rules):
    """Three instances on each of these GPUs."""
    return offer_of(
        *(made(("1g.5gb", 4), ("1g.5gb", 5), ("1g.5gb", 6), minor=m) for m in minors), **rules
    )


def part(minor, start, place=None):
    of = f"MIG-19-{start}-of-{minor}"
    return DeviceId(of if place is None else f"{of}::{place}")


@pytest.mark.parametrize(
    ("policy", "size", "expected"),
    [
        pytest.param(AUTO, 1, [part(1, 6)], id="auto: of the GPU of which most is given out"),
        pytest.param(AUTO, 2, [part(0, 4), part(1, 6)], id="auto: of different GPUs"),
        pytest.param(DISTRIBUTED, 1, [part(0, 4)], id="distributed"),
        pytest.param(PACKED, 2, [part(0, 4), part(0, 5)], id="packed: of one GPU"),
        pytest.param(PACKED, 1, [part(1, 6)], id="packed: where it just fits"),
    ],
)
def test_instances_are_chosen_as_replicas_are(policy, size, expected):
    offer = instances(0, 1, allocation_policy=policy)
    free = [part(0, 4), part(0, 5), part(0, 6), part(1, 6)]

    assert list(choose(offer, free, size, resource=MIG)) == expected


REPLICAS_OF_INSTANCES = MigRules(replicas=(("1g.5gb", 2),))


@pytest.mark.parametrize(
    ("policy", "size", "expected"),
    [
        pytest.param(AUTO, 2, [part(0, 5, 1), part(1, 4, 0)], id="auto: of different GPUs"),
        pytest.param(
            AUTO, 3, [part(0, 4, 0), part(0, 5, 1), part(1, 4, 0)], id="auto: then of instances"
        ),
        pytest.param(PACKED, 2, [part(1, 4, 0), part(1, 4, 1)], id="packed: of one instance"),
        pytest.param(
            PACKED, 3, [part(0, 4, 0), part(0, 4, 1), part(0, 5, 1)], id="packed: of one GPU"
        ),
    ],
)
def test_replicas_of_instances_too(policy, size, expected):
    offer = instances(0, 1, allocation_policy=policy, mig=REPLICAS_OF_INSTANCES)
    free = [part(0, 4, 0), part(0, 4, 1), part(0, 5, 1), part(1, 4, 0), part(1, 4, 1)]

    assert choose(offer, free, size, resource=MIG) == tuple(sorted(expected))


def test_replicas_of_instances_that_share_by_mps_are_of_one_instance():
    """Those of two would be refused: a program under MPS computes on one instance."""
    offer = instances(0, 1, mig=REPLICAS_OF_INSTANCES, default_strategy=SharingStrategy.MPS)
    free = [part(minor, start, place) for minor in (0, 1) for start in (4, 5) for place in (0, 1)]

    assert list(choose(offer, free, 2, resource=MIG)) == [part(0, 4, 0), part(0, 4, 1)]


# Whole GPUs.


def placed(number, clique=lambda n: None, switch=lambda n: None, numa=lambda n: None):
    """GPUs in neighbourhoods that follow from their numbers."""
    return [
        gpu(
            minor,
            uuid=f"GPU-{minor:02}",
            topology=Topology(
                pcie_switch=switch(minor),
                numa_node=numa(minor),
                nvlink_clique=clique(minor),
            ),
        )
        for minor in range(number)
    ]


BRIDGED = placed(8, clique=lambda n: f"pair-{n // 2}", numa=lambda n: n // 4)
NVSWITCH = placed(8, lambda n: "all", lambda n: f"switch-{n // 2}", lambda n: n // 4)
BY_PCIE = placed(8, switch=lambda n: f"switch-{n // 4}", numa=lambda n: 0)
BY_NUMA = placed(8, numa=lambda n: n % 2)
UNKNOWN = placed(4)


def closest(gpus, free, size, must=()):
    offer = offer_of(*gpus)
    ids = [DeviceId(gpus[number].uuid) for number in free]
    chosen = choose(offer, ids, size, [DeviceId(gpus[number].uuid) for number in must])
    return [int(id_.removeprefix("GPU-")) for id_ in chosen]


@pytest.mark.parametrize(
    ("gpus", "free", "size", "must", "expected"),
    [
        pytest.param(BRIDGED, range(8), 2, (), [0, 1], id="two with a bridge"),
        pytest.param(BRIDGED, [1, 2, 4, 5], 2, (), [4, 5], id="the pair that is free"),
        pytest.param(BRIDGED, range(8), 4, (), [0, 1, 2, 3], id="two pairs of one NUMA node"),
        pytest.param(BRIDGED, [1, 3, 4, 6], 2, (), [1, 3], id="no pair: of one NUMA node"),
        pytest.param(BRIDGED, [0, 1, 3], 1, (), [3], id="one: of a pair that is broken"),
        pytest.param(BRIDGED, range(8), 2, (5,), [4, 5], id="with the partner of what is there"),
        pytest.param(BRIDGED, range(8), 3, (6,), [4, 5, 6], id="a pair and one of its NUMA node"),
        pytest.param(NVSWITCH, range(8), 2, (), [0, 1], id="two on a switch"),
        pytest.param(NVSWITCH, [0, 2, 4, 5], 2, (), [4, 5], id="on the switch that is free"),
        pytest.param(NVSWITCH, [0, 2, 4, 5, 6], 3, (), [4, 5, 6], id="three of a NUMA node"),
        pytest.param(NVSWITCH, [1, 2, 3, 4, 5, 6, 7], 1, (), [1], id="one whose switch is taken"),
        pytest.param(NVSWITCH, range(8), 8, (), list(range(8)), id="all of them"),
        pytest.param(BY_PCIE, [0, 4, 5, 6], 3, (), [4, 5, 6], id="three on a switch"),
        pytest.param(BY_PCIE, [0, 1, 2, 4, 5, 6, 7], 3, (), [0, 1, 2], id="where no more are left"),
        pytest.param(BY_NUMA, range(8), 4, (), [0, 2, 4, 6], id="four of a NUMA node"),
        pytest.param(UNKNOWN, range(4), 2, (), [0, 1], id="nothing is known"),
        pytest.param(UNKNOWN, range(4), 2, (3,), [0, 3], id="nothing is known, one is there"),
    ],
)
def test_whole_gpus_are_close_to_each_other(gpus, free, size, must, expected):
    assert closest(gpus, free, size, must) == expected


def test_a_single_gpu_is_not_taken_of_a_pair_while_there_are_others():
    gpus = placed(4, clique=lambda n: "pair" if n < 2 else None)

    assert closest(gpus, range(4), 1) == [2]


def test_one_that_was_taken_too_early_is_exchanged_for_a_better_one():
    gpus = placed(
        4,
        switch=lambda n: "switch" if n == 3 else None,
        numa=lambda n: 0 if n in (1, 2) else None,
    )

    assert closest(gpus, range(4), 3) == [0, 1, 2]


def test_very_many_gpus_are_taken_in_their_order():
    gpus = placed(40, clique=lambda n: f"pair-{n % 20}")

    assert [g.minor for g in closest_gpus(gpus, [gpus[7]], 3)] == [7, 0, 1]


@st.composite
def neighbourhoods(draw):
    """GPUs of which a switch is of one NUMA node, and NVLink goes where it likes."""
    number = draw(st.integers(2, 7))
    switches = draw(st.lists(st.integers(0, 3), min_size=number, max_size=number))
    cliques = draw(st.lists(st.integers(0, 2) | st.none(), min_size=number, max_size=number))
    return placed(
        number,
        lambda n: None if cliques[n] is None else f"clique-{cliques[n]}",
        lambda n: f"switch-{switches[n]}",
        lambda n: switches[n] // 2,
    )


@given_any(gpus=neighbourhoods(), data=st.data())
def test_no_other_gpus_share_a_smaller_neighbourhood(gpus, data):
    size = data.draw(st.integers(2, len(gpus)))
    included = gpus[: data.draw(st.integers(0, size))]

    chosen = closest_gpus(gpus, included, size)

    assert len(chosen) == size and set(included) <= set(chosen)
    others = [set(each) for each in combinations(gpus, size) if set(included) <= set(each)]
    for neighbourhood in (_by_clique_and_switch, _by_clique, _by_switch, _by_numa):
        if any(neighbourhood(each) for each in others):
            assert neighbourhood(chosen)
            break


def _by_clique(gpus):
    cliques = {each.topology.nvlink_clique for each in gpus}
    return len(cliques) == 1 and None not in cliques


def _by_switch(gpus):
    return len({each.topology.pcie_switch for each in gpus}) == 1


def _by_clique_and_switch(gpus):
    return _by_clique(gpus) and _by_switch(gpus)


def _by_numa(gpus):
    return len({each.topology.numa_node for each in gpus}) == 1


# Whatever the kubelet asks.


@st.composite
def questions(draw):
    """A node of any kind, and what the kubelet may ask of it, also when it is wrong."""
    rules = {
        "allocation_policy": draw(st.sampled_from(AllocationPolicy)),
        "replicas": draw(st.integers(1, 6)),
        "default_strategy": draw(st.sampled_from(SharingStrategy)),
        "mig": MigRules(
            replicas=(("1g.5gb", draw(st.integers(1, 3))),), single=draw(st.booleans())
        ),
    }
    boards = [made(("1g.5gb", 4), ("1g.5gb", 5), minor=2), made(("1g.5gb", 4), minor=3)]
    gpus = draw(st.lists(st.sampled_from([gpu(0), gpu(1), *boards]), unique=True))
    offer = offer_of(*gpus, **rules) if gpus else Offer()
    lists = listed_devices(offer.devices, NAMES)
    resource = draw(st.sampled_from([GPU, MIG, *lists]))
    known = list(lists.get(resource, ()))
    ids = st.sampled_from([*known, "GPU-x", "GPU-x::1", "", "::"])
    available = draw(st.lists(ids, max_size=30))
    must = draw(st.lists(st.sampled_from(available), max_size=5)) if available else []
    return offer, resource, available, must, draw(st.integers(-1, 40))


@pytest.mark.point(133, 134)
@given_any(question=questions(), data=st.data())
def test_the_preferred_devices_are_available_ones_as_many_as_asked_for(question, data):
    offer, resource, available, must, size = question

    chosen = preferred(offer, resource, available, must, size, NAMES)

    assert len(chosen) == len(set(chosen)) == min(max(size, 0), len(set(available)))
    assert set(chosen) <= set(available)
    assert set(must) <= set(chosen) or set(chosen) <= set(must)
    shuffled = data.draw(st.permutations(available))
    assert preferred(offer, resource, shuffled, must, size, NAMES) == chosen


@pytest.mark.point(134)
@given_any(
    must=st.lists(st.text(max_size=5), max_size=4),
    available=st.lists(st.text(max_size=5), max_size=4),
    size=st.integers(-3, 8),
)
def test_ids_that_nobody_knows_are_answered(must, available, size):
    chosen = preferred(offer_of(), GPU, available, must, size, ResourceNames(gpu=""))

    assert set(chosen) <= set(available)
    assert len(chosen) == min(max(size, 0), len(set(available)))


def first_replicas(numbers):
    """So many of each GPU."""
    return [
        replica(minor, place) for minor, number in enumerate(numbers) for place in range(number)
    ]


@given_any(
    free=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    taken=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    size=st.integers(1, 16),
    policy=st.sampled_from([AUTO, DISTRIBUTED]),
)
def test_several_replicas_are_of_as_many_gpus_as_possible(free, taken, size, policy):
    available = first_replicas(free)
    must = first_replicas(map(min, taken, free))

    chosen = choose(shared(allocation_policy=policy), available, size, must)

    if must and size < len(must):
        return
    gpus = Counter(minor for minor, _ in places(chosen))
    of_must = Counter(minor for minor, _ in places(must))
    more = Counter({minor: gpus[minor] - of_must[minor] for minor in gpus})
    # Nothing was taken of a GPU while another one, of which less was taken, had something left.
    for minor, number in more.items():
        if number > 0:
            assert all(
                gpus[minor] - 1 <= gpus[other] for other in range(4) if gpus[other] < free[other]
            )


@given_any(
    free=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    size=st.integers(1, 16),
    data=st.data(),
)
def test_packed_replicas_are_of_as_few_gpus_as_possible(free, size, data):
    available = first_replicas(free)
    several = st.lists(st.sampled_from(available), max_size=2, unique=True)
    must = data.draw(several) if available else []

    chosen = choose(shared(allocation_policy=PACKED), available, size, must)

    gpus = {minor for minor, _ in places(chosen)}
    of_must = {minor for minor, _ in places(must)}
    if size < len(must):
        return
    fewest = min(
        number
        for number in range(5)
        for some in combinations(range(4), number)
        if of_must <= set(some) and sum(free[minor] for minor in some) >= min(size, sum(free))
    )
    assert len(gpus) == fewest


@given_any(free=st.lists(st.integers(0, 4), min_size=4, max_size=4).filter(any))
def test_one_replica_is_of_the_fullest_gpu_or_of_the_emptiest(free):
    available = replicas(free)
    (fullest,) = places(choose(shared(allocation_policy=AUTO), available, 1))
    (emptiest,) = places(choose(shared(allocation_policy=DISTRIBUTED), available, 1))

    assert free[fullest[0]] == min(number for number in free if number)
    assert free[emptiest[0]] == max(free)
