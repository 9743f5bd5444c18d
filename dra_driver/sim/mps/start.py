"""From the options of ``nvidia-cuda-mps-control -d`` or ``-f`` to a running daemon."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dra_driver.sim.mps.command_line import CommandRefused
from dra_driver.sim.mps.processes import (
    interpreter_arguments,
    interpreter_environment,
    interpreter_file,
)

if TYPE_CHECKING:  # what only the daemon needs, it imports: the program that starts it is quicker
    from dra_driver.sim.mps.control_daemon import DaemonOptions
    from dra_driver.sim.mps.paths import DaemonPaths

_NAME: Final = "nvidia-cuda-mps-control"
_DAEMON: Final = "--daemon"  # how the program calls itself, with where it says that it is up
_DIES_SECONDS: Final = 0.1
_UP: Final = b"+"


@dataclass(slots=True)
class StartOptions:
    """The options of a start."""

    background: bool = False
    multiuser: bool = False
    protocol: int = 2
    config: Path | None = None


def main(arguments: Sequence[str]) -> int:
    """*arguments*: root, newest protocol, behaviour, and what the program was called with."""
    if arguments[0] == _DAEMON:
        return _serve(int(arguments[1]), *arguments[2:])
    try:
        started = options(arguments[3:], int(arguments[1]))
    except CommandRefused as error:
        sys.stderr.write(f"{error}\n")
        return 1
    reading, writing = os.pipe()
    if not started.background:
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # nobody waits for it to be up
    os.set_inheritable(writing, True)
    own = interpreter_arguments(
        _NAME, "-m", "dra_driver.sim.mps.start", _DAEMON, str(writing), *arguments
    )
    if not started.background:
        os.execve(interpreter_file(), own, interpreter_environment(os.environ))
    if os.fork() == 0:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.execve(interpreter_file(), own, interpreter_environment(os.environ))
    os.close(writing)
    return 0 if os.read(reading, 1) == _UP else 1


def options(words: Sequence[str], newest: int) -> StartOptions:
    """What *words* ask for. CommandRefused: the program does not know one of them."""
    started, remaining = StartOptions(), list(words)
    while remaining:
        word = remaining.pop(0)
        name, _, value = word.partition("=")
        if word in ("-d", "-f"):
            started.background = word == "-d"
        elif name in ("-p", "--protocol", "-a", "--apply") and newest >= 3:
            value = value or (remaining.pop(0) if remaining else "")
            _take_option(started, name, value)
        elif word in _MULTIUSER:
            started.multiuser = True
        else:
            raise CommandRefused(f"Unknown option '{word}'")
    if newest >= 3 and os.environ.get("CUDA_MPS_PROTOCOL_VERSION"):
        _take_option(started, "-p", os.environ["CUDA_MPS_PROTOCOL_VERSION"])
    if started.config and started.protocol == 2:
        raise CommandRefused("--apply needs protocol 3")
    _refuse_other_spelling(words, started.protocol)
    return started


_MULTIUSER: Final = {"-m": 3, "--multiuser": 3, "-M": 2, "--multiuser-server": 2}


def _take_option(started: StartOptions, name: str, value: str) -> None:
    if name in ("-a", "--apply"):
        started.config = Path(value).absolute()
    elif value not in ("2", "3"):
        raise CommandRefused(f"Unknown protocol '{value}': 2 or 3")
    else:
        started.protocol = int(value)


def _refuse_other_spelling(words: Sequence[str], protocol: int) -> None:
    for word in words:
        if _MULTIUSER.get(word, protocol) != protocol:
            raise CommandRefused(f"Unknown option '{word}' of protocol {protocol}")


def _serve(tell: int, root: str, newest: str, behaviour: str, *words: str) -> int:
    """Be the daemon."""
    from dra_driver.sim.mps.control_daemon import DaemonOptions
    from dra_driver.sim.mps.paths import COMM

    Path("/proc/self/comm").write_text(COMM)
    started = options(words, int(newest))
    places = _places(started.protocol)
    sys.excepthook = lambda kind, error, _: places.write("Control", f"{kind.__name__}: {error}")
    if behaviour == "fails":
        places.write("Control", "Failed to start: this simulated daemon always fails")
        return 1
    if places.running():
        places.write("Control", "An instance of this daemon is already running")
        return 1
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = None if devices is None else tuple(filter(None, devices.split(",")))
    daemon_options = DaemonOptions(
        Path(root).absolute(), started.protocol, started.multiuser, os.geteuid(), visible
    )
    return _run(daemon_options, places, started.config, tell, behaviour == "dies")


def _run(
    options: "DaemonOptions", places: "DaemonPaths", config: Path | None, tell: int, dies: bool
) -> int:
    from dra_driver.sim.mps.loop import DaemonLoop

    os.chdir("/")
    loop = DaemonLoop(options, places)
    try:
        loop.open(config)
    except CommandRefused as error:
        places.write("Control", str(error))
        loop.finish()
        return 1
    if dies:
        threading.Thread(target=_die, args=(places,), daemon=True).start()
    os.write(tell, _UP)
    os.close(tell)
    loop.run()
    return 0


def _die(places: "DaemonPaths") -> None:
    time.sleep(_DIES_SECONDS)
    places.write("Control", "Fatal: this simulated daemon always dies")
    os._exit(1)


def _places(protocol: int) -> "DaemonPaths":
    from dra_driver.sim.mps.paths import DaemonPaths

    usual = "/run/nvidia-mps" if protocol == 3 and os.geteuid() == 0 else "/tmp/nvidia-mps"
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or usual
    log = os.environ.get("CUDA_MPS_LOG_DIRECTORY") or "/var/log/nvidia-mps"
    return DaemonPaths(Path(pipe).absolute(), Path(log).absolute())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
