"""In which order partitions are tried, and how much room that leaves for the large ones.

Partitions come and go at random, and each takes the first place that is free: a loss system, whose
long run is computed and not drawn. What counts is how often a 3g finds a place.
"""

import itertools
from collections import Counter
from collections.abc import Mapping

import pytest

from dra_driver.model.gpus import Partition
from dra_driver.model.profiles import MigRules
from dra_driver.plan.mig.partitions import (
    UnmanagedInstances,
    dynamic_partitions,
    dynamic_profiles,
    packing_order,
)
from tests.plan.mig.boards import mig

Order = Mapping[int, tuple[int, ...]]  # by size: the starts as they are tried

NVIDIA: Order = {1: (0, 1, 2, 3, 4, 5, 6), 2: (0, 2, 4), 4: (0, 4)}  # by the name of the device
FROM_THE_END: Order = {1: (6, 5, 4, 3, 2, 1, 0), 2: (4, 2, 0), 4: (4, 0)}
# The best of all orders for each mix, up to symmetry: 3780 were compared.
USUAL: Order = {1: (0, 1, 2, 3, 4, 5, 6), 2: (2, 0, 4), 4: (4, 0)}
CROWDED: Order = {1: (0, 2, 3, 1, 4, 5, 6), 2: (2, 0, 4), 4: (4, 0)}
WITHOUT_2G: Order = {1: (0, 2, 1, 3, 6, 4, 5), 2: (2, 0, 4), 4: (4, 0)}


def partitions(board, *profiles):
    its = mig(board)
    names = profiles or ("1g.5gb", "2g.10gb", "3g.20gb")
    found = dynamic_profiles(its, MigRules(True, names))
    return [
        one.partition
        for one in dynamic_partitions(its, found, UnmanagedInstances(), whole=False).places
    ]


def starts(found: list[Partition]):
    """As they are tried, by profile."""
    by_profile: dict[str, list[int]] = {}
    for one in found:
        by_profile.setdefault(one.profile.name, []).append(one.placement.start)
    return {name: tuple(of_one) for name, of_one in by_profile.items()}


def ours() -> Order:
    one, two, three = starts(partitions("a100-40")).values()
    return {1: one, 2: two, 4: three}


def room_for_3g(order: Order, rates: Mapping[int, float]) -> float:
    """The share of time in which a 3g would find a place. *rates*: how many of each size come in
    the time that one stays."""
    masks = {
        (size, start): (1 << size) - 1 << start for size in order for start in sorted(order[size])
    }

    def moves(state):
        occupied = sum(masks[one] for one in state)
        for one in state:
            yield state - {one}, 1.0
        for size, rate in rates.items():
            free = (one for one in order[size] if not occupied & masks[size, one])
            if rate and (start := next(free, None)) is not None:
                yield state | {(size, start)}, rate

    empty: frozenset = frozenset()
    number, states, rows = {empty: 0}, [empty], []
    for state in states:  # grows as it goes
        row = []
        for to, rate in moves(state):
            if to not in number:
                number[to] = len(states)
                states.append(to)
            row.append((number[to], rate))
        rows.append(row)
    chance = _in_the_long_run(rows, 7 + sum(rates.values()))
    fits = [any(not sum(masks[one] for one in s) & masks[4, n] for n in (0, 4)) for s in states]
    return sum(part for part, fit in zip(chance, fits, strict=True) if fit)


def _in_the_long_run(rows, fastest, lifetimes=12):
    chance = [1.0] + [0.0] * (len(rows) - 1)
    stays = [fastest - sum(rate for _, rate in row) for row in rows]
    for _ in range(int(lifetimes * fastest)):
        after = [part * stay for part, stay in zip(chance, stays, strict=True)]
        for part, row in zip(chance, rows, strict=True):
            for to, rate in row:
                after[to] += part * rate
        chance = [part / fastest for part in after]
    return chance


@pytest.mark.parametrize(
    ("rates", "best", "nvidia"),
    [
        pytest.param({1: 1.5, 2: 0.3, 4: 0.3}, USUAL, 0.691, id="mostly small ones"),
        pytest.param({1: 3.0, 2: 1.0, 4: 1.0}, CROWDED, 0.272, id="crowded"),
        pytest.param({1: 2.0, 2: 0.0, 4: 0.6}, WITHOUT_2G, 0.597, id="two sizes"),
    ],
)
def test_a_3g_finds_a_place_as_often_as_in_the_best_of_all_orders(rates, best, nvidia):
    found = room_for_3g(ours(), rates)

    assert found > room_for_3g(best, rates) - 0.003
    theirs = room_for_3g(NVIDIA, rates)
    assert theirs == pytest.approx(nvidia, abs=0.001)
    assert found > theirs
    assert found > room_for_3g(FROM_THE_END, rates) + 0.05


def test_small_partitions_fill_one_half_and_large_ones_begin_with_the_other():
    assert starts(partitions("a100-40")) == {
        "1g.5gb": (0, 1, 2, 3, 4, 5, 6),
        "2g.10gb": (0, 2, 4),
        "3g.20gb": (4, 0),
    }


def test_a_claim_that_any_partition_serves_gets_a_small_one():
    sizes = [one.placement.size for one in partitions("a100-40", "*")]

    assert sizes == sorted(sizes)


def test_small_partitions_go_first_where_no_large_one_could_be():
    found = starts(partitions("a100-40", "1g.5gb", "2g.10gb", "4g.20gb"))

    assert found == {"1g.5gb": (6, 5, 4, 0, 1, 2, 3), "2g.10gb": (4, 0, 2), "4g.20gb": (0,)}


def test_without_larger_ones_the_2g_are_the_large_ones():
    found = starts(partitions("a100-40", "1g.5gb", "2g.10gb"))

    assert found == {"1g.5gb": (6, 0, 1, 2, 3, 4, 5), "2g.10gb": (4, 2, 0)}


@pytest.mark.parametrize(
    ("board", "names"),
    [("a30-24", ("1g.6gb", "2g.12gb")), ("rtx-pro-6000-96", ("1g.24gb", "2g.48gb"))],
)
def test_boards_of_two_equal_halves_are_filled_from_both_ends(board, names):
    small, large = starts(partitions(board, *names)).values()

    assert small == tuple(sorted(small))
    assert large == tuple(sorted(large, reverse=True))


PLAIN = ("1g.*gb", "2g.*gb", "3g.*gb", "4g.*gb", "7g.*gb")


@pytest.mark.parametrize("board", ["a100-40", "h100-80-sxm", "h200-141", "b200-180"])
def test_a_kind_of_double_memory_goes_first_where_no_larger_one_fits(board):
    found = starts(partitions(board, *PLAIN))

    double = list(found)[1]
    assert double.startswith("1g.")
    assert found[double] == (6, 0, 2, 4)


def fits_together(board, names):
    """Every set of partitions to which none can be added, as the number of each profile."""
    its = [one for one in partitions(board, *names) if "+" not in one.profile.name]
    sets: set[frozenset[tuple[str, int]]] = set()

    def add(rest, occupied, counts):
        sets.add(frozenset(counts.items()))
        for at, one in enumerate(rest):
            name, mask = one.profile.name, bits(one.placement)
            if not occupied & mask and counts[name] < one.profile.most:
                add(rest[at + 1 :], occupied | mask, counts + Counter({name: 1}))

    add(its, 0, Counter())
    every = [Counter(dict(one)) for one in sets]
    return its, [one for one in every if not any(one < other for other in every)]


def bits(place):
    return (1 << place.size) - 1 << place.start


@pytest.mark.parametrize("board", ["a100-40", "h100-80-sxm", "a30-24", "rtx-pro-6000-96"])
def test_whatever_fits_together_is_placed_where_the_largest_come_first(board):
    its, sets = fits_together(board, (*PLAIN, "*"))
    size = {one.profile.name: (one.placement.size, one.profile.slices) for one in its}

    assert len(sets) >= 4
    for wanted in sets:
        occupied = 0
        for name in sorted(wanted.elements(), key=lambda name: size[name], reverse=True):
            places = (bits(one.placement) for one in its if one.profile.name == name)
            mask = next((one for one in places if not occupied & one), 0)
            assert mask, f"{name} of {wanted} finds no place"
            occupied |= mask


def test_the_order_does_not_depend_on_how_they_are_given():
    some = partitions("a100-40", "1g.5gb+me", "2g.10gb", "7g.40gb")[:4]

    assert {tuple(packing_order(one)) for one in itertools.permutations(some)} == {
        tuple(packing_order(some))
    }


def test_nothing_to_offer_is_in_order():
    assert packing_order([]) == []
