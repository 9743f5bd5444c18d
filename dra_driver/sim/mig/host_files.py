"""The files of a simulated host that follow its MIG instances, for nvidia-smi and device nodes.

Those below ``/proc/driver/nvidia`` lead to the device nodes.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from dra_driver.base.frozen import frozen
from dra_driver.sim.host.files import FileTree, text_file
from dra_driver.sim.host.tools import NVIDIA_SMI, SmiMigLines, nvidia_smi
from dra_driver.sim.mig.devices import uuid_of
from dra_driver.sim.mig.identifiers import (
    COMPUTE_INSTANCES_PER_GPU_INSTANCE,
    CONFIG_MINOR,
    GPU_INSTANCES_PER_GPU,
    MONITOR_MINOR,
    capability_minors,
    minor_of,
)
from dra_driver.sim.mig.nvml_structures import device_name
from dra_driver.sim.mig.state import BoardState, GpuInstanceState, MigStateStore, put_file
from dra_driver.sim.node_spec import SimulatedGpu, SimulatedNode

CAPABILITIES: Final = "proc/driver/nvidia/capabilities"
_ROOT, _ALL = 0o400, 0o444  # who may open the device node: what a driver was seen to say
_MINORS: Final = "proc/driver/nvidia-caps/mig-minors"


def driver_capability_files(node: SimulatedNode) -> FileTree:
    """What is there as long as the driver is."""
    return {
        f"{CAPABILITIES}/mig/config": text_file(_access(CONFIG_MINOR, _ROOT)),
        f"{CAPABILITIES}/mig/monitor": text_file(_access(MONITOR_MINOR)),
        _MINORS: text_file("".join(f"{line}\n" for line in _capability_lines(node))),
    }


def board_capability_files(gpu: SimulatedGpu, state: BoardState) -> dict[str, str]:
    """What is there for the instances of a GPU, below its own directory."""
    minor = int(gpu.minor or 0)
    files = {}
    for instance in state.instances:
        home = f"mig/gi{instance.gi}"
        files[f"{home}/access"] = _access(minor_of(minor, instance.gi))
        for compute in instance.computes:
            files[f"{home}/ci{compute.ci}/access"] = _access(
                minor_of(minor, instance.gi, compute.ci)
            )
    return files


def _access(minor: int, mode: int = _ALL) -> str:
    return f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"


def _capability_lines(node: SimulatedNode) -> Iterator[str]:
    yield f"config {CONFIG_MINOR}"
    yield f"monitor {MONITOR_MINOR}"
    for gpu in node.gpus:
        if gpu.listed and gpu.geometry:
            minor = int(gpu.minor or 0)
            for gi in range(GPU_INSTANCES_PER_GPU):
                yield f"gpu{minor}/gi{gi}/access {minor_of(minor, gi)}"
                for ci in range(COMPUTE_INSTANCES_PER_GPU_INSTANCE):
                    yield f"gpu{minor}/gi{gi}/ci{ci}/access {minor_of(minor, gi, ci)}"


@frozen
class MigHostFiles:
    """Of the host in *host*: the capabilities of instances, and nvidia-smi, which lists them."""

    host: Path

    def follow(self, node: SimulatedNode, gpu: SimulatedGpu, state: BoardState | None) -> None:
        """*state*: of *gpu* now; None: it is gone, or the driver is."""
        home = self.host / CAPABILITIES / f"gpu{gpu.minor}"
        expected = board_capability_files(gpu, state) if state else {}
        if home.is_dir():
            for file in [*home.rglob("access")]:
                if str(file.relative_to(home)) not in expected:
                    # Not with its directories at once: who reads meanwhile finds all or nothing.
                    file.unlink(missing_ok=True)
                    _remove_empty(file.parent, home)
        for path, content in expected.items():
            if not (home / path).exists():
                put_file(home / path, content)
        if state is None:
            shutil.rmtree(home, ignore_errors=True)
        self._list(node)

    def _list(self, node: SimulatedNode) -> None:
        script = self.host / NVIDIA_SMI
        if script.is_file():
            content = nvidia_smi(node, mig_lines(self.host, node))
            if script.read_text() != content:
                put_file(script, content, 0o755)


def open_mig_states(host: Path, is_root: Callable[[], bool] | None = None) -> MigStateStore:
    """The partitions on the simulated host in *host*, with the files that follow it."""
    states = MigStateStore(host, followed=MigHostFiles(host).follow)
    if is_root is not None:
        states.is_root = is_root
    return states


def mig_lines(host: Path, node: SimulatedNode) -> Mapping[str, SmiMigLines]:
    """What nvidia-smi says of MIG, by UUID of the GPU, from what is kept in *host*."""
    states = MigStateStore(host)
    lines_by_gpu = {}
    for gpu in node.gpus:
        if gpu.geometry is None or (state := states.saved(node, gpu)) is None:
            continue
        lines = [line for instance in state.instances for line in _lines(gpu, instance)]
        lines_by_gpu[str(gpu.uuid)] = SmiMigLines(state.on, state.pending, tuple(lines))
    return lines_by_gpu


def _lines(gpu: SimulatedGpu, instance: GpuInstanceState) -> list[str]:
    board = gpu.geometry
    assert board is not None
    minor, partition = int(gpu.minor or 0), instance.partition(board)
    profile, place = partition.profile, partition.placement
    cap = minor_of(minor, instance.gi)
    fields = (f"MIG {profile.name}", profile.id, instance.gi, f"{place.start}:{place.size}")
    lines = ["|".join(map(str, ("gi", minor, cap, cap, *fields)))]
    for compute in instance.computes:
        name, uuid = device_name(profile, compute.slices), uuid_of(gpu, profile, instance, compute)
        caps = capability_minors(minor, instance.gi, compute.ci)
        lines.append("|".join(map(str, ("ci", minor, *caps, name, instance.gi, compute.ci, uuid))))
    return lines


def _remove_empty(directory: Path, end: Path) -> None:
    while directory != end:
        try:
            directory.rmdir()
        except OSError:
            return  # another instance is in it
        directory = directory.parent
