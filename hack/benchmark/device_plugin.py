"""What a pod waits for that gets its GPU by the device-plugin API."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hack.benchmark.errors import BenchError
from hack.benchmark.figures import Measured, Results, median_of
from hack.benchmark.pods import in_turn, start_of, start_result
from hack.benchmark.stage import Stage
from tests.e2e.device_plugin import GPU, PROFILE, asking
from tests.e2e.kube import wait

KINDS = {"pod_start_ms": {}, "pod_start_with_gpu_ms": {GPU: 1}}
_CALLS = {"allocate_p50_ms": "Allocate", "prestart_p50_ms": "PreStartContainer"}
_NAME = "by-device-plugin"  # of the profile


def measure(stage: Stage, number: int) -> Results:
    """*number* pods with a GPU, and as many without, in turns."""
    if stage.cluster.mode != "full":
        raise BenchError(f"no containers here: {stage.cluster.why}")
    samples: dict[str, list[float]] = {name: [] for name in KINDS}
    with tempfile.TemporaryDirectory(prefix="dra-bench-") as directory:
        (Path(directory) / f"{_NAME}.yaml").write_text(PROFILE)
        stage.launch(profiles=directory, profile=_NAME, log_format="json")
        stage.driver.wait_ready()
        wait("its GPUs", stage.driver.allocatable)
        for limits in KINDS.values():
            start_of(stage, asking(limits), [])  # the first of a kind warms caches
        begun = len(stage.driver.log)
        for turn in range(number):
            for name in in_turn(turn, list(KINDS)):
                samples[name].append(start_of(stage, asking(KINDS[name]), []))
        stage.stop()
    log = stage.driver.log[begun:]
    starts = {name: start_result(seconds) for name, seconds in samples.items()}
    return starts | {name: _result(log, method) for name, method in _CALLS.items()}


def _result(log: str, method: str) -> Measured:
    seconds = list(call_seconds(log, method))
    if not seconds:
        raise BenchError(f"the plugin logged no call of {method}")
    return median_of(seconds, f"the longest {max(seconds) * 1000:.1f}")


def call_seconds(log: str, method: str) -> Iterator[float]:
    """How long each call of *method* took that gave devices, by the plugin's *log* in JSON."""
    for line in log.splitlines():
        entry = json.loads(line) if line.startswith("{") else {}
        if entry.get("method") == method and "seconds" in entry:
            yield float(entry["seconds"])
