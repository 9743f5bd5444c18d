"""GPUs in memory that layouts can partition; they refuse what hardware refuses, and fail or die
where a test says so."""

from collections.abc import Callable
from dataclasses import dataclass, field

from dra_driver.base.errors import NodeError, PlacementTaken, TimedOut
from dra_driver.model.gpus import (
    Gpu,
    GpuUuid,
    GuestRestriction,
    Inventory,
    MigInfo,
    MigInstance,
    Partition,
    PartitionKey,
    UnavailableGpu,
    UnusableGpuInstance,
)
from dra_driver.model.processes import GpuProcess
from dra_driver.sim.mig.geometry import BoardGeometry, board_geometry, fits_on_board
from tests.builders import gpu

AMPERE, HOPPER = "A100-40-SXM", "H100-80-SXM"


def table(product: str) -> BoardGeometry:
    """The partitions that the board can have."""
    geometry = board_geometry(product)
    assert geometry is not None
    return geometry


def part(product: str, name: str, start: int) -> PartitionKey:
    """The partition of this profile that begins there."""
    profile = table(product).named(name)
    assert profile is not None
    place = next(placement for placement in profile.placements if placement.start == start)
    return Partition(profile, place).key


@dataclass
class Board:
    """One GPU."""

    product: str
    minor: int = 0
    on: bool = False
    pending: bool | None = None  # None: as it is
    fixed: GuestRestriction = GuestRestriction.NOTHING
    instances: dict[PartitionKey, bool] = field(default_factory=dict)  # True: with compute instance
    divided: set[PartitionKey] = field(default_factory=set)  # by others, of those without theirs
    used: dict[PartitionKey | None, int] = field(default_factory=dict)  # by a process; None: whole

    @property
    def uuid(self) -> GpuUuid:
        return GpuUuid(f"GPU-{self.minor}")

    @property
    def switches(self) -> bool:
        """Without a reset."""
        return self.product == HOPPER

    def instance(self, key: PartitionKey) -> MigInstance:
        """The same kind in the same place is called the same again, whoever makes it: the driver
        makes the UUID of the GPU and of the numbers of the instances in it."""
        number = 1 + 10 * key.profile_id + key.start
        return MigInstance(key, number, 0, GpuUuid(f"MIG-{self.minor}-{number}"))

    @property
    def gpu(self) -> Gpu:
        whole = [self.instance(key) for key in sorted(self.instances) if self.instances[key]]
        unusable = [
            UnusableGpuInstance(key, self.instance(key).gi, 2 * (key in self.divided))
            for key in sorted(self.instances)
            if not self.instances[key]
        ]
        profiles = table(self.product).profiles
        pending = self.on if self.pending is None else self.pending
        mig = MigInfo(
            self.on, pending, self.switches, profiles, tuple(whole), tuple(unusable), self.fixed
        )
        return gpu(self.minor, uuid=self.uuid, product_name=self.product, mig=mig)

    def partition(self, key: PartitionKey) -> Partition:
        profile = table(self.product).profile(key.profile_id)
        assert profile is not None
        return Partition(profile, key.placement)


class Boards:
    """The node that a reconciler works on: what it looks at, and what it changes."""

    def __init__(self, *boards: Board, plain: tuple[Gpu, ...] = ()) -> None:
        """*plain*: GPUs that cannot be partitioned."""
        self.boards = {board.uuid: board for board in boards}
        self._plain = plain
        self._seen: Inventory | None = None
        self.step: Callable[[str], None] = lambda call: None  # before and after every effect
        self.done: list[str] = []  # effects
        self.gone: set[GpuUuid] = set()  # that cannot be seen
        self.unread: set[GpuUuid] = set()  # of which a look finds nothing new
        self._last: dict[GpuUuid, Gpu] = {}  # as they were read last
        self.commands: dict[int, str] = {}  # of processes that are seen
        self.patience: list[float | None] = []  # of those that change a mode

    @property
    def mig(self) -> "Boards":
        return self

    def inventory(self) -> Inventory:
        return self._seen or self.refresh()

    def refresh(self) -> Inventory:
        present = {
            board.uuid: board.gpu for board in self.boards.values() if board.uuid not in self.gone
        }
        old = {uuid: self._last[uuid] for uuid in self.unread & present.keys() & self._last.keys()}
        self._last |= present | old
        gpus = sorted((*(present | old).values(), *self._plain), key=lambda gpu: gpu.minor)
        missing = (
            UnavailableGpu(f"GPU {uuid}", "it does not answer") for uuid in sorted(self.gone)
        )
        self._seen = Inventory(tuple(gpus), tuple(missing), frozenset(old))
        return self._seen

    def see(self, inventory: Inventory) -> None:
        """The last look found that."""
        self._seen = inventory

    def processes(self, gpu: GpuUuid) -> tuple[GpuProcess, ...]:
        """Of a GPU those of the GPU as a whole, of an instance its own."""
        for board in self.boards.values():
            for key, pid in board.used.items():
                if gpu == (board.uuid if key is None else board.instance(key).uuid):
                    return (GpuProcess(pid, 0),)
        return ()

    def command(self, pid: int) -> str:
        return self.commands.get(pid, "")

    def set_mode(self, gpu: GpuUuid, on: bool, patience: float | None = None) -> None:
        self.patience.append(patience)
        board = self.boards[gpu]
        assert board.switches, "it needs a reset"
        self._switch(board, on)

    def reset_mode(self, gpu: GpuUuid, on: bool, patience: float | None = None) -> None:
        self.patience.append(patience)
        board = self.boards[gpu]
        assert not board.switches, "it needs no reset"
        self._switch(board, on)

    def create(
        self, gpu: GpuUuid, key: PartitionKey, new: bool = False, patience: float | None = None
    ) -> MigInstance:
        board = self.boards[gpu]
        if not board.on:
            raise NodeError(f"{gpu}: MIG mode is off")
        if new and key in board.instances:
            raise PlacementTaken(f"{gpu}: {key} exists already")
        if key not in board.instances:
            with_gi = f"GI {key}"
            self.step(with_gi)
            others = [board.partition(place) for place in board.instances]
            if not fits_on_board(table(board.product), others, board.partition(key)):
                raise PlacementTaken(f"{gpu} has no room for {key}")
            board.instances[key] = False
            self._did(with_gi)
        if not board.instances[key]:
            self.step(f"CI {key}")
            board.instances[key] = True
            self._did(f"CI {key}")
        return board.instance(key)

    def remove(
        self,
        gpu: GpuUuid,
        key: PartitionKey,
        uuid: GpuUuid | None = None,
        patience: float | None = None,
    ) -> None:
        board = self.boards[gpu]
        if board.instances.get(key) and uuid not in (None, board.instance(key).uuid):
            return
        if not board.on or key not in board.instances:
            return
        if board.used.get(key):
            raise NodeError(f"{gpu}: {key} is in use")
        if board.instances[key]:
            self.step(f"no CI {key}")
            board.instances[key] = False
            self._did(f"no CI {key}")
        self.step(f"no GI {key}")
        del board.instances[key]
        self._did(f"no GI {key}")

    def _switch(self, board: Board, on: bool) -> None:
        if board.on == on:
            board.pending = None
            return
        if board.fixed is not GuestRestriction.NOTHING:
            raise NodeError(f"{board.uuid}: this virtual machine cannot")
        if board.instances or board.used:
            raise NodeError(f"{board.uuid}: it is in use")
        self.step(f"mode {on}")
        board.on, board.pending = on, None
        self._did(f"mode {on}")

    def _did(self, call: str) -> None:
        self.done.append(call)
        self.step(call)


class Claims:
    """Which GPUs claims hold: what ``PreparedClaims.while_free`` knows."""

    def __init__(self) -> None:
        self.holding: set[GpuUuid] = set()
        self.busy: TimedOut | None = None  # claims are being prepared
        self.asked: list[GpuUuid] = []

    def while_free(self, gpu: Gpu, act: Callable[[], None]) -> bool:
        self.asked.append(gpu.uuid)
        if self.busy:
            raise self.busy
        if gpu.uuid in self.holding:
            return False
        act()
        return True
