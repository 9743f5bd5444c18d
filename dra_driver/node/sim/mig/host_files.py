"""The files of a simulated host that follow what is cut."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dra_driver.node.sim.mig.capabilities import CAPABILITIES, of_board
from dra_driver.node.sim.mig.devices import uuid_of
from dra_driver.node.sim.mig.minors import capabilities, minor_of
from dra_driver.node.sim.mig.profile_info import device_name
from dra_driver.node.sim.mig.state import BoardState, Cut, MigStates, put_file
from dra_driver.node.sim.node import Node, SimulatedGpu
from dra_driver.node.sim.tools import NVIDIA_SMI, MigLines, nvidia_smi


@dataclass(frozen=True, slots=True)
class HostFiles:
    """Of the host in *host*: the capabilities of instances, and nvidia-smi, which lists them."""

    host: Path

    def follow(self, node: Node, gpu: SimulatedGpu, state: BoardState | None) -> None:
        """*state*: of *gpu* now; None: it is gone, or the driver is."""
        home = self.host / CAPABILITIES / f"gpu{gpu.minor}"
        wanted = of_board(gpu, state) if state else {}
        if home.is_dir():
            for file in [*home.rglob("access")]:
                if str(file.relative_to(home)) not in wanted:
                    # Not with its directories at once: who reads meanwhile finds all or nothing.
                    file.unlink(missing_ok=True)
                    _remove_empty(file.parent, home)
        for path, content in wanted.items():
            if not (home / path).exists():
                put_file(home / path, content)
        if state is None:
            shutil.rmtree(home, ignore_errors=True)
        self._list(node)

    def _list(self, node: Node) -> None:
        script = self.host / NVIDIA_SMI
        if script.is_file():
            content = nvidia_smi(node, mig_lines(self.host, node))
            if script.read_text() != content:
                put_file(script, content, 0o755)


def kept_on(host: Path, is_root: Callable[[], bool] | None = None) -> MigStates:
    """What is cut on the simulated host in *host*, with the files that follow it."""
    states = MigStates(host, followed=HostFiles(host).follow)
    if is_root is not None:
        states.is_root = is_root
    return states


def mig_lines(host: Path, node: Node) -> Mapping[str, MigLines]:
    """What nvidia-smi says of MIG, by UUID of the GPU, from what is kept in *host*."""
    states = MigStates(host)
    found = {}
    for gpu in node.gpus:
        if gpu.geometry is None or (state := states.kept(node, gpu)) is None:
            continue
        lines = [line for cut in state.cuts for line in _lines(gpu, cut)]
        found[str(gpu.uuid)] = MigLines(state.on, state.pending, tuple(lines))
    return found


def _lines(gpu: SimulatedGpu, cut: Cut) -> list[str]:
    board = gpu.geometry
    assert board is not None
    minor, partition = int(gpu.minor or 0), cut.partition(board)
    profile, place = partition.profile, partition.placement
    cap = minor_of(minor, cut.gi)
    fields = (f"MIG {profile.name}", profile.id, cut.gi, f"{place.start}:{place.size}")
    lines = ["|".join(map(str, ("gi", minor, cap, cap, *fields)))]
    for one in cut.computes:
        name, uuid = device_name(profile, one.slices), uuid_of(gpu, profile, cut, one)
        caps = capabilities(minor, cut.gi, one.ci)
        lines.append("|".join(map(str, ("ci", minor, *caps, name, cut.gi, one.ci, uuid))))
    return lines


def _remove_empty(directory: Path, end: Path) -> None:
    while directory != end:
        try:
            directory.rmdir()
        except OSError:
            return  # another instance is in it
        directory = directory.parent
