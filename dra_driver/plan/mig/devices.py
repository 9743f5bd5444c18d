"""The devices that are partitions of one GPU, and what keeps all its devices apart."""

from collections.abc import Sequence
from dataclasses import dataclass

from dra_driver.model.devices import Gpu
from dra_driver.model.mig import MigProfile, PartitionKey
from dra_driver.model.offer import CounterSet, Device, Keeps, Shape, counter_set_name
from dra_driver.model.profiles import Rules
from dra_driver.plan.mig.blocks import Amounts
from dra_driver.plan.mig.cutting import Cutting
from dra_driver.plan.mig.offered import Foreign, Hold, Offered, existing, held_partitions, offered
from dra_driver.plan.shapes import kept, shape_of_partitions


@dataclass(frozen=True, slots=True)
class Parts:
    """What a GPU is offered as, beside the whole of it."""

    devices: tuple[Device, ...] = ()
    of_whole: Amounts = ()  # what the GPU as a whole takes of the counters
    counter_sets: tuple[CounterSet, ...] = ()  # one, or none
    problems: tuple[str, ...] = ()  # what keeps partitions from being offered as the rules say


@dataclass(frozen=True, slots=True)
class Board:
    """A GPU and what holds for it: the rules, the API server, and the claims."""

    gpu: Gpu
    rules: Rules
    keeps: Keeps
    holds: Sequence[Hold]  # of claims that do more than look on
    there: Foreign


def parts(board: Board, cutting: Cutting) -> Parts:
    """The partitions of *board*, as they are tried."""
    found = _offered(board, cutting)
    shapes = _Shapes(board)
    devices = tuple(
        Device(
            board.gpu,
            shapes.of(place.partition.profile, place.partition.key),
            board.rules,
            place.partition,
            place.instance,
            takes=place.takes,
            offered=cutting.names,
        )
        for place in found.places
    )
    sets = (CounterSet(counter_set_name(board.gpu), found.counters),) if found.counters else ()
    return Parts(devices, found.of_whole, sets, tuple(shapes.problems))


def _offered(board: Board, cutting: Cutting) -> Offered:
    mig = board.gpu.mig
    if mig is None or (cutting.whole and not cutting.profiles):
        return Offered()  # nothing would keep them from the GPU as a whole
    held = held_partitions(mig, board.holds)
    if cutting.profiles:
        return offered(mig, cutting.profiles, board.there, whole=cutting.whole, held=held)
    return existing(mig, board.there, held)


class _Shapes:
    """The shape of every partition: as a claim that holds it found it, else as the rules say."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._held = {h.partition: h.shape for h in board.holds if h.partition is not None}
        self._wanted: dict[MigProfile, Shape] = {}
        self.problems: list[str] = []

    def of(self, profile: MigProfile, key: PartitionKey) -> Shape:
        board = self._board
        if key in self._held:
            return kept(self._held[key], board.rules)
        if profile not in self._wanted:
            shape, problem = shape_of_partitions(board.gpu, profile, board.rules, board.keeps)
            self._wanted[profile] = shape
            self.problems += [f"partitions {profile.name}: {problem}"] if problem else []
        return self._wanted[profile]
