"""What a change among many CDI files costs the node's containerd, which reads all of them again."""

import time
from collections.abc import Sequence

from dra_driver.k8s.claims import ClaimRef
from hack.benchmark.calls import Calls
from hack.benchmark.errors import BenchError
from hack.benchmark.figures import Measured, Results
from hack.benchmark.prepares import GPUS
from hack.benchmark.sizes import Sizes
from hack.benchmark.stage import Stage
from hack.benchmark.usage import cpu_seconds

_IDLE_SECONDS = 5.0
_LOOK_SECONDS = 0.25
_QUIET_LOOKS = 3  # one after the other, before containerd counts as done
_QUIET_SECONDS = 0.01  # of CPU between two looks, above what it takes idle
_PATIENCE_SECONDS = 300.0


def measure(stage: Stage, sizes: Sizes) -> Results:
    """CPU time of containerd for each claim prepared or unprepared, less what it takes idle: in the
    directory that it watches, while other claims are held there. The next change comes when
    containerd is done with the one before, since it may read once for several."""
    figure = f"containerd_cpu_ms_per_change_{sizes.held}_held"
    pid = stage.cluster.status().components.get("containerd")
    if pid is None:
        return {figure: Measured(None, f"no containers here: {stage.cluster.why}")}
    devices = [f"gpu-{index % GPUS}" for index in range(sizes.held)]
    held_claims = stage.claims.on(devices, admin=True)
    changing = stage.claims.on(devices[: sizes.changes])
    try:
        with stage.plugin() as calls:
            idle = _idle_share(pid)
            alone = _per_change(pid, idle, calls, changing)
            for ref in held_claims:
                calls.prepare(ref)
            _wait_until_quiet(pid, idle)
            beside_held = _per_change(pid, idle, calls, changing)
            for ref in held_claims:
                calls.unprepare(ref)
            _wait_until_quiet(pid, idle)  # else it would take the processor from what comes next
    finally:
        stage.claims.delete()
    where = f"with none held {alone * 1000:.2g}; idle {idle * 100:.2g} % of a core"
    return {figure: Measured(beside_held * 1000, where, 2 * len(changing))}


def _idle_share(pid: int) -> float:
    """Of a core."""
    used, begun = cpu_seconds(pid), time.monotonic()
    time.sleep(_IDLE_SECONDS)
    return (cpu_seconds(pid) - used) / (time.monotonic() - begun)


def _per_change(pid: int, idle: float, calls: Calls, refs: Sequence[ClaimRef]) -> float:
    """CPU seconds for each of the two changes that preparing and unpreparing one of *refs* is."""
    used, begun = cpu_seconds(pid), time.monotonic()
    for ref in refs:
        for change in (calls.prepare, calls.unprepare):
            change(ref)
            _wait_until_quiet(pid, idle)
    seconds = time.monotonic() - begun
    return (cpu_seconds(pid) - used - idle * seconds) / (2 * len(refs))


def _wait_until_quiet(pid: int, idle: float) -> None:
    give_up_at = time.monotonic() + _PATIENCE_SECONDS
    quiet_looks = 0
    while quiet_looks < _QUIET_LOOKS:
        if time.monotonic() > give_up_at:
            raise BenchError(f"containerd was busy for {_PATIENCE_SECONDS:g} s")
        used = cpu_seconds(pid)
        time.sleep(_LOOK_SECONDS)
        is_quiet = cpu_seconds(pid) - used < idle * _LOOK_SECONDS + _QUIET_SECONDS
        quiet_looks = quiet_looks + 1 if is_quiet else 0
