"""What a container gets with its devices: by names, or file by file."""

from dataclasses import replace

import pytest

from cdi.spec import CdiDevice, ContainerEdits, DeviceNode, Hook, Mount, Spec
from dra_driver.k8s.claims import ClaimRef, ClaimUid
from dra_driver.kubeletplugin.device_plugin.resources import (
    ContainerResponse,
    HostDevice,
    HostMount,
)
from dra_driver.plan.device_plugin.container import (
    kept_answer_problems,
    response_ahead,
    response_by_files,
    response_by_names,
    takes_names,
)
from tests.builders import prepared_device


@pytest.mark.parametrize(
    ("setting", "kubelet", "names"),
    [
        ("auto", (1, 28), False),
        ("auto", (1, 29), True),
        ("auto", (1, 36), True),
        ("auto", None, False),
        ("true", (1, 28), True),
        ("true", None, True),
        ("false", (1, 36), False),
    ],
)
def test_names_are_for_kubelets_that_hand_them_on(setting, kubelet, names):
    assert takes_names(setting, kubelet) is names


def test_each_name_comes_once_those_of_the_devices_first():
    prepared = [
        prepared_device("gpu-0", "gpu", "x/claim=a-0", "x/driver=files"),
        prepared_device("gpu-1", "gpu", "x/claim=a-1", "x/driver=files"),
    ]

    assert response_by_names(prepared) == ContainerResponse(
        cdi_names=("x/claim=a-0", "x/claim=a-1", "x/driver=files")
    )


def test_the_names_are_known_before_anything_is_prepared():
    ref = ClaimRef("", "nvidia.com-gpu", ClaimUid("dp-0"))

    assert response_ahead(ref, 2, "gpu.nvidia.com").cdi_names == (
        "k8s.gpu.nvidia.com/claim=dp-0-0",
        "k8s.gpu.nvidia.com/claim=dp-0-1",
        "k8s.gpu.nvidia.com/driver=files",
    )


def test_the_edits_of_both_specs_come_together_and_the_allocations_count():
    driver = Spec(
        "x/driver",
        devices=(CdiDevice("files", container_edits=ContainerEdits(env=("VERSION=1",))),),
        container_edits=ContainerEdits(
            env=("SHARED=driver", "URL=a=b"),
            mounts=(Mount("/lib/a", "/usr/lib/a", options=("ro", "bind")),),
            hooks=(Hook("createContainer", "/bin/hook"),),
        ),
    )
    allocation = Spec(
        "x/claim",
        devices=(
            CdiDevice(
                "a-0",
                container_edits=ContainerEdits(
                    env=("SHARED=allocation",),
                    device_nodes=(DeviceNode("/dev/gpu0", permissions="rw"),),
                ),
            ),
            CdiDevice(
                "a-1",
                container_edits=ContainerEdits(
                    device_nodes=(DeviceNode("/dev/gpu1", "/host/gpu1"),),
                    mounts=(Mount("/run/shm", "/dev/shm", options=("rw", "rbind")),),
                ),
            ),
        ),
        container_edits=ContainerEdits(device_nodes=(DeviceNode("/dev/ctl", permissions="rw"),)),
    )

    assert response_by_files(driver, allocation) == ContainerResponse(
        env=(("SHARED", "allocation"), ("URL", "a=b"), ("VERSION", "1")),
        mounts=(HostMount("/lib/a", "/usr/lib/a"), HostMount("/run/shm", "/dev/shm", False)),
        devices=(
            HostDevice("/dev/ctl", "/dev/ctl", "rw"),
            HostDevice("/dev/gpu0", "/dev/gpu0", "rw"),
            HostDevice("/host/gpu1", "/dev/gpu1", "rwm"),
        ),
    )


KEPT = ContainerResponse(
    env=(("CUDA_MPS_PIPE_DIRECTORY", "/mps/a"),),
    mounts=(HostMount("/lib/a", "/usr/lib/a"),),
    devices=(HostDevice("/dev/gpu0", "/dev/gpu0"),),
)


@pytest.mark.parametrize(
    ("now", "problems"),
    [
        (KEPT, []),
        (replace(KEPT, mounts=(), env=(*KEPT.env, ("NEW", "1"))), []),
        (replace(KEPT, devices=()), ["/dev/gpu0 is not the device file any more"]),
        (replace(KEPT, env=()), ["its MPS server is not at /mps/a any more"]),
    ],
    ids=["the same", "another release", "another number", "another server"],
)
def test_an_answer_that_was_kept_holds_while_it_gives_what_one_would_give_now(now, problems):
    assert list(kept_answer_problems(KEPT, now, lambda path: True)) == problems


def test_an_answer_that_names_what_is_gone_does_not_hold():
    now = replace(KEPT, mounts=())

    assert list(kept_answer_problems(KEPT, now, lambda path: False)) == ["/lib/a is gone"]
    assert list(kept_answer_problems(KEPT, KEPT, lambda path: False)) == []
