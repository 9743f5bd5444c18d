"""The processes of a pod's containers, as the host counts them."""

import contextlib
from pathlib import Path

from tests.e2e.kube import Kube, wait


def container_ids(kube: Kube, name: str, namespace: str = "default") -> dict[str, str]:
    """By its name, the id of each container of a pod that was started; also of init containers."""
    status = kube.get("Pod", name, namespace)["status"]
    statuses = (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
    return {
        container["name"]: container["containerID"].rpartition("/")[2]
        for container in statuses
        if container.get("containerID")
    }


def pids(container_id: str) -> dict[str, int]:
    """By its command line, the host's number of each process of a container."""
    by_command = {}
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        with contextlib.suppress(OSError):
            if container_id in path.read_text():
                words = (path.parent / "cmdline").read_bytes().decode().split("\0")
                by_command[" ".join(words).strip()] = int(path.parent.name)
    return by_command


def process(container_id: str, begins: str) -> int:
    """The process whose command line begins so, once there is one."""

    def matching_pid() -> int:
        return next((pid for line, pid in pids(container_id).items() if line.startswith(begins)), 0)

    return int(wait(f"a process {begins}", matching_pid, 10))


def main_process(kube: Kube, pod: str, container: str = "main", namespace: str = "default") -> int:
    """The shell that a container's command runs in."""
    return process(container_ids(kube, pod, namespace)[container], "sh -c")


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
