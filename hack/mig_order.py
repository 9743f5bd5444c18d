"""How much room an order in which partitions are tried leaves for the large ones.

    python -m hack.mig_order

Partitions come and go at random on an A100, and each takes the first place that is free: a loss
system, whose long run is computed and not drawn. What counts is how often a 3g finds a place.
"""

from collections.abc import Iterator, Mapping

Order = Mapping[int, tuple[int, ...]]  # by size: the starts as they are tried
State = frozenset[tuple[int, int]]  # the size and start of what is there
Row = list[tuple[int, float]]  # the number of the next state, and how often

OURS: Order = {1: (0, 1, 2, 3, 4, 5, 6), 2: (0, 2, 4), 4: (4, 0)}  # tests/plan/mig/test_order.py
NAMES: Order = {1: (0, 1, 2, 3, 4, 5, 6), 2: (0, 2, 4), 4: (0, 4)}  # of the devices, sorted
FROM_THE_END: Order = {1: (6, 5, 4, 3, 2, 1, 0), 2: (4, 2, 0), 4: (4, 0)}
# How many of each size come in the time that one stays, and the best of all orders for it, up to
# symmetry: 3780 were compared.
MIXES: Mapping[str, tuple[Mapping[int, float], Order]] = {
    "mostly small ones": (
        {1: 1.5, 2: 0.3, 4: 0.3},
        {1: (0, 1, 2, 3, 4, 5, 6), 2: (2, 0, 4), 4: (4, 0)},
    ),
    "crowded": (
        {1: 3.0, 2: 1.0, 4: 1.0},
        {1: (0, 2, 3, 1, 4, 5, 6), 2: (2, 0, 4), 4: (4, 0)},
    ),
    "two sizes": (
        {1: 2.0, 2: 0.0, 4: 0.6},
        {1: (0, 2, 1, 3, 6, 4, 5), 2: (2, 0, 4), 4: (4, 0)},
    ),
}


def room_for_3g(order: Order, rates: Mapping[int, float]) -> float:
    """The share of time in which a 3g would find a place."""
    masks = {(size, start): (1 << size) - 1 << start for size in order for start in order[size]}

    def moves(state: State) -> Iterator[tuple[State, float]]:
        occupied = sum(masks[place] for place in state)
        for place in sorted(state):
            yield state - {place}, 1.0
        for size, rate in rates.items():
            free = (start for start in order[size] if not occupied & masks[size, start])
            if rate and (start := next(free, None)) is not None:
                yield state | {(size, start)}, rate

    empty: State = frozenset()
    numbers, states, rows = {empty: 0}, [empty], list[Row]()
    for state in states:  # grows as it goes
        row: Row = []
        for following, rate in moves(state):
            if following not in numbers:
                numbers[following] = len(states)
                states.append(following)
            row.append((numbers[following], rate))
        rows.append(row)
    chances = _in_the_long_run(rows, 7 + sum(rates.values()))
    return sum(chance for chance, state in zip(chances, states, strict=True) if _fits(state, masks))


def _fits(state: State, masks: Mapping[tuple[int, int], int]) -> bool:
    occupied = sum(masks[place] for place in state)
    return any(not occupied & masks[4, start] for start in (0, 4))


def _in_the_long_run(rows: list[Row], fastest: float, lifetimes: int = 12) -> list[float]:
    """How likely each state is."""
    chances = [1.0] + [0.0] * (len(rows) - 1)
    stays = [fastest - sum(rate for _, rate in row) for row in rows]
    for _ in range(int(lifetimes * fastest)):
        after = [chance * stay for chance, stay in zip(chances, stays, strict=True)]
        for chance, row in zip(chances, rows, strict=True):
            for following, rate in row:
                after[following] += chance * rate
        chances = [chance / fastest for chance in after]
    return chances


def main() -> None:
    for mix, (rates, best) in MIXES.items():
        orders = {"best": best, "ours": OURS, "names": NAMES, "from the end": FROM_THE_END}
        figures = (f"{name} {room_for_3g(order, rates):.3f}" for name, order in orders.items())
        print(f"{mix:18}", *figures, sep="  ")


if __name__ == "__main__":
    main()
