"""The one door to ``nvidia-smi compute-policy``: how long the processes of a GPU take turns.

NVML has no function for it, so the driver's own program is run, which NVIDIA does not promise to
keep its output. What was seen of it: the usage text, and a refusal (driver 535, Tesla P4)::

    Failed to set timeslice policy with value Default for GPU 0 : Not Supported
    Failed to set timeslice for requested devices : Not Supported

with exit code 3, the number of that NVML error. The shape of its list is not documented; any line
or table that names the policy "timeslice" is understood, and what is not understood counts as not
said. Which GPUs can set an interval is found by trying: compute capability 7.0 is what NVIDIA's
documents ask for, and boards differ.

Where nvidia-smi does not end in time, no second one is started for that GPU while it lives. What it
should have restored is written to disk, and is restored later in this boot: the next one sets up
the GPU anew.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from dra_driver.base.errors import ClaimError, NodeError, TimedOut
from dra_driver.base.files import disk_errors, try_lock, write_atomically
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.steps import TimeSliceInterval
from dra_driver.node.driver.commands import RunCommand, run_command
from dra_driver.node.driver.root import DriverRoot

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS: Final = 10.0  # of which a node with eight GPUs may need two or three
_NAMES: Final = {str(interval).casefold(): interval for interval in TimeSliceInterval}
_RESTORE_SUFFIX: Final = ".to-restore"  # of the name of a file, behind the UUID of its GPU
_POLICY: Final = "timeslice"
_UNSUPPORTED_MESSAGES: Final = ("not supported", "not available")
_GPU_GONE_MESSAGES: Final = ("no devices were found", "gpu is lost")


class TimeSlices:
    """The intervals of the GPUs of the driver in *driver*. Safe to use from several threads.

    *directory*: where locks and notes outlive this process; it is made. *boot*: which one it is.
    """

    def __init__(
        self, driver: DriverRoot, directory: Path, boot: str, run: RunCommand = run_command
    ) -> None:
        self._driver = driver
        self._directory = directory
        self._boot = boot
        self._run = run

    def read(self, gpu: GpuUuid) -> TimeSliceInterval | None:
        """The interval of *gpu* now; None: it does not say. TimedOut: it did not answer. NodeError:
        the one before is still to be restored."""
        self._refuse_unrestored(gpu)
        try:
            text = self._ask(gpu, "-l")
        except TimedOut:
            raise
        except NodeError as e:
            log.info("a GPU does not say its interval", extra={"gpu": gpu, "error": str(e)})
            return None
        interval = parse_time_slice(text)
        if interval is None:
            log.warning("cannot read a GPU's interval", extra={"gpu": gpu, "output": text.strip()})
        return interval

    def set(self, gpu: GpuUuid, interval: TimeSliceInterval) -> None:
        """Have the processes on *gpu* take turns at *interval*.

        ClaimError: this GPU has no other interval than the default one. NodeError: it failed.
        """
        self._refuse_unrestored(gpu)
        self._set(gpu, interval)

    def _set(self, gpu: GpuUuid, interval: TimeSliceInterval) -> None:
        try:
            self._ask(gpu, f"--set-timeslice={interval.value}")
        except TimedOut:
            raise
        except NodeError as e:
            if not _says(e, _UNSUPPORTED_MESSAGES):
                raise NodeError(
                    f"the time-slice interval of {gpu} cannot be set to {interval}: {e}; it takes "
                    "root, and a GPU that nvidia-smi -L lists"
                ) from e
            # It has the default interval, since it can have no other.
            if interval is not TimeSliceInterval.DEFAULT:
                raise ClaimError(
                    f"{gpu} has no time-slice interval to set ({e}): leave out "
                    "sharing.timeSlicingConfig, or write the interval Default there, or select "
                    "GPUs that can (compute capability 7.0 and newer)"
                ) from e

    def restore(self, gpu: GpuUuid, interval: TimeSliceInterval) -> None:
        """Like :meth:`set`, for what a claim leaves behind.

        A GPU that is gone, one that never had an interval and a driver that is not loaded any more
        have nothing left that could be restored: giving the claim back must not fail for ever.
        Where nvidia-smi does not end, the interval is ``unrestored`` from now on.
        """
        try:
            self._set(gpu, interval)
        except TimedOut as e:
            fields = {"gpu": gpu, "interval": str(interval), "error": str(e)}
            log.warning("an interval is restored later", extra=fields)
            self._write_restore_file(gpu, interval)
            return
        except (ClaimError, NodeError) as e:
            # The kernel module keeps the intervals: without it, there is nothing to restore.
            if (
                isinstance(e, NodeError)
                and not _says(e, _GPU_GONE_MESSAGES)
                and self._driver.loaded_version() is not None
            ):
                raise
            log.warning("no interval to restore", extra={"gpu": gpu, "error": str(e)})
        with disk_errors(f"note that the interval of {gpu} was restored"):
            if (path := self._restore_file(gpu)).exists():
                path.unlink()

    def unrestored(self) -> Mapping[GpuUuid, TimeSliceInterval]:
        """The intervals that are still to be restored. NodeError: they cannot be read."""
        with disk_errors(f"read which intervals are to be restored from {self._directory}"):
            try:
                names = sorted(os.listdir(self._directory))
            except FileNotFoundError:
                return {}
            files = [name for name in names if name.endswith(_RESTORE_SUFFIX)]
            gpus = [GpuUuid(name.removesuffix(_RESTORE_SUFFIX)) for name in files]
            intervals = {gpu: self._read_restore_file(gpu) for gpu in gpus}
            return {gpu: interval for gpu, interval in intervals.items() if interval is not None}

    def retry_setting_restores(self) -> bool:
        """Try to restore what is ``unrestored``, where no nvidia-smi runs. Whether some was."""
        before = self.unrestored()
        for gpu in before:
            try:
                self._retry_restore(gpu)
            except NodeError as e:
                log.info("an interval is not restored yet", extra={"gpu": gpu, "error": str(e)})
        return self.unrestored().keys() != before.keys()

    def _retry_restore(self, gpu: GpuUuid) -> None:
        """Other GPUs may have taken long: what was restored meanwhile may be another claim's."""
        if not self._is_in_use(gpu) and (interval := self.unrestored().get(gpu)) is not None:
            self.restore(gpu, interval)

    def _refuse_unrestored(self, gpu: GpuUuid) -> None:
        with disk_errors(f"read whether the interval of {gpu} is to be restored"):
            interval = self._read_restore_file(gpu)
        if interval is not None:
            raise NodeError(
                f"the time-slice interval of {gpu}, which an earlier claim had changed, is still "
                "to be restored, since nvidia-smi does not end; select another GPU, or reboot the "
                "node"
            )

    def _write_restore_file(self, gpu: GpuUuid, interval: TimeSliceInterval) -> None:
        with disk_errors(f"write down that the interval of {gpu} is to be restored"):
            write_atomically(self._restore_file(gpu), f"{interval.value} {self._boot}".encode())

    def _read_restore_file(self, gpu: GpuUuid) -> TimeSliceInterval | None:
        """None: there is none of this boot."""
        try:
            value, _, boot = self._restore_file(gpu).read_text(errors="replace").partition(" ")
            return TimeSliceInterval(int(value)) if boot == self._boot else None
        except (FileNotFoundError, ValueError):
            return None

    def _restore_file(self, gpu: GpuUuid) -> Path:
        return self._directory / f"{gpu}{_RESTORE_SUFFIX}"

    def _lock_file(self, gpu: GpuUuid) -> Path:
        return self._directory / f"{gpu}.lock"

    def _is_in_use(self, gpu: GpuUuid) -> bool:
        with disk_errors(f"lock {self._lock_file(gpu)}"):
            file = try_lock(self._lock_file(gpu))
        if file is not None:
            os.close(file)
        return file is None

    def _ask(self, gpu: GpuUuid, option: str) -> str:
        command = self._driver.command("nvidia-smi", "compute-policy", option, "-i", gpu)
        with disk_errors(f"make {self._directory}"):
            self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        return self._run(replace(command, lock=str(self._lock_file(gpu))), _TIMEOUT_SECONDS)


def parse_time_slice(text: str) -> TimeSliceInterval | None:
    """The one interval in a list of compute policies, however it is drawn. None: there is none, or
    several.

    >>> parse_time_slice("|   0     Timeslice        Short    |")
    <TimeSliceInterval.SHORT: 1>
    >>> parse_time_slice("GPU  0: Timeslice: LONG")
    <TimeSliceInterval.LONG: 3>
    >>> parse_time_slice("|   0     Timeslice        N/A      |")
    """
    lines = [_fields(line) for line in text.splitlines()]
    intervals = set(_in_rows(lines)) or set(_in_columns(lines))
    return intervals.pop() if len(intervals) == 1 else None


def _in_rows(lines: list[list[str]]) -> Iterator[TimeSliceInterval]:
    """A policy per line: its name, then its value; whatever else there is stands behind it."""
    for fields in lines:
        for place, field in enumerate(fields):
            if _is_policy(field):
                behind = field.casefold().rpartition("slice")[2]
                values = (_interval(value) for value in (behind, *fields[place + 1 :]))
                yield from [value for value in values if value is not None][:1]
                break


def _in_columns(lines: list[list[str]]) -> Iterator[TimeSliceInterval]:
    """A policy per column: below its name."""
    column: int | None = None
    width = 0
    for fields in lines:
        places = [place for place, field in enumerate(fields) if _is_policy(field)]
        if places:
            column, width = places[0], len(fields)
        elif column is not None and len(fields) == width:
            value = _interval(fields[column])
            if value is not None:
                yield value


def _fields(line: str) -> list[str]:
    """The cells of a table's row, or the parts of a line with colons."""
    cells = re.split(r"\||:|=|,|\t|\s{2,}", line)
    return [cell.strip() for cell in cells if cell.strip()]


def _is_policy(field: str) -> bool:
    return _POLICY in re.sub(r"[\s_-]", "", field.casefold())


def _interval(field: str) -> TimeSliceInterval | None:
    """A value by name or by number: "Short", "SHORT (1)", "1"."""
    words = re.findall(r"[a-z]+|\d+", field.casefold())
    intervals = [_NAMES[word] for word in words if word in _NAMES]
    if intervals:
        return intervals[0]
    if len(words) == 1 and words[0].isdigit() and int(words[0]) in range(4):
        return TimeSliceInterval(int(words[0]))
    return None


def _says(error: Exception, words: tuple[str, ...]) -> bool:
    return any(word in str(error).casefold() for word in words)
