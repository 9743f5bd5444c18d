"""The machine that the figures are of."""

import os
import platform
import time
from pathlib import Path
from typing import Any


def facts() -> dict[str, Any]:
    """What a reader of the figures has to know of it.

    *load*: running processes, averaged over the last minute before the start. *loop_ms*: a million
    additions, which tells a slow hour of a virtual machine from a fast one.
    """
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "processor": _field("/proc/cpuinfo", "model name"),
        "memory_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "loop_ms": round(min(_loop() for _ in range(5)) * 1000, 1),
    }


def _loop() -> float:
    begun, total = time.perf_counter(), 0
    for number in range(1_000_000):
        total += number
    return time.perf_counter() - begun


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "0 unknown"
