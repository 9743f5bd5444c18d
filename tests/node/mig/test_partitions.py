"""GPUs are cut where it was asked for and nowhere else, and what is cut goes again."""

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


def after(seconds, act):
    """Has *act* happen a little later."""
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def test_a_partition_is_cut_where_it_was_asked_for(node):
    made = node.partitions.create(node.gpu, node.key("2g.20gb", 4))
    assert node.dynamic.instances == (made,)
    assert made.key == PartitionKey(14, 4, 2, 2)
    assert made.uuid.startswith("MIG-")


def test_cutting_twice_is_cutting_once(node):
    key = node.key("1g.10gb", 3)
    assert node.partitions.create(node.gpu, key) == node.partitions.create(node.gpu, key)
    assert node.instances == ["1g.10gb at 3"]


def test_one_that_has_to_be_new_is_not_what_somebody_else_cut_there(node):
    foreign = node.partitions.create(node.gpu, node.key("2g.20gb", 2))
    with pytest.raises(
        PlacementTaken,
        match=rf"{node.gpu}: profile 14 at 2 exists already, as GPU instance 3, MIG-",
    ):
        node.partitions.create(node.gpu, foreign.key, new=True)
    made = node.partitions.create(node.gpu, node.key("2g.20gb", 4), new=True)
    assert node.dynamic.instances == (foreign, made)


def test_what_is_in_the_way_of_a_partition_leaves_it_uncut(node):
    node.partitions.create(node.gpu, node.key("2g.20gb", 2))
    with pytest.raises(PlacementTaken, match=r"has no room for profile 19 at 3: 2g\.20gb at 2"):
        node.partitions.create(node.gpu, node.key("1g.10gb", 3), new=True)
    assert node.instances == ["2g.20gb at 2"]


def test_a_partition_that_is_half_made_is_completed(node):
    key = node.key("3g.40gb", 4)
    _gpu_instance_alone(node, key)
    assert [instance.cis for instance in node.dynamic.unusable] == [0]
    node.partitions.create(node.gpu, key)
    assert (node.instances, node.dynamic.unusable) == (["3g.40gb at 4"], ())


def test_one_that_is_removed_leaves_nothing_and_its_like_stays(node):
    first, second = node.key("1g.10gb", 0), node.key("1g.10gb", 1)
    for key in (first, second):
        node.partitions.create(node.gpu, key)
    for _ in range(2):
        node.partitions.remove(node.gpu, first)
        assert (node.instances, node.dynamic.unusable) == (["1g.10gb at 1"], ())


def test_half_a_partition_is_removed_too(node):
    key = node.key("1g.10gb", 5)
    _gpu_instance_alone(node, key)
    node.partitions.remove(node.gpu, key)
    assert (node.instances, node.dynamic.unusable) == ([], ())


def test_every_board_can_be_filled(tmp_path):
    for name, profile, count in (
        ("A30", "1g.6gb", 4),
        ("A100-40-SXM", "1g.5gb", 7),
        ("RTX-PRO-6000", "1g.24gb", 4),
    ):
        directory = tmp_path / name
        directory.mkdir()
        node = MigNode(directory, board(name, mig=True))
        places = node.profile(profile).placements
        for place in places:
            node.partitions.create(node.gpu, node.key(profile, place.start))
        assert len(node.instances) == len(places) == count


def test_what_is_in_the_way_is_named_and_stays(tmp_path):
    foreign = {"profile": "1g.10gb", "start": 5}
    node = MigNode(tmp_path, board(mig=True, instances=[foreign]))
    with pytest.raises(NodeError, match=r"has no room for profile 9 at 4: 1g\.10gb at 5 \(GPU"):
        node.partitions.create(node.gpu, node.key("3g.40gb", 4))
    assert node.instances == ["1g.10gb at 5"]


def test_where_engines_are_used_up_what_uses_them_is_named(node):
    node.partitions.create(node.gpu, node.key("1g.10gb+me", 0))
    with pytest.raises(NodeError, match=r"engines or its memory are used up \(1g\.10gb\+me at 0"):
        node.partitions.create(node.gpu, node.key("1g.10gb+me", 1))


def test_without_mig_mode_nothing_is_cut(tmp_path):
    node = MigNode(tmp_path, board())
    with pytest.raises(NodeError, match="MIG mode is off"):
        node.partitions.create(node.gpu, node.key("1g.10gb"))
    node.partitions.remove(node.gpu, node.key("1g.10gb"))


def test_who_divided_a_partition_is_told_how_to_mend_it(tmp_path):
    foreign = {"profile": "2g.20gb", "start": 0, "compute": [1]}
    node = MigNode(tmp_path, board(mig=True, instances=[foreign]))
    with pytest.raises(NodeError, match="somebody else divided GPU instance"):
        node.partitions.create(node.gpu, node.key("2g.20gb"))


def test_another_instance_than_the_one_that_was_cut_stays(node, caplog):
    ours = node.partitions.create(node.gpu, node.key("2g.20gb"))
    gone = GpuUuid("MIG-that-somebody-removed")
    with caplog.at_level(logging.WARNING):
        node.partitions.remove(node.gpu, ours.key, gone)
    assert node.dynamic.instances == (ours,)
    assert "there is another instance where ours was" in caplog.text
    node.partitions.remove(node.gpu, ours.key, ours.uuid)
    assert node.instances == []


def test_half_of_what_was_cut_has_no_name_and_is_removed(node):
    key = node.key("1g.10gb", 5)
    _gpu_instance_alone(node, key)
    node.partitions.remove(node.gpu, key, GpuUuid("MIG-ours"))
    assert node.dynamic.unusable == ()


class Lying(SimulatedNvml):
    """Says of so many instances that they are removed, which they are not."""

    lies = 0

    def nvmlGpuInstanceDestroy(self, gpuInstance):  # noqa: N802, N803
        if self.lies:
            self.lies -= 1
            return 0
        return super().nvmlGpuInstanceDestroy(gpuInstance)


def test_what_is_still_there_when_nvml_says_it_is_removed_is_removed_again(tmp_path):
    node = MigNode(tmp_path, patience=5.0)
    key, functions = node.key("1g.10gb"), Lying(node.live, mig=node.mig)
    partitions = node.through(functions)
    partitions.create(node.gpu, key)
    functions.lies = 2
    partitions.remove(node.gpu, key)
    assert (node.instances, node.dynamic.unusable, functions.lies) == ([], (), 0)


def test_what_nvml_removes_in_words_alone_is_told(node):
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


def test_one_with_fewer_multiprocessors_than_it_could_have_is_not_taken_for_whole(tmp_path):
    foreign = {"profile": "1g.20gb", "start": 0, "compute": [1]}
    node = MigNode(tmp_path, board(mig=True, instances=[foreign]))
    assert (node.instances, [instance.cis for instance in node.dynamic.unusable]) == ([], [1])
    with pytest.raises(NodeError, match="somebody else divided"):
        node.partitions.create(node.gpu, node.key("1g.20gb"))


def test_what_lies_in_the_way_is_named_and_nothing_is_said_of_whose_it_is(node):
    ours = node.partitions.create(node.gpu, node.key("1g.10gb"))
    with pytest.raises(PlacementTaken) as raised:
        node.partitions.create(node.gpu, node.key("3g.40gb"))
    text = f"1g.10gb at 0 (GPU instance {ours.gi}, {ours.uuid}) lies there; it can be created once"
    assert text in str(raised.value)


def test_what_is_cut_is_told_without_reading_again_how_it_can_be_cut(node):
    node.partitions.create(node.gpu, node.key("1g.10gb"))
    node.change(gpu=0, fails={"nvmlDeviceGetGpuInstanceProfileInfoV": "UNKNOWN"})
    assert node.partitions.keys(node.gpu) == (node.key("1g.10gb"),)


def test_each_capability_is_asked_for_before_it_is_needed(node):
    seen = []

    def allow(capability):
        there = [*node.dynamic.instances, *node.dynamic.unusable]
        seen.append((capability, len(there), len(node.dynamic.instances)))

    partitions = MigPartitions(
        GpuMigReader(node.nvml, node.geometries, GpuHolders(node.nvml), lambda: True),
        0.0,
        allow=allow,
    )
    made = partitions.create(node.gpu, node.key("1g.10gb"))
    home = f"gpu0/mig/gi{made.gi}"
    assert seen == [("mig/config", 0, 0), (home, 1, 0), (f"{home}/ci{made.ci}", 1, 1)]
    seen.clear()
    partitions.remove(node.gpu, made.key)
    assert seen == [("mig/config", 1, 1)]


def test_what_uses_a_partition_is_named(node):
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
    timer = after(0.1, lambda: node.change(gpu=0, processes=[]))
    node.partitions.remove(node.gpu, made.key)
    timer.join()
    assert node.instances == []


def test_one_that_vanished_is_said(node):
    key = node.key("1g.10gb")
    with pytest.raises(MigInstanceNotFound, match="the instance of profile 19 at 0 vanished"):
        node.partitions.find(node.gpu, key)
    made = node.partitions.create(node.gpu, key)
    assert node.partitions.find(node.gpu, key) == made


def test_who_may_not_cut_is_told_so(node):
    node.change(gpu=0, fails={"nvmlDeviceCreateGpuInstanceWithPlacement": "NO_PERMISSION"})
    with pytest.raises(NodeError, match=r"creating profile 19 at 0: NVML says .*run this as root"):
        node.partitions.create(node.gpu, node.key("1g.10gb"))


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param({"gpus": []}, id="the GPU was pulled out"),
        pytest.param({"driver": "not-loaded"}, id="the driver was unloaded"),
        pytest.param({"driver": "no-library"}, id="the driver was removed"),
    ],
)
def test_with_a_gpu_or_a_driver_what_was_cut_is_gone(node, gone):
    made = node.partitions.create(node.gpu, node.key("1g.10gb"))
    gpu = node.gpu
    node.change(**gone)
    node.partitions.remove(gpu, made.key)
    node.partitions.restore_mode(gpu, False)
    with pytest.raises(NodeError):
        node.partitions.create(gpu, made.key)


def test_what_nvml_refuses_is_no_reason_to_believe_it_gone(node):
    made = node.partitions.create(node.gpu, node.key("1g.10gb"))
    node.change(gpu=0, fails={"nvmlComputeInstanceDestroy": "UNKNOWN"})
    with pytest.raises(NodeError, match="removing profile 19 at 0: NVML says Unknown"):
        node.partitions.remove(node.gpu, made.key)
    assert node.instances == ["1g.10gb at 0"]


def test_claims_that_come_at_once_cut_one_after_the_other(node):
    keys = [node.key("1g.10gb", start) for start in range(7)]
    threads = [
        threading.Thread(target=node.partitions.create, args=(node.gpu, key)) for key in keys
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(node.instances) == 7


def test_a_look_at_a_gpu_that_is_being_cut_is_not_late(tmp_path):
    class Slow(SimulatedNvml):
        begun = threading.Event()

        def nvmlDeviceCreateGpuInstanceWithPlacement(self, *args):  # noqa: N802
            self.begun.set()
            time.sleep(0.4)
            return super().nvmlDeviceCreateGpuInstanceWithPlacement(*args)

    node = MigNode(tmp_path, deadline=0.2)
    key, functions = node.key("1g.10gb"), Slow(node.live, mig=node.mig)
    partitions = node.through(functions)
    cutting = threading.Thread(target=partitions.create, args=(node.gpu, key))
    cutting.start()
    assert functions.begun.wait(5)
    assert not isinstance(node.nvml.dynamic_states([0])[0], TimedOut)
    cutting.join(10)


def test_an_instance_is_asked_by_its_own_uuid_while_it_is_there(node):
    made = node.partitions.create(node.gpu, node.key("1g.10gb"))

    def instance(functions, handle):
        return functions.nvmlDeviceGetUUID(handle)

    assert node.nvml.on_gpu(made.uuid, "asking", instance) == made.uuid
    node.partitions.remove(node.gpu, made.key)
    assert node.instances == []
    with pytest.raises(MigInstanceNotFound, match=f"^{made.uuid}, asking: NVML does not list it"):
        node.nvml.on_gpu(made.uuid, "asking", instance)


def test_what_a_gpu_that_is_not_listed_is_asked_is_an_error(node):
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
