"""Counters allow exactly those partitions beside each other that the board allows."""

import re
from collections import Counter

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
from tests.plan.mig.boards import boards, instance, key, legal, mig, partition, unusable

EVERYTHING = MigRules(dynamic=True, profiles=("*",))
PLAIN = MigRules(dynamic=True)
WHOLE = "the whole GPU"


def sets_by_counters(found: OfferedPartitions, whole: bool):
    """Every set of devices that the counters have room for."""
    takes: dict[Partition | str, Counter[str]] = {
        place.partition: Counter(dict(place.takes)) for place in found.places
    }
    if whole:
        takes[WHOLE] = Counter(dict(found.of_whole))

    def grow(devices, left):
        yield frozenset()
        for number, device in enumerate(devices):
            if all(left[name] >= amount for name, amount in takes[device].items()):
                for more in grow(devices[number + 1 :], left - takes[device]):
                    yield more | {device}

    return set(grow(list(takes), Counter(dict(found.counters))))


def sets_by_board(its: MigInfo, found: OfferedPartitions, whole: bool, there=()):
    """Every set of devices that the board takes, beside what is *there* and in use or not."""

    def grow(partitions, chosen):
        yield frozenset(chosen)
        for number, one in enumerate(partitions):
            if legal(its, [*there, *chosen, one]):
                yield from grow(partitions[number + 1 :], [*chosen, one])

    def some(devices):
        if not devices:
            return [frozenset()]
        rest = some(devices[1:])
        return rest + [one | {devices[0]} for one in rest]

    exist = [place.partition for place in found.places if place.instance is not None]
    new = list(grow([place.partition for place in found.places if place.instance is None], []))
    sets = {one | used for one in new for used in some(exist)}
    return sets | ({frozenset({WHOLE})} if whole else set())


def every_partition(its: MigInfo, rules: MigRules, whole: bool):
    return dynamic_partitions(its, dynamic_profiles(its, rules), UnmanagedInstances(), whole=whole)


def most_taken(found: OfferedPartitions):
    return max(len(takes) for takes in (found.of_whole, *(place.takes for place in found.places)))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("board", boards())
def test_the_plain_profiles_of_every_board_are_kept_apart_exactly_and_by_few_counters(board, whole):
    its = mig(board)

    found = every_partition(its, PLAIN, whole)

    assert sets_by_counters(found, whole) == sets_by_board(its, found, whole)
    assert len(found.counters) <= 5
    assert most_taken(found) <= 2
    assert {name.split("-")[0] for name, _ in found.counters} == {"block"}


@pytest.mark.parametrize("board", boards())
def test_all_profiles_of_every_board_are_kept_apart_exactly(board):
    its = mig(board)

    found = every_partition(its, EVERYTHING, whole=True)

    assert {place.partition.profile for place in found.places} == set(its.profiles)
    assert sets_by_counters(found, whole=True) == sets_by_board(its, found, whole=True)
    assert len(found.counters) <= 14
    assert most_taken(found) <= 4


def test_the_counters_of_an_a100_are_blocks_of_its_memory():
    found = every_partition(mig("a100-40"), PLAIN, whole=True)

    assert found.counters == (
        ("block-0-2", 2),
        ("block-0-4", 4),
        ("block-2-2", 2),
        ("block-4-2", 2),
        ("block-4-4", 4),
    )
    by_name = {
        (place.partition.profile.name, place.partition.placement.start): place.takes
        for place in found.places
    }
    assert by_name["1g.5gb", 0] == (("block-0-2", 1), ("block-0-4", 1))
    assert by_name["1g.5gb", 6] == (("block-4-4", 1),)
    assert by_name["3g.20gb", 4] == (("block-4-4", 4),)
    assert by_name["7g.40gb", 0] == found.of_whole == (("block-0-4", 4), ("block-4-4", 4))


def test_one_counter_does_for_partitions_of_one_size():
    found = every_partition(mig("h100-80-sxm"), MigRules(True, ("1g.10gb",)), whole=True)

    assert found.counters == (("block-0-8", 8),)
    assert {place.takes for place in found.places} == {(("block-0-8", 1),)}
    assert found.of_whole == (("block-0-8", 8),)


def test_partitions_that_cannot_overlap_need_no_counter():
    found = every_partition(mig("a100-40"), MigRules(True, ("1g.5gb",)), whole=False)

    assert found.counters == ()
    assert {place.takes for place in found.places} == {()}


def test_the_partition_that_is_all_of_the_board_is_kept_from_the_whole_gpu():
    its = mig("h100-80-sxm")
    found = every_partition(its, MigRules(True, ("7g.80gb",)), whole=True)

    assert sets_by_counters(found, whole=True) == {
        frozenset(),
        frozenset({WHOLE}),
        frozenset({partition(its, "7g.80gb", 0)}),
    }


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
    found = every_partition(mig(board), MigRules(True, profiles), whole=True)

    assert {name: there for name, there in found.counters if "block" not in name} == counters


@st.composite
def situations(draw):
    """A board, what is allowed of it, and what somebody else cut."""
    its = mig(draw(st.sampled_from(sorted(boards()))))
    names = [profile.name for profile in its.profiles]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    there: list[Partition] = []
    for name in draw(st.lists(st.sampled_from(names), max_size=2)):
        profile = next(profile for profile in its.profiles if profile.name == name)
        one = Partition(profile, draw(st.sampled_from(profile.placements)))
        there += [one] if legal(its, [*there, one]) else []
    number = draw(st.integers(0, len(there)))
    return its, chosen, there[:number], there[number:]


@given(situations())
def test_what_somebody_else_cut_takes_its_place_and_its_engines_from_what_is_offered(situation):
    its, chosen, whole_ones, odd_ones = situation
    foreign = UnmanagedInstances(
        tuple(instance(its, one.profile.name, one.placement.start) for one in whole_ones),
        tuple(unusable(its, one.profile.name, one.placement.start) for one in odd_ones),
    )
    there = [*whole_ones, *odd_ones]
    profiles = dynamic_profiles(its, MigRules(True, tuple(chosen)))

    found = dynamic_partitions(its, profiles, foreign, whole=not there)

    assert sets_by_counters(found, not there) == sets_by_board(its, found, not there, there)
    possible = {Partition(profile, place) for profile in profiles for place in profile.placements}
    assert {place.partition for place in found.places} == set(whole_ones) | {
        one for one in possible if legal(its, [*there, one])
    }
    for name, amount in found.counters:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
        assert amount > 0
    assert len(found.counters) <= 32


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


@given(its=made_up_boards(), whole=st.booleans())
def test_on_any_board_partitions_are_kept_apart_exactly(its, whole):
    found = every_partition(its, EVERYTHING, whole)

    assert sets_by_counters(found, whole) == sets_by_board(its, found, whole)


def test_where_placements_do_not_nest_memory_units_are_counted_one_by_one():
    placements = [Placement(0, 2), Placement(1, 2), Placement(4, 1)]

    found = partition_counters(placements, Placement(0, 5))

    assert found.there == (("memory-slice-1", 1),)
    assert found.of(Placement(0, 2)) == found.of(Placement(1, 2)) == (("memory-slice-1", 1),)
    assert found.of(Placement(4, 1)) == found.of(Placement(3, 1)) == ()


def test_engines_of_which_the_board_does_not_tell_how_many_it_has_are_not_counted():
    engines = Engines(copy=1)
    small = MigProfile("1g", 1, 0, 1, 2, 1, engines, (Placement(0, 1), Placement(1, 1)))
    whole = MigProfile("2g", 0, 1, 2, 1, 2, Engines(), (Placement(0, 2),))
    its = MigInfo(True, True, True, (small, whole))

    found = every_partition(its, EVERYTHING, whole=False)

    assert [name for name, _ in found.counters] == ["block-0-2"]
    assert len(found.places) == 3


def test_fewer_instances_of_a_profile_than_would_fit_are_counted():
    one = MigProfile("1g", 1, 0, 1, 2, 1, Engines(), tuple(Placement(n, 1) for n in range(4)))
    its = MigInfo(True, True, False, (one,))
    taken = UnmanagedInstances((), (UnusableGpuInstance(key(its, "1g", 0), 1, 0),))

    free = every_partition(its, EVERYTHING, whole=False)
    less = dynamic_partitions(its, its.profiles, taken, whole=False)

    assert free.counters == (("profile-1", 2),)
    assert less.counters == (("profile-1", 1),)
    assert {place.takes for place in less.places} == {(("profile-1", 1),)}
