"""The simulated driver refuses what a driver with memory limits refuses."""

import errno

import pynvml
import pytest

from dra_driver.node.nvml.api import FUNCTION_NOT_FOUND, NO_PERMISSION, NOT_FOUND, NOT_SUPPORTED
from tests.fakes.limits import GIB, LimitedNode

MAX = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
INVALID = pynvml.NVML_ERROR_INVALID_ARGUMENT


class Raw(LimitedNode):
    """NVML's own two functions, on the first GPU."""

    def __init__(self, directory, backend, **fields):
        super().__init__(directory, backend, **fields)
        self.functions.nvmlInit()
        self.a = self.tree.make("a")  # a cgroup

    def set(self, cgroup, hard, soft=0, gpu=0):
        handle = self.functions.nvmlDeviceGetHandleByIndex(gpu)
        limits = pynvml.c_nvmlSetMemoryLimits_v1_t(str(cgroup).encode(), soft, hard)
        self.functions.nvmlDeviceSetMemoryLimits_v1(handle, limits)

    def get(self, cgroup, gpu=0):
        """Soft, hard, used."""
        handle = self.functions.nvmlDeviceGetHandleByIndex(gpu)
        limits = pynvml.c_nvmlGetMemoryLimits_v1_t(str(cgroup).encode())
        self.functions.nvmlDeviceGetMemoryLimits_v1(handle, limits)
        return limits.softLimit, limits.hardLimit, limits.currentUsed


@pytest.fixture(params=["dmem", "misc"])
def either(tmp_path, request):
    return Raw(tmp_path, request.param)


@pytest.fixture
def dmem(tmp_path):
    return Raw(tmp_path, "dmem")


@pytest.fixture
def misc(tmp_path):
    return Raw(tmp_path, "misc")


def refused(call, *args, **kwargs):
    with pytest.raises(pynvml.NVMLError) as refusal:
        call(*args, **kwargs)
    return refusal.value.value


def test_the_codes_are_those_of_nvml():
    assert NOT_SUPPORTED == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert NO_PERMISSION == pynvml.NVML_ERROR_NO_PERMISSION
    assert NOT_FOUND == pynvml.NVML_ERROR_NOT_FOUND
    assert FUNCTION_NOT_FOUND == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND


def test_a_limit_is_kept_for_each_gpu(either):
    either.set(either.a, 4 * GIB, soft=GIB)
    either.set(either.a, 8 * GIB, gpu=1)
    assert either.get(either.a) == (GIB, 4 * GIB, 0)
    assert either.get(either.a, gpu=1) == (0, 8 * GIB, 0)


def test_a_limit_is_the_sum_of_all_processes_and_goes_by_what_was_given_back(either):
    either.set(either.a, 4 * GIB)
    first = either.allocate(either.a, 3 * GIB)
    assert first is not None
    assert either.allocate(either.a, 2 * GIB) is None
    assert either.allocate(either.a, 2 * GIB, gpu=1) is not None
    either.driver.free(first)
    assert either.allocate(either.a, 4 * GIB) is not None
    assert either.get(either.a)[2] == 4 * GIB


def test_a_cleared_limit_limits_nothing(either):
    either.set(either.a, GIB)
    either.set(either.a, MAX)
    assert either.get(either.a) == (0, MAX, 0)
    assert either.allocate(either.a, 40 * GIB) is not None


def test_only_root_sets_and_anybody_reads(either):
    either.set(either.a, GIB)
    either.is_root = False
    assert refused(either.set, either.a, 2 * GIB) == NO_PERMISSION
    assert either.get(either.a)[1] == GIB


def test_a_gpu_in_mig_mode_has_no_limits(either):
    either.node.change(gpu=0, mig=True)
    assert refused(either.set, either.a, GIB) == NOT_SUPPORTED
    assert refused(either.get, either.a) == NOT_SUPPORTED
    either.set(either.a, GIB, gpu=1)


def test_what_is_no_cgroup_is_refused(either, tmp_path):
    assert refused(either.set, either.tree.root, GIB) == NOT_SUPPORTED
    assert refused(either.set, either.tree.root / "gone", GIB) == NOT_FOUND
    assert refused(either.set, tmp_path, GIB) == INVALID
    assert refused(either.set, either.tree.root / "..", GIB) == INVALID
    assert refused(either.set, "", GIB) == INVALID


def test_a_promise_beyond_the_limit_is_refused(either):
    assert refused(either.set, either.tree.make("a"), GIB, soft=2 * GIB) == INVALID


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        pytest.param({"backend": "off"}, NOT_SUPPORTED, id="accounting is off"),
        pytest.param({"backend": "dmem", "driver_version": "610.10"}, FUNCTION_NOT_FOUND, id="610"),
    ],
)
def test_without_accounting_or_before_615_there_are_no_limits(tmp_path, fields, code):
    node = Raw(tmp_path, **fields)
    assert refused(node.set, node.a, GIB) == code
    assert refused(node.get, node.a) == code


def test_without_cgroup_v2_there_are_no_limits(either):
    (either.tree.root / "cgroup.controllers").unlink()
    assert refused(either.set, either.a, GIB) == NOT_SUPPORTED


def test_dmem_needs_its_files(dmem):
    (dmem.tree.make("a") / "cgroup.subtree_control").write_text("cpu misc\n")
    b = dmem.tree.make("a/b")
    assert refused(dmem.set, b, GIB) == NOT_FOUND
    dmem.set(b.parent, 2 * GIB)
    assert dmem.get(b)[1] == 2 * GIB  # the nearest parent that has them
    (dmem.tree.root / "bare").mkdir()
    assert refused(dmem.get, dmem.tree.root / "bare") == NOT_FOUND


def test_with_dmem_every_parents_limit_counts_and_shows_nowhere_else(dmem):
    pod, leaf = dmem.tree.make("pod"), dmem.tree.make("pod/leaf")
    dmem.set(pod, 2 * GIB)
    assert dmem.get(leaf)[1] == MAX
    assert dmem.allocate(leaf, 3 * GIB) is None
    dmem.set(leaf, 8 * GIB)
    assert dmem.allocate(leaf, 3 * GIB) is None


def test_dmem_counts_from_the_start_and_leaves_a_limit_that_is_in_use_silently(dmem):
    assert dmem.allocate(dmem.a, 3 * GIB) is not None
    dmem.set(dmem.a, 2 * GIB)
    assert dmem.get(dmem.a) == (0, MAX, 3 * GIB)


def test_what_a_leaf_was_promised_stays_with_its_parents(dmem):
    pod, leaf = dmem.tree.make("kubepods/pod"), dmem.tree.make("kubepods/pod/leaf")
    dmem.set(leaf, 4 * GIB, soft=2 * GIB)
    dmem.set(leaf, 4 * GIB, soft=GIB)
    assert dmem.get(pod)[0] == dmem.get(pod.parent)[0] == GIB
    dmem.tree.remove(leaf)
    assert dmem.get(pod)[0] == dmem.get(pod.parent)[0] == GIB


def test_a_gap_stops_a_promise(dmem):
    (dmem.tree.make("top") / "cgroup.subtree_control").write_text("misc\n")
    (dmem.tree.make("top/gap") / "cgroup.subtree_control").write_text("dmem\n")
    dmem.set(dmem.tree.make("top/gap/leaf"), GIB, soft=GIB)
    assert dmem.get(dmem.tree.root / "top")[0] == 0


def test_misc_says_of_a_group_without_a_limit_what_it_says_where_there_is_none(misc):
    assert refused(misc.get, misc.tree.make("a")) == NOT_SUPPORTED


def test_misc_counts_nothing_that_was_there_before_the_limit(misc):
    before = misc.allocate(misc.a, 3 * GIB)
    misc.set(misc.a, 2 * GIB)
    assert misc.get(misc.a)[2] == 0
    assert misc.allocate(misc.a, 2 * GIB) is not None
    misc.driver.free(before)
    assert misc.get(misc.a)[2] == 2 * GIB


def test_misc_refuses_a_limit_below_what_is_in_use(misc):
    misc.set(misc.a, 4 * GIB)
    assert misc.allocate(misc.a, 3 * GIB) is not None
    assert refused(misc.set, misc.a, 2 * GIB) == INVALID
    assert misc.get(misc.a)[1] == 4 * GIB


def test_misc_knows_only_the_nearest_limit(misc):
    pod, leaf = misc.tree.make("pod"), misc.tree.make("pod/leaf")
    misc.set(pod, 2 * GIB)
    assert misc.get(leaf)[1] == 2 * GIB
    assert misc.allocate(leaf, 3 * GIB) is None
    misc.set(leaf, 8 * GIB)
    assert misc.allocate(leaf, 3 * GIB) is not None
    assert misc.get(pod)[2] == 0


def test_a_cgroup_with_others_in_it_does_not_go(either):
    leaf = either.tree.make("pod/leaf")
    with pytest.raises(OSError, match="busy") as refusal:
        either.tree.remove("pod")
    assert refusal.value.errno == errno.EBUSY
    either.tree.remove(leaf)
    either.tree.remove("pod")
    with pytest.raises(FileNotFoundError):
        either.tree.remove("pod")


def test_misc_forgets_a_cgroup_that_goes(misc):
    misc.set(misc.tree.make("a"), GIB)
    misc.tree.remove("a")
    assert refused(misc.get, misc.tree.make("a")) == NOT_SUPPORTED


@pytest.mark.parametrize(
    "event",
    [
        pytest.param({"driver": "not-loaded"}, id="the driver is unloaded"),
        pytest.param({"driver_version": "620.10"}, id="another driver is loaded"),
    ],
)
def test_with_the_driver_every_limit_goes(either, event):
    either.set(either.a, GIB)
    before = {name: either.node.document[name] for name in event if name in either.node.document}
    either.node.change(**event)
    either.node.live.current()
    either.node.change(**({"driver": "ready"} | before))
    either.functions.nvmlShutdown()
    either.functions.nvmlInit()
    if either.node.document["memory_limits"] == "misc":
        assert refused(either.get, either.a) == NOT_SUPPORTED
    else:
        assert either.get(either.a) == (0, MAX, 0)


def test_with_its_gpu_a_limit_goes_and_the_others_stay(either):
    either.set(either.a, GIB)
    either.set(either.a, GIB, gpu=1)
    either.node.change(gpu=0, present=False)
    either.node.live.current()
    either.node.change(gpu=0, present=True)
    assert either.get(either.a, gpu=1)[1] == GIB
    assert either.allocate(either.a, 2 * GIB) is not None


def test_limits_outlive_the_process_that_set_them(either):
    either.set(either.a, GIB)
    again = Raw.__new__(Raw)
    LimitedNode.__init__(again, either.node.file.parent, either.node.document["memory_limits"])
    again.functions.nvmlInit()
    assert again.get(either.a)[1] == GIB
