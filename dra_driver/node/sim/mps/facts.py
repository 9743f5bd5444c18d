"""What the daemon finds on the simulated host: its GPUs and their compute modes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FACTS: Final = "usr/share/nvidia-simulated/mps.json"  # below the root of the simulated host
EXCLUSIVE_PROCESS: Final = "3"
PROHIBITED: Final = "2"


@dataclass(frozen=True, slots=True)
class Gpu:
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


@dataclass(frozen=True, slots=True)
class Facts:
    """The host, at one moment."""

    max_clients: int  # of each GPU
    gpus: tuple[Gpu, ...]

    def find(self, name: str) -> Gpu | None:
        """A GPU by its index or UUID."""
        return next((gpu for gpu in self.gpus if name in (str(gpu.index), gpu.uuid)), None)


def read_facts(root: Path) -> Facts:
    """The simulated host in *root*, as it is now."""
    said = json.loads((root / FACTS).read_text())
    settings = root / said["settings"]
    return Facts(said["max_clients"], tuple(_gpu(one, settings) for one in said["gpus"]))


def _gpu(said: Mapping[str, object], settings: Path) -> Gpu:
    try:
        mode = (settings / f"{said['uuid']}.compute-mode").read_text().strip()
    except FileNotFoundError:
        mode = "0"
    fields = dict(said)
    fields["capability"] = tuple(fields["capability"])  # type: ignore[arg-type]
    return Gpu(**fields, mode=mode)  # type: ignore[arg-type]
