"""Has processes use a simulated MPS as CUDA programs would: ``python -m`` this, as root.

::

    attach PID [--memory 5Gi] [--priority 0|1]     it becomes a client, as its environment says
    show PID [-o json]                             what holds for it: server, namespace, limits
    detach PID                                     it is a client no longer
    wedge PID                                      to terminate it takes for ever
    wedge-server PID                               the daemon answers nobody any more
    kill-server PID                                the server ends, and is started again
    raise PID [--percent 100]                      it asks for more compute, as tenants may who are
                                                   root: of its namespace, or of protocol 2's server

What the process would see is looked at: its environment, its root with /dev/shm and the device
nodes. Where its pipe directory is, is connected to as it would be: through its mounts, from its
root, as its user and in its groups, so that modes, read-only mounts and paths that are too long
count. ``--pipe-directory DIR`` says where instead, as the process sees it; for ``wedge-server`` and
``kill-server`` without a process that is enough. Exit status: 1 it is refused, 3 it runs without
MPS, without limits and without a word of that, as CUDA has it; 4 the daemon does not answer.
"""

import argparse
import json
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dra_driver.node.sim.mps.programs import NoMps, Program, connected, program

REFUSED: Final = 1
WITHOUT_MPS: Final = 3
NO_ANSWER: Final = 4
_SECONDS: Final = 8.0
_UNITS: Final = {"": 0, "Ki": 10, "Mi": 20, "Gi": 30, "K": 10, "M": 20, "G": 30}
_CALLS: Final = ("attach", "show", "detach", "wedge", "wedge-server", "kill-server", "raise")


def ask(made: socket.socket, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the daemon answers to whom *made* is a connection. TimeoutError."""
    with made:
        made.settimeout(_SECONDS)
        try:
            made.sendall(json.dumps(asked).encode() + b"\n")
            line = made.makefile().readline()
        except ConnectionError:
            line = ""  # as one that hangs up: there is no answer
    if not line:
        raise TimeoutError
    return dict(json.loads(line))


def connect(options: argparse.Namespace, seen: Program | None) -> socket.socket:
    """To the daemon that is meant. NoMps, OSError, TimeoutError."""
    if seen is not None:
        return seen.connect(options.pipe_directory or seen.pipe, _SECONDS)
    try:
        return connected(options.pipe_directory)
    except OSError as error:
        raise NoMps(f"{options.pipe_directory}/control: {error.strerror or error}") from error


def question(options: argparse.Namespace, seen: Program | None) -> dict[str, Any]:
    """What is asked, and for whom."""
    if seen is None:
        return {"call": options.call, "pid": 0, "shm": None}
    environ = dict(seen.environ)
    if options.priority is not None:
        environ["CUDA_MPS_CLIENT_PRIORITY"] = options.priority
    return {
        "call": options.call,
        "pid": seen.pid,
        "command": seen.command,
        "environ": environ,
        "minors": seen.minors(),
        "capabilities": seen.capabilities(),
        "shm": seen.shared_memory(),
        "memory": options.memory,
        "percent": options.percent,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    options = _options(arguments)
    try:
        seen = None if options.pid is None else program(options.pid)
        answer = ask(connect(options, seen), question(options, seen))
    except NoMps as error:
        return _say(f"no MPS: {error}", WITHOUT_MPS)
    except TimeoutError:
        return _say("the daemon does not answer", NO_ANSWER)
    except OSError as error:
        return _say(f"process {options.pid}: {error.strerror or error}", REFUSED)
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
    parser.add_argument("--percent", default="100")
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
