"""From the start of the process to the first ResourceSlice in the API server."""

import subprocess
import sys
import time

from hack.benchmark.errors import BenchError
from hack.benchmark.figures import Results, median_of, percentile
from hack.benchmark.stage import AS_IN_IMAGE, Stage
from tests.e2e.kube import PATHS

_SECONDS = 30


def measure(stage: Stage, number: int) -> Results:
    """*number* starts on a node whose slices are gone."""
    timings = [_start(stage) for _ in range(number)]
    imports = percentile([_imports() for _ in range(3)], 0.5) * 1000
    where = f"interpreter and imports {imports:.0f}, then first look, connection, write"
    return {"start_to_slices_ms": median_of(timings, where)}


def _start(stage: Stage) -> float:
    version = stage.delete_slices()
    query = {**stage.slices_query(), "resourceVersion": version}
    watch = stage.kube.api.watch(PATHS["ResourceSlice"], query, _SECONDS)
    try:
        begun = time.perf_counter()
        stage.launch()
        for event in watch:
            if event["type"] == "ADDED":
                return time.perf_counter() - begun
        raise BenchError(f"no slice within {_SECONDS} s of a start:\n{stage.driver.log[-1000:]}")
    finally:
        watch.close()
        stage.driver.wait_ready()  # else the kubelet would see it come and go
        stage.stop()


def _imports() -> float:
    begun = time.perf_counter()
    # As the command does it, which looks for no garbage meanwhile; how Python ends does not count.
    modules = "dra_driver.__main__, dra_driver.plugin.run"
    program = f"import gc, os; gc.disable(); import {modules}; os._exit(0)"
    subprocess.run([*AS_IN_IMAGE, sys.executable, "-c", program], check=True, timeout=60)
    return time.perf_counter() - begun
