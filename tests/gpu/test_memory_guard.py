"""The memory guard on a real GPU: of three CUDA processes it ends the outlier, and only it."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.model.gpus import DeviceName
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimMemoryLimit, ClaimRecord, Holding
from dra_driver.node.cgroups.containers import NoContainer
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.library import load_nvml
from dra_driver.node.nvml.processes import gpu_processes
from dra_driver.plugin.memory.guard import MemoryEnforcer, MemoryGuardDependencies
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.process_owners import ProcessOwners
from tests.builders import ref
from tests.fakes.processes import Proc

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]
GIB = 1024**3
GRACE_SECONDS = 2.0
A, B = ref("a"), ref("b")
WEB = Pod("web", PodUid("5b6ffb0e-5d6a-4a3b-9e0b-9c1e8d7a0001"))
DB = Pod("db", PodUid("5b6ffb0e-5d6a-4a3b-9e0b-9c1e8d7a0002"))
CONTAINERS = {WEB: "c0ffee" + 58 * "0", DB: "decaf" + 59 * "0"}


class Told:
    def __init__(self):
        self.events = []

    def emit(self, event):
        self.events.append(event)


@pytest.fixture
def gpu(node):
    return node.inventory().gpus[-1]


@pytest.fixture
def nvml(driver):
    opened = Nvml(lambda: load_nvml(driver.nvml_library()), GeometryCache)
    yield opened
    opened.stop()


@pytest.fixture
def start(driver, gpu, tmp_path):
    """Starts a process in a pod that takes so much of the GPU's memory, beside its context."""
    libraries = {library.soname: library.host_path for library in driver.files().libraries}
    proc = Proc(tmp_path / "proc")
    started = []

    def run(pod, gib):
        size, library = str(int(gib * GIB)), libraries["libcuda.so.1"]
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.memory_holder", size, library],
            cwd=REPOSITORY,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu.uuid)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(child)
        output = child.stdout
        assert output is not None
        if output.readline() != b"ready\n":
            pytest.fail(f"CUDA does not work here: {child.communicate(timeout=30)[1].decode()}")
        proc.put(child.pid, pod.uid, CONTAINERS[pod])
        return child

    yield run
    for child in started:
        child.kill()
        child.communicate()


def holding(claim, gpu, gib):
    limit = ClaimMemoryLimit(gib * GIB, GuardRules(GuardPolicy.KILL, GRACE_SECONDS))
    return Holding(claim, DeviceName(str(gpu.name)), gpu=gpu.uuid, limit=limit)


def uses(nvml, gpu, *children):
    """What NVML says that each of them uses."""
    used = {process.pid: process.memory_bytes for process in gpu_processes(nvml, gpu.uuid)}
    if not used.keys() >= {child.pid for child in children}:
        pytest.skip(f"NVML sees other processes here than we do (another PID namespace): {used}")
    sizes = [used[child.pid] for child in children]
    if None in sizes:
        pytest.skip("NVML does not tell here how much memory each process uses")
    return sizes


def test_the_outlier_is_ended_and_only_it(nvml, gpu, start, tmp_path, report):
    small, outlier, neighbour = start(WEB, 0.25), start(WEB, 4), start(DB, 4)
    sizes = uses(nvml, gpu, small, outlier, neighbour)
    records = [
        ClaimRecord(A, (holding(A, gpu, 3),), pods=(WEB,)),  # small and outlier share it
        ClaimRecord(B, (holding(B, gpu, 8),), pods=(DB,)),
    ]
    recorder: Any = Told()
    processes = ContainerProcesses(tmp_path / "proc")
    owners = ProcessOwners(
        lambda uuid: gpu_processes(nvml, uuid), processes, lambda id_: NoContainer.NOWHERE
    )
    guard = MemoryEnforcer(
        lambda: records,
        MemoryGuardDependencies(owners, processes, recorder, Metrics()),
    )

    began = time.monotonic()
    while outlier.poll() is None and time.monotonic() - began < 60:
        guard.check()
        time.sleep(0.25)
    ended = time.monotonic() - began
    for _ in range(8):  # long enough for a guard that goes on to end somebody else
        guard.check()
        time.sleep(0.5)

    assert outlier.poll() is not None
    assert ended >= GRACE_SECONDS
    assert (small.poll(), neighbour.poll()) == (None, None)
    assert [(event.regarding.name, event.reason) for event in recorder.events] == [
        ("web", "GPUMemoryAboveShare"),
        ("web", "GPUMemoryProcessEnded"),
    ]
    report([f"processes of {[f'{size / GIB:.2f} GiB' for size in sizes]}; ended in {ended:.1f} s"])
