"""MIG devices of simulated boards: each has a slot for as long as it is there."""

from dataclasses import dataclass, field

from dra_driver.model.mig import MigProfile
from dra_driver.node.sim.handles import MigHandle
from dra_driver.node.sim.mig.functions import Seen
from dra_driver.node.sim.mig.state import Compute, Cut
from dra_driver.node.sim.mig.uuids import Said, mig_uuid, tag
from dra_driver.node.sim.node import SimulatedGpu


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A compute instance as a device."""

    seen: Seen
    cut: Cut
    compute: Compute

    @property
    def profile(self) -> MigProfile:
        return self.cut.partition(self.seen.board).profile

    @property
    def uuid(self) -> str:
        return uuid_of(self.seen.gpu, self.profile, self.cut, self.compute)

    @property
    def handle(self) -> MigHandle:
        parent = self.seen.handle
        compute = self.compute
        return MigHandle(parent.session, parent.bus_id, self.cut.gi, compute.ci, compute.born)


def uuid_of(gpu: SimulatedGpu, profile: MigProfile, cut: Cut, compute: Compute) -> str:
    """Of a MIG device."""
    minor, uuid = int(gpu.minor or 0), str(gpu.uuid)
    return mig_uuid(Said(minor, profile.number, cut.start, cut.gi, compute.ci, tag(uuid)))


def mig_devices(seen: Seen) -> dict[int, MigDevice]:
    """Of a board, by the index that NVML has for them: what goes leaves a hole."""
    found = [MigDevice(seen, cut, one) for cut in seen.state.cuts for one in cut.computes]
    return {one.compute.slot: one for one in sorted(found, key=lambda one: one.compute.slot)}


def by_name(seen: Seen, name: str) -> MigDevice | None:
    """The one that is called so, by its UUID or its place: "MIG-GPU-<uuid>/<gi>/<ci>"."""
    for one in mig_devices(seen).values():
        if name in (one.uuid, f"MIG-{seen.gpu.uuid}/{one.cut.gi}/{one.compute.ci}"):
            return one
    return None


@dataclass(slots=True)
class Listed:
    """What a process has been told of by index: NVML goes on telling it of those that another
    process removed, as long as nothing else takes their place."""

    _devices: dict[tuple[str, int, int], MigDevice] = field(default_factory=dict)

    def at(self, seen: Seen, index: int) -> MigDevice | None:
        """The one at this index now, or when it was last looked at."""
        place = (seen.handle.bus_id, seen.handle.session, index)
        if (there := mig_devices(seen).get(index)) is not None:
            self._devices[place] = there
        return self._devices.get(place)

    def by_handle(self, handle: MigHandle) -> MigDevice | None:
        """One that is or was there."""
        return next((one for one in self._devices.values() if one.handle == handle), None)

    def forget(self, compute: Compute) -> None:
        """This process has removed it."""
        gone = [place for place, one in self._devices.items() if one.compute == compute]
        for place in gone:
            del self._devices[place]
