"""How soon all partitions of a node with sixteen MIG GPUs are in the API server."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dra_driver.sim.node_spec import node_file
from hack.benchmark.errors import BenchError
from hack.benchmark.figures import Measured, Results, percentile
from hack.benchmark.stage import Stage
from tests.e2e.kube import PATHS

GPUS = 16

_NODE = "a100x16"
_FOREIGN = {"profile": "1g.5gb", "start": 0}  # an instance that somebody else makes
_LOOK_SECONDS = "1"
_SECONDS = 60

Document = Mapping[str, Any]


def measure(stage: Stage, number: int, directory: Path) -> Results:
    """*number* starts on a node whose slices are gone, and as often a change while it runs. The
    first start finds MIG mode off and turns it on; it counts apart."""
    node = directory / "node.yaml"
    node.write_text(node_file(_NODE).read_text())
    first = _start(stage, node)[0]
    timings = [_start(stage, node) for _ in range(number)]
    starts, changes = zip(*timings, strict=True)
    low, high = min(changes) * 1000, max(changes) * 1000
    return {
        "publish_16_mig_gpus_ms": Measured(
            percentile(starts, 0.5) * 1000,
            f"{first * 1000:.0f} where MIG mode is turned on before",
            number,
        ),
        "republish_16_mig_gpus_ms": Measured(
            percentile(changes, 0.5) * 1000, f"{low:.0f} to {high:.0f}", number
        ),
    }


def is_whole(slices: Iterable[Document], counter_sets: int) -> bool:
    """Whether *slices* are all of their pool, with so many counter sets."""
    specs = [each["spec"] for each in slices]
    newest = max((spec["pool"]["generation"] for spec in specs), default=0)
    specs = [spec for spec in specs if spec["pool"]["generation"] == newest]
    published = sum(len(spec.get("sharedCounters") or ()) for spec in specs)
    return published == counter_sets and len(specs) == specs[0]["pool"]["resourceSliceCount"]


def number_of_static(slices: Iterable[Document]) -> int:
    """How many partitions of *slices* exist, whether a claim needs them or not."""
    devices = [device for each in slices for device in each["spec"].get("devices") or ()]
    return sum(
        "uuid" in device["attributes"]
        for device in devices
        if device["attributes"]["type"]["string"] == "mig"
    )


def _start(stage: Stage, node: Path) -> tuple[float, float]:
    """The seconds from a start until the pool is whole, and after a change from the first slice
    that is written to the last: nothing of the pool can be allocated meanwhile."""
    since = stage.delete_slices()
    begun = time.perf_counter()
    try:
        stage.launch(sim=str(node), profile="mig", look_interval=_LOOK_SECONDS)
        started = _until_whole(stage, since, static=0)[1] - begun
        stage.driver.wait_ready()
        since = stage.slices_version()
        _put(node, [_FOREIGN])
        first, last = _until_whole(stage, since, static=1)
        return started, last - first
    finally:
        stage.stop()
        _put(node, [])


def _put(node: Path, instances: list[Mapping[str, Any]]) -> None:
    """*instances* of others are on the last GPU."""
    document = yaml.safe_load(node.read_text())
    document["gpus"][-1]["instances"] = instances
    new = node.with_suffix(".new")
    new.write_text(yaml.safe_dump(document))
    new.replace(node)


def _until_whole(stage: Stage, since: str, static: int) -> tuple[float, float]:
    """When the first slice was written after *since*, and when all were there."""
    slices = {each["metadata"]["name"]: each for each in stage.slices()}
    query = {**stage.slices_query(), "resourceVersion": since}
    watch = stage.kube.api.watch(PATHS["ResourceSlice"], query, _SECONDS)
    first = 0.0
    try:
        for event in watch:
            now = time.perf_counter()
            first = first or now
            slices[event["object"]["metadata"]["name"]] = event["object"]
            if event["type"] == "DELETED":
                slices.pop(event["object"]["metadata"]["name"])
            if is_whole(slices.values(), GPUS) and number_of_static(slices.values()) == static:
                return first, now
    finally:
        watch.close()
    raise BenchError(f"the pool was not whole within {_SECONDS} s:\n{stage.driver.log[-1000:]}")
