"""What it takes to prepare a partition that is created for its claim, beside a whole GPU.

The board is simulated: a real one takes far longer, and the files that the simulated driver makes
for an instance are a part of what is measured here.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from api import names
from dra_driver.k8s.claims import ClaimRef
from hack.benchmark.errors import BenchError
from hack.benchmark.figures import Results, median_of, percentile
from hack.benchmark.sizes import Sizes
from hack.benchmark.stage import Stage

_NODE = "h100x8"
_PARTITIONED, _WHOLE = "gpu-0", "gpu-1"
_PROFILE = "1g.10gb"
_NEXT = 18

Document = Mapping[str, Any]


def measure(stage: Stage, sizes: Sizes, cdi_dir: Path) -> Results:
    """In each round the first partition of a GPU, whose MIG mode it turns on, and then next ones
    beside it, in turns with claims for another GPU as a whole. In a CDI directory of its own, as
    ``prepares.measure_held`` says why."""
    first: list[float] = []
    following: list[float] = []
    removed: list[float] = []
    whole: list[float] = []
    try:
        with stage.plugin(sim=_NODE, profile="mig", cdi_dir=str(cdi_dir)) as calls:
            devices, memory = partitions(stage.slices(), _PARTITIONED, _PROFILE)
            for _ in range(sizes.rounds):
                first_claim, *others = _claims(stage, devices, memory)
                wholes = stage.claims.on([_WHOLE] * _NEXT)
                first.append(calls.prepare(first_claim))
                for partition, whole_gpu in zip(others, wholes, strict=True):
                    whole.append(calls.prepare(whole_gpu))
                    calls.unprepare(whole_gpu)
                    following.append(calls.prepare(partition))
                    removed.append(calls.unprepare(partition))
                calls.unprepare(first_claim)
    finally:
        stage.claims.delete()
    p95, undone = percentile(following, 0.95) * 1000, percentile(removed, 0.5) * 1000
    where = (
        f"p95 {p95:.3g}; unprepare {undone:.3g}; "
        f"the first of a GPU, with its MIG mode, {percentile(first, 0.5) * 1000:.3g}"
    )
    return {
        "mig_whole_prepare_p50_ms": median_of(whole),
        "mig_prepare_p50_ms": median_of(following, where),
    }


def partitions(slices: Iterable[Document], gpu: str, profile: str) -> tuple[list[str], str]:
    """The devices of *gpu* that are partitions of *profile*, and how much memory each has."""
    memory_by_device = {
        device["name"]: device["capacity"][names.MEMORY]["value"]
        for each in slices
        for device in each["spec"].get("devices") or ()
        if device["name"].startswith(f"{gpu}-mig-")
        and device["attributes"]["profile"]["string"] == profile
    }
    if not memory_by_device:
        raise BenchError(f"{gpu} is published without partitions {profile}")
    return sorted(memory_by_device), next(iter(memory_by_device.values()))


def _claims(stage: Stage, partition_names: Sequence[str], memory: str) -> list[ClaimRef]:
    """One on the first partition, and then on the others in turns."""
    others = partition_names[1:]
    devices = [partition_names[0], *(others[turn % len(others)] for turn in range(_NEXT))]
    return stage.claims.on(devices, memory=memory)
