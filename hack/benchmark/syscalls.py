"""How many system calls a prepare and an unprepare take, of all threads of the plugin."""

import contextlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dra_driver.k8s.claims import ClaimRef
from hack.benchmark.calls import Calls
from hack.benchmark.errors import BenchError
from hack.benchmark.figures import Measured, Results
from hack.benchmark.stage import Stage

_GPUS = 8
_WARM = 8
_SECONDS = 10.0
_SHOWN = 8  # kinds of calls that are named
# "  5.26    0.000012           1        10         2 openat"; the number of errors may be missing.
_ROW = re.compile(r"\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)(?:\s+\d+)?\s+(\w+)")


def measure(stage: Stage, number: int) -> Results:
    """*number* claims for a whole GPU, one after another, under ``strace``."""
    if shutil.which("strace") is None:
        return {"syscalls_per_pair": Measured(None, "left out: there is no strace here")}
    refs = stage.claims.on([f"gpu-{index % _GPUS}" for index in range(_WARM + number)])
    try:
        with stage.plugin() as calls:
            _pairs(calls, refs[:_WARM])
            counts = call_counts(_summary(stage.pid, calls, refs[_WARM:]))
    except _NotTraced as e:
        return {"syscalls_per_pair": Measured(None, f"left out: {e}")}
    finally:
        stage.claims.delete()
    most = sorted(counts, key=lambda name: (-counts[name], name))[:_SHOWN]
    where = ", ".join(f"{name} {counts[name] / number:.2g}" for name in most)
    return {"syscalls_per_pair": Measured(sum(counts.values()) / number, where, number)}


def call_counts(summary: str) -> Mapping[str, int]:
    r"""How often each system call was made, by what ``strace -c`` writes.

    >>> call_counts(
    ...     "% time     seconds  usecs/call     calls    errors syscall\n"
    ...     " 60.00    0.000012           1        10         2 openat\n"
    ...     " 40.00    0.000008           1         8           close\n"
    ...     "100.00    0.000020           1        18         2 total\n"
    ... )
    {'openat': 10, 'close': 8}
    """
    rows = (match for line in summary.splitlines() if (match := _ROW.fullmatch(line.rstrip())))
    return {row[2]: int(row[1]) for row in rows if row[2] != "total"}


class _NotTraced(BenchError):
    """This machine does not let the plugin be traced."""


def _pairs(calls: Calls, refs: Sequence[ClaimRef]) -> None:
    for ref in refs:
        calls.prepare(ref)
        calls.unprepare(ref)


def _summary(pid: int, calls: Calls, refs: Sequence[ClaimRef]) -> str:
    """What strace counted of the process while *refs* were prepared and unprepared."""
    with tempfile.TemporaryDirectory(prefix="dra-bench-") as directory:
        summary = Path(directory) / "summary"
        command = ["strace", "--follow-forks", "--summary-only", f"--output={summary}"]
        strace = subprocess.Popen([*command, f"--attach={pid}"], stderr=subprocess.PIPE, text=True)
        try:
            _wait_until_traced(pid, strace)
            _pairs(calls, refs)
        finally:
            with contextlib.suppress(ProcessLookupError):
                strace.send_signal(signal.SIGINT)  # it lets the process go, and writes
            error = strace.communicate(timeout=_SECONDS)[1].strip()
        if not summary.exists():
            raise _NotTraced(error)
        return summary.read_text()


def _wait_until_traced(pid: int, strace: subprocess.Popen[str]) -> None:
    give_up_at = time.monotonic() + _SECONDS
    while not all(map(_is_traced, Path(f"/proc/{pid}/task").iterdir())):
        if strace.poll() is not None:
            raise _NotTraced(strace.communicate()[1].strip())
        if time.monotonic() > give_up_at:
            raise BenchError(f"strace did not attach to process {pid} within {_SECONDS:g} s")
        time.sleep(0.05)


def _is_traced(task: Path) -> bool:
    try:
        return "\nTracerPid:\t0\n" not in (task / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True  # that thread has just ended
