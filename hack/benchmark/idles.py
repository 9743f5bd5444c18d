"""What a plugin takes that has nothing to do."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hack.benchmark.figures import Measured, Results
from hack.benchmark.stage import Stage
from hack.benchmark.usage import cpu_seconds
from tests.pages import read_page

_SETTLE_SECONDS = 5.0
_PARTS = 6
# As the chart has it.
_READINESS_SECONDS = 2.0
_READINESS_PER_LIVENESS = 5


def measure(stage: Stage, seconds: float) -> Results:
    """Processor time over *seconds*; slices are published and the kubelet is connected."""
    with stage.plugin(), _probed(stage.driver.ports[""]):
        time.sleep(_SETTLE_SECONDS)
        parts = [_percent(stage.pid, seconds / _PARTS) for _ in range(_PARTS)]
    mean = sum(parts) / len(parts)
    where = f"over {seconds:g} s; in parts of it {min(parts):.3f} to {max(parts):.3f}"
    return {"cpu_idle_percent": Measured(mean, where, _PARTS)}


@contextmanager
def _probed(port: int) -> Iterator[None]:
    """Somebody asks the plugin how it is, as the kubelet asks a pod of the chart."""
    stop = threading.Event()

    def probe() -> None:
        count = 0
        while not stop.wait(_READINESS_SECONDS):
            count += 1
            read_page(port, "/readyz")
            if count % _READINESS_PER_LIVENESS == 0:
                read_page(port, "/livez")

    thread = threading.Thread(target=probe, name="probes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _percent(pid: int, seconds: float) -> float:
    used, begun = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_seconds(pid) - used) / (time.monotonic() - begun)
