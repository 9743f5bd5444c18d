"""MIG devices of simulated boards: each has a slot for as long as it is there."""

from dataclasses import dataclass, field

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import MigProfile
from dra_driver.sim.mig.gpu_instances import BoardSnapshot
from dra_driver.sim.mig.identifiers import MigUuidParts, mig_uuid, uuid_tag
from dra_driver.sim.mig.state import ComputeInstanceState, GpuInstanceState
from dra_driver.sim.node_spec import SimulatedGpu
from dra_driver.sim.nvml_handles import MigHandle


@frozen
class MigDevice:
    """A compute instance as a device."""

    snapshot: BoardSnapshot
    instance: GpuInstanceState
    compute: ComputeInstanceState

    @property
    def profile(self) -> MigProfile:
        return self.instance.partition(self.snapshot.board).profile

    @property
    def uuid(self) -> str:
        return uuid_of(self.snapshot.gpu, self.profile, self.instance, self.compute)

    @property
    def handle(self) -> MigHandle:
        parent = self.snapshot.handle
        compute = self.compute
        return MigHandle(parent.session, parent.bus_id, self.instance.gi, compute.ci, compute.born)


def uuid_of(
    gpu: SimulatedGpu,
    profile: MigProfile,
    instance: GpuInstanceState,
    compute: ComputeInstanceState,
) -> str:
    """Of a MIG device."""
    minor, uuid = int(gpu.minor or 0), str(gpu.uuid)
    return mig_uuid(
        MigUuidParts(minor, profile.number, instance.start, instance.gi, compute.ci, uuid_tag(uuid))
    )


def mig_devices(snapshot: BoardSnapshot) -> dict[int, MigDevice]:
    """Of a board, by the index that NVML has for them: what goes leaves a hole."""
    devices = [
        MigDevice(snapshot, instance, compute)
        for instance in snapshot.state.instances
        for compute in instance.computes
    ]
    return {
        device.compute.slot: device
        for device in sorted(devices, key=lambda device: device.compute.slot)
    }


def find_mig_device(snapshot: BoardSnapshot, name: str) -> MigDevice | None:
    """The one that is called so, by its UUID or its place: "MIG-GPU-<uuid>/<gi>/<ci>"."""
    for device in mig_devices(snapshot).values():
        if name in (
            device.uuid,
            f"MIG-{snapshot.gpu.uuid}/{device.instance.gi}/{device.compute.ci}",
        ):
            return device
    return None


@dataclass(slots=True)
class ListedMigDevices:
    """What a process has been told of by index: NVML goes on telling it of those that another
    process removed, as long as nothing else takes their place."""

    _devices: dict[tuple[str, int, int], MigDevice] = field(default_factory=dict)

    def at(self, snapshot: BoardSnapshot, index: int) -> MigDevice | None:
        """The one at this index now, or when it was last looked at."""
        place = (snapshot.handle.bus_id, snapshot.handle.session, index)
        if (device := mig_devices(snapshot).get(index)) is not None:
            self._devices[place] = device
        return self._devices.get(place)

    def by_handle(self, handle: MigHandle) -> MigDevice | None:
        """One that is or was there."""
        return next((device for device in self._devices.values() if device.handle == handle), None)

    def forget(self, compute: ComputeInstanceState) -> None:
        """This process has removed it."""
        gone = [place for place, device in self._devices.items() if device.compute == compute]
        for place in gone:
            del self._devices[place]
