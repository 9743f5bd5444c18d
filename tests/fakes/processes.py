"""A /proc in a directory: real processes, in the containers that a test puts them into."""

from pathlib import Path

from dra_driver.k8s.claims import PodUid
from dra_driver.model.processes import ContainerProcess

CONTAINER = "c0ffee" + 58 * "0"


def cgroup_of(pod: str, container: str, version: int = 2) -> str:
    """What /proc/<pid>/cgroup says of a process in a container."""
    if version == 1:
        path = f"/kubepods/burstable/pod{pod}/{container}"
        return f"11:memory:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:{path}\n0::/\n"
    uid = pod.replace("-", "_")
    return f"0::/kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-{container}.scope\n"


class Proc:
    """The directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, pid: int, pod: str, container: str = CONTAINER, version: int = 2) -> None:
        """Put the real process *pid* into a container."""
        place = self.path / str(pid)
        place.mkdir(parents=True, exist_ok=True)
        (place / "stat").unlink(missing_ok=True)
        (place / "stat").symlink_to(f"/proc/{pid}/stat")
        (place / "cgroup").write_text(cgroup_of(pod, container, version))

    def write(
        self, pid: int, pod: str, name: str = "app", started: int = 7, cgroup: str | None = None
    ) -> None:
        """A process that is only told of."""
        place = self.path / str(pid)
        place.mkdir(parents=True, exist_ok=True)
        (place / "stat").unlink(missing_ok=True)  # it may be a link to a real one
        fields = ["S", "1", *(["0"] * 17), str(started), *(["0"] * 30)]
        (place / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
        (place / "cgroup").write_text(cgroup_of(pod, CONTAINER) if cgroup is None else cgroup)
        (place / "comm").write_text(f"{name}\n")

    def process(self, pid: int, pod: str, started: int = 7) -> ContainerProcess:
        """As what ``write`` wrote is found."""
        return ContainerProcess(pid, started, PodUid(pod), CONTAINER)
