"""The driver's command line tools of a simulated host."""

import json
import sys
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

import pynvml

from dra_driver.base.frozen import frozen
from dra_driver.node.nvml.values import architecture
from dra_driver.sim.host.files import FileTree, SimulatedFile, text_file
from dra_driver.sim.mps.host_snapshot import FACTS_FILE
from dra_driver.sim.node_spec import SimulatedGpu, SimulatedNode, serial

SETTINGS_DIRECTORY: Final = (
    "run/nvidia-simulated"  # <driver version>/<UUID>: the interval that was set
)
COMPUTE_MODE_SUFFIX: Final = ".compute-mode"  # <driver version>/<UUID>.compute-mode
MIG_STATE_SUFFIX: Final = ".mig"  # <driver version>/<UUID>.mig: mode and instances
RESET_SUFFIX: Final = ".reset"  # <driver version>/<UUID>.reset: when it was reset
MIG_MODE_FILE: Final = "inforom/{}.mig-mode"  # of a board that keeps its mode without a driver
CAPS_MAJOR: Final = 510  # of nvidia-caps and nvidia-uvm: the kernel gives them free ones, and
UVM_MAJOR: Final = 511  # /proc/devices says which
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
_PYTHON: Final = {
    "PYTHON": sys.executable,
    "PYTHONPATH": str(Path(__file__).parents[3]),
    "PYTHONOPTIMIZE": str(sys.flags.optimize),  # an image has bytecode of one level only
}

NVIDIA_SMI: Final = "usr/bin/nvidia-smi"


@frozen
class SmiMigLines:
    """What nvidia-smi says of MIG for one GPU."""

    on: bool
    pending: bool
    lines: tuple[str, ...]  # of each instance, as the script reads them


def driver_tools(node: SimulatedNode, mig: Mapping[str, SmiMigLines]) -> FileTree:
    """Scripts below ``usr/bin`` that know the node's GPUs. *mig*: by UUID."""
    tree: FileTree = {f"usr/bin/{name}": _script("other") for name in _OTHERS}
    if node.mps == "missing":
        del tree["usr/bin/nvidia-cuda-mps-server"]
    else:
        tree |= _mps(node)
    tree[NVIDIA_SMI] = text_file(nvidia_smi(node, mig), 0o755)
    if node.nvidia_modprobe != "missing":
        tree["usr/bin/nvidia-modprobe"] = _script(
            "nvidia-modprobe",
            WORKS="yes" if node.nvidia_modprobe == "works" else "no",
            UVM_MAJOR=str(UVM_MAJOR),
            CAPS_MAJOR=str(CAPS_MAJOR),
        )
    return tree


def nvidia_smi(node: SimulatedNode, mig: Mapping[str, SmiMigLines]) -> str:
    """The script. It holds what it says, and so it says in a container what was so when that was
    made: what nvidia-smi there is given besides."""
    gpus = [gpu for gpu in sorted(node.gpus, key=lambda gpu: gpu.bus_id) if gpu.listed]
    return _filled(
        "nvidia-smi",
        DRIVER_VERSION=node.driver_version,
        CUDA_VERSION=node.cuda_version,
        SETTINGS=SETTINGS_DIRECTORY,
        COMPUTE_MODE=COMPUTE_MODE_SUFFIX,
        NODE_FILE=node.file,
        **_PYTHON,
        GPUS="\n".join(_line(gpu, mig.get(str(gpu.uuid))) for gpu in gpus),
        MIG="\n".join(
            line for gpu in gpus if str(gpu.uuid) in mig for line in mig[str(gpu.uuid)].lines
        ),
    )


def _mps(node: SimulatedNode) -> FileTree:
    newest = 3 if node.major_version >= _PROTOCOL_3_FROM and node.mps != "protocol-2" else 2
    cuda = tuple(map(int, node.cuda_version.split(".")))
    snapshot = {
        "settings": f"{SETTINGS_DIRECTORY}/{node.driver_version}",
        "max_clients": _MORE_CLIENTS if cuda >= _MORE_CLIENTS_FROM else _MOST_CLIENTS,
        "gpus": [_facts(place, gpu) for place, gpu in enumerate(_working(node))],
    }
    return {
        FACTS_FILE: text_file(json.dumps(snapshot, indent=1) + "\n"),
        f"usr/bin/{_MPS}": _script(
            _MPS,
            PROTOCOL=str(newest),
            BEHAVIOUR=node.mps,
            **_PYTHON,
        ),
    }


def _working(node: SimulatedNode) -> list[SimulatedGpu]:
    """The GPUs on which something can compute, in the order of CUDA."""
    gpus = [gpu for gpu in node.gpus if gpu.listed and gpu.error(_MPS) is None]
    return sorted(gpus, key=lambda gpu: gpu.bus_id) if node.driver == "ready" else []


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
        "mig": _mig_facts(gpu),
    }


def _mig_facts(gpu: SimulatedGpu) -> list[dict[str, object]]:
    """What an instance of each profile has; the daemon learns which one it is by its UUID."""
    board = gpu.geometry
    if board is None:
        return []
    return [
        {
            "number": profile.number,
            "name": f"MIG {profile.name}",
            "memory_bytes": profile.memory_bytes,
            "multiprocessors": profile.engines.multiprocessors,
            "part": [profile.slices, board.slices],
        }
        for profile in board.profiles
    ]


def _script(name: str, **values: str) -> SimulatedFile:
    return text_file(_filled(name, **values), 0o755)


def _filled(name: str, **values: str) -> str:
    script = _template(name)
    for key, value in values.items():
        script = script.replace(f"@{key}@", value)
    return script


@cache
def _template(name: str) -> str:
    return resources.files(__package__).joinpath("tools", name).read_text()


def current_settings(node: SimulatedNode) -> frozenset[str]:
    """Where settings of the GPUs are kept that the loaded driver has now: with the driver, or with
    a GPU, its settings go, besides what the board itself keeps."""
    own = frozenset(f"{SETTINGS_DIRECTORY}/{MIG_MODE_FILE.format(gpu.uuid)}" for gpu in node.gpus)
    if node.driver != "ready":
        return own
    return own | frozenset(
        f"{SETTINGS_DIRECTORY}/{node.driver_version}/{gpu.uuid}{kind}"
        for gpu in node.gpus
        if gpu.listed
        for kind in ("", COMPUTE_MODE_SUFFIX, MIG_STATE_SUFFIX, RESET_SUFFIX)
    )


def _line(gpu: SimulatedGpu, mig: SmiMigLines | None) -> str:
    mode, pending = (mig.on, mig.pending) if mig else (gpu.mig, gpu.mig)
    used = sum(process.memory_bytes or 0 for process in gpu.processes)
    return "|".join(
        (
            str(gpu.minor),
            f"0000{gpu.bus_id.upper()}",
            str(gpu.uuid),
            serial(gpu),
            str(gpu.board.memory_bytes >> 20),
            str(used >> 20),
            _mode(gpu, mode),
            _mode(gpu, pending),
            "NVIDIA",
            architecture(gpu.board.architecture),
            "{}.{}".format(*gpu.board.compute_capability),
            _refusal(gpu),
            _nvml_message(gpu.error("nvmlDeviceSetComputeMode")),
            " ".join(
                f"{process.pid}:{(process.memory_bytes or 0) >> 20}" for process in gpu.processes
            ),
            gpu.board.name,
        )
    )


def _mode(gpu: SimulatedGpu, on: bool) -> str:
    return "[N/A]" if not gpu.board.mig else "Enabled" if on else "Disabled"


def _refusal(gpu: SimulatedGpu) -> str:
    """The NVML error with which ``nvidia-smi compute-policy`` fails, its number and its words."""
    error = gpu.error("compute-policy")
    if error is None and gpu.board.compute_capability < _SLICES_FROM:
        error = pynvml.NVML_ERROR_NOT_SUPPORTED
    return _nvml_message(error)


def _nvml_message(error: int | None) -> str:
    return "" if error is None else f"{error}:{pynvml.NVMLError(error)}"
