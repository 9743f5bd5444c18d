"""The driver's command line tools of a simulated host."""

import json
import sys
from importlib import resources
from pathlib import Path
from typing import Final

import pynvml

from dra_driver.node.nvml_values import architecture
from dra_driver.node.sim.files import File, Tree, text
from dra_driver.node.sim.mps.facts import FACTS
from dra_driver.node.sim.node import Node, SimulatedGpu, serial

SETTINGS: Final = "run/nvidia-simulated"  # <driver version>/<UUID>: the interval that was set
COMPUTE_MODE: Final = ".compute-mode"  # <driver version>/<UUID>.compute-mode
UVM_MAJOR: Final = 511  # the kernel gives nvidia-uvm a free one; /proc/devices says which
_SLICES_FROM: Final = (7, 0)  # NVIDIA's documents; a Tesla P4 (6.1) was seen to refuse
_MPS: Final = "nvidia-cuda-mps-control"
_PROTOCOL_3_FROM: Final = 615
_MOST_CLIENTS: Final = 48  # of a GPU
_MORE_CLIENTS: Final = 60
_MORE_CLIENTS_FROM: Final = (13, 1)  # of CUDA
_OTHERS: Final = (
    "nvidia-cuda-mps-server",
    "nvidia-debugdump",
    "nvidia-persistenced",
)


def tools(node: Node) -> Tree:
    """Scripts below ``usr/bin`` that know the node's GPUs."""
    tree: Tree = {f"usr/bin/{name}": _script("other") for name in _OTHERS}
    if node.mps == "missing":
        del tree["usr/bin/nvidia-cuda-mps-server"]
    else:
        tree |= _mps(node)
    tree["usr/bin/nvidia-smi"] = _script(
        "nvidia-smi",
        DRIVER_VERSION=node.driver_version,
        CUDA_VERSION=node.cuda_version,
        SETTINGS=SETTINGS,
        COMPUTE_MODE=COMPUTE_MODE,
        GPUS="\n".join(
            _line(gpu) for gpu in sorted(node.gpus, key=lambda gpu: gpu.bus_id) if gpu.listed
        ),
    )
    if node.nvidia_modprobe != "missing":
        tree["usr/bin/nvidia-modprobe"] = _script(
            "nvidia-modprobe",
            WORKS="yes" if node.nvidia_modprobe == "works" else "no",
            UVM_MAJOR=str(UVM_MAJOR),
        )
    return tree


def _mps(node: Node) -> Tree:
    newest = 3 if node.major_version >= _PROTOCOL_3_FROM and node.mps != "protocol-2" else 2
    cuda = tuple(map(int, node.cuda_version.split(".")))
    facts = {
        "settings": f"{SETTINGS}/{node.driver_version}",
        "max_clients": _MORE_CLIENTS if cuda >= _MORE_CLIENTS_FROM else _MOST_CLIENTS,
        "gpus": [_facts(place, gpu) for place, gpu in enumerate(_working(node))],
    }
    return {
        FACTS: text(json.dumps(facts, indent=1) + "\n"),
        f"usr/bin/{_MPS}": _script(
            _MPS,
            PROTOCOL=str(newest),
            BEHAVIOUR=node.mps,
            PYTHON=sys.executable,
            PYTHONPATH=str(Path(__file__).parents[3]),
        ),
    }


def _working(node: Node) -> list[SimulatedGpu]:
    """The GPUs on which something can compute, in the order of CUDA."""
    there = [gpu for gpu in node.gpus if gpu.listed and gpu.error(_MPS) is None]
    return sorted(there, key=lambda gpu: gpu.bus_id) if node.driver == "ready" else []


def _facts(place: int, gpu: SimulatedGpu) -> dict[str, object]:
    return {
        "index": place,
        "uuid": gpu.uuid,
        "minor": gpu.minor,
        "name": gpu.board.name,
        "bus_id": f"0000{gpu.bus_id.upper()}",
        "memory_bytes": gpu.board.memory_bytes,
        "capability": gpu.board.compute_capability,
        "multiprocessors": gpu.board.multiprocessors,
    }


def _script(name: str, **values: str) -> File:
    script = resources.files(__package__).joinpath("tools", name).read_text()
    for key, value in values.items():
        script = script.replace(f"@{key}@", value)
    return text(script, 0o755)


def settings(node: Node) -> frozenset[str]:
    """Where settings of the GPUs are kept that the loaded driver has now: with the driver, or with
    a GPU, its settings go."""
    if node.driver != "ready":
        return frozenset()
    return frozenset(
        f"{SETTINGS}/{node.driver_version}/{gpu.uuid}{kind}"
        for gpu in node.gpus
        if gpu.listed
        for kind in ("", COMPUTE_MODE)
    )


def _line(gpu: SimulatedGpu) -> str:
    mig = "[N/A]" if not gpu.board.mig else "Enabled" if gpu.mig else "Disabled"
    used = sum(process.memory_bytes or 0 for process in gpu.processes)
    return "|".join(
        (
            str(gpu.minor),
            f"0000{gpu.bus_id.upper()}",
            str(gpu.uuid),
            serial(gpu),
            str(gpu.board.memory_bytes >> 20),
            str(used >> 20),
            mig,
            "NVIDIA",
            architecture(gpu.board.architecture),
            "{}.{}".format(*gpu.board.compute_capability),
            _refusal(gpu),
            _said(gpu.error("nvmlDeviceSetComputeMode")),
            " ".join(f"{one.pid}:{(one.memory_bytes or 0) >> 20}" for one in gpu.processes),
            gpu.board.name,
        )
    )


def _refusal(gpu: SimulatedGpu) -> str:
    """The NVML error with which ``nvidia-smi compute-policy`` fails, its number and its words."""
    error = gpu.error("compute-policy")
    if error is None and gpu.board.compute_capability < _SLICES_FROM:
        error = pynvml.NVML_ERROR_NOT_SUPPORTED
    return _said(error)


def _said(error: int | None) -> str:
    return "" if error is None else f"{error}:{pynvml.NVMLError(error)}"
