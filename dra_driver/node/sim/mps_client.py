"""Has processes use a simulated MPS as CUDA programs would: ``python -m`` this, as root.

::

    attach PID [--memory 5Gi] [--priority 0|1]     it becomes a client, as its environment says
    show PID [-o json]                             what holds for it: server, namespace, limits
    detach PID                                     it is a client no longer
    wedge PID                                      to terminate it takes for ever
    wedge-server PID                               the daemon answers nobody any more
    kill-server PID                                the server ends, and is started again

What the process would see is looked at: its environment, its root with the pipe directory, /dev/shm
and the device nodes. ``--pipe-directory DIR`` says where instead; for ``wedge-server`` and
``kill-server`` that is enough. Exit status: 1 it is refused, 3 it runs without MPS, without limits
and without a word of that, as CUDA has it; 4 the daemon does not answer.
"""

import argparse
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

REFUSED: Final = 1
WITHOUT_MPS: Final = 3
NO_ANSWER: Final = 4
_SECONDS: Final = 8.0
_STARTS_SECONDS: Final = 0.2
_USUAL: Final = "/tmp/nvidia-mps"
_UNITS: Final = {"": 0, "Ki": 10, "Mi": 20, "Gi": 30, "K": 10, "M": 20, "G": 30}
_CALLS: Final = ("attach", "show", "detach", "wedge", "wedge-server", "kill-server")


class NoMps(Exception):
    """Nothing listens where the process would look."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A process, as CUDA in it would see the world."""

    pid: int
    uid: int
    command: str
    root: Path
    environ: Mapping[str, str]

    @property
    def pipe(self) -> Path:
        """Its pipe directory, from here."""
        inside = self.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _USUAL
        return self.root / inside.lstrip("/")

    def minors(self) -> list[int] | None:
        """The GPUs whose device nodes it has; None: it has none at all, and is no container."""
        names = [path.name for path in (self.root / "dev").glob("nvidia[0-9]*")]
        numbers = sorted(int(name[6:]) for name in names if name[6:].isdecimal())
        return numbers or None

    def shared_memory(self) -> list[str]:
        return sorted(path.name for path in (self.root / "dev/shm").glob("cuda.shm.*"))


def process(pid: int) -> Seen:
    """The process *pid*. FileNotFoundError: there is none."""
    proc = Path(f"/proc/{pid}")
    entries = _environ(proc).decode(errors="replace").split("\0")
    environ = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    # As CUDA's own variables: whatever else is in there is nobody's business.
    own = {name: value for name, value in environ.items() if name.startswith("CUDA_")}
    words = (proc / "cmdline").read_bytes().decode(errors="replace").split("\0")
    command = "".join(letter for letter in words[0] if letter.isprintable())
    return Seen(pid, proc.stat().st_uid, command or "?", proc / "root", own)


def _environ(proc: Path) -> bytes:
    """For a moment after a program was started the kernel shows none."""
    end = time.monotonic() + _STARTS_SECONDS
    while not (found := (proc / "environ").read_bytes()) and time.monotonic() < end:
        time.sleep(0.002)
    return found


def ask(pipe: Path, question: Mapping[str, Any]) -> dict[str, Any]:
    """What the daemon behind *pipe* answers. NoMps: there is none. TimeoutError."""
    try:
        directory = os.open(pipe, os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise NoMps(f"{pipe}: {error.strerror}") from error
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(_SECONDS)
        try:
            # A short path, whatever the pipe directory is: the length of its own counts, not this.
            made.connect(f"/proc/self/fd/{directory}/control")
        except OSError as error:
            raise NoMps(f"{pipe}/control: {error.strerror}") from error
        finally:
            os.close(directory)
        made.sendall(json.dumps(question).encode() + b"\n")
        line = made.makefile().readline()
    if not line:
        raise TimeoutError
    return dict(json.loads(line))


def question(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Whom to ask, and what."""
    if options.pid is None:
        asked = {"call": options.call, "pid": 0, "uid": os.geteuid(), "shm": None}
        return Path(options.pipe_directory), asked
    seen = process(options.pid)
    environ = dict(seen.environ)
    if options.priority is not None:
        environ["CUDA_MPS_CLIENT_PRIORITY"] = options.priority
    return Path(options.pipe_directory or seen.pipe), {
        "call": options.call,
        "pid": seen.pid,
        "uid": seen.uid,
        "command": seen.command,
        "environ": environ,
        "minors": seen.minors(),
        "shm": seen.shared_memory(),
        "memory": options.memory,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    options = _options(arguments)
    try:
        pipe, asked = question(options)
    except OSError as error:
        return _say(f"process {options.pid}: {error.strerror}", REFUSED)
    try:
        answer = ask(pipe, asked)
    except NoMps as error:
        return _say(f"no MPS: {error}", WITHOUT_MPS)
    except TimeoutError:
        return _say(f"the daemon in {pipe} does not answer", NO_ANSWER)
    if "refused" in answer:
        return _say(answer["refused"], REFUSED)
    if options.output == "json":
        sys.stdout.write(json.dumps(answer["done"], indent=2) + "\n")
    elif options.call in ("show", "attach"):
        for key, value in answer["done"].items():
            sys.stdout.write(f"{key}: {value}\n")
    return 0


def _say(text: str, code: int) -> int:
    sys.stderr.write(f"{text}\n")
    return code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dra_driver.node.sim.mps_client",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("call", choices=_CALLS)
    parser.add_argument("pid", type=int, nargs="?")
    parser.add_argument("--pipe-directory", default="")
    parser.add_argument("--memory", type=_size, default=0)
    parser.add_argument("--priority", choices=("0", "1"))
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    if options.pid is None and not (options.pipe_directory and options.call.endswith("-server")):
        parser.error("name a process")
    return options


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]i?|)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; one is 5Gi")
    return int(match[1]) << _UNITS[match[2]]


if __name__ == "__main__":
    raise SystemExit(main())
