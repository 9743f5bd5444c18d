"""Control daemons of others are told of in few words, whatever they call themselves."""

import pytest

from dra_driver.node.mps.processes import UnmanagedDaemon, describe_unmanaged, is_in_pod

CONTAINER = "c" * 64


def test_each_on_the_host_is_described_and_those_in_pods_are_counted():
    daemons = [
        UnmanagedDaemon(12, "/tmp/nvidia-mps"),
        UnmanagedDaemon(7, "/run/mps"),
        *(UnmanagedDaemon(n, f"/tmp/{n}", in_pod=True) for n in (8, 9)),
    ]

    assert describe_unmanaged(daemons) == (
        "nvidia-cuda-mps-control (process 7, pipe directory /run/mps)",
        "nvidia-cuda-mps-control (process 12, pipe directory /tmp/nvidia-mps)",
        "nvidia-cuda-mps-control (2 processes in pods)",
    )
    assert describe_unmanaged(daemons[2:3]) == ("nvidia-cuda-mps-control (1 process in pods)",)


def test_however_many_there_are_sixteen_lines_tell_of_them():
    daemons = [UnmanagedDaemon(n, "/run/mps", in_pod=n > 100) for n in range(1000)]

    lines = describe_unmanaged(daemons)

    assert len(lines) == 16
    assert lines[-2:] == (
        "nvidia-cuda-mps-control (87 more on this host)",
        "nvidia-cuda-mps-control (899 processes in pods)",
    )


def test_a_directory_is_shortened_and_shown_in_one_line():
    (line,) = describe_unmanaged([UnmanagedDaemon(7, "/tmp/a\nb\x1b[31m" + "x" * 1000)])

    assert line.startswith("nvidia-cuda-mps-control (process 7, pipe directory /tmp/a?b?[31mxxx")
    assert len(line) == len("nvidia-cuda-mps-control (process 7, pipe directory )") + 128


@pytest.mark.parametrize(
    ("cgroup", "inside"),
    [
        (f"0::/kubepods.slice/kubepods-pod1_2.slice/cri-containerd-{CONTAINER}.scope\n", True),
        (f"0::/kubepods/burstable/pod1-2/{CONTAINER}\n", True),
        (f"0::/../../pod1-2/{CONTAINER}\n", True),
        (f"4:cpu:/kubepods/pod1-2/{CONTAINER}\n3:pids:/kubepods/pod7/{'d' * 64}\n", True),
        ("0::/system.slice/nvidia-mps.service\n", False),
        ("0::/dra-driver-gpu-mps\n", False),
        ("", False),
    ],
)
def test_a_process_in_a_pod_is_known_by_its_cgroup(cgroup, inside):
    assert is_in_pod(cgroup.encode()) is inside
