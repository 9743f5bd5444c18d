"""GPUs come, go, fail, hang and recover while we look."""

from collections import Counter
from dataclasses import replace

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GuestRestriction, Inventory
from dra_driver.node.driver.pci import PciBus
from dra_driver.node.inventory.gpus import GpuDiscovery
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.nvml.client import Nvml
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.simulated import Node, h100, no_nvidia_modprobe, two_gpus
from tests.waiting import eventually


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path, two_gpus())
    assert node.host
    return node


@pytest.fixture
def gpus(node):
    return node.gpus()


def names(inventory: Inventory) -> list[str]:
    """Of those that answer."""
    lost = dict(inventory.lost)
    return [str(gpu.name) for gpu in inventory.gpus if gpu.uuid not in lost]


def test_a_gpu_that_comes_is_offered_at_the_next_look(node, gpus):
    assert names(gpus.scan()) == ["gpu-0", "gpu-1"]
    node.document["gpus"].append(h100("9d"))
    node.write()
    assert names(gpus.scan()) == ["gpu-0", "gpu-1", "gpu-2"]
    assert gpus.scan().gpus[2].topology.nvlink_peers == 2


def test_a_gpu_that_is_pulled_out_is_gone_and_comes_back_as_it_was(node, gpus):
    before = gpus.scan()
    node.change(gpu=0, present=False)
    without = gpus.scan()
    assert (names(without), without.unavailable) == (["gpu-1"], ())
    assert without.gpus[0].topology.nvlink_clique is None
    node.change(gpu=0, present=True)
    assert gpus.scan() == before


def test_a_gpu_given_to_a_virtual_machine_is_unavailable_and_comes_back(node, gpus):
    before = gpus.scan()
    node.change(gpu=0, driver="vfio-pci")
    inventory = gpus.scan()
    assert (names(inventory), [missing.what for missing in inventory.unavailable]) == (
        ["gpu-1"],
        ["GPU 0000:1b:00.0"],
    )
    node.change(gpu=0, driver="nvidia")
    assert gpus.scan() == before


def test_a_fault_that_passes_leaves_no_trace(node, gpus):
    before = gpus.scan()
    node.change(gpu=0, fails="GPU_IS_LOST")
    faulty = gpus.scan()
    assert faulty.gpus == before.gpus
    ((uuid, reason),) = faulty.lost
    assert uuid == before.gpus[0].uuid
    assert "GPU is lost" in reason
    assert (faulty.stale, faulty.unavailable) == ({uuid}, ())
    node.change(gpu=0, fails={})
    assert gpus.scan() == before


def lost(inventory: Inventory) -> list[str]:
    """By name."""
    by_uuid = {gpu.uuid: str(gpu.name) for gpu in inventory.gpus}
    return [by_uuid[uuid] for uuid, _ in inventory.lost]


def test_a_lost_gpu_stays_lost_when_nvml_is_started_again(node, gpus):
    before = gpus.scan()
    node.change(gpu=0, fails="GPU_IS_LOST")
    gpus.scan()
    node.nvml.restart()
    assert lost(gpus.scan()) == ["gpu-0"]
    node.change(gpu=0, fails={})
    node.nvml.restart()
    assert gpus.scan() == before


def test_a_gpu_that_an_earlier_process_lost_is_lost_to_this_one(node, gpus):
    before = gpus.scan()
    node.change(gpu=0, fails="GPU_IS_LOST")
    assert names(node.gpus().scan()) == ["gpu-1"]
    later = node.gpus()
    later.remember(before.gpus[:1])
    inventory = later.scan()
    assert (inventory.gpus[0], names(inventory)) == (before.gpus[0], ["gpu-1"])
    assert (lost(inventory), inventory.unavailable) == (["gpu-0"], ())
    node.change(gpu=0, fails={})
    assert later.scan() == before


def test_a_lost_gpu_that_leaves_the_driver_is_forgotten(node, gpus):
    before = gpus.scan()
    node.change(gpu=0, fails="GPU_IS_LOST")
    assert lost(gpus.scan()) == ["gpu-0"]
    node.change(gpu=0, driver="vfio-pci")
    assert lost(gpus.scan()) == []
    node.change(gpu=0, driver="nvidia")
    assert lost(gpus.scan()) == []  # who knows whether it is the same?
    node.change(gpu=0, fails={})
    assert gpus.scan() == before


def test_a_driver_that_goes_while_gpus_are_read_loses_none_of_them(node, gpus):
    gpus.scan()
    node.change(gpu=0, fails="DRIVER_NOT_LOADED")
    inventory = gpus.scan()
    assert (names(inventory), inventory.lost) == (["gpu-1"], ())


def test_a_new_process_knows_a_lost_gpu_as_it_was_and_all_while_nvml_is_released(node, gpus):
    before = gpus.scan()
    node.change(gpu=0, fails="GPU_IS_LOST")
    next_gpus = node.gpus()
    next_gpus.remember(gpus.answered)
    faulty = next_gpus.scan()
    assert faulty.gpus == before.gpus
    ((uuid, reason),) = faulty.lost
    assert uuid == before.gpus[0].uuid
    assert "GPU is lost" in reason
    assert faulty.unavailable == ()
    node.change(gpu=0, fails={})
    assert next_gpus.scan() == before

    node.nvml.release("it is reset")
    released = node.gpus()
    released.remember(gpus.answered)
    every = frozenset(gpu.uuid for gpu in before.gpus)
    assert released.scan() == replace(before, stale=every)
    node.nvml.resume()
    assert released.scan() == before


def test_mig_mode_and_partitions_are_seen_as_they_come_and_go(node, gpus):
    before = gpus.scan().gpus[0].mig
    assert (before.on, before.switches, before.units, before.instances) == (False, True, 8, ())
    node.change(gpu=0, mig=True, instances=[{"profile": "3g.40gb", "start": 4}])
    mig = gpus.scan().gpus[0].mig
    assert (mig.on, mig.pending, mig.profiles) == (True, True, before.profiles)
    assert [(instance.key.start, instance.key.slices) for instance in mig.instances] == [(4, 3)]
    node.change(gpu=0, mig=False)
    assert gpus.scan().gpus[0].mig == before


@pytest.mark.parametrize(
    ("product", "virtualization", "fixed", "switches"),
    [
        ("A100-40-SXM", "none", GuestRestriction.NOTHING, False),
        ("A100-40-SXM", "passthrough", GuestRestriction.MODE, False),
        ("A100-40-SXM", "vgpu", GuestRestriction.ALL, False),
        ("H100-80-SXM", "passthrough", GuestRestriction.NOTHING, True),
        ("H100-80-SXM", "vgpu", GuestRestriction.ALL, False),
    ],
)
def test_what_a_virtual_machine_cannot_change_of_a_gpu_is_seen(
    tmp_path, product, virtualization, fixed, switches
):
    document = h100("1b", product=product, virtualization=virtualization)
    (gpu,) = Node(tmp_path, {"gpus": [document]}).gpus(lambda minors: None).scan().gpus
    assert gpu.mig is not None
    assert (gpu.mig.fixed, gpu.mig.switches) == (fixed, switches)


class Overtaken(SimulatedNvml):
    """A claim turns MIG mode on between the first glance and the reading of the rest."""

    done = False

    def nvmlDeviceGetPciInfo(self, handle):  # noqa: N802 - NVML's name
        if not self.done:
            self.done = True
            self.nvmlDeviceSetMigMode(handle, 1)
        return super().nvmlDeviceGetPciInfo(handle)

    def nvmlDeviceGetMinorNumber(self, handle):  # noqa: N802
        return super().nvmlDeviceGetMinorNumber(handle) + 5 * self.nvmlDeviceGetMigMode(handle)[0]


def test_what_was_read_while_the_mode_changed_is_read_again(tmp_path):
    node = Node(tmp_path, {"gpus": [h100("1b")]})
    node.functions = Overtaken(node.live, mig=node.mig)
    gpus = node.gpus(lambda minors: None)
    (gpu,) = gpus.scan().gpus
    assert node.functions.done
    node.nvml.on_gpu(gpu.uuid, "turning it off", lambda nvml, it: nvml.nvmlDeviceSetMigMode(it, 0))
    (again,) = gpus.scan().gpus
    assert (gpu.minor, again.minor) == (5, 0)


def test_a_gpu_in_mig_mode_is_never_taken_for_one_without_partitions(node):
    node.change(gpu=0, mig=True)
    for gpu in (0, 1):
        node.change(gpu=gpu, fails={"nvmlDeviceGetGpuInstancePossiblePlacements": "UNKNOWN"})
    first, second = node.gpus().scan().gpus
    assert (first.mig.on, first.mig.profiles) == (True, ())
    assert second.mig is None


def test_what_a_change_of_mig_mode_did_to_a_gpu_is_read_again(node, gpus):
    gpus.scan()
    node.change(gpu=0, mig=True, minor=7)
    assert [gpu.minor for gpu in gpus.scan().gpus] == [1, 7]


def test_a_new_driver_is_told_of_every_gpu(node, gpus):
    gpus.scan()
    node.change(driver_version="590.48.01", cuda_version="13.1")
    waiting = gpus.scan()
    assert [missing.what for missing in waiting.unavailable] == ["all GPUs"]
    assert {str(device.driver_version) for device in gpus.scan().gpus} == {"590.48.1"}


def test_a_gpu_that_hangs_costs_its_deadline_once_and_recovers_by_itself(tmp_path):
    node = Node(tmp_path, two_gpus(), deadline_seconds=0.3)
    gpus = node.gpus()
    before = gpus.scan()
    node.change(gpu=0, hangs=True)
    # Late for the first time: it may only be slow.
    assert gpus.scan() == replace(before, stale=frozenset({before.gpus[0].uuid}))
    for _ in range(5):
        inventory = gpus.scan()
        ((uuid, reason),) = inventory.lost
        assert uuid == before.gpus[0].uuid
        assert "has not returned since" in reason
        assert inventory.gpus == before.gpus
    node.change(gpu=0, hangs=False)
    eventually(lambda: gpus.scan() == before)


def test_a_gpu_that_was_slow_once_and_is_slow_again_later_is_offered_all_the_time(tmp_path):
    node = Node(tmp_path, two_gpus(), deadline_seconds=0.3)
    gpus = node.gpus()
    before = gpus.scan()
    for _ in range(2):
        node.change(gpu=0, hangs=True)
        assert gpus.scan().gpus == before.gpus
        node.change(gpu=0, hangs=False)
        eventually(lambda: not isinstance(node.nvml.dynamic_states([0])[0], NodeError))
        assert gpus.scan() == before


def test_a_gpu_that_comes_while_another_hangs_is_offered_once_that_recovers(tmp_path):
    node = Node(tmp_path, two_gpus(), deadline_seconds=0.3)
    gpus = node.gpus()
    gpus.scan()
    node.change(gpu=0, hangs=True)
    gpus.scan()
    node.document["gpus"].append(h100("9d"))
    node.write()
    assert names(gpus.scan()) == ["gpu-1"]
    node.change(gpu=0, hangs=False)
    eventually(lambda: names(gpus.scan()) == ["gpu-0", "gpu-1", "gpu-2"])


class Counting:
    """NVML's functions, and how often each was called."""

    def __init__(self, functions):
        self.functions = functions
        self.calls = Counter()

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            return getattr(self.functions, name)  # a structure

        def call(*arguments):
            self.calls[name] += 1
            return getattr(self.functions, name)(*arguments)

        return call


def test_a_routine_look_asks_only_for_what_can_change(node):
    counting = Counting(node.functions)
    sysfs, devices = PciBus(node.root / "sys"), node.root / "dev"
    gpus = GpuDiscovery(Nvml(lambda: counting, GeometryCache), sysfs, devices, no_nvidia_modprobe)
    gpus.scan()
    counting.calls.clear()
    gpus.scan()
    assert counting.calls == {
        "nvmlSystemGetDriverVersion": 1,
        "nvmlSystemGetCudaDriverVersion": 1,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 2,
        "nvmlDeviceGetUUID": 2,
        "nvmlDeviceGetMigMode": 2,
    }
