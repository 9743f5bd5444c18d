"""Programs that use a GPU while a test asks them, and processes as procfs shows them.

No wait is for ever, and nothing is ended that was not started here.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
REPOSITORY = Path(__file__).parents[2]
END_SECONDS = 10.0

_ANSWER_SECONDS = 60.0  # the first program may wait for a server that is started for it
_LOOK_SECONDS = 15.0
# In mounts of its own, and the same process from then on.
_WITH_SHM = 'mount --bind "$0" /dev/shm && exec "$@"'

T = TypeVar("T")


class Program:
    """A process that answers questions on lines (``mps_client``). None of its waits is for ever."""

    def __init__(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str],
        shm: str = "",
        end_seconds: float = END_SECONDS,
    ) -> None:
        """*shm*: the directory that it has as /dev/shm."""
        self._end_seconds = end_seconds
        if shm:
            argv = [*_own_mounts(_WITH_SHM), shm, *argv]
        # Nothing of this shell's own MPS or choice of GPUs.
        own = {name: text for name, text in os.environ.items() if not name.startswith("CUDA_")}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 as long as the process
        self._child = subprocess.Popen(
            argv,
            cwd=REPOSITORY,
            env={**own, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.pid = self._child.pid
        self.greeting = self._answer(_ANSWER_SECONDS)  # what it says first

    @property
    def error(self) -> str:
        """Why it cannot use the GPU; empty: it can."""
        return str(self.greeting["error"])

    def ask(self, question: str, seconds: float = _ANSWER_SECONDS) -> str:
        """What went wrong with it; empty: nothing."""
        try:
            assert self._child.stdin is not None
            self._child.stdin.write(f"{question}\n".encode())
            self._child.stdin.flush()
        except OSError:
            return f"it has ended: {self._last_words()}"
        return str(self._answer(seconds)["error"])

    def end(self) -> None:
        """Have it end by itself, or kill it."""
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what it had not read
                    continue
        try:
            self._child.wait(self._end_seconds)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(END_SECONDS)
        self._errors.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        output = self._child.stdout
        assert output is not None
        if not select.select([output], [], [], seconds)[0]:
            return {"error": f"no answer in {seconds:g} s"}
        line = output.readline()  # it writes whole ones, and no more than it is asked for
        if not line:
            return {"error": f"it has ended: {self._last_words()}"}
        return dict(json.loads(line))

    def _last_words(self) -> str:
        try:
            code = self._child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "not quite"
        self._errors.seek(0)
        return f"code {code} {self._errors.read().decode(errors='replace').strip()[-500:]}"


def program_of(cuda_library: str) -> list[str]:
    return [sys.executable, "-m", "tests.gpu.mps_client", cuda_library]


def until(look: Callable[[], T], enough: Callable[[T], bool], seconds: float = _LOOK_SECONDS) -> T:
    """What is seen once it is *enough*, or when the time is over."""
    over = time.monotonic() + seconds
    while not enough(value := look()) and time.monotonic() < over:
        time.sleep(0.2)
    return value


def why_no_mounts() -> str:
    """Why a program cannot have a /dev/shm of its own here; empty: it can."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        argv = [*_own_mounts(_WITH_SHM), directory, "true"]
        try:
            ran = subprocess.run(argv, capture_output=True, timeout=30, text=True, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            return str(e)
    return "" if ran.returncode == 0 else ran.stderr.strip() or f"code {ran.returncode}"


def mps_processes() -> list[int]:
    """Every daemon and server of MPS on this machine, by its program's name."""
    return [pid for pid in pids() if program_name(pid) in (CONTROL, SERVER)]


def end(pid: int) -> None:
    """At once."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def in_use_by(directory: str) -> list[int]:
    """The processes whose pipe directory it is."""
    return [pid for pid in pids() if pipe_of(pid) == directory]


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def program_name(pid: int) -> str:
    """The name of its program; a script has its interpreter in front."""
    names = [os.path.basename(word) for word in read_words(pid, "cmdline")[:3]]
    return next((name for name in names if name in (CONTROL, SERVER)), names[0])


def pipe_of(pid: int) -> str:
    mark = f"{PIPE_DIRECTORY}="
    settings = (entry for entry in read_words(pid, "environ") if entry.startswith(mark))
    return next(settings, "").removeprefix(mark)


def read_words(pid: int, file: str) -> list[str]:
    """The words of a file of procfs; a process that has ended has an empty one."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return [""]


def _own_mounts(script: str) -> list[str]:
    return ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script]
