"""What a container is told of the MPS server that serves its claim."""

import pytest

from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName, MpsPriority, ServedNamespace
from dra_driver.plan.prepare.cdi_spec import mps_edits
from tests.builders import MIB, gpu

GIB = 1024 * MIB
NAME, CLAIM = MpsNamespaceName("c_0"), ClaimUid("uid")


def environment(protocol=3, gpus=1, **fields):
    namespace = MpsNamespace(NAME, CLAIM, tuple(gpu(n).uuid for n in range(gpus)), **fields)
    edits = mps_edits(ServedNamespace(namespace, protocol, "/run/mps/s0/c_0"))
    variables = dict(line.split("=", 1) for line in edits.env)
    return {name.removeprefix("CUDA_MPS_"): value for name, value in variables.items()}


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_share_of_one_gpu_is_told_as_it_is_limited(protocol):
    assert environment(protocol, percent=30, memory_bytes=(24 * GIB,)) == {
        "PIPE_DIRECTORY": "/run/mps/s0/c_0",
        "ACTIVE_THREAD_PERCENTAGE": "30",
        "PINNED_DEVICE_MEM_LIMIT": "0=24576M",
    }


def test_what_has_no_limit_is_told_none():
    for memory in ((), (None,)):
        assert environment(memory_bytes=memory) == {
            "PIPE_DIRECTORY": "/run/mps/s0/c_0",
            "ACTIVE_THREAD_PERCENTAGE": "100",
        }


def test_with_protocol_2_each_gpu_has_its_limit_by_the_index_that_a_program_sees():
    variables = environment(2, 3, memory_bytes=(24 * GIB, None, 8 * GIB))

    assert variables["PINNED_DEVICE_MEM_LIMIT"] == "0=24576M,2=8192M"


def test_with_protocol_3_the_limits_of_several_gpus_are_left_to_the_server():
    """One for a GPU that a program hides from itself would make it forget all of them."""
    assert "PINNED_DEVICE_MEM_LIMIT" not in environment(3, 2, memory_bytes=(24 * GIB, 8 * GIB))


def test_a_priority_is_told_where_it_is_not_the_usual_one():
    assert environment(priority=MpsPriority.BELOW_NORMAL)["CLIENT_PRIORITY"] == "1"


@pytest.mark.parametrize(("protocol", "access"), [(2, "rw"), (3, "ro")])
def test_the_way_to_the_server_is_mounted_where_it_is(protocol, access):
    """With protocol 2 it is a small file system, in which clients may make files."""
    served = ServedNamespace(MpsNamespace(NAME, CLAIM, (gpu(0).uuid,)), protocol, "/run/mps/s0/c_0")

    (mount,) = mps_edits(served).mounts

    assert (mount.host_path, mount.container_path) == ("/run/mps/s0/c_0", "/run/mps/s0/c_0")
    assert set(mount.options) == {access, "nosuid", "nodev", "noexec", "rbind", "rprivate"}


def test_with_protocol_2_the_shared_memory_of_the_server_is_the_containers():
    served = ServedNamespace(
        MpsNamespace(NAME, CLAIM, (gpu(0).uuid,)), 2, "/run/mps/s0/pipe", "/run/mps/s0/shm"
    )

    edits = mps_edits(served)

    assert [(m.host_path, m.container_path) for m in edits.mounts] == [
        ("/run/mps/s0/pipe", "/run/mps/s0/pipe"),
        ("/run/mps/s0/shm", "/dev/shm"),
    ]
    assert all("rw" in mount.options for mount in edits.mounts)
