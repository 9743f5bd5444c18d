"""Partitions are created where it was asked for and nowhere else, and are removed again."""

import logging
import threading
import time

import pynvml
import pytest

from dra_driver.base.errors import MigInstanceNotFound, NodeError, PlacementTaken, TimedOut
from dra_driver.model.gpus import GpuUuid, PartitionKey
from dra_driver.node.mig.gpu_holders import GpuHolders
from dra_driver.node.mig.modes import GpuMigReader
from dra_driver.node.mig.partitions import MigPartitions
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.mig_node import MigNode, board


@pytest.fixture
def node(tmp_path):
    return MigNode(tmp_path)


@pytest.fixture
def partitioned(tmp_path):
    """A node on whose GPU somebody created these instances."""
    return lambda *instances: MigNode(tmp_path, board(mig=True, instances=list(instances)))


def test_a_partition_is_created_where_it_was_asked_for_once(node):
    key = node.key("2g.20gb", 4)
    made = node.partitions.create(node.gpu, key)
    assert made.key == PartitionKey(14, 4, 2, 2)
    assert made.uuid.startswith("MIG-")
    assert node.partitions.create(node.gpu, key) == made
    assert node.dynamic.instances == (made,)


@pytest.mark.parametrize(
    ("existing", "name", "start", "new", "problem"),
    [
        pytest.param(
            ("2g.20gb", 2),
            "2g.20gb",
            2,
            True,
            r"profile 14 at 2 exists already, as GPU instance 3, MIG-",
            id="one that has to be new exists",
        ),
        pytest.param(
            ("2g.20gb", 2),
            "1g.10gb",
            3,
            True,
            r"has no room for profile 19 at 3: 2g\.20gb at 2",
            id="an instance is in its place",
        ),
        pytest.param(
            ("1g.10gb", 5),
            "3g.40gb",
            4,
            False,
            r"has no room for profile 9 at 4: 1g\.10gb at 5 \(GPU instance \d+, MIG-\S+\) lies "
            "there; it can be created once that is removed",
            id="an instance overlaps it",
        ),
        pytest.param(
            ("1g.10gb+me", 0),
            "1g.10gb+me",
            1,
            False,
            r"engines or its memory are used up \(1g\.10gb\+me at 0",
            id="its engines are used up",
        ),
    ],
)
def test_what_is_in_the_way_is_named_and_stays(node, existing, name, start, new, problem):
    unmanaged = node.partitions.create(node.gpu, node.key(*existing))
    with pytest.raises(PlacementTaken, match=rf"{node.gpu}.*{problem}"):
        node.partitions.create(node.gpu, node.key(name, start), new=new)
    assert node.dynamic.instances == (unmanaged,)


def test_half_a_partition_is_completed_and_removed(node):
    key = node.key("3g.40gb", 4)
    _gpu_instance_alone(node, key)
    assert [instance.cis for instance in node.dynamic.unusable] == [0]
    node.partitions.create(node.gpu, key)
    assert (node.instances, node.dynamic.unusable) == (["3g.40gb at 4"], ())
    for uuid in (None, GpuUuid("MIG-ours")):  # a GPU instance alone has no UUID
        _gpu_instance_alone(node, node.key("1g.10gb"))
        node.partitions.remove(node.gpu, node.key("1g.10gb"), uuid)
        assert (node.instances, node.dynamic.unusable) == (["3g.40gb at 4"], ())


def test_a_removed_partition_leaves_nothing_and_others_of_its_profile_stay(node):
    first, second = node.key("1g.10gb", 0), node.key("1g.10gb", 1)
    for key in (first, second):
        node.partitions.create(node.gpu, key)
    for _ in range(2):
        node.partitions.remove(node.gpu, first)
        assert (node.instances, node.dynamic.unusable) == (["1g.10gb at 1"], ())


@pytest.mark.parametrize(
    ("product", "profile", "count"),
    [("A30", "1g.6gb", 4), ("A100-40-SXM", "1g.5gb", 7), ("RTX-PRO-6000", "1g.24gb", 4)],
)
def test_every_board_can_be_filled(tmp_path, product, profile, count):
    node = MigNode(tmp_path, board(product, mig=True))
    placements = node.profile(profile).placements
    for placement in placements:
        node.partitions.create(node.gpu, node.key(profile, placement.start))
    assert len(node.instances) == len(placements) == count


def test_without_mig_mode_nothing_is_created(tmp_path):
    node = MigNode(tmp_path, board())
    with pytest.raises(NodeError, match="MIG mode is off"):
        node.partitions.create(node.gpu, node.key("1g.10gb"))
    node.partitions.remove(node.gpu, node.key("1g.10gb"))


@pytest.mark.parametrize("profile", ["2g.20gb", "1g.20gb"])
def test_an_instance_that_others_divided_is_not_whole_and_they_are_told_how_to_mend_it(
    partitioned, profile
):
    """The compute instance of a 1g.20gb has all slices, and fewer multiprocessors than it could."""
    node = partitioned({"profile": profile, "start": 0, "compute": [1]})
    assert (node.instances, [instance.cis for instance in node.dynamic.unusable]) == ([], [1])
    with pytest.raises(NodeError, match="somebody else divided GPU instance"):
        node.partitions.create(node.gpu, node.key(profile))


def test_another_instance_than_the_one_that_was_created_stays(node, caplog):
    ours = node.partitions.create(node.gpu, node.key("2g.20gb"))
    with caplog.at_level(logging.WARNING):
        node.partitions.remove(node.gpu, ours.key, GpuUuid("MIG-that-somebody-removed"))
    assert node.dynamic.instances == (ours,)
    assert "there is another instance where ours was" in caplog.text
    node.partitions.remove(node.gpu, ours.key, ours.uuid)
    assert node.instances == []


class Lying(SimulatedNvml):
    """Says of so many instances that they are removed, which they are not."""

    lies = 0

    def nvmlGpuInstanceDestroy(self, gpuInstance):  # noqa: N802, N803
        if self.lies:
            self.lies -= 1
            return 0
        return super().nvmlGpuInstanceDestroy(gpuInstance)


def test_an_instance_that_is_listed_after_its_removal_is_removed_again(tmp_path):
    node = MigNode(tmp_path, patience=5.0)
    key, functions = node.key("1g.10gb"), Lying(node.live, mig=node.mig)
    partitions = node.through(functions)
    partitions.create(node.gpu, key)
    functions.lies = 2
    partitions.remove(node.gpu, key)
    assert (node.instances, node.dynamic.unusable, functions.lies) == ([], (), 0)


def test_a_removal_that_nvml_only_reports_is_an_error(node):
    key, functions = node.key("1g.10gb"), Lying(node.live, mig=node.mig)
    partitions = node.through(functions)
    made = partitions.create(node.gpu, key)
    functions.lies = 1000
    with pytest.raises(NodeError, match=rf"says that GPU instance {made.gi} is removed, and lists"):
        partitions.remove(node.gpu, key)


def test_a_partition_has_all_multiprocessors_where_there_is_a_choice(node):
    made = node.partitions.create(node.gpu, node.key("1g.20gb", 2))

    def count(functions, handle):
        return functions.nvmlDeviceGetAttributes_v2(handle).multiprocessorCount

    assert node.nvml.on_gpu(made.uuid, "counting", count) == 26


def test_partitions_are_read_without_reading_the_profiles_again(node):
    node.partitions.create(node.gpu, node.key("1g.10gb"))
    node.change(gpu=0, fails={"nvmlDeviceGetGpuInstanceProfileInfoV": "UNKNOWN"})
    assert node.partitions.keys(node.gpu) == (node.key("1g.10gb"),)


def test_each_capability_is_asked_for_before_it_is_needed(node):
    asked = []

    def allow(capability):
        whole, unusable = len(node.dynamic.instances), len(node.dynamic.unusable)
        asked.append((capability, whole + unusable, whole))

    partitions = MigPartitions(
        GpuMigReader(node.nvml, node.geometries, GpuHolders(node.nvml), lambda: True),
        0.0,
        allow=allow,
    )
    made = partitions.create(node.gpu, node.key("1g.10gb"))
    home = f"gpu0/mig/gi{made.gi}"
    assert asked == [("mig/config", 0, 0), (home, 1, 0), (f"{home}/ci{made.ci}", 1, 1)]
    asked.clear()
    partitions.remove(node.gpu, made.key)
    assert asked == [("mig/config", 1, 1)]


def test_a_process_that_uses_a_partition_is_named(node):
    made = node.partitions.create(node.gpu, node.key("1g.10gb"))
    process = {"pid": 4242, "memory_bytes": 1, "gi": made.gi}
    other = {"pid": 4343, "memory_bytes": 1, "gi": made.gi + 1}
    node.change(gpu=0, processes=[process, other])
    with pytest.raises(NodeError, match=r"in use, held by process 4242; end what") as raised:
        node.partitions.remove(node.gpu, made.key)
    assert "4343" not in str(raised.value)
    assert "4242" not in raised.value.public  # it may be another tenant's
    assert "held by processes that the log of this node's plugin names" in raised.value.public
    assert node.instances == ["1g.10gb at 0"]


def test_a_process_that_ends_in_time_is_waited_for(tmp_path):
    node = MigNode(tmp_path, patience=5.0)
    made = node.partitions.create(node.gpu, node.key("1g.10gb"))
    node.change(gpu=0, processes=[{"pid": 4242, "memory_bytes": 1, "gi": made.gi}])
    timer = threading.Timer(0.1, lambda: node.change(gpu=0, processes=[]))
    timer.start()
    node.partitions.remove(node.gpu, made.key)
    timer.join()
    assert node.instances == []


def test_an_instance_that_vanished_is_an_error(node):
    key = node.key("1g.10gb")
    with pytest.raises(MigInstanceNotFound, match="the instance of profile 19 at 0 vanished"):
        node.partitions.find(node.gpu, key)
    made = node.partitions.create(node.gpu, key)
    assert node.partitions.find(node.gpu, key) == made


@pytest.mark.parametrize(
    ("function", "code", "change", "problem"),
    [
        (
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            "NO_PERMISSION",
            "create",
            "creating profile 14 at 4: NVML says .*run this as root",
        ),
        (
            "nvmlComputeInstanceDestroy",
            "UNKNOWN",
            "remove",
            "removing profile 19 at 0: NVML says Unknown",
        ),
    ],
)
def test_a_refusal_of_nvml_is_an_error_and_changes_nothing(node, function, code, change, problem):
    node.partitions.create(node.gpu, node.key("1g.10gb"))
    key = node.key("2g.20gb", 4) if change == "create" else node.key("1g.10gb")
    node.change(gpu=0, fails={function: code})
    with pytest.raises(NodeError, match=problem):
        getattr(node.partitions, change)(node.gpu, key)
    assert node.instances == ["1g.10gb at 0"]


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param({"gpus": []}, id="the GPU was pulled out"),
        pytest.param({"driver": "not-loaded"}, id="the driver was unloaded"),
        pytest.param({"driver": "no-library"}, id="the driver was removed"),
    ],
)
def test_with_a_gpu_or_a_driver_its_partitions_are_gone(node, gone):
    made = node.partitions.create(node.gpu, node.key("1g.10gb"))
    gpu = node.gpu
    node.change(**gone)
    node.partitions.remove(gpu, made.key)
    node.partitions.restore_mode(gpu, False)
    with pytest.raises(NodeError):
        node.partitions.create(gpu, made.key)


def test_partitions_that_are_created_at_once_are_created_one_after_the_other(node):
    keys = [node.key("1g.10gb", start) for start in range(7)]
    threads = [
        threading.Thread(target=node.partitions.create, args=(node.gpu, key)) for key in keys
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(node.instances) == 7


def test_reading_a_gpu_that_is_being_partitioned_is_not_late(tmp_path):
    class Slow(SimulatedNvml):
        begun = threading.Event()

        def nvmlDeviceCreateGpuInstanceWithPlacement(self, *args):  # noqa: N802
            self.begun.set()
            time.sleep(0.4)
            return super().nvmlDeviceCreateGpuInstanceWithPlacement(*args)

    node = MigNode(tmp_path, deadline=0.2)
    key, functions = node.key("1g.10gb"), Slow(node.live, mig=node.mig)
    partitions = node.through(functions)
    creating = threading.Thread(target=partitions.create, args=(node.gpu, key))
    creating.start()
    assert functions.begun.wait(5)
    assert not isinstance(node.nvml.dynamic_states([0])[0], TimedOut)
    creating.join(10)


def test_an_instance_is_asked_by_its_own_uuid_while_it_is_there(node):
    made = node.partitions.create(node.gpu, node.key("1g.10gb"))

    def instance(functions, handle):
        return functions.nvmlDeviceGetUUID(handle)

    assert node.nvml.on_gpu(made.uuid, "asking", instance) == made.uuid
    node.partitions.remove(node.gpu, made.key)
    assert node.instances == []
    with pytest.raises(MigInstanceNotFound, match=f"^{made.uuid}, asking: NVML does not list it"):
        node.nvml.on_gpu(made.uuid, "asking", instance)


def test_a_gpu_that_is_not_listed_is_an_error(node):
    with pytest.raises(NodeError, match="NVML does not list it"):
        node.partitions.mode(GpuUuid("GPU-x"))


def _gpu_instance_alone(node, key):
    """As a crash leaves it that comes between the two."""

    def make(functions, handle):
        place = pynvml.c_nvmlGpuInstancePlacement_t(key.start, key.size)
        functions.nvmlDeviceCreateGpuInstanceWithPlacement(
            handle, key.profile_id, pynvml.byref(place)
        )

    node.nvml.on_gpu(node.gpu, "making half of it", make)
