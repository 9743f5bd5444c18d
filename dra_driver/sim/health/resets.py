"""Which GPUs were reset, and what a reset cured.

That is kept in the settings of the simulated host, so that it goes with the driver or the GPU. A
reset cures what the node file says of a GPU's health, until the file says something else.
"""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dra_driver.base.files import read_file
from dra_driver.sim.documents import Document
from dra_driver.sim.health.spec import HealthFields, SimulatedEvent, common_events, events_after
from dra_driver.sim.host.tools import RESET_SUFFIX, SETTINGS_DIRECTORY
from dra_driver.sim.mig.state import put_file
from dra_driver.sim.node_spec import SimulatedGpu, SimulatedNode

LOADED: Final = "proc/driver/nvidia/version"  # is there since the driver was loaded
_CURED: Final[Mapping[str, Any]] = {
    name: HealthFields.model_fields[name].default
    for name in (
        "remap",
        "recovery_action",
        "clocks",
        "nvlinks_down",
        "fabric",
        "pcie_replays",
    )
}


class _Reset(Document):
    """The last reset of a GPU, and what the node file said of it: as much of that as it has said
    ever since."""

    at: float
    said: HealthFields


@dataclass(slots=True)
class GpuResets:
    """Those of the host in *host*; None: there is nothing that could reset a GPU."""

    host: Path | None = None
    _started: float = field(default_factory=time.time)

    def after(self, node: SimulatedNode, gpu: SimulatedGpu) -> SimulatedGpu:
        """*gpu* without the faults that its last reset cured."""
        reset = self._read(node, gpu)
        if reset is None:
            return gpu
        cured = {
            name: well
            for name, well in _CURED.items()
            if getattr(gpu, name) == getattr(reset.said, name)
        }
        return gpu.model_copy(update=cured)

    def events_since(self, node: SimulatedNode, gpu: SimulatedGpu) -> tuple[SimulatedEvent, ...]:
        """What happened to *gpu* since its driver was loaded or it was reset."""
        reset = self._read(node, gpu)
        return events_after(reset.said.events, gpu.events) if reset else gpu.events

    def seconds_up(self, node: SimulatedNode, gpu: SimulatedGpu) -> float:
        """How long ago the driver was loaded or *gpu* reset."""
        since, reset = self._started, self._read(node, gpu)
        if self.host is not None:
            with contextlib.suppress(FileNotFoundError):
                since = (self.host / LOADED).stat().st_mtime
        return max(0.0, time.time() - max(since, reset.at if reset else 0.0))

    def record(self, node: SimulatedNode, gpu: SimulatedGpu) -> None:
        """*gpu* has been reset now. OSError: that cannot be kept."""
        said = HealthFields(**{name: getattr(gpu, name) for name in HealthFields.model_fields})
        self._write(node, gpu, _Reset(at=time.time(), said=said))

    def follow(self, node: SimulatedNode) -> None:
        """Forget what the node file does not say any more: when it says it again, it is new."""
        for gpu in node.gpus:
            reset = self._read(node, gpu)
            if reset is None:
                continue
            changed = {
                name: well
                for name, well in _CURED.items()
                if getattr(gpu, name) != getattr(reset.said, name)
            }
            events = common_events(reset.said.events, gpu.events)
            said = reset.said.model_copy(update={**changed, "events": events})
            if said != reset.said:
                with contextlib.suppress(PermissionError):  # who only looks sees it all the same
                    self._write(node, gpu, _Reset(at=reset.at, said=said))

    def _read(self, node: SimulatedNode, gpu: SimulatedGpu) -> _Reset | None:
        if self.host is None:
            return None
        try:  # it is asked for with every health value, and rarely there
            return _Reset.model_validate_json(read_file(self._file(node, gpu)))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _write(self, node: SimulatedNode, gpu: SimulatedGpu, reset: _Reset) -> None:
        # The host tidies up in the directories below, and would take a file that is half written.
        file = Path(self._file(node, gpu))
        put_file(file, reset.model_dump_json(), aside=file.parents[1])

    def _file(self, node: SimulatedNode, gpu: SimulatedGpu) -> str:
        return f"{self.host}/{SETTINGS_DIRECTORY}/{node.driver_version}/{gpu.uuid}{RESET_SUFFIX}"
