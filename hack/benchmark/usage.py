"""What a process takes: resident memory and processor time."""

import time
from pathlib import Path

from hack.benchmark.errors import BenchError


def rss_mib(pid: int) -> dict[str, float]:
    """Resident memory in MiB: in all, and what of it is files (libraries) and what is its own."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError as e:
        raise BenchError(f"process {pid} is gone") from e
    kib = {line.split()[0].rstrip(":"): line.split()[1] for line in lines if line.endswith(" kB")}
    names = {"all": "VmRSS", "own": "RssAnon", "files": "RssFile", "peak": "VmHWM"}
    return {name: int(kib[field]) / 1024 for name, field in names.items()}


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads so far, in nanosecond steps (clock_getcpuclockid(3))."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError as e:
        raise BenchError(f"process {pid} is gone") from e
