"""MIG mode and instances of simulated GPUs, kept as a driver keeps them.

They outlive the process that changed them, and go with the driver or the GPU; boards before Hopper
keep the mode. Several processes can use the same host.
"""

import contextlib
import fcntl
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pydantic

from dra_driver.base.files import FileSignature, read_file, signature_of, write_atomically
from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import Partition, Placement
from dra_driver.sim.host.tools import MIG_MODE_FILE, MIG_STATE_SUFFIX, SETTINGS_DIRECTORY
from dra_driver.sim.mig.geometry import (
    BoardGeometry,
    compute_instance_kinds,
    fits_on_board,
    instance_id,
)
from dra_driver.sim.mig.identifiers import minor_of
from dra_driver.sim.node_spec import SimulatedGpu, SimulatedNode, UnmanagedInstance

SWITCHES_FROM: Final = (9, 0)  # without a reset


@frozen
class ComputeInstanceState:
    """A compute instance."""

    ci: int
    start: int
    slices: int
    born: int  # no two instances of a board have the same
    number: int  # NVML_COMPUTE_INSTANCE_PROFILE_*, and the id as well
    slot: int  # NVML's index of it among the MIG devices of the board

    @property
    def placement(self) -> Placement:
        return Placement(self.start, self.slices)


@frozen
class GpuInstanceState:
    """A GPU instance."""

    profile_id: int
    start: int
    gi: int
    born: int
    unmanaged: bool = False  # of the node file
    computes: tuple[ComputeInstanceState, ...] = ()

    def partition(self, board: BoardGeometry) -> Partition:
        profile = board.profile(self.profile_id)
        assert profile is not None
        return Partition(profile, Placement(self.start, profile.size))


@frozen
class BoardState:
    """One GPU."""

    on: bool
    pending: bool
    specified: bool  # whether the node file has the mode on
    born: int = 0  # how many instances there have been
    instances: tuple[GpuInstanceState, ...] = ()  # by number
    ended: tuple[tuple[str, int], ...] = ()  # of the node file, but destroyed
    needs_reset: bool = False  # and does nothing before the driver is loaded anew

    def instance(self, gi: int) -> GpuInstanceState | None:
        """The GPU instance of that number."""
        return next((instance for instance in self.instances if instance.gi == gi), None)

    def free_slots(self) -> Iterator[int]:
        """Indices that no MIG device has, from the lowest on."""
        used = {compute.slot for instance in self.instances for compute in instance.computes}
        return (slot for slot in itertools.count() if slot not in used)

    def partitions(self, board: BoardGeometry) -> list[Partition]:
        return [instance.partition(board) for instance in self.instances]

    def with_instance(self, instance: GpuInstanceState) -> "BoardState":
        """With *instance*, in place of the one of that number."""
        others = [each for each in self.instances if each.gi != instance.gi]
        instances = tuple(sorted([*others, instance], key=lambda each: each.gi))
        born = max([self.born, instance.born, *(compute.born for compute in instance.computes)])
        return replace(self, instances=instances, born=born)


_CODEC: Final = pydantic.TypeAdapter(BoardState)

Followed = Callable[[SimulatedNode, SimulatedGpu, BoardState | None], None]


@dataclass(slots=True)
class MigStateStore:
    """The boards of the host in *host*; None: nothing is kept, and each lives as long as this."""

    host: Path | None = None
    is_root: Callable[[], bool] = lambda: os.geteuid() == 0
    followed: Followed = lambda node, gpu, state: None  # told of each change; None: it is gone
    _states: dict[str, BoardState] = field(default_factory=dict)
    _read: dict[str, tuple[FileSignature, BoardState]] = field(default_factory=dict)  # by file
    _lock: Any = field(default_factory=threading.RLock)

    def may_enter(self, gpu: SimulatedGpu, instance: GpuInstanceState) -> bool:
        """Whether something can be made in a GPU instance: the device node of its capability is
        there."""
        if self.host is None:
            return True
        minor = minor_of(int(gpu.minor or 0), instance.gi)
        return (self.host / f"dev/nvidia-caps/nvidia-cap{minor}").exists()

    def read(self, node: SimulatedNode, gpu: SimulatedGpu) -> BoardState:
        """The board now, after what the node file has happen to it."""
        before = self.saved(node, gpu)
        if before is not None and _follow_node(before, gpu) == before:
            return before
        return self.change(node, gpu, lambda state: state)

    def change(
        self, node: SimulatedNode, gpu: SimulatedGpu, by: Callable[[BoardState], BoardState]
    ) -> BoardState:
        """Have *by* change the board; nobody else does meanwhile."""
        with self._lock, self._locked():
            before = self.saved(node, gpu)
            now = _follow_node(before or self._first(gpu), gpu)
            after = _follow_node(by(now), gpu)
            if after != before:
                with contextlib.suppress(PermissionError):  # who only looks sees it all the same
                    self._save(node, gpu, after)
                    self.followed(node, gpu, after)
            return after

    def follow(self, node: SimulatedNode) -> None:
        """Take over what *node* says of every GPU."""
        for gpu in node.gpus:
            if gpu.geometry is None:
                continue
            state = None
            if gpu.listed and node.driver == "ready":
                state = self.read(node, gpu)
            else:
                self._states.pop(str(gpu.uuid), None)
            with contextlib.suppress(PermissionError):
                self.followed(node, gpu, state)  # a crash may have kept it from that

    def _first(self, gpu: SimulatedGpu) -> BoardState:
        """As the driver finds it."""
        on = gpu.mig
        if self.host is not None and keeps_mode(gpu):
            with contextlib.suppress(OSError):
                file = self._settings() / MIG_MODE_FILE.format(gpu.uuid)
                specified, mode = file.read_text().split()
                on = mode == "on" if (specified == "on") == gpu.mig else gpu.mig
        return BoardState(on, on, gpu.mig)

    def saved(self, node: SimulatedNode, gpu: SimulatedGpu) -> BoardState | None:
        """The board when it was last changed; None: the driver has not looked at it yet."""
        if self.host is None:
            return self._states.get(str(gpu.uuid))
        file = (
            f"{self.host}/{SETTINGS_DIRECTORY}/{node.driver_version}/{gpu.uuid}{MIG_STATE_SUFFIX}"
        )
        try:
            signature = signature_of(os.stat(file))
            if (last := self._read.get(file)) is None or last[0] != signature:
                last = signature, _CODEC.validate_json(read_file(file))
                self._read[file] = last
        except FileNotFoundError:
            return None
        return last[1]

    def _save(self, node: SimulatedNode, gpu: SimulatedGpu, state: BoardState) -> None:
        if self.host is None:
            self._states[str(gpu.uuid)] = state
            return
        # The host tidies up in the directories below, and would take a file that is half written.
        aside = self._settings()
        put_file(self._file(node, gpu), _CODEC.dump_json(state).decode(), aside=aside)
        self._read.clear()
        if keeps_mode(gpu):
            words = ("on" if mode else "off" for mode in (state.specified, state.pending))
            put_file(aside / MIG_MODE_FILE.format(gpu.uuid), " ".join(words), aside=aside)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self.host is None:
            yield
            return
        try:
            self._settings().mkdir(parents=True, exist_ok=True)
            handle = os.open(self._settings(), os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            yield
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _settings(self) -> Path:
        assert self.host is not None
        return self.host / SETTINGS_DIRECTORY

    def _file(self, node: SimulatedNode, gpu: SimulatedGpu) -> Path:
        return self._settings() / node.driver_version / f"{gpu.uuid}{MIG_STATE_SUFFIX}"


def keeps_mode(gpu: SimulatedGpu) -> bool:
    """Whether the mode outlives the driver, and takes a reset to change: before Hopper."""
    return gpu.board.compute_capability < SWITCHES_FROM


def _follow_node(state: BoardState, gpu: SimulatedGpu) -> BoardState:
    """After what the node file says of the mode, and of unmanaged instances."""
    if gpu.mig != state.specified:
        state = replace(state, on=gpu.mig, pending=gpu.mig, specified=gpu.mig)
    if not state.on:
        return replace(state, instances=()) if state.instances else state
    unmanaged = {(instance.profile, instance.start): instance for instance in gpu.instances}
    ended = tuple(name for name in state.ended if name in unmanaged)
    instances = tuple(
        instance
        for instance in state.instances
        if not instance.unmanaged or _profile_and_start(gpu, instance) in unmanaged
    )
    state = replace(state, instances=instances, ended=ended)
    existing = {_profile_and_start(gpu, instance) for instance in instances}
    for name, new in unmanaged.items():
        if name not in existing and name not in ended:
            state = _with_unmanaged(state, gpu, new)
    return state


def _profile_and_start(gpu: SimulatedGpu, instance: GpuInstanceState) -> tuple[str, int]:
    board = gpu.geometry
    assert board is not None
    return instance.partition(board).profile.name, instance.start


def _with_unmanaged(state: BoardState, gpu: SimulatedGpu, new: UnmanagedInstance) -> BoardState:
    board = gpu.geometry
    profile = board.named(new.profile) if board else None
    assert board is not None
    assert profile is not None  # the node file was read
    place = Placement(new.start, profile.size)
    if not fits_on_board(board, state.partitions(board), Partition(profile, place)):
        return state
    gi = instance_id(board, profile, {instance.gi for instance in state.instances})
    kinds = compute_instance_kinds(board, profile)
    by_slices = {kind.slices: kind for kind in reversed(kinds)}
    new_kinds = kinds[-1:] if new.compute is None else [by_slices[size] for size in new.compute]
    born, start, computes, slots = state.born + 1, 0, [], state.free_slots()
    for ci, kind in enumerate(new_kinds):
        computes.append(
            ComputeInstanceState(ci, start, kind.slices, born + 1 + ci, kind.number, next(slots))
        )
        start += kind.slices
    return state.with_instance(
        GpuInstanceState(profile.id, new.start, gi, born, True, tuple(computes))
    )


def put_file(file: Path, text: str, mode: int = 0o644, aside: Path | None = None) -> None:
    """Several processes may write it. *aside*: where the temporary file is; None: beside *file*."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = (aside or file.parent) / f".{file.name}.{secrets.token_hex(8)}"
    write_atomically(file, text.encode(), mode=mode, temporary=temporary)
