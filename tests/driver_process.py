"""Commands of the driver as processes, forked from one that has imported the driver.

To import it takes a second of CPU, and tests start it some hundred times. That it starts from
nothing, and ends with all that Python does at the end, is seen where it runs in its container, and
where ``whole_process`` of the plugin's tests starts it.
"""

import atexit
import multiprocessing
import os
import runpy
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import reduction
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
_IMPORTED = ("agent", "controller", "plugin")
_STDOUT, _STDERR = 1, 2

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([f"dra_driver.{name}.run" for name in _IMPORTED])


class DriverProcess:
    """``python -m dra_driver ARGUMENTS``, with what ``subprocess.Popen`` has of a process.

    *errors*: the file that its log is written to, or ``subprocess.PIPE``, to read :attr:`stderr`;
    without one, it goes where that of the tests goes. *program*: a module that runs the driver in
    its own way.
    """

    def __init__(
        self,
        *arguments: str,
        errors: IO[bytes] | int = _STDERR,
        program: str = "dra_driver",
    ) -> None:
        self.stderr: IO[bytes] | None = None
        if errors == subprocess.PIPE:
            reading, log = os.pipe()
            self.stderr = os.fdopen(reading, "rb")
        else:
            log = os.dup(errors if isinstance(errors, int) else errors.fileno())
        self._process = _context.Process(
            target=_run,
            args=(_File(log), program, arguments),
            daemon=True,  # it does not outlive the tests
        )
        self._process.start()
        os.close(log)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Negative: the signal that ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; ``subprocess.TimeoutExpired`` if it runs on."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("dra_driver", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float = 60) -> tuple[None, bytes]:
        """Once it has ended: nothing, and what of its log was not read yet."""
        end, log = time.monotonic() + timeout, b""
        if self.stderr is not None and not self.stderr.closed:
            with self.stderr as file:
                while select.select([file], [], [], max(0, end - time.monotonic()))[0]:
                    if not (read := os.read(file.fileno(), 1 << 16)):
                        break
                    log += read
        self.wait(max(0, end - time.monotonic()))
        return None, log

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


Process = DriverProcess | subprocess.Popen[bytes]


def start_driver(
    log: IO[bytes],
    *arguments: str,
    inside: Sequence[str] = (),
    program: Sequence[str] = ("dra_driver",),
) -> Process:
    """*program*: a module, and its first arguments. *inside*: a command, such as unshare, in which
    it is run from its start to its end; without one it is forked."""
    if not inside:
        module, *first = program
        return DriverProcess(*first, *arguments, program=module, errors=log)
    process = subprocess.Popen(
        [*inside, sys.executable, "-m", *program, *arguments],
        stdout=log,
        stderr=log,
        env={"PATH": os.environ["PATH"]},
        cwd=ROOT,
    )
    atexit.register(process.kill)  # it does not outlive the tests either
    return process


class _File:
    """An open file, on its way into another process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _file_number, (reduction.DupFd(self._number),)


def _file_number(duplicate: Any) -> int:
    return int(duplicate.detach())


def _run(log: int, program: str, arguments: tuple[str, ...]) -> None:
    os.dup2(log, _STDOUT)
    os.dup2(log, _STDERR)
    os.close(log)
    for name in os.environ.keys() - {"PATH"}:
        del os.environ[name]
    os.chdir(ROOT)
    sys.argv[1:] = arguments
    runpy.run_module(program, run_name="__main__", alter_sys=True)
