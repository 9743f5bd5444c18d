"""What the driver offers is found by trying, seldom, and its reasons say what to change."""

import os
import time
from typing import Any

import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.node.cgroups.tree import Cgroups
from dra_driver.node.memory.support import (
    MemoryAccounting,
    MemoryLimitProbe,
    MemoryLimitSupport,
    apply_limit,
)
from tests.fakes.limits import GIB, LimitedNode
from tests.fakes.simulated import h100


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def looking(node, cgroups=None):
    clock = Clock()
    return MemoryLimitProbe(node.nvml, cgroups or node.cgroups, clock), clock


def offered(node, cgroups=None):
    return looking(node, cgroups)[0].support()


def counting(node, error=None):
    """The cgroups of a node, and the names of those that are made for a trial."""
    tries = []

    def make(path):
        tries.append(path.name)
        if error:
            raise error
        return node.tree.make(path)

    return Cgroups(node.tree.root, make, node.tree.remove), tries


DMEM = MemoryLimitSupport(MemoryAccounting.DMEM)
READ_ONLY = OSError(30, "Read-only file system")


@pytest.mark.parametrize("backend", list(MemoryAccounting))
@pytest.mark.parametrize("controllers", ["cpu dmem misc\n", "cpu misc\n"])
def test_who_counts_is_told_apart(tmp_path, backend, controllers):
    node = LimitedNode(tmp_path, backend.value)
    # With dmem files also where the driver was told not to use them.
    if backend is MemoryAccounting.MISC:
        (node.tree.root / "cgroup.subtree_control").write_text(controllers)
    assert offered(node) == MemoryLimitSupport(backend)
    assert [path.name for path in node.tree.root.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"driver_version": "580.95.05"}, "driver 580.95.5 is too old: 615 or newer does"),
        ({"driver": "no-library"}, "install the NVIDIA driver"),
        ({"memory_limits": "off"}, "remove RmMemacctMode=0 from the nvidia module's options"),
        ({"gpus": []}, "no GPU answers"),
    ],
)
def test_what_is_missing_is_said(tmp_path, fields, reason):
    support = offered(LimitedNode(tmp_path, **fields))
    assert support.backend is None
    assert reason in support.reason


def test_gpus_in_mig_mode_are_passed_over(tmp_path):
    node = LimitedNode(tmp_path)
    node.node.change(gpu=0, mig=True)
    assert offered(node) == DMEM

    (tmp_path / "all").mkdir()
    node = LimitedNode(tmp_path / "all", gpus=[h100("1b", mig=True)])
    assert "every GPU is in MIG mode" in offered(node).reason


def test_cgroup_v1_is_said_and_so_is_none_at_all(tmp_path):
    node = LimitedNode(tmp_path)
    (tmp_path / "v1/memory").mkdir(parents=True)
    for root, reason in ((tmp_path / "v1", "is cgroup v1: boot with"), (tmp_path / "x", "missing")):
        support = offered(node, Cgroups(root))
        assert (support.backend, reason in support.reason) == (None, True)


@pytest.mark.parametrize(
    ("file", "controllers", "reason"),
    [
        ("cgroup.controllers", "cpu memory\n", "neither the dmem nor the misc"),
        ("cgroup.subtree_control", "cpu misc\n", "add +dmem"),
    ],
)
def test_a_controller_that_is_missing_or_not_given_on_is_said(tmp_path, file, controllers, reason):
    node = LimitedNode(tmp_path)
    (node.tree.root / file).write_text(controllers)
    assert reason in offered(node).reason


def test_without_the_right_to_set_it_is_said(tmp_path):
    node = LimitedNode(tmp_path)
    node.is_root = False
    assert "run this as root" in offered(node).reason


def test_a_cgroup_file_system_that_cannot_be_written_is_said(tmp_path):
    node = LimitedNode(tmp_path)
    cgroups, _ = counting(node, READ_ONLY)
    reason = offered(node, cgroups).reason
    assert "Read-only file system; it has to be mounted writable" in reason


def test_each_process_tries_on_a_cgroup_of_its_own(tmp_path):
    node = LimitedNode(tmp_path)
    cgroups, tries = counting(node)
    assert offered(node, cgroups) == DMEM
    assert tries == [f"dra-driver-gpu-trial-{os.getpid()}"]


def test_a_trial_that_a_crash_left_is_removed_and_one_that_goes_on_is_not(tmp_path):
    node = LimitedNode(tmp_path)
    cgroup = node.tree.make("dra-driver-gpu-trial-1")
    goes_on = node.tree.make("dra-driver-gpu-trial-2")
    os.utime(cgroup, (0.0, time.time() - 61.0))
    assert offered(node) == DMEM
    assert not cgroup.exists()
    assert goes_on.exists()


@pytest.mark.parametrize("backend", list(MemoryAccounting))
def test_the_trial_goes_without_its_limit(tmp_path, backend):
    node = LimitedNode(tmp_path, backend.value)
    limits = []

    def remove(path):
        limits.append(node.limit(path))
        node.tree.remove(path)

    offered(node, Cgroups(node.tree.root, node.tree.make, remove))
    assert limits == [None]


REFUSALS: dict[str, dict[str, Any]] = {
    "its accounting is off": {"memory_limits": "off"},
    "every GPU is in MIG mode": {"gpus": [h100("1b", mig=True)]},
    "there is no GPU": {"gpus": []},
    "the cgroup file system is read-only": {},
    "it may not": {},
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_was_refused_is_tried_again_after_a_minute(tmp_path, refusal):
    node = LimitedNode(tmp_path, **REFUSALS[refusal])
    node.is_root = refusal != "it may not"
    read_only = refusal == "the cgroup file system is read-only"
    cgroups, tries = counting(node, READ_ONLY if read_only else None)
    node.nvml.system()
    probe, clock = looking(node, cgroups)
    assert probe.known() is None
    first, tried = probe.support(), len(tries)
    node.node.change(memory_limits="dmem", gpus=[h100("1b")])
    assert node.nvml.restart()
    node.is_root = True
    clock.now = 59.9
    assert probe.support() == first
    assert len(tries) == tried
    clock.now = 60.0
    probe.support()
    assert len(tries) == tried + 1


def test_it_is_tried_once_as_long_as_the_driver_is_the_same(tmp_path):
    node = LimitedNode(tmp_path)
    cgroups, tries = counting(node)
    probe, clock = looking(node, cgroups)
    for clock.now in (0.0, 60.0, 3600.0):
        assert probe.support().backend is probe.known() is MemoryAccounting.DMEM
    assert len(tries) == 1


def test_a_driver_that_is_not_ready_is_looked_at_again_soon(tmp_path):
    node = LimitedNode(tmp_path, driver="not-loaded")
    probe, clock = looking(node)
    assert probe.support().fault
    node.node.change(driver="ready")
    clock.now = 4.9
    assert probe.support().fault
    clock.now = 5.0
    assert probe.support() == DMEM


class LateNvml:
    """*nvml*, which does not answer in time while it is late."""

    def __init__(self, nvml):
        self.nvml = nvml
        self.late = False

    def system(self):
        if self.late:
            raise TimedOut("NVML did not answer")
        return self.nvml.system()

    def __getattr__(self, name):
        return getattr(self.nvml, name)


def test_a_driver_that_is_late_once_limits_as_before_and_no_more_when_it_is_late_again(tmp_path):
    node = LimitedNode(tmp_path)
    nvml: Any = LateNvml(node.nvml)
    clock = Clock()
    probe = MemoryLimitProbe(nvml, node.cgroups, clock)
    for now, late, limits in (
        (0.0, False, True),
        (60.0, True, True),
        (65.0, True, False),
        (70.0, False, True),
        (130.0, True, True),
    ):
        clock.now, nvml.late = now, late
        assert (probe.support() == DMEM, probe.support().fault) == (limits, not limits)


def test_a_driver_that_was_never_in_time_limits_nothing(tmp_path):
    node = LimitedNode(tmp_path)
    nvml: Any = LateNvml(node.nvml)
    nvml.late = True

    assert MemoryLimitProbe(nvml, node.cgroups, Clock()).support().fault


def test_another_driver_is_tried_anew(tmp_path):
    node = LimitedNode(tmp_path)
    probe, clock = looking(node)
    assert probe.support().backend is MemoryAccounting.DMEM
    node.node.change(driver_version="580.95.05")
    clock.now = 60.0
    assert "older" in probe.support().reason or "changed in use" in probe.support().reason
    clock.now = 120.0
    assert "too old" in probe.support().reason


def test_a_limit_that_the_driver_left_as_it_was_is_seen(tmp_path):
    node = LimitedNode(tmp_path)
    pod = node.pod("a")
    assert node.allocate(pod, 3 * GIB) is not None
    with pytest.raises(NodeError, match=rf"left it at all \({3 * GIB} bytes are in use\)"):
        apply_limit(node.nvml, node.gpus[0], pod, 2 * GIB)
