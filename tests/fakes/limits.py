"""A simulated node with a driver that limits GPU memory by cgroup, and pods in its cgroups."""

import tempfile
from pathlib import Path
from typing import Any

from dra_driver.k8s.claims import PodUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.node.cgroups.tree import Cgroups
from dra_driver.node.memory.support import get_memory_limit
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.nvml.client import Nvml
from dra_driver.sim.memory_limits import CgroupTree, GpuAllocation, SimulatedMemoryLimits
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.simulated import Node, two_gpus

GIB = 1 << 30
MODERN = "615.71.09"


def container_id(name: str) -> str:
    return name.encode().hex().rjust(64, "0")


class LimitedNode:
    """Two GPUs, a cgroup file system, and what the driver keeps for it."""

    def __init__(
        self,
        directory: Path,
        backend: str = "dmem",
        deadline_seconds: float = 5.0,
        **fields: Any,
    ) -> None:
        document = {**two_gpus(), "driver_version": MODERN, "memory_limits": backend, **fields}
        self.node = Node(directory, document)
        self.tree = CgroupTree(directory / "cgroup")
        self.is_root = True
        self.driver = SimulatedMemoryLimits(self.tree.root, lambda: self.is_root)
        self.functions = SimulatedNvml(self.node.live, self.driver)
        self.nvml = Nvml(lambda: self.functions, GeometryCache, deadline_seconds)
        self.cgroups = Cgroups(self.tree.root, self.tree.make, self.tree.remove)
        gpus = self.node.live.current().gpus
        self.gpus = tuple(GpuUuid(str(gpu.uuid)) for gpu in gpus)

    def pod(self, uid: str) -> Path:
        """The kubelet makes a pod's cgroup."""
        return self.tree.make(f"kubepods/burstable/pod{uid}")

    def container(self, pod: str, name: str) -> Path:
        """The runtime makes a container's."""
        return self.tree.make(f"kubepods/burstable/pod{pod}/{container_id(name)}")

    def end(self, pod: str) -> None:
        """All of the pod's cgroups go, as the kubelet does it: what is inside first."""
        directory = self.tree.root / f"kubepods/burstable/pod{pod}"
        for inside in sorted(filter(Path.is_dir, directory.rglob("*")), reverse=True):
            self.tree.remove(inside)
        # The next one of this name is to have another inode, as with the kernel, which numbers
        # cgroups once and for all.
        directory.rename(tempfile.mkdtemp(prefix=".ended.", dir=self.tree.root.parent))

    def limit(self, cgroup: Path, gpu: int = 0) -> int | None:
        """What holds for *cgroup*, as NVML says it."""
        return get_memory_limit(self.nvml, self.gpus[gpu], cgroup).hard_bytes

    def of_pod(self, uid: str, gpu: int = 0) -> int | None:
        directory = self.cgroups.pod(PodUid(uid))
        assert directory is not None
        return self.limit(directory, gpu)

    def allocate(self, cgroup: Path, size_bytes: int, gpu: int = 0) -> GpuAllocation | None:
        """What a process in *cgroup* gets; None: out of memory."""
        node = self.node.live.current()
        return self.driver.allocate(node, node.gpus[gpu], cgroup, size_bytes)
