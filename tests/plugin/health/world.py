"""A node whose GPUs are seen as a test says, and a monitor of their health that can die."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from dra_driver.base.errors import NodeError
from dra_driver.k8s.events import Event, NodeRef
from dra_driver.model.gpus import GpuUuid, Inventory
from dra_driver.model.health import Faults, GpuEvent, HealthReading, HealthState, Problem
from dra_driver.model.profiles import DEFAULT_PROFILE, Profile
from dra_driver.model.records import ClaimRecord
from dra_driver.node.state.health_file import HealthFile
from dra_driver.plugin.health.monitor import HealthInputs, HealthMonitor
from dra_driver.plugin.health.report import HealthReporter
from dra_driver.plugin.metrics import HealthMetrics, Metrics
from tests.builders import POOL, gpu_uuid, inventory
from tests.fakes.mortal import Killed


def xid(number: int, minor: int = 0, **fields: Any) -> GpuEvent:
    return GpuEvent(gpu_uuid(minor), Problem.XID, str(number), **fields)


class NoRequests:
    """No administrator says anything, until *edit* is set."""

    def __init__(self) -> None:
        self.edit: Callable[[HealthState], HealthState] | None = None
        self.done_count = 0

    def apply(self, state: HealthState, gpus: object) -> HealthState:
        edit, self.edit = self.edit, None
        return edit(state) if edit else state

    def done(self) -> None:
        self.done_count += 1


class World:
    """Times are in seconds; the clock stands still unless a test moves it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "state/health.json"
        self.boot = "boot"
        self.now = 1000.0
        self.inventory: Inventory = inventory(8)
        self.inventory_now: Inventory | NodeError | None = None
        self.scans = 0  # that the monitor asked for
        self.readings: dict[GpuUuid, HealthReading | NodeError] = {
            gpu.uuid: HealthReading(gpu.uuid, energy_mj=1000) for gpu in self.inventory.gpus
        }
        self.unmonitored: dict[GpuUuid, str] = {}
        self.looks = 0
        self.energy_of: set[GpuUuid] = set()  # of whom the last look asked for the energy
        self.profile: Profile = DEFAULT_PROFILE
        self.newest = True
        self.records: tuple[ClaimRecord, ...] = ()
        self.events: list[Event] = []
        self.writes = 0
        self.changes = 0
        self.effects_left: int | None = None  # until the process dies; None: it lives
        self.start()

    def start(self) -> HealthMonitor:
        """A new process; the one before is gone."""
        self.effects_left = None
        self.metrics = Metrics()
        self.requests = NoRequests()
        file = HealthFile(self.path, self.boot)
        write = file.write

        def counted(state: HealthState) -> None:
            self.effect()
            write(state)
            self.writes += 1

        file.write = counted  # type: ignore[method-assign]
        reporter = HealthReporter(
            self,
            HealthMetrics(self.metrics),
            lambda: NodeRef(POOL, "uid-node"),
            lambda: self.records,
            lambda pid: None,
        )
        inputs = HealthInputs(
            scan=self.scan_now,
            readings=self.look,
            unmonitored=lambda: self.unmonitored,
            profile=lambda: self.profile,
            is_newest=lambda: self.newest,
            epoch=lambda: self.now,
            clock=lambda: self.now,
        )
        self.monitor = HealthMonitor(inputs, file, reporter, self.requests)
        self.monitor.on_change.append(self.note_change)
        return self.monitor

    def effect(self) -> None:
        """Something is done outside of the process, which may die just before."""
        if self.effects_left is not None:
            if self.effects_left == 0:
                raise Killed
            self.effects_left -= 1

    def emit(self, event: Event) -> None:
        self.effect()
        self.events.append(event)

    def note_change(self) -> None:
        self.effect()
        self.changes += 1

    def look(self, energy_of: Collection[GpuUuid]) -> dict[GpuUuid, HealthReading | NodeError]:
        self.looks += 1
        self.energy_of = set(energy_of)
        return {
            gpu: replace(reading, energy_mj=None)
            if isinstance(reading, HealthReading) and gpu not in self.energy_of
            else reading
            for gpu, reading in self.readings.items()
        }

    def scan_now(self) -> Inventory:
        """GPUs as they are now, where that is another than at the last scan."""
        self.scans += 1
        if isinstance(self.inventory_now, NodeError):
            raise self.inventory_now
        return self.inventory_now or self.inventory

    def scan(self) -> Faults:
        return self.monitor.faults_for(self.inventory)

    def step(self, *events: GpuEvent, after: float = 0.0) -> float | None:
        """One step of the loop, *after* so many seconds."""
        self.now += after
        self.scan()
        if events:
            self.monitor.saw(events)
        return self.monitor.step()

    def published(self) -> list[tuple[GpuUuid, Problem, str]]:
        return [(fault.gpu, fault.problem, fault.value) for fault in self.scan()]

    def told(self) -> list[tuple[str, str]]:
        """To whom something was told, and the reason, in order."""
        return [(event.regarding.name, event.reason) for event in self.events]
