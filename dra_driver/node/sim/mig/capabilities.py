"""The files of ``/proc/driver/nvidia`` that lead to the device nodes of MIG."""

from collections.abc import Iterator
from typing import Final

from dra_driver.node.sim.files import Tree, text
from dra_driver.node.sim.mig.minors import COMPUTE, CONFIG, INSTANCES, MONITOR, minor_of
from dra_driver.node.sim.mig.state import BoardState
from dra_driver.node.sim.node import Node, SimulatedGpu

CAPABILITIES: Final = "proc/driver/nvidia/capabilities"
_ROOT, _ALL = 0o400, 0o444  # who may open the device node: what a driver was seen to say
_MINORS: Final = "proc/driver/nvidia-caps/mig-minors"


def of_driver(node: Node) -> Tree:
    """What is there as long as the driver is."""
    return {
        f"{CAPABILITIES}/mig/config": text(_access(CONFIG, _ROOT)),
        f"{CAPABILITIES}/mig/monitor": text(_access(MONITOR)),
        _MINORS: text("".join(f"{line}\n" for line in _lines(node))),
    }


def of_board(gpu: SimulatedGpu, state: BoardState) -> dict[str, str]:
    """What is there for the instances of a GPU, below its own directory."""
    minor = int(gpu.minor or 0)
    files = {}
    for cut in state.cuts:
        home = f"mig/gi{cut.gi}"
        files[f"{home}/access"] = _access(minor_of(minor, cut.gi))
        for one in cut.computes:
            files[f"{home}/ci{one.ci}/access"] = _access(minor_of(minor, cut.gi, one.ci))
    return files


def _access(minor: int, mode: int = _ALL) -> str:
    return f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"


def _lines(node: Node) -> Iterator[str]:
    yield f"config {CONFIG}"
    yield f"monitor {MONITOR}"
    for gpu in node.gpus:
        if gpu.listed and gpu.geometry:
            minor = int(gpu.minor or 0)
            for gi in range(INSTANCES):
                yield f"gpu{minor}/gi{gi}/access {minor_of(minor, gi)}"
                for ci in range(COMPUTE):
                    yield f"gpu{minor}/gi{gi}/ci{ci}/access {minor_of(minor, gi, ci)}"
