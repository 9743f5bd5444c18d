"""The driver's memory limits by cgroup on a real GPU, on a cgroup of the test's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.node.cgroups.tree import Cgroups, cgroup_root
from dra_driver.node.memory.support import (
    MIN_DRIVER_MAJOR,
    MemoryLimitProbe,
    apply_limit,
    get_memory_limit,
    set_memory_limit,
)
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.nvml.api import FUNCTION_NOT_FOUND, nvml_error_code
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.library import load_nvml

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]
GIB = 1024**3
SECONDS = 120.0
# What a process sees as all there is; then whether it gets more, and whether it gets less.
LOOK = """
import ctypes, json, sys
from tests.gpu.cuda_program import Cuda
cuda, most = Cuda(sys.argv[1]), int(sys.argv[2])
device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
cuda("cuInit", ctypes.c_uint(0))
cuda("cuDeviceGet", ctypes.byref(device), 0)
cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
cuda("cuCtxSetCurrent", context)
cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
codes = [
    ctypes.CDLL(sys.argv[1]).cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
    for size in (most + (1 << 30), most // 2)
]
json.dump([total.value, *codes], sys.stdout)
"""
OUT_OF_MEMORY = 2


@pytest.fixture
def gpu(node):
    return node.inventory().gpus[-1]


@pytest.fixture
def nvml(driver):
    opened = Nvml(lambda: load_nvml(driver.nvml_library()), GeometryCache)
    yield opened
    opened.stop()


@pytest.fixture
def cgroup():
    """An empty one, below the root of cgroup v2."""
    cgroups = Cgroups(cgroup_root(Path("/")))
    if not cgroups.unified:
        pytest.skip(f"{cgroups.root} is cgroup v1")
    made = cgroups.root / f"dra-driver-gpu-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield made
    made.rmdir()


@pytest.fixture
def offered(nvml):
    """What the driver offers; the test is skipped where that is nothing."""
    support = MemoryLimitProbe(nvml, Cgroups(cgroup_root(Path("/")))).support()
    if support.backend is None:
        pytest.skip(f"the driver does not limit memory by cgroup here: {support.reason}")
    return support


def test_a_driver_says_what_it_offers_or_why_it_does_not(nvml, report):
    version = nvml.system().driver_version
    support = MemoryLimitProbe(nvml, Cgroups(cgroup_root(Path("/")))).support()
    report([f"driver {version}: {support.backend or support.reason}"])
    if version.major < MIN_DRIVER_MAJOR:
        assert support.reason == f"driver {version} is too old: {MIN_DRIVER_MAJOR} or newer does"
    assert bool(support.reason) == (support.backend is None)


def test_a_driver_before_615_has_no_such_function(nvml, gpu, tmp_path):
    if nvml.system().driver_version.major >= MIN_DRIVER_MAJOR:
        pytest.skip("this driver has it")
    with pytest.raises(NodeError) as refusal:
        set_memory_limit(nvml, gpu.uuid, tmp_path, GIB)
    assert nvml_error_code(refusal.value) == FUNCTION_NOT_FOUND


def test_a_limit_is_read_back_and_cleared(nvml, gpu, cgroup, offered):
    apply_limit(nvml, gpu.uuid, cgroup, 2 * GIB)
    apply_limit(nvml, gpu.uuid, cgroup, 3 * GIB)
    assert get_memory_limit(nvml, gpu.uuid, cgroup).used_bytes == 0
    apply_limit(nvml, gpu.uuid, cgroup, None)
    assert get_memory_limit(nvml, gpu.uuid, cgroup).hard_bytes is None


def test_what_is_no_cgroup_is_refused(nvml, gpu, cgroup, offered, report):
    answers = []
    for path in (cgroup.parent, cgroup / "gone", Path("/proc")):
        with pytest.raises(NodeError) as refusal:
            set_memory_limit(nvml, gpu.uuid, path, GIB)
        answers.append(f"{path}: {nvml_error_code(refusal.value)}")
    report(answers)


def test_a_process_sees_its_share_and_gets_no_more(driver, nvml, gpu, cgroup, offered, report):
    apply_limit(nvml, gpu.uuid, cgroup, 4 * GIB)
    try:
        libraries = {library.soname: library.host_path for library in driver.files().libraries}
        look = [sys.executable, "-c", LOOK, libraries["libcuda.so.1"], str(4 * GIB)]
        ran = subprocess.run(
            ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', cgroup, *look],
            cwd=REPOSITORY,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu.uuid)},
            capture_output=True,
            timeout=SECONDS,
            check=False,
            text=True,
        )
    finally:
        apply_limit(nvml, gpu.uuid, cgroup, None)
    if ran.returncode != 0:
        pytest.fail(f"CUDA does not work here: {ran.stderr}")
    report([f"with 4 GiB and {offered.backend}: [total, more, less] = {ran.stdout}"])
    total, more, less = json.loads(ran.stdout)
    assert total <= 4 * GIB
    assert (more, less) == (OUT_OF_MEMORY, 0)


def test_where_nothing_was_ever_set_nothing_is_limited(nvml, gpu, cgroup, offered):
    assert get_memory_limit(nvml, gpu.uuid, cgroup).hard_bytes is None
