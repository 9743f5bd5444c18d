"""Instances outlive the process that created them, and the files of the host follow."""

import multiprocessing
import os
import stat
import subprocess
from ctypes import byref

import pynvml
import pytest

from dra_driver.sim.host.directory import SimulatedHost
from dra_driver.sim.live_node import LiveNode
from dra_driver.sim.mig.host_files import open_mig_states
from dra_driver.sim.mig.identifiers import capability_minors, minor_of
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.shells import SHELLS
from tests.fakes.simulated import Node, h100

A100 = {"product": "A100-40-SXM", "bus_id": "0000:43:00.0", "mig": True}
HOPPER, AMPERE = 0, 1
PROC = "proc/driver/nvidia/capabilities"


class Host(Node):
    """A node whose host keeps its instances."""

    def __init__(self, directory, **more):
        super().__init__(directory, {"gpus": [h100("1b"), dict(A100, **more)]})
        assert self.host
        self.again()

    def again(self):
        """As another process sees it."""
        self.functions = SimulatedNvml(self.live, mig=open_mig_states(self.root, lambda: True))
        self.functions.nvmlInit()

    def device(self, index):
        return self.functions.nvmlDeviceGetHandleByIndex(index)

    def create(self, index, profile, start, size, filled=True):
        place = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
        create = self.functions.nvmlDeviceCreateGpuInstanceWithPlacement
        made = create(self.device(index), profile, byref(place))
        gi = self.functions.nvmlGpuInstanceGetInfo(made).id
        if filled:
            self.allow(index, gi)
            slices = {0: 4, 5: 3, 9: 2, 14: 1, 19: 0}[profile]
            self.functions.nvmlGpuInstanceCreateComputeInstance(made, slices)
        return gi

    def allow(self, index, gi):
        """Make the device node of a GPU instance."""
        done = self.modprobe("-f", f"/{PROC}/gpu{index}/mig/gi{gi}/access")
        assert (done.returncode, done.stderr) == (0, "")

    def remove(self, index, gi):
        nvml = self.functions
        made = nvml.nvmlDeviceGetGpuInstanceById(self.device(index), gi)
        nvml.nvmlComputeInstanceDestroy(nvml.nvmlGpuInstanceGetComputeInstanceById(made, 0))
        nvml.nvmlGpuInstanceDestroy(made)

    def instances(self, index):
        """UUIDs of its MIG devices."""
        uuids = []
        for place in range(self.functions.nvmlDeviceGetMaxMigDeviceCount(self.device(index))):
            try:
                ask = self.functions.nvmlDeviceGetMigDeviceHandleByIndex
                uuids.append(self.functions.nvmlDeviceGetUUID(ask(self.device(index), place)))
            except pynvml.NVMLError_NotFound:
                continue
        return uuids

    def mode(self, index):
        return self.functions.nvmlDeviceGetMigMode(self.device(index))

    def capabilities(self):
        home = self.root / PROC
        return sorted(str(file.relative_to(home)) for file in home.rglob("*") if file.is_file())

    def smi(self, *arguments, shell=(), root=None):
        program = str((root or self.root) / "usr/bin/nvidia-smi")
        return subprocess.run(
            [*shell, program, *arguments], capture_output=True, text=True, env={}, timeout=30
        )

    def modprobe(self, *arguments):
        program = str(self.root / "usr/bin/nvidia-modprobe")
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=30)

    def reload(self):
        self.functions.nvmlShutdown()
        for driver in ("not-loaded", "ready"):
            self.change(driver=driver)
            self.live.current()
        self.functions.nvmlInit()


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def test_instances_outlive_the_process_that_created_them(host):
    host.create(AMPERE, 14, 2, 2)
    before = host.instances(AMPERE)
    host.again()
    assert host.instances(AMPERE) == before
    SimulatedHost(LiveNode(host.file), host.root)
    host.again()
    assert host.instances(AMPERE) == before


def test_of_two_processes_each_sees_at_once_what_the_other_created(host):
    second = SimulatedNvml(LiveNode(host.file), mig=open_mig_states(host.root, lambda: True))
    second.nvmlInit()
    gi = host.create(AMPERE, 14, 2, 2)
    device = second.nvmlDeviceGetHandleByIndex(AMPERE)
    second.nvmlDeviceGetGpuInstanceById(device, gi)
    host.remove(AMPERE, gi)
    with pytest.raises(pynvml.NVMLError_NotFound):
        second.nvmlDeviceGetGpuInstanceById(device, gi)


def _create_all(file, root):
    live = LiveNode(file)
    nvml = SimulatedNvml(live, mig=open_mig_states(root, lambda: True))
    nvml.nvmlInit()
    device, made = nvml.nvmlDeviceGetHandleByIndex(AMPERE), 0
    for _ in range(7):
        try:
            nvml.nvmlDeviceCreateGpuInstance(device, 19)
            made += 1
        except pynvml.NVMLError_InsufficientResources:
            break
    return made


def test_processes_that_create_at_the_same_time_never_get_the_same_place(host):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        made = pool.starmap(_create_all, [(host.file, host.root)] * 3)
    assert sum(made) == 7
    starts = {
        host.functions.nvmlGpuInstanceGetInfo(
            host.functions.nvmlDeviceGetGpuInstanceById(host.device(AMPERE), gi)
        ).placement.start
        for gi in range(7, 14)
    }
    assert starts == set(range(7))


def test_instances_go_with_the_driver_and_the_mode_only_since_hopper(host):
    host.functions.nvmlDeviceSetMigMode(host.device(HOPPER), 1)
    for index in (HOPPER, AMPERE):
        host.create(index, 19, 0, 1)
    host.reload()
    assert host.mode(HOPPER) == [0, 0]
    assert host.mode(AMPERE) == [1, 1]
    assert host.instances(AMPERE) == []
    assert host.capabilities() == ["mig/config", "mig/monitor"]


def test_a_mode_that_was_pending_comes_with_the_driver(host):
    host.change(gpu=AMPERE, mig_reset="impossible")
    host.functions.nvmlDeviceSetMigMode(host.device(AMPERE), 0)
    assert host.mode(AMPERE) == [1, 0]
    host.reload()
    assert host.mode(AMPERE) == [0, 0]


def test_a_board_that_needs_a_reset_works_again_after_a_reboot_in_its_new_mode(host):
    host.change(gpu=AMPERE, virtualization="passthrough")
    host.functions.nvmlDeviceSetMigMode(host.device(AMPERE), 0)
    host.again()
    with pytest.raises(pynvml.NVMLError_ResetRequired):
        host.functions.nvmlDeviceGetMemoryInfo(host.device(AMPERE))
    host.reload()
    assert host.mode(AMPERE) == [0, 0]
    assert host.functions.nvmlDeviceGetMemoryInfo(host.device(AMPERE)).total


def test_what_the_node_file_says_of_the_mode_later_counts_more_than_what_the_board_kept(host):
    host.functions.nvmlDeviceSetMigMode(host.device(AMPERE), 0)
    host.reload()
    assert host.mode(AMPERE) == [0, 0]
    host.change(gpu=AMPERE, mig=False)
    host.change(gpu=AMPERE, mig=True)
    assert host.mode(AMPERE) == [0, 0]  # nobody looked between
    host.change(gpu=AMPERE, mig=False)
    host.live.current()
    host.change(gpu=AMPERE, mig=True)
    assert host.mode(AMPERE) == [1, 1]


def test_capabilities_lead_to_device_nodes_that_nvidia_modprobe_makes(host):
    gi = host.create(AMPERE, 14, 2, 2)
    files = [f"gpu1/mig/gi{gi}/access", f"gpu1/mig/gi{gi}/ci0/access"]
    assert host.capabilities() == [*files, "mig/config", "mig/monitor"]
    numbers = capability_minors(1, gi, 0)
    for file, number in zip(files, numbers, strict=True):
        lines = (host.root / PROC / file).read_text().splitlines()
        assert lines == [f"DeviceFileMinor: {number}", "DeviceFileMode: 292", "DeviceFileModify: 1"]
    assert "DeviceFileMode: 256\n" in (host.root / PROC / "mig/config").read_text()
    listed = (host.root / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    assert f"gpu1/gi{gi}/ci0/access {numbers[1]}" in listed
    assert os.listdir(host.root / "dev/nvidia-caps") == [f"nvidia-cap{numbers[0]}"]
    done = host.modprobe("-f", f"/{PROC}/{files[0]}", f"-f={host.root}/{PROC}/{files[1]}")
    assert (done.returncode, done.stderr) == (0, "")
    nodes = [host.root / f"dev/nvidia-caps/nvidia-cap{number}" for number in numbers]
    assert all(stat.S_ISCHR(node.stat().st_mode) for node in nodes)
    assert " nvidia-caps\n" in (host.root / "proc/devices").read_text()

    host.remove(AMPERE, gi)
    assert host.capabilities() == ["mig/config", "mig/monitor"]
    done = host.modprobe("-f", f"/{PROC}/{files[0]}")
    assert (done.returncode, "is no capability" in done.stderr) == (1, True)


def test_a_broken_nvidia_modprobe_makes_no_capability_node(host):
    host.change(nvidia_modprobe="fails")
    host.live.current()
    assert host.modprobe("-f", f"/{PROC}/mig/monitor").returncode == 1
    assert not (host.root / "dev/nvidia-caps/nvidia-cap2").exists()


def test_capability_nodes_go_with_the_driver(host):
    assert host.modprobe("-f", f"/{PROC}/mig/monitor").returncode == 0
    assert os.listdir(host.root / "dev/nvidia-caps") == ["nvidia-cap2"]
    host.change(driver="not-loaded")
    host.live.current()
    assert not (host.root / "dev/nvidia-caps").exists()
    assert not (host.root / PROC / "mig").exists()


def test_root_needs_the_device_node_of_an_instance_and_not_that_of_mig_config(
    host,
):
    gi = host.create(AMPERE, 14, 2, 2, filled=False)
    assert not (host.root / "dev/nvidia-caps/nvidia-cap1").exists()
    instance = host.functions.nvmlDeviceGetGpuInstanceById(host.device(AMPERE), gi)
    with pytest.raises(pynvml.NVMLError_NoPermission):
        host.functions.nvmlGpuInstanceCreateComputeInstance(instance, 1)
    assert host.instances(AMPERE) == []
    host.allow(AMPERE, gi)
    host.functions.nvmlGpuInstanceCreateComputeInstance(instance, 1)
    assert len(host.instances(AMPERE)) == 1
    host.remove(AMPERE, gi)
    assert host.instances(AMPERE) == []


def test_no_two_capabilities_have_the_same_number():
    numbers = [
        minor_of(gpu, gi, ci) for gpu in (0, 1, 15) for gi in range(15) for ci in (None, *range(8))
    ]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) == 3


@pytest.mark.parametrize("shell", SHELLS)
def test_nvidia_smi_lists_mig_devices_below_their_gpu(host, shell):
    host.create(AMPERE, 9, 4, 4)
    host.create(AMPERE, 19, 0, 1)
    large, small = host.instances(AMPERE)
    done = host.smi("-L", shell=shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2:] == [
        f"  MIG 3g.20gb     Device  0: (UUID: {large})",
        f"  MIG 1g.5gb      Device  1: (UUID: {small})",
    ]


@pytest.mark.parametrize("shell", SHELLS)
def test_nvidia_smi_lists_gpu_instances_with_and_without_compute_instances(host, shell):
    host.create(AMPERE, 9, 4, 4)
    host.create(AMPERE, 19, 0, 1, filled=False)
    done = host.smi("mig", "-lgi", shell=shell)
    rows = [line.strip("| ").split() for line in done.stdout.splitlines() if " MIG " in line]
    assert rows == [
        ["1", "MIG", "3g.20gb", "9", "1", "4:4"],
        ["1", "MIG", "1g.5gb", "19", "7", "0:1"],
    ]
    assert len({len(line) for line in done.stdout.splitlines()}) == 1


def test_nvidia_smi_says_why_there_are_no_instances(host):
    assert host.smi("mig", "-lgi").stdout == "No GPU instances found: Not Found\n"
    assert host.smi("mig", "-lgi", "-i", "0").stdout == "No MIG-enabled devices found.\n"
    for arguments in ([], ["-lgip"], ["-lgi", "-i"]):
        assert host.smi("mig", *arguments).returncode == 2


def test_nvidia_smi_shows_the_mode_and_what_is_pending(host):
    host.change(gpu=AMPERE, mig_reset="impossible")
    host.functions.nvmlDeviceSetMigMode(host.device(AMPERE), 0)
    host.functions.nvmlDeviceSetMigMode(host.device(HOPPER), 1)
    done = host.smi("--query-gpu=mig.mode.current,mig.mode.pending", "--format=csv,noheader")
    assert done.stdout.splitlines() == ["Enabled, Enabled", "Enabled, Disabled"]
    assert "Enabled" in host.smi().stdout


def test_in_a_container_nvidia_smi_lists_the_instances_whose_device_nodes_are_there(host, tmp_path):
    first, second = host.create(AMPERE, 19, 0, 1), host.create(AMPERE, 19, 1, 1)
    inside = tmp_path / "container"
    (inside / "usr/bin").mkdir(parents=True)
    (inside / "dev/nvidia-caps").mkdir(parents=True)
    os.link(host.root / "usr/bin/nvidia-smi", inside / "usr/bin/nvidia-smi")
    caps = [f"nvidia-caps/nvidia-cap{number}" for number in capability_minors(1, second, 0)]
    for name in ("nvidiactl", "nvidia1", *caps):
        (inside / "dev" / name).touch()
    uuid = host.instances(AMPERE)[1]
    host.create(AMPERE, 19, 2, 1)  # later: what was mounted stays what it was
    lines = host.smi("-L", root=inside).stdout.splitlines()
    assert lines[1:] == [f"  MIG 1g.5gb      Device  0: (UUID: {uuid})"]
    assert first != second


def test_files_of_instances_are_there_again_when_the_host_is_made_anew(tmp_path):
    host = Host(tmp_path, instances=[{"profile": "3g.20gb", "start": 0}])
    assert host.capabilities()[:2] == ["gpu1/mig/gi1/access", "gpu1/mig/gi1/ci0/access"]
    host.change(gpu=HOPPER, numa_node=1)
    host.live.current()
    assert "MIG 3g.20gb" in host.smi("-L").stdout
    host.change(gpu=AMPERE, present=False)
    host.live.current()
    assert host.capabilities() == ["mig/config", "mig/monitor"]
    assert "MIG 3g.20gb" not in host.smi("-L").stdout


def test_what_a_crash_left_undone_is_done_by_the_next_process(host):
    gi = host.create(AMPERE, 14, 2, 2)
    (host.root / PROC / f"gpu1/mig/gi{gi}/access").unlink()
    smi = host.root / "usr/bin/nvidia-smi"
    smi.write_text(smi.read_text().replace("MIG 2g.10gb", "MIG 1g.5gb"))
    host.again()
    assert f"gpu1/mig/gi{gi}/access" in host.capabilities()
    assert "MIG 2g.10gb" in host.smi("-L").stdout


def test_while_nothing_changes_nothing_is_written(host):
    host.create(AMPERE, 14, 2, 2)
    before = {file: file.stat().st_ino for file in host.root.rglob("*")}
    host.again()
    assert host.mode(AMPERE) == [1, 1]
    SimulatedHost(LiveNode(host.file), host.root)
    assert {file: file.stat().st_ino for file in host.root.rglob("*")} == before
