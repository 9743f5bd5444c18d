"""The GPUs of the simulated host and their compute modes, as the daemon sees them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dra_driver.base.frozen import frozen
from dra_driver.sim.mig.identifiers import MIG_PREFIX, parse_mig_uuid

FACTS_FILE: Final = "usr/share/nvidia-simulated/mps.json"  # below the root of the simulated host
EXCLUSIVE_PROCESS: Final = "3"
PROHIBITED: Final = "2"


@frozen
class HostGpu:
    """One GPU that works now."""

    index: int  # as nvidia-smi counts them
    uuid: str
    minor: int
    name: str
    bus_id: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    mode: str  # the number of its compute mode
    mig: tuple[Mapping[str, Any], ...] = ()  # what an instance of each profile has
    part: tuple[int, int] = (1, 1)  # compute slices of an instance, and of its board
    instance: tuple[int, int] | None = None  # numbers of GPU and compute instance; None: a GPU

    def instance_named(self, name: str) -> "HostGpu | None":
        """Its instance with this UUID, as a device."""
        instance = parse_mig_uuid(name)
        if instance is None or instance.minor != self.minor or not instance.is_of(self.uuid):
            return None
        for profile in self.mig:
            if profile["number"] == instance.number:
                return replace(
                    self,
                    uuid=name,
                    name=f"{self.name} {profile['name']}",
                    memory_bytes=profile["memory_bytes"],
                    multiprocessors=profile["multiprocessors"],
                    mig=(),
                    part=tuple(profile["part"]),
                    instance=(instance.gi, instance.ci),
                )
        return None


@frozen
class HostSnapshot:
    """The host, at one moment."""

    max_clients: int  # of each GPU
    gpus: tuple[HostGpu, ...]

    def find(self, name: str) -> HostGpu | None:
        """A GPU by its index or UUID, or a MIG instance by its UUID.

        Whether that instance exists now, only the host can say on which it was created.
        """
        if name.startswith(MIG_PREFIX):
            return next(filter(None, (gpu.instance_named(name) for gpu in self.gpus)), None)
        return next((gpu for gpu in self.gpus if name in (str(gpu.index), gpu.uuid)), None)

    def most_clients(self, gpu: HostGpu) -> int:
        """Of an instance: as many of the board's as it has of its compute slices (MIG user
        guide)."""
        slices, all_slices = gpu.part
        return self.max_clients * slices // all_slices


def read_host(root: Path) -> HostSnapshot:
    """The simulated host in *root*, as it is now."""
    document = json.loads((root / FACTS_FILE).read_text())
    settings = root / document["settings"]
    gpus = tuple(_gpu(gpu, settings) for gpu in document["gpus"])
    return HostSnapshot(document["max_clients"], gpus)


def _gpu(document: Mapping[str, object], settings: Path) -> HostGpu:
    try:
        mode = (settings / f"{document['uuid']}.compute-mode").read_text().strip()
    except FileNotFoundError:
        mode = "0"
    fields = dict(document)
    fields["capability"] = tuple(fields["capability"])  # type: ignore[arg-type]
    fields["mig"] = tuple(fields["mig"])  # type: ignore[arg-type]
    return HostGpu(**fields, mode=mode)  # type: ignore[arg-type]
