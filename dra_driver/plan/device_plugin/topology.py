"""Which whole GPUs are close to each other, so that one container should get them together."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from dra_driver.model.gpus import Gpu

_MOST_COMPARED: Final = 16  # GPUs of a node; of more it would take too long


def closest_gpus(gpus: Collection[Gpu], included: Collection[Gpu], size: int) -> tuple[Gpu, ...]:
    """*size* of *gpus*, *included* among them, that are as close to each other as possible.

    They are all in the smallest neighbourhood that has as many: NVLink before PCIe before NUMA. Of
    equally close ones it is those that are the least close to the others: pairs stay together.
    """
    in_order = sorted(gpus, key=lambda gpu: (gpu not in included, gpu.minor))
    if not len(included) < size < len(in_order) <= _MOST_COMPARED:
        return tuple(in_order[:size])
    links = _Links(in_order)
    start = range(len(included))
    choices = (
        [
            links.grown([*start, seed], group, size)
            for group in neighbourhoods
            if len(group) >= size and set(start) <= set(group)
            for seed in group
            if seed not in start
        ]
        for neighbourhoods in _neighbourhoods(in_order, size)
    )
    closest = max(next(filter(None, choices)), key=links.rank)
    return tuple(in_order[number] for number in closest)


def _neighbourhoods(gpus: Sequence[Gpu], size: int) -> Iterator[list[list[int]]]:
    """Groups of *gpus*, by number: the smallest neighbourhoods first, and at last all of the node.
    One GPU is as good as another in whatever neighbourhood."""
    for level in range(len(_places(gpus[0])) if size > 1 else 0):
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for number, gpu in enumerate(gpus):
            if None not in (place := _places(gpu)[level]):
                groups[place].append(number)
        yield list(groups.values())
    yield [list(range(len(gpus)))]


def _places(gpu: Gpu) -> tuple[tuple[object, ...], ...]:
    """The neighbourhoods that *gpu* is in, the smallest first. None: which one is not known."""
    topology = gpu.topology
    clique, switch = topology.nvlink_clique, topology.pcie_switch
    root, numa_node = topology.pcie_root, topology.numa_node
    by_nvlink = ((clique, switch), (clique, root), (clique, numa_node), (clique,))
    return (*by_nvlink, (switch,), (root,), (numa_node,))


class _Links:
    """How close each two GPUs are: by the bus that they have in common."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._links = [[_link(gpu, other) for other in gpus] for gpu in gpus]
        self._totals = [sum(row) for row in self._links]

    def grown(self, start: Sequence[int], group: Sequence[int], size: int) -> list[int]:
        """*start* and more of *group*: each time the closest one; at last, some are exchanged for
        others, while that is better."""
        chosen = list(start)
        free = [number for number in group if number not in chosen]
        to_chosen = {number: sum(self._links[number][c] for c in chosen) for number in free}
        while len(chosen) < size:
            nearest = max(free, key=lambda n: (to_chosen[n], -self._totals[n], -n))
            chosen.append(nearest)
            free.remove(nearest)
            for number in free:
                to_chosen[number] += self._links[number][nearest]
        best = sorted(chosen)
        while better := self._exchanged(best, start, group):
            best = better
        return best

    def _exchanged(
        self, chosen: Sequence[int], start: Sequence[int], group: Sequence[int]
    ) -> list[int] | None:
        """The best of *chosen* with another one in the place of one; None: none is better."""
        exchanged = (
            sorted({*chosen, other} - {number})
            for number in chosen
            if number not in start
            for other in group
            if other not in chosen
        )
        best = max(exchanged, key=self.rank, default=None)
        return best if best and self.rank(best) > self.rank(chosen) else None

    def rank(self, chosen: Sequence[int]) -> tuple[int, int, list[int]]:
        """How good the choice is: the closest, then those that are far from the others, then those
        that come first."""
        inside = sum(self._links[number][other] for number in chosen for other in chosen)
        all_links = sum(self._totals[number] for number in chosen)
        return inside, inside - all_links, [-number for number in chosen]


def _link(gpu: Gpu, other: Gpu) -> int:
    if gpu is other:
        return 0
    here, there = gpu.topology, other.topology
    shared = (
        (8, here.nvlink_clique, there.nvlink_clique),
        (4, here.pcie_switch, there.pcie_switch),
        (2, here.pcie_root, there.pcie_root),
        (1, here.numa_node, there.numa_node),
    )
    return sum(weight for weight, mine, others in shared if mine == others and mine is not None)
