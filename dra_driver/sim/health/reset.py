"""What ``nvidia-smi --gpu-reset`` does to GPUs of a simulated host.

Seen of the real one: that it refuses a GPU that somebody has open, and the words of NVML's error.
NVIDIA's documents: a reset ends MIG instances, brings a MIG mode that was pending, and resets the
volatile counters. Assumed: the other words, and that the exit code is the number of NVML's error.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pynvml

from dra_driver.base.errors import SettingsError
from dra_driver.sim.health.clients import alone_on
from dra_driver.sim.health.resets import GpuResets
from dra_driver.sim.host.tools import COMPUTE_MODE_SUFFIX, SETTINGS_DIRECTORY
from dra_driver.sim.mig.host_files import open_mig_states
from dra_driver.sim.mps.processes import ServerProcesses
from dra_driver.sim.node_spec import SimulatedGpu, SimulatedNode, read_node

_WORDS: Final[Mapping[int, str]] = {  # nvmlErrorString's, which pynvml asks of the library
    pynvml.NVML_ERROR_NOT_SUPPORTED: "Not Supported",
    pynvml.NVML_ERROR_TIMEOUT: "Timeout",
    pynvml.NVML_ERROR_GPU_IS_LOST: "GPU is lost",
    pynvml.NVML_ERROR_IN_USE: "In use by another client",
}


def main(arguments: Sequence[str]) -> int:
    """*arguments*: the host, the node file, and the UUIDs of the GPUs."""
    host, file, *uuids = arguments
    try:
        node = read_node(Path(file))
    except SettingsError as error:
        print(error)  # noqa: T201 - a command prints its answer
        return int(pynvml.NVML_ERROR_UNKNOWN)
    results = {
        f"0000{gpu.bus_id.upper()}": _reset(Path(host), node, gpu)
        for gpu in node.gpus
        if gpu.uuid in uuids and gpu.listed
    }
    for line in _report(results):
        print(line)  # noqa: T201
    return next((error for error in results.values() if error), 0)


def reset_gpu(host: Path, node: SimulatedNode, gpu: SimulatedGpu) -> None:
    """Reset *gpu* on the host in *host*. The caller sees to it that nobody uses it."""
    if gpu.geometry is not None:
        open_mig_states(host, lambda: True).change(
            node,
            gpu,
            lambda state: replace(state, on=state.pending, instances=(), needs_reset=False),
        )
    for suffix in ("", COMPUTE_MODE_SUFFIX):  # the interval of time slices has none
        settings = host / SETTINGS_DIRECTORY / node.driver_version / f"{gpu.uuid}{suffix}"
        settings.unlink(missing_ok=True)
    GpuResets(host).record(node, gpu)


def _reset(host: Path, node: SimulatedNode, gpu: SimulatedGpu) -> int:
    """NVML's error, or 0."""
    if gpu.virtualization != "none" or gpu.mig_reset == "impossible":
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED)  # its machine has no means for it
    if (error := gpu.error("gpu-reset")) is not None:
        return error
    with alone_on(host, str(gpu.uuid)) as alone:
        if not alone or gpu.processes or ServerProcesses(host).are_on_board(str(gpu.uuid)):
            return int(pynvml.NVML_ERROR_IN_USE)
        reset_gpu(host, node, gpu)
    return 0


def _report(results: dict[str, int]) -> Sequence[str]:
    lines = [f"GPU {bus_id} was successfully reset." for bus_id in results if not results[bus_id]]
    if not any(results.values()):
        return [*lines, "All done."]
    lines.append("The following GPUs could not be reset:")
    lines += [f"  GPU {bus_id}: {_WORDS.get(e, e)}" for bus_id, e in results.items() if e]
    if used := [*results.values()].count(pynvml.NVML_ERROR_IN_USE):
        devices = "1 device is" if used == 1 else f"{used} devices are"
        lines += ["", f"{devices} currently being used by one or more other processes."]
    return lines


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
