"""From the options of ``nvidia-cuda-mps-control -d`` or ``-f`` to a running daemon."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dra_driver.node.sim.mps.processes import call, environment, interpreter
from dra_driver.node.sim.mps.refusals import Refused

if TYPE_CHECKING:  # what only the daemon needs, it imports: the program that starts it is quicker
    from dra_driver.node.sim.mps.control import Options
    from dra_driver.node.sim.mps.places import Places

_NAME: Final = "nvidia-cuda-mps-control"
_DAEMON: Final = "--daemon"  # how the program calls itself, with where it says that it is up
_DIES_SECONDS: Final = 0.1
_UP: Final = b"+"


@dataclass(slots=True)
class Asked:
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
        asked = options(arguments[3:], int(arguments[1]))
    except Refused as error:
        sys.stderr.write(f"{error}\n")
        return 1
    reading, writing = os.pipe()
    if not asked.background:
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # nobody waits for it to be up
    os.set_inheritable(writing, True)
    own = call(_NAME, "-m", "dra_driver.node.sim.mps.start", _DAEMON, str(writing), *arguments)
    if not asked.background:
        os.execve(interpreter(), own, environment(os.environ))
    if os.fork() == 0:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.execve(interpreter(), own, environment(os.environ))
    os.close(writing)
    return 0 if os.read(reading, 1) == _UP else 1


def options(words: Sequence[str], newest: int) -> Asked:
    """What *words* ask for. Refused: the program does not know one of them."""
    asked, rest = Asked(), list(words)
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if word in ("-d", "-f"):
            asked.background = word == "-d"
        elif name in ("-p", "--protocol", "-a", "--apply") and newest >= 3:
            value = value or (rest.pop(0) if rest else "")
            _take(asked, name, value)
        elif word in _MULTIUSER:
            asked.multiuser = True
        else:
            raise Refused(f"Unknown option '{word}'")
    if newest >= 3 and os.environ.get("CUDA_MPS_PROTOCOL_VERSION"):
        _take(asked, "-p", os.environ["CUDA_MPS_PROTOCOL_VERSION"])
    if asked.config and asked.protocol == 2:
        raise Refused("--apply needs protocol 3")
    _refuse_other_spelling(words, asked.protocol)
    return asked


_MULTIUSER: Final = {"-m": 3, "--multiuser": 3, "-M": 2, "--multiuser-server": 2}


def _take(asked: Asked, name: str, value: str) -> None:
    if name in ("-a", "--apply"):
        asked.config = Path(value).absolute()
    elif value not in ("2", "3"):
        raise Refused(f"Unknown protocol '{value}': 2 or 3")
    else:
        asked.protocol = int(value)


def _refuse_other_spelling(words: Sequence[str], protocol: int) -> None:
    for word in words:
        if _MULTIUSER.get(word, protocol) != protocol:
            raise Refused(f"Unknown option '{word}' of protocol {protocol}")


def _serve(tell: int, root: str, newest: str, behaviour: str, *words: str) -> int:
    """Be the daemon."""
    from dra_driver.node.sim.mps.control import Options
    from dra_driver.node.sim.mps.places import COMM

    Path("/proc/self/comm").write_text(COMM)
    asked = options(words, int(newest))
    places = _places(asked.protocol)
    sys.excepthook = lambda kind, error, _: places.write("Control", f"{kind.__name__}: {error}")
    if behaviour == "fails":
        places.write("Control", "Failed to start: this simulated daemon always fails")
        return 1
    if places.running():
        places.write("Control", "An instance of this daemon is already running")
        return 1
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = None if devices is None else tuple(filter(None, devices.split(",")))
    made = Options(Path(root).absolute(), asked.protocol, asked.multiuser, os.geteuid(), visible)
    return _run(made, places, asked.config, tell, behaviour == "dies")


def _run(options: "Options", places: "Places", config: Path | None, tell: int, dies: bool) -> int:
    from dra_driver.node.sim.mps.loop import Loop

    os.chdir("/")
    loop = Loop(options, places)
    try:
        loop.open(config)
    except Refused as error:
        places.write("Control", str(error))
        loop.finish()
        return 1
    if dies:
        threading.Thread(target=_die, args=(places,), daemon=True).start()
    os.write(tell, _UP)
    os.close(tell)
    loop.run()
    return 0


def _die(places: "Places") -> None:
    time.sleep(_DIES_SECONDS)
    places.write("Control", "Fatal: this simulated daemon always dies")
    os._exit(1)


def _places(protocol: int) -> "Places":
    from dra_driver.node.sim.mps.places import Places

    usual = "/run/nvidia-mps" if protocol == 3 and os.geteuid() == 0 else "/tmp/nvidia-mps"
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or usual
    log = os.environ.get("CUDA_MPS_LOG_DIRECTORY") or "/var/log/nvidia-mps"
    return Places(Path(pipe).absolute(), Path(log).absolute())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
