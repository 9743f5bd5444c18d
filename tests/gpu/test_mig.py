"""How GPUs of this machine can be partitioned, read only: no mode and no partition is changed."""

import re
import time
from pathlib import Path

import pytest

from dra_driver.node.mig.capabilities import MONITOR_CAPABILITY
from dra_driver.node.nvml.library import load_nvml
from tests.gpu.mig_probe import NOT_THERE, SUCCESS, answers, differences, machine, unread

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def partitionable(node, driver):
    """This machine, where NVML itself says that a GPU has a MIG mode."""
    with machine(node, load_nvml(driver.nvml_library())) as probed:
        if not probed.handles:
            pytest.skip("NVML says of no GPU of this machine that it has a MIG mode")
        yield probed


def test_the_profiles_of_every_gpu_with_a_mig_mode_are_known(partitionable):
    assert unread(partitionable) == {}


def test_every_profile_lies_within_its_board(partitionable):
    for gpu in partitionable.gpus:
        for profile in gpu.mig.profiles:
            assert profile.placements, profile
            assert all(
                0 <= place.start < place.end <= gpu.mig.units for place in profile.placements
            )
            assert profile.memory_bytes <= gpu.memory_bytes
            assert re.fullmatch(r"\d+g\.\d+gb([+-][a-z.]+)?", profile.name), profile


def test_the_simulation_partitions_the_board_as_its_driver_does(partitionable, report):
    by_product = {
        gpu.product_name: differences(gpu.product_name, gpu.mig.profiles)
        for gpu in partitionable.gpus
    }
    report(
        [
            f"{name}: {line}"
            for name, compared in by_product.items()
            if compared
            for line in compared.rest
        ]
    )
    assert {
        name: compared.wrong for name, compared in by_product.items() if compared and compared.wrong
    } == {}
    if not any(by_product.values()):
        pytest.skip(f"the simulation has no {', '.join(by_product)}")


def test_calls_that_list_instances_are_made_as_the_library_takes_them(partitionable, report):
    for gpu in partitionable.gpus:
        ids = [profile.id for profile in gpu.mig.profiles]
        codes = answers(partitionable.functions, partitionable.handles[gpu.uuid], ids)
        report([f"{gpu.name}, {name}: {code}" for name, code in codes.items()])
        of_boards = {name: code for name, code in codes.items() if "GetGpuInstances " in name}
        assert len(of_boards) == len(ids)
        # Without MIG, NVML's manual has a refusal, and driver 580 has none to list.
        expected = {SUCCESS} if gpu.mig.on else {SUCCESS, *NOT_THERE}
        assert set(of_boards.values()) <= expected, of_boards
        of_none = {name: code for name, code in codes.items() if name not in of_boards}
        assert set(of_none.values()) <= set(NOT_THERE), of_none


def test_the_mode_is_what_nvidia_smi_says(partitionable, document):
    modes = {gpu.uuid: gpu.mig for gpu in document.gpus}

    for gpu in partitionable.gpus:
        assert partitionable.node.mig.mode(gpu.uuid) == (modes[gpu.uuid] == "Enabled")


def test_instances_are_those_that_nvidia_smi_lists(partitionable, ask_smi):
    listed = set(re.findall(r"MIG-[0-9a-f-]+", ask_smi("-L")))

    ours = {instance.uuid for gpu in partitionable.gpus for instance in gpu.mig.instances}
    assert ours <= listed
    others = sum(instance.cis for gpu in partitionable.gpus for instance in gpu.mig.unusable)
    assert len(listed) == len(ours) + others


def test_who_monitors_gets_its_capability(partitionable):
    if not Path("/proc/driver/nvidia/capabilities/mig/monitor").exists():
        pytest.skip("this driver has no capability to monitor instances")

    node, gpu = partitionable.node, partitionable.gpus[0]
    capabilities = node.device_files((gpu.minor,), (MONITOR_CAPABILITY,)).capabilities

    assert capabilities[MONITOR_CAPABILITY].container_path.startswith("/dev/nvidia-caps/nvidia-cap")


def test_a_scan_of_a_gpu_with_a_mig_mode_is_quick(partitionable):
    partitionable.node.refresh()
    began = time.monotonic()

    partitionable.node.refresh()

    assert time.monotonic() - began < 1.0
