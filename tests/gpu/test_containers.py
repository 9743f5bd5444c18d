"""A claim's CDI spec, done to a container: it sees its one GPU, and computes on it."""

import json

import pytest

from tests.gpu.bundle import base_config
from tests.gpu.rootfs import PROGRAM, PYTHON

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture
def gpu(node):
    return node.inventory().gpus[-1]  # not the one that any mistake would give


@pytest.fixture
def config(world, gpu):
    return world.config("one", gpu.name)


def output_of(run, config, *args):
    ran = run(config, args)
    assert ran.code == 0, f"{args}: {ran.out}\n{ran.err}"
    return ran.out


def test_nvidia_smi_lists_exactly_the_one_gpu(container, config, gpu):
    (line,) = output_of(container, config, "/usr/bin/nvidia-smi", "-L").splitlines()

    assert f"{gpu.product_name} (UUID: {gpu.uuid})" in line


def test_the_device_files_are_those_of_the_one_gpu(container, config, gpu):
    names = output_of(container, config, "ls", "/dev").split()

    numbered = [name for name in names if name.startswith("nvidia") and name[6:].isdigit()]
    assert numbered == [f"nvidia{gpu.minor}"]
    assert {"nvidiactl", "nvidia-uvm"} <= set(names)


def test_the_workload_is_told_what_it_holds(container, config, gpu):
    environment = dict(
        line.split("=", 1)
        for line in output_of(container, config, "env").splitlines()
        if "=" in line
    )

    assert environment[f"GPU_DEVICE_{gpu.minor}_UUID"] == gpu.uuid
    assert environment[f"GPU_DEVICE_{gpu.minor}_CLAIM"] == "default/one"
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_cuda_computes_in_the_container(container, config, gpu):
    answer = json.loads(output_of(container, config, PYTHON, PROGRAM))

    assert (answer["gpus"], answer["name"], answer["right"]) == (1, gpu.product_name, True)


def test_a_container_without_the_claim_has_no_gpu(container, config):
    bare = {**config, "linux": base_config()["linux"]}  # its files, but no device

    ran = container(bare, [PYTHON, PROGRAM])

    assert ran.code != 0
    assert "CUDA_ERROR" in ran.err


def test_all_gpus_of_one_claim_are_seen_together(container, world):
    devices = world.node.inventory().gpus
    config = world.config("all", *(gpu.name for gpu in devices))

    listed = output_of(container, config, "/usr/bin/nvidia-smi", "-L")

    assert sorted(gpu.uuid in listed for gpu in devices) == [True] * len(devices)
    assert json.loads(output_of(container, config, PYTHON, PROGRAM))["gpus"] == len(devices)


def test_the_mounts_and_device_files_are_enough_without_a_container(chroot, config, gpu):
    listed = output_of(chroot, config, "/usr/bin/nvidia-smi", "-L")
    answer = json.loads(output_of(chroot, config, PYTHON, PROGRAM))

    assert gpu.uuid in listed
    assert answer["right"]


def test_a_claim_that_is_taken_back_leaves_the_drivers_spec_alone(world, gpu):
    ref = world.claims.put("short", gpu.name)
    world.preparer.prepare(ref)
    assert len(list(world.cdi.iterdir())) == 2

    world.preparer.unprepare(ref)

    (spec,) = world.cdi.iterdir()
    assert spec.name == "k8s.gpu.nvidia.com-driver_files.json"
    assert world.ledger.records() == ()
