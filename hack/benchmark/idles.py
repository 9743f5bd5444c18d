"""What a plugin takes that has nothing to do."""

import time

from hack.benchmark.figures import Measured, Results
from hack.benchmark.stage import Stage
from hack.benchmark.usage import cpu_seconds

_SETTLE_SECONDS = 5.0
_PARTS = 6


def measure(stage: Stage, seconds: float) -> Results:
    """Processor time over *seconds*; slices are published and the kubelet is connected."""
    with stage.plugin():
        time.sleep(_SETTLE_SECONDS)
        parts = [_percent(stage.pid, seconds / _PARTS) for _ in range(_PARTS)]
    mean = sum(parts) / len(parts)
    where = f"over {seconds:g} s; in parts of it {min(parts):.3f} to {max(parts):.3f}"
    return {"cpu_idle_percent": Measured(mean, where, _PARTS)}


def _percent(pid: int, seconds: float) -> float:
    used, begun = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_seconds(pid) - used) / (time.monotonic() - begun)
