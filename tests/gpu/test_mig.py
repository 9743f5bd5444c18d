"""How this machine's GPUs could be cut, read only: no mode is changed and nothing is cut."""

import re
import time
from pathlib import Path

import pytest

from dra_driver.node.mig.capabilities import MONITOR
from dra_driver.node.sim.boards import boards
from dra_driver.node.sim.mig.geometry import geometry

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cuttable(node):
    """The GPUs of this machine that have a MIG mode."""
    found = [gpu for gpu in node.refresh().gpus if gpu.mig is not None]
    if not found:
        pytest.skip("no GPU of this machine can be cut")
    return found


def simulated(gpu):
    """The same board in the simulation; None: there is none of that name."""
    product = next((key for key, one in boards().items() if one.name == gpu.product_name), None)
    return geometry(product) if product else None


def test_every_profile_lies_within_its_board(cuttable):
    for gpu in cuttable:
        assert gpu.mig.profiles, gpu.product_name
        for profile in gpu.mig.profiles:
            assert profile.placements, profile
            assert all(
                0 <= place.start < place.end <= gpu.mig.units for place in profile.placements
            )
            assert profile.memory_bytes <= gpu.memory_bytes
            assert re.fullmatch(r"\d+g\.\d+gb([+-][a-z.]+)?", profile.name), profile


def test_the_simulation_cuts_the_board_where_its_driver_does(cuttable):
    known = [(gpu, found) for gpu in cuttable if (found := simulated(gpu)) is not None]
    if not known:
        pytest.skip(f"the simulation has no {cuttable[0].product_name}")
    for gpu, found in known:
        ours = {one.name: one.placements for one in found.profiles}
        theirs = {one.name: one.placements for one in gpu.mig.profiles if one.name in ours}
        assert theirs == {name: ours[name] for name in theirs}
        assert {one.name for one in found.profiles if one.is_plain} <= theirs.keys()


def test_the_mode_is_what_nvidia_smi_says(node, cuttable, document):
    said = {gpu.uuid: gpu.mig for gpu in document.gpus}

    for gpu in cuttable:
        assert node.mig.mode(gpu.uuid) == (said[gpu.uuid] == "Enabled")


def test_instances_are_those_that_nvidia_smi_lists(node, cuttable, ask_smi):
    listed = set(re.findall(r"MIG-[0-9a-f-]+", ask_smi("-L")))

    ours = {one.uuid for gpu in cuttable for one in gpu.mig.instances}
    assert ours <= listed
    assert bool(ours or any(gpu.mig.odd for gpu in cuttable)) == bool(listed)


def test_who_monitors_gets_its_capability(node, cuttable):
    if not Path("/proc/driver/nvidia/capabilities/mig/monitor").exists():
        pytest.skip("this driver has no capability to monitor instances")

    found = node.device_files((cuttable[0].minor,), (MONITOR,)).capabilities

    assert found[MONITOR].container_path.startswith("/dev/nvidia-caps/nvidia-cap")


def test_a_look_at_a_gpu_that_can_be_cut_is_quick(node, cuttable):
    node.refresh()
    began = time.monotonic()

    node.refresh()

    assert time.monotonic() - began < 1.0
