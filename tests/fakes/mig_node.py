"""A simulated node whose GPUs are partitioned through our own door to NVML."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from dra_driver.model.gpus import GpuUuid, MigProfile, Partition, PartitionKey
from dra_driver.node.mig.gpu_holders import GpuHolders
from dra_driver.node.mig.modes import GpuMigReader
from dra_driver.node.mig.partitions import MigPartitions
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.values import DynamicState, StaticInfo
from dra_driver.sim.mig.state import MigStateStore
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.simulated import Document, Node

BUS = "0000:1b:00.0"


def board(product: str = "H100-80-SXM", bus: str = BUS, **more: Any) -> Document:
    """One GPU of a node file."""
    return {"product": product, "bus_id": bus, **more}


class MigNode(Node):
    """A node with one GPU, unless *gpus* says more, and the partitions of the first."""

    def __init__(
        self, directory: Path, *gpus: Document, patience: float = 0.0, deadline: float = 5.0
    ) -> None:
        self.proc = directory / "proc"  # nobody is there
        super().__init__(directory, {"gpus": list(gpus) or [board(mig=True)]}, deadline)
        self.patience, self.deadline = patience, deadline
        self.partitions = self.through(self.functions)

    def through(self, functions: Any) -> MigPartitions:
        """A process that has only now come, which asks *functions*."""
        self.nvml.stop()
        self.nvml = Nvml(lambda: functions, self.geometries.start_session, self.deadline)
        loaded: Callable[[], bool] = lambda: self.live.current().driver == "ready"  # noqa: E731
        holders = GpuHolders(self.nvml, self.proc)
        gpus = GpuMigReader(self.nvml, self.geometries, holders, loaded)
        return MigPartitions(gpus, self.patience)

    @property
    def gpu(self) -> GpuUuid:
        return GpuUuid(str(self.live.current().gpus[0].uuid))

    @property
    def dynamic(self) -> DynamicState:
        self.nvml.system()
        state = self.nvml.dynamic_states([0])[0]
        assert isinstance(state, DynamicState), state
        return state

    @property
    def static(self) -> StaticInfo:
        self.nvml.system()
        info = self.nvml.static_infos([0])[0]
        assert isinstance(info, StaticInfo), info
        return info

    @cached_property
    def profiles(self) -> tuple[MigProfile, ...]:
        """As they were found first."""
        return self.static.mig_profiles

    def profile(self, name: str) -> MigProfile:
        return next(profile for profile in self.static.mig_profiles if profile.name == name)

    def key(self, name: str, start: int = 0) -> PartitionKey:
        """The partition of this profile from *start* on."""
        profile = next(profile for profile in self.profiles if profile.name == name)
        place = next(placement for placement in profile.placements if placement.start == start)
        return Partition(profile, place).key

    @property
    def instances(self) -> list[str]:
        """The whole instances of the GPU: "1g.10gb at 0"."""
        return [self.named(instance.key) for instance in self.dynamic.instances]

    def named(self, key: PartitionKey) -> str:
        name = next(profile.name for profile in self.profiles if profile.id == key.profile_id)
        return f"{name} at {key.start}"

    def fresh(self) -> SimulatedNvml:
        """The same boards, without partitions but those of the file."""
        self.mig = MigStateStore(is_root=lambda: True)
        self.functions = SimulatedNvml(self.live, mig=self.mig)
        self.partitions = self.through(self.functions)
        return self.functions
