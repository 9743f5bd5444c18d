"""The processes of a pod's containers, as the host counts them."""

import contextlib
from pathlib import Path

from tests.e2e.kube import Kube, wait


def container_ids(kube: Kube, name: str, namespace: str = "default") -> dict[str, str]:
    """By its name, the id of each container of a pod that was started; also of init containers."""
    status = kube.get("Pod", name, namespace)["status"]
    found = (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
    return {
        one["name"]: one["containerID"].rpartition("/")[2]
        for one in found
        if one.get("containerID")
    }


def pids(container_id: str) -> dict[str, int]:
    """By its command line, the host's number of each process of a container."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        with contextlib.suppress(OSError):
            if container_id in path.read_text():
                words = (path.parent / "cmdline").read_bytes().decode().split("\0")
                found[" ".join(words).strip()] = int(path.parent.name)
    return found


def process(container_id: str, begins: str) -> int:
    """The process whose command line begins so, once there is one."""

    def there() -> int:
        return next((pid for line, pid in pids(container_id).items() if line.startswith(begins)), 0)

    return int(wait(f"a process {begins}", there, 10))


def main_process(kube: Kube, pod: str, container: str = "main", namespace: str = "default") -> int:
    """The shell that a container's command runs in."""
    return process(container_ids(kube, pod, namespace)[container], "sh -c")


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
