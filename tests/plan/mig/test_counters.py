"""Counters allow exactly those partitions beside each other that the board allows."""

import re
from collections import Counter
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.gpus import (
    Engines,
    MigInfo,
    MigProfile,
    Partition,
    Placement,
    UnusableGpuInstance,
)
from dra_driver.model.profiles import MigRules
from dra_driver.plan.mig.counters import partition_counters
from dra_driver.plan.mig.partitions import (
    OfferedPartitions,
    UnmanagedInstances,
    dynamic_partitions,
    dynamic_profiles,
)
from tests.plan.mig.boards import boards, instance, key, legal, mig, unusable

EVERYTHING = MigRules(dynamic=True, profiles=("*",))
PLAIN = MigRules(dynamic=True)
WHOLE = "the whole GPU"


def sets_by_counters(offered: OfferedPartitions, whole: bool):
    """Every set of devices that the counters have room for."""
    takes: dict[Partition | str, Counter[str]] = {
        place.partition: Counter(dict(place.takes)) for place in offered.places
    }
    if whole:
        takes[WHOLE] = Counter(dict(offered.of_whole))

    def grow(devices, counters):
        yield frozenset()
        for number, device in enumerate(devices):
            if all(counters[name] >= amount for name, amount in takes[device].items()):
                for more in grow(devices[number + 1 :], counters - takes[device]):
                    yield more | {device}

    return set(grow(list(takes), Counter(dict(offered.counters))))


def sets_by_board(mig_info: MigInfo, offered: OfferedPartitions, whole: bool, unmanaged=()):
    """Every set of devices that the board takes, beside *unmanaged* instances in use or not."""

    def grow(partitions, chosen):
        yield frozenset(chosen)
        for number, part in enumerate(partitions):
            if legal(mig_info, [*unmanaged, *chosen, part]):
                yield from grow(partitions[number + 1 :], [*chosen, part])

    existing = [place.partition for place in offered.places if place.instance is not None]
    new = list(grow([place.partition for place in offered.places if place.instance is None], []))
    subsets = chain(*(combinations(existing, size) for size in range(len(existing) + 1)))
    sets = {added | set(used) for used in subsets for added in new}
    return sets | ({frozenset({WHOLE})} if whole else set())


def every_partition(mig_info: MigInfo, rules: MigRules, whole: bool):
    return dynamic_partitions(
        mig_info, dynamic_profiles(mig_info, rules), UnmanagedInstances(), whole=whole
    )


def most_taken(offered: OfferedPartitions):
    return max(
        len(takes) for takes in (offered.of_whole, *(place.takes for place in offered.places))
    )


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("board", boards())
def test_the_plain_profiles_of_every_board_are_kept_apart_exactly_and_by_few_counters(board, whole):
    mig_info = mig(board)

    offered = every_partition(mig_info, PLAIN, whole)

    assert sets_by_counters(offered, whole) == sets_by_board(mig_info, offered, whole)
    assert len(offered.counters) <= 5
    assert most_taken(offered) <= 2
    assert {name.split("-")[0] for name, _ in offered.counters} == {"block"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("board", boards())
def test_all_profiles_of_every_board_are_kept_apart_exactly(board):
    mig_info = mig(board)

    offered = every_partition(mig_info, EVERYTHING, whole=True)

    assert {place.partition.profile for place in offered.places} == set(mig_info.profiles)
    assert sets_by_counters(offered, whole=True) == sets_by_board(mig_info, offered, whole=True)
    assert len(offered.counters) <= 14
    assert most_taken(offered) <= 4


def test_the_counters_of_an_a100_are_blocks_of_its_memory():
    offered = every_partition(mig("a100-40"), PLAIN, whole=True)

    assert offered.counters == (
        ("block-0-2", 2),
        ("block-0-4", 4),
        ("block-2-2", 2),
        ("block-4-2", 2),
        ("block-4-4", 4),
    )
    by_name = {
        (place.partition.profile.name, place.partition.placement.start): place.takes
        for place in offered.places
    }
    assert by_name["1g.5gb", 0] == (("block-0-2", 1), ("block-0-4", 1))
    assert by_name["1g.5gb", 6] == (("block-4-4", 1),)
    assert by_name["3g.20gb", 4] == (("block-4-4", 4),)
    assert by_name["7g.40gb", 0] == offered.of_whole == (("block-0-4", 4), ("block-4-4", 4))


@pytest.mark.parametrize(
    ("whole", "counters", "takes"),
    [
        pytest.param(True, (("block-0-8", 8),), (("block-0-8", 1),), id="one for all of one size"),
        pytest.param(False, (), (), id="none where nothing can overlap"),
    ],
)
def test_partitions_of_one_size_need_one_counter_at_most(whole, counters, takes):
    offered = every_partition(mig("a100-40"), MigRules(True, ("1g.5gb",)), whole)

    assert (offered.counters, offered.of_whole) == (counters, counters)
    assert {place.takes for place in offered.places} == {takes}


@pytest.mark.parametrize(
    ("board", "profiles", "counters"),
    [
        pytest.param("a30-24", ("1g.6gb*",), {"ofa-engines": 1}, id="ofa and jpeg are the same"),
        pytest.param("a100-40", ("*",), {"ofa-engines": 1}, id="decoders are enough then"),
        pytest.param("rtx-pro-6000-96", ("*",), {"decoders": 4, "ofa-engines": 1}, id="all media"),
        pytest.param("gh200-144", ("*",), {}, id="no partition has them all"),
    ],
)
def test_there_are_counters_for_engines_only_where_partitions_could_take_too_many(
    board, profiles, counters
):
    offered = every_partition(mig(board), MigRules(True, profiles), whole=True)

    assert {name: amount for name, amount in offered.counters if "block" not in name} == counters


@st.composite
def situations(draw):
    """A board, the profiles that are allowed, and unmanaged instances: usable and unusable."""
    mig_info = mig(draw(st.sampled_from(sorted(boards()))))
    names = [profile.name for profile in mig_info.profiles]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    existing: list[Partition] = []
    for name in draw(st.lists(st.sampled_from(names), max_size=2)):
        profile = next(profile for profile in mig_info.profiles if profile.name == name)
        part = Partition(profile, draw(st.sampled_from(profile.placements)))
        existing += [part] if legal(mig_info, [*existing, part]) else []
    number = draw(st.integers(0, len(existing)))
    return mig_info, chosen, existing[:number], existing[number:]


@given(situations())
def test_unmanaged_instances_take_their_places_and_engines_from_what_is_offered(situation):
    mig_info, chosen, usable, useless = situation
    unmanaged = UnmanagedInstances(
        tuple(instance(mig_info, part.profile.name, part.placement.start) for part in usable),
        tuple(unusable(mig_info, part.profile.name, part.placement.start) for part in useless),
    )
    existing = [*usable, *useless]
    profiles = dynamic_profiles(mig_info, MigRules(True, tuple(chosen)))

    offered = dynamic_partitions(mig_info, profiles, unmanaged, whole=not existing)

    assert sets_by_counters(offered, not existing) == sets_by_board(
        mig_info, offered, not existing, existing
    )
    possible = {Partition(profile, place) for profile in profiles for place in profile.placements}
    assert {place.partition for place in offered.places} == set(usable) | {
        part for part in possible if legal(mig_info, [*existing, part])
    }
    for name, amount in offered.counters:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
        assert amount > 0
    assert len(offered.counters) <= 32


@st.composite
def made_up_boards(draw):
    """A board of six units whose placements need not nest; the last profile is all of it."""
    total = Engines(*(draw(st.integers(0, 6)) for _ in range(6)))
    profiles = []
    for number in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 4))
        starts = draw(st.lists(st.integers(0, 6 - size), min_size=1, max_size=3, unique=True))
        placements = tuple(Placement(start, size) for start in sorted(starts))
        engines = Engines(
            *(draw(st.integers(0, getattr(total, kind))) for kind in Engines.__dataclass_fields__)
        )
        most = draw(st.integers(1, len(starts)))
        profiles.append(MigProfile(f"{number}g", number, number, 1, most, 1, engines, placements))
    whole = MigProfile("all", 9, 9, 7, 1, 9, total, (Placement(0, 6),))
    return MigInfo(True, True, True, (*profiles, whole))


@given(mig_info=made_up_boards(), whole=st.booleans())
def test_on_any_board_partitions_are_kept_apart_exactly(mig_info, whole):
    offered = every_partition(mig_info, EVERYTHING, whole)

    assert sets_by_counters(offered, whole) == sets_by_board(mig_info, offered, whole)


def test_where_placements_do_not_nest_memory_units_are_counted_one_by_one():
    placements = [Placement(0, 2), Placement(1, 2), Placement(4, 1)]

    counters = partition_counters(placements, Placement(0, 5))

    assert counters.amounts == (("memory-slice-1", 1),)
    assert counters.of(Placement(0, 2)) == counters.of(Placement(1, 2)) == (("memory-slice-1", 1),)
    assert counters.of(Placement(4, 1)) == counters.of(Placement(3, 1)) == ()


def test_engines_of_which_the_board_does_not_tell_how_many_it_has_are_not_counted():
    engines = Engines(copy=1)
    small = MigProfile("1g", 1, 0, 1, 2, 1, engines, (Placement(0, 1), Placement(1, 1)))
    whole = MigProfile("2g", 0, 1, 2, 1, 2, Engines(), (Placement(0, 2),))
    mig_info = MigInfo(True, True, True, (small, whole))

    offered = every_partition(mig_info, EVERYTHING, whole=False)

    assert [name for name, _ in offered.counters] == ["block-0-2"]
    assert len(offered.places) == 3


def test_fewer_instances_of_a_profile_than_would_fit_are_counted():
    small = MigProfile("1g", 1, 0, 1, 2, 1, Engines(), tuple(Placement(n, 1) for n in range(4)))
    mig_info = MigInfo(True, True, False, (small,))
    taken = UnmanagedInstances((), (UnusableGpuInstance(key(mig_info, "1g", 0), 1, 0),))

    free = every_partition(mig_info, EVERYTHING, whole=False)
    less = dynamic_partitions(mig_info, mig_info.profiles, taken, whole=False)

    assert free.counters == (("profile-1", 2),)
    assert less.counters == (("profile-1", 1),)
    assert {place.takes for place in less.places} == {(("profile-1", 1),)}
