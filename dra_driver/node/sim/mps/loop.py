"""What wakes the daemon: commands, clients, servers that end, signals."""

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

from dra_driver.node.sim.mps.admission import attach, shown
from dra_driver.node.sim.mps.config import apply, read_config
from dra_driver.node.sim.mps.control import DEFAULT, Control, Never, Options, Place
from dra_driver.node.sim.mps.places import PathTooLong, Places
from dra_driver.node.sim.mps.processes import ServerProcesses
from dra_driver.node.sim.mps.protocol2 import Protocol2
from dra_driver.node.sim.mps.protocol3 import Protocol3
from dra_driver.node.sim.mps.refusals import Refused
from dra_driver.node.sim.mps.servers import Server
from dra_driver.node.sim.mps.users import user_of

_DIES_AT_ONCE: Final = 1
_ASKS_SECONDS: Final = 2.0
_ANSWERS_SECONDS: Final = 2.0
_FOREVER_SECONDS: Final = 3600.0


class Words(Protocol):
    """A protocol: what is asked of the daemon, and its answer."""

    def answer(self, words: list[str], uid: int) -> str: ...


class Loop:
    """Runs one daemon until it is told to quit."""

    def __init__(self, options: Options, places: Places) -> None:
        self._places = places
        self._selector = selectors.DefaultSelector()
        self.control = Control(options, places, self, ServerProcesses(options.root))
        protocol = Protocol3 if options.protocol == 3 else Protocol2
        self._words: Words = protocol(self.control, self.finish)
        self._marker = Path(f"/dev/shm/cuda.shm.{options.uid:x}.{os.getpid():x}.1")
        self.finished = False
        self._answered = threading.Event()  # whoever had it finish

    def open(self, config: Path | None) -> None:
        """Be found by clients and commands. Refused: *config* is no good."""
        document = read_config(config) if config else {}
        self.listen(self._places.pipe, None)
        where = f"{self._places.pipe}/control"
        self._places.write("Control", f"Starting control daemon using socket {where}")
        requests = self._places.open_requests()
        self._selector.register(requests, selectors.EVENT_READ, self._requests(requests))
        if self.control.options.protocol == 2:
            self._marker.touch()
        with self.control.changed:
            apply(document, self.control, self.control.options.uid)
        self._places.remember(self.control.options.protocol)

    def run(self) -> None:
        """Until it ends in order."""
        waking, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGTERM, self._told_to_end)
        signal.signal(signal.SIGINT, self._told_to_end)
        self._selector.register(waking, selectors.EVENT_READ, lambda: os.read(waking, 100))
        while not self.finished:
            for key, _ in self._selector.select():
                key.data()
        self._answered.wait(_ANSWERS_SECONDS)

    def finish(self) -> None:
        """Take everything away that a daemon takes away when it ends in order."""
        servers = [*self.control.servers.values()]
        self.control.servers.clear()
        for server in servers:
            self.control.processes.end(server.pid)
        self._places.write("Control", "Exit")
        self._places.remove()
        self._marker.unlink(missing_ok=True)
        self.finished = True

    def _told_to_end(self, number: int, frame: FrameType | None) -> None:
        if not (self.control.wedged or self.finished):
            self.finish()
            self._answered.set()  # nobody asked

    def listen(self, directory: Path, place: Place) -> None:
        try:
            made = self._places.listen(directory)
        except PathTooLong:
            os._exit(_DIES_AT_ONCE)  # measured: it dies, and nothing is in its log
        self._selector.register(made, selectors.EVENT_READ, lambda: self._accept(made, place))

    def close(self, directory: Path) -> None:
        made = self._places.close(directory)
        self._selector.unregister(made)
        made.close()

    def watch_server(self, server: Server, reading: int) -> None:
        def told() -> None:
            byte = os.read(reading, 1)
            with self.control.changed:
                if byte:
                    self.control.started(server)
                    return
                self._selector.unregister(reading)
                os.close(reading)
                with contextlib.suppress(ChildProcessError):  # it was waited for already
                    os.waitpid(pid, 0)
                self.control.ended(server)

        pid = server.pid
        self._selector.register(reading, selectors.EVENT_READ, told)

    def watch_client(self, pid: int) -> None:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self.control.gone(pid)
            return

        def ended() -> None:
            self._selector.unregister(handle)
            os.close(handle)
            with self.control.changed:
                self.control.gone(pid)

        self._selector.register(handle, selectors.EVENT_READ, ended)

    def _requests(self, reading: int) -> Callable[[], None]:
        rest = b""

        def come() -> None:
            nonlocal rest
            *lines, rest = (rest + os.read(reading, 65536)).split(b"\n")
            for line in lines:
                words = line.decode(errors="replace").split("\t")
                threading.Thread(target=self._command, args=(words,), daemon=True).start()

        return come

    def _command(self, request: list[str]) -> None:
        """Answer into the pipe that the command has made. It waits there, or is gone."""
        path, *words = request
        try:
            answer = os.open(path, os.O_WRONLY)
            uid = os.fstat(answer).st_uid
            os.unlink(path)
        except OSError:
            return
        text, code = self._said(words, uid)
        mark = "!" if code else "="
        lines = "".join(f"{mark}{line}\n" for line in text.splitlines())
        try:
            with open(answer, "w") as file:
                file.write(f"{lines}.{code}\n")
        except BrokenPipeError:
            pass
        if self.finished:
            os._exit(0)

    def _said(self, words: list[str], uid: int) -> tuple[str, int]:
        with self.control.changed:
            if self.control.wedged:
                self.hang()
            try:
                return self._words.answer(words, uid), 0
            except Refused as error:
                return str(error), 1
            except Never:
                self.hang()
        return "", 1

    def hang(self) -> None:
        """Let nobody else wait for the one who waits for ever."""
        self.control.changed.release()
        try:
            time.sleep(_FOREVER_SECONDS)
        finally:
            self.control.changed.acquire()

    def _accept(self, listener: socket.socket, place: Place) -> None:
        made, _ = listener.accept()
        threading.Thread(target=self._client, args=(made, place), daemon=True).start()

    def _client(self, made: socket.socket, place: Place) -> None:
        with made:
            made.settimeout(_ASKS_SECONDS)
            peer = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            uid = struct.unpack("3i", peer)[1]
            try:
                ask = json.loads(made.makefile().readline() or "{}")
                answer = self._asked(place, ask, uid)
                made.sendall(json.dumps(answer).encode() + b"\n")
            except (OSError, ValueError):
                return

    def _asked(self, place: Place, ask: dict[str, Any], uid: int) -> dict[str, Any]:
        control = self.control
        with control.changed:
            if control.wedged:
                self.hang()
            try:
                if self._misses_shared_memory(ask["shm"]):
                    raise Refused("CUDA_ERROR_MPS_CONNECTION_FAILED: no shared memory with it")
                self._refuse_stranger(int(ask["pid"]), uid)
                return {"done": self._do(ask["call"], place, {**ask, "uid": uid})}
            except Refused as error:
                return {"refused": str(error)}

    def _refuse_stranger(self, pid: int, uid: int) -> None:
        """Who connects for a process has to be of its user; without one, of the daemon's."""
        try:
            owner = user_of(pid).uid if pid else self.control.options.uid
        except OSError:
            owner = None  # it ended
        if uid != owner:
            raise Refused("CUDA_ERROR_NOT_PERMITTED")

    def _misses_shared_memory(self, seen: list[str] | None) -> bool:
        """*seen*: None where nobody looked."""
        found = seen is None or self._marker.name in seen
        return self.control.options.protocol == 2 and not found

    def _do(self, call: str, place: Place, ask: dict[str, Any]) -> Any:
        control = self.control
        if call == "attach":
            return attach(control, place, ask)
        if call == "wedge-server":
            control.wedged = True
            return {}
        if call == "kill-server":
            for name in [place[0]] if place else sorted(control.servers):
                os.kill(control.servers[name].pid, signal.SIGKILL)
            return {}
        if call == "raise":
            return {"said": self._words.answer(_raising(control, place, ask), ask["uid"])}
        server, namespace, client = control.find(ask["pid"])
        if call == "detach":
            del namespace.clients[client.pid]
        elif call == "wedge":
            client.wedged = True
        return shown(server, namespace, client)


def _raising(control: Control, place: Place, ask: dict[str, Any]) -> list[str]:
    """The command of a client that would have more of the GPUs' compute."""
    percent = str(ask["percent"])
    if control.options.protocol == 2:
        return ["stdin", f"set_default_active_thread_percentage {percent}"]
    owner = 0 if control.options.multiuser else ask["uid"]
    server, name = place or (f"uid_{owner}", DEFAULT)
    limit = f"--active-thread-percentage={percent}"
    return ["arguments", "namespace", "set", name, f"--server={server}", limit]
