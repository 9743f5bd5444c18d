"""A node as the plugin sees it: steps are carried out, and undone, by the driver's own means."""

from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.base.errors import ClaimError, DriverUnusable, MigInstanceNotFound, NodeError
from dra_driver.k8s.claims import PodUid
from dra_driver.model.gpus import GpuUuid, Partition
from dra_driver.model.processes import GpuProcess
from dra_driver.model.steps import (
    CreatePartition,
    PodMemoryLimit,
    RemovePartition,
    SetMemoryLimits,
    SetMigMode,
    SetTimeSlice,
    TimeSliceInterval,
)
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.sim.memory_limits import CgroupTree
from tests.fakes.simulated import open_simulated

POD = PodUid("0b5a7e8c-0000-4000-8000-000000000000")
GIB = 1024**3


@pytest.fixture
def opened(tmp_path):
    """Opens the node of a file that says this."""

    def open_it(*lines, name="node"):
        file = tmp_path / f"{name}.yaml"
        file.write_text(
            "\n".join(("gpus: [{product: H100-80-SXM, bus_id: '0000:1b:00.0'}]", *lines))
        )
        return open_simulated(file, tmp_path)

    return open_it


def interval(node, gpu):
    return node.current_setting(SetTimeSlice(gpu, TimeSliceInterval.LONG))


def gpu_of(node):
    return node.inventory().gpus[0].uuid


def test_gpus_are_known_without_nvml_also_those_that_are_away(
    opened,
):
    with opened() as node:
        (gpu,) = node.refresh().gpus
    away = replace(gpu, uuid=GpuUuid("GPU-away"), pci_bus_id="0000:ff:00.0")
    with opened() as node:
        assert node.known_gpus() == ()
        node.remember([gpu, away])
        assert node.known_gpus() == (gpu, away)
        node.release("GPUs are released")
        node.refresh()
        assert {each.uuid for each in node.known_gpus()} == {gpu.uuid, away.uuid}


def test_an_interval_is_set_and_restored(opened):
    with opened() as node:
        gpu = gpu_of(node)
        assert interval(node, gpu) is TimeSliceInterval.DEFAULT

        node.carry_out(SetTimeSlice(gpu, TimeSliceInterval.LONG))
        assert interval(node, gpu) is TimeSliceInterval.LONG

        node.restore(SetTimeSlice(gpu, TimeSliceInterval.DEFAULT))
        assert interval(node, gpu) is TimeSliceInterval.DEFAULT


def test_what_cannot_be_restored_since_the_driver_is_incomplete_is_told_from_other_failures(
    opened, tmp_path
):
    """The kernel module is loaded, so the interval is there."""
    setting = SetTimeSlice(GpuUuid("GPU-any"), TimeSliceInterval.DEFAULT)
    with opened("nvidia_modprobe: missing") as node:
        smi = tmp_path / "sim/usr/bin/nvidia-smi"
        smi.rename(tmp_path / "away")
        with pytest.raises(DriverUnusable, match=r"driver cannot be used: .* no nvidia-smi"):
            node.restore(setting)
        (tmp_path / "away").rename(smi)
    fails = (
        "gpus: [{product: H100-80-SXM, bus_id: '0000:1b:00.0', fails: {compute-policy: UNKNOWN}}]"
    )
    with opened(name="fails") as node:
        (tmp_path / "fails.yaml").write_text(fails)
        with pytest.raises(NodeError, match="Unknown Error") as failure:
            node.restore(SetTimeSlice(gpu_of(node), TimeSliceInterval.DEFAULT))
        assert not isinstance(failure.value, DriverUnusable)


def test_a_gpu_whose_interval_is_to_be_put_back_is_unavailable_until_it_was(opened, tmp_path):
    with opened() as node:
        (gpu,) = node.refresh().gpus
        node.carry_out(SetTimeSlice(gpu.uuid, TimeSliceInterval.LONG))
        note = tmp_path / f"time-slices/{gpu.uuid}.to-restore"
        note.write_text(f"1 {boot_id(Path('/'))}")

        inventory = node.refresh()
        assert inventory.gpus == ()
        (unavailable,) = inventory.unavailable
        assert unavailable.what == f"GPU {gpu.pci_bus_id} ({gpu.uuid})"
        assert unavailable.reason.startswith(
            "its time-slice interval is still to be restored to Short"
        )
        note.with_name("GPU-other.to-restore").mkdir()  # it cannot be told what is owed
        assert node.refresh() == inventory
        note.with_name("GPU-other.to-restore").rmdir()

        assert node.retry_setting_restores()
        assert node.refresh().gpus == (gpu,)
        assert interval(node, gpu.uuid) is TimeSliceInterval.SHORT
        assert not node.retry_setting_restores()


def test_an_interval_of_a_gpu_that_is_gone_is_refused_but_needs_no_restoring(opened):
    with opened() as node:
        absent = GpuUuid("GPU-00000000-0000-0000-0000-000000000000")
        assert interval(node, absent) is None
        with pytest.raises((ClaimError, NodeError)):
            node.carry_out(SetTimeSlice(absent, TimeSliceInterval.LONG))

        node.restore(SetTimeSlice(absent, TimeSliceInterval.DEFAULT))


def test_a_pod_is_limited_where_the_driver_can(opened, tmp_path):
    with opened("driver_version: '615.71.09'") as node:
        gpu = gpu_of(node)
        pod = CgroupTree(tmp_path / "sim/sys/fs/cgroup").make(f"kubepods/pod{POD}")
        node.carry_out(SetMemoryLimits(gpu, (PodMemoryLimit(POD, 10 * GIB),), strict=True))
        assert str(10 * GIB) in (pod / "dmem.max").read_text()

        node.restore(SetMemoryLimits(gpu, (PodMemoryLimit(POD, None),)))
        assert str(10 * GIB) not in (pod / "dmem.max").read_text()


def test_where_the_driver_cannot_limit_only_who_is_strict_is_refused(opened):
    with opened() as node:
        limit = SetMemoryLimits(gpu_of(node), (PodMemoryLimit(POD, GIB),))
        node.carry_out(limit)

        with pytest.raises(NodeError, match="615"):
            node.carry_out(SetMemoryLimits(limit.gpu, limit.pods, strict=True))


def test_device_files_are_made_and_never_taken_away(opened, tmp_path):
    with opened() as node:
        node.inventory()
        (tmp_path / "sim/dev/nvidia0").unlink()

        node.device_files((0,))

        assert (tmp_path / "sim/dev/nvidia0").exists()


def test_it_tells_what_computes_on_a_gpu(tmp_path):
    file = tmp_path / "busy.yaml"
    file.write_text(
        "gpus: [{product: T4, bus_id: '0000:1b:00.0', processes: [{pid: 7, memory_bytes: 5}]}]"
    )
    with open_simulated(file, tmp_path) as node:
        assert node.processes(gpu_of(node)) == (GpuProcess(7, 5),)


def test_as_long_as_nothing_changes_it_is_the_same_inventory(opened):
    with opened() as node:
        assert node.refresh() is node.refresh() is node.inventory()


def first_partition(node):
    gpu = node.inventory().gpus[0]
    profile = gpu.mig.profiles[0]
    return Partition(profile, profile.placements[-1]).key


def test_a_partition_is_created_with_its_device_files_and_removed_again(opened):
    with opened() as node:
        gpu, key = gpu_of(node), first_partition(node)
        assert node.current_setting(SetMigMode(gpu, True)) is False
        for step in (SetMigMode(gpu, True), CreatePartition(gpu, key)) * 2:
            node.carry_out(step)
        made = node.instance(gpu, key)
        names = (f"gpu0/mig/gi{made.gi}", f"gpu0/mig/gi{made.gi}/ci{made.ci}")
        assert list(node.device_files((0,), names).capabilities) == list(names)
        assert node.refresh().gpus[0].mig.instances == (made,)
        assert node.processes(made.uuid) == ()

        for undone in (RemovePartition(gpu, key), SetMigMode(gpu, False)) * 2:
            node.restore(undone)
        assert node.current_setting(SetMigMode(gpu, True)) is False
        with pytest.raises(MigInstanceNotFound):
            node.instance(gpu, key)
        with pytest.raises(NodeError, match="vanished"):
            node.device_files((0,), names)


def test_partitions_outlive_the_process_that_created_them(opened):
    with opened() as node:
        gpu, key = gpu_of(node), first_partition(node)
        node.carry_out(SetMigMode(gpu, True))
        node.carry_out(CreatePartition(gpu, key))
    with opened() as node:
        assert [instance.key for instance in node.inventory().gpus[0].mig.instances] == [key]
        node.carry_out(RemovePartition(gpu, key))
        assert node.refresh().gpus[0].mig.instances == ()
