"""The event loop of the simulated daemon, and the file (``--apply``) that it starts from."""

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

from dra_driver.sim.mps.admission import attach_client, client_row
from dra_driver.sim.mps.command_line import CommandRefused
from dra_driver.sim.mps.control_daemon import (
    DEFAULT_NAMESPACE,
    AdmissionTarget,
    DaemonOptions,
    NoAnswer,
    SimulatedControlDaemon,
)
from dra_driver.sim.mps.paths import DaemonPaths, PathTooLong
from dra_driver.sim.mps.processes import ServerProcesses, user_of
from dra_driver.sim.mps.protocol2 import SimulatedProtocol2
from dra_driver.sim.mps.protocol3 import SimulatedProtocol3, limit_changes
from dra_driver.sim.mps.servers import SimulatedServer

_CONFIG_LIMITS: Final = ("pinned_memory_limit", "active_thread_percentage", "client_priority")
_CONFIG_SERVER: Final[Mapping[str, type]] = {
    "allowed_devices": str, "uid": int, "locality_domains": bool, "namespaces": dict,
    "devices": list, **dict.fromkeys(_CONFIG_LIMITS, str),
}  # fmt: skip
_FEATURES: Final[Mapping[str, Mapping[str, type]]] = {
    "memacct": {"enabled": bool, "audit_log": bool},
    "context-share": {"enabled": bool, "default_socket": str},
}


def read_config(path: Path) -> Mapping[str, Any]:
    """The file. CommandRefused: every reason why it is none."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CommandRefused(f"Cannot read {path}: {error}") from error
    _check_config(document, {"schema_version": str, "servers": dict, "features": dict}, "")
    if document.get("schema_version") != "1.0":
        raise CommandRefused('schema_version has to be "1.0"')
    for name, server in document.get("servers", {}).items():
        _check_config(server, _CONFIG_SERVER, f"servers.{name}.")
        for namespace, limits in server.get("namespaces", {}).items():
            where = f"servers.{name}.namespaces.{namespace}."
            _check_config(limits, dict.fromkeys(_CONFIG_LIMITS, str), where)
    for name, feature in document.get("features", {}).items():
        _check_config({name: feature}, dict.fromkeys(_FEATURES, dict), "features.")
        _check_config(feature, _FEATURES[name], f"features.{name}.")
    return document


def apply_config(document: Mapping[str, Any], control: SimulatedControlDaemon, uid: int) -> None:
    """Make the servers and namespaces of a file."""
    for name, server in document.get("servers", {}).items():
        devices = tuple(filter(None, server.get("allowed_devices", "").split(",")))
        created = control.create_server(name, server.get("uid", uid), devices)
        created.locality_domains = server.get("locality_domains", False)
        _config_change(server)(created.default.limits)
        for namespace, limits in server.get("namespaces", {}).items():
            if namespace != DEFAULT_NAMESPACE:
                control.create_namespace(name, namespace)
            _config_change(limits)(created.namespaces[namespace].limits)


def _config_change(limits: Mapping[str, Any]) -> Callable[[Any], None]:
    return limit_changes(
        {key.replace("_", "-"): limits[key] for key in _CONFIG_LIMITS if key in limits}
    )


def _check_config(table: Any, known: Mapping[str, type], where: str) -> None:
    if not isinstance(table, dict):
        raise CommandRefused(f"{where.rstrip('.')} has to be a table")
    for key, value in table.items():
        if key not in known:
            raise CommandRefused(f"Unknown key {where}{key}")
        if type(value) is not known[key]:
            raise CommandRefused(f"{where}{key} has to be a {known[key].__name__}")


_DIES_AT_ONCE: Final = 1
_ASKS_SECONDS: Final = 2.0
_ANSWERS_SECONDS: Final = 2.0
_FOREVER_SECONDS: Final = 3600.0


class CommandProtocol(Protocol):
    """A protocol: what is asked of the daemon, and its answer."""

    def answer(self, words: list[str], uid: int) -> str: ...


class DaemonLoop:
    """Runs one daemon until it is told to quit."""

    def __init__(self, options: DaemonOptions, places: DaemonPaths) -> None:
        self._places = places
        self._selector = selectors.DefaultSelector()
        self.control = SimulatedControlDaemon(options, places, self, ServerProcesses(options.root))
        protocol = SimulatedProtocol3 if options.protocol == 3 else SimulatedProtocol2
        self._words: CommandProtocol = protocol(self.control, self.finish)
        shared_memory = os.environ.get("SIMULATED_SHARED_MEMORY", "/dev/shm")
        self._marker = Path(f"{shared_memory}/cuda.shm.{options.uid:x}.{os.getpid():x}.1")
        self.finished = False
        self._answered = threading.Event()  # whoever had it finish

    def open(self, config: Path | None) -> None:
        """Be found by clients and commands. CommandRefused: *config* is no good."""
        document = read_config(config) if config else {}
        self.listen(self._places.pipe, None)
        where = f"{self._places.pipe}/control"
        self._places.write("Control", f"Starting control daemon using socket {where}")
        requests = self._places.open_requests()
        self._selector.register(requests, selectors.EVENT_READ, self._requests(requests))
        if self.control.options.protocol == 2:
            self._marker.touch()
        with self.control.changed:
            apply_config(document, self.control, self.control.options.uid)
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

    def listen(self, directory: Path, place: AdmissionTarget) -> None:
        try:
            listener = self._places.listen(directory)
        except PathTooLong:
            os._exit(_DIES_AT_ONCE)  # measured: it dies, and nothing is in its log
        accept = partial(self._accept, listener, place)
        self._selector.register(listener, selectors.EVENT_READ, accept)

    def close(self, directory: Path) -> None:
        listener = self._places.close(directory)
        self._selector.unregister(listener)
        listener.close()

    def watch_server(self, server: SimulatedServer, reading: int) -> None:
        def on_readable() -> None:
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
        self._selector.register(reading, selectors.EVENT_READ, on_readable)

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
        partial_line = b""

        def come() -> None:
            nonlocal partial_line
            *lines, partial_line = (partial_line + os.read(reading, 65536)).split(b"\n")
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
        text, code = self._answer_and_code(words, uid)
        mark = "!" if code else "="
        lines = "".join(f"{mark}{line}\n" for line in text.splitlines())
        try:
            with open(answer, "w") as file:
                file.write(f"{lines}.{code}\n")
        except BrokenPipeError:
            pass
        if self.finished:
            os._exit(0)

    def _answer_and_code(self, words: list[str], uid: int) -> tuple[str, int]:
        with self.control.changed:
            if self.control.wedged:
                self.hang()
            try:
                return self._words.answer(words, uid), 0
            except CommandRefused as error:
                return str(error), 1
            except NoAnswer:
                self.hang()
        return "", 1

    def hang(self) -> None:
        """Let nobody else wait for the one who waits for ever."""
        self.control.changed.release()
        try:
            time.sleep(_FOREVER_SECONDS)
        finally:
            self.control.changed.acquire()

    def _accept(self, listener: socket.socket, place: AdmissionTarget) -> None:
        connection, _ = listener.accept()
        threading.Thread(target=self._client, args=(connection, place), daemon=True).start()

    def _client(self, connection: socket.socket, place: AdmissionTarget) -> None:
        with connection:
            connection.settimeout(_ASKS_SECONDS)
            size = struct.calcsize("3i")
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            uid = struct.unpack("3i", peer)[1]
            try:
                ask = json.loads(connection.makefile().readline() or "{}")
                answer = self._asked(place, ask, uid)
                connection.sendall(json.dumps(answer).encode() + b"\n")
            except (OSError, ValueError):
                return

    def _asked(self, place: AdmissionTarget, ask: dict[str, Any], uid: int) -> dict[str, Any]:
        control = self.control
        with control.changed:
            if control.wedged:
                self.hang()
            try:
                if self._misses_shared_memory(ask["shm"]):
                    raise CommandRefused(
                        "CUDA_ERROR_MPS_CONNECTION_FAILED: no shared memory with it"
                    )
                self._refuse_other_user(int(ask["pid"]), uid)
                return {"done": self._do(ask["call"], place, {**ask, "uid": uid})}
            except CommandRefused as error:
                return {"refused": str(error)}

    def _refuse_other_user(self, pid: int, uid: int) -> None:
        """Who connects for a process has to be of its user; without one, of the daemon's."""
        try:
            owner = user_of(pid).uid if pid else self.control.options.uid
        except OSError:
            owner = None  # it ended
        if uid != owner:
            raise CommandRefused("CUDA_ERROR_NOT_PERMITTED")

    def _misses_shared_memory(self, names: list[str] | None) -> bool:
        """*names*: of the files in the shared memory of the client; None where nobody looked."""
        shared = names is None or self._marker.name in names
        return self.control.options.protocol == 2 and not shared

    def _do(self, call: str, place: AdmissionTarget, ask: dict[str, Any]) -> Any:
        control = self.control
        if call == "attach":
            return attach_client(control, place, ask)
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
        return client_row(server, namespace, client)


def _raising(
    control: SimulatedControlDaemon, place: AdmissionTarget, ask: dict[str, Any]
) -> list[str]:
    """The command of a client that would have more of the GPUs' compute."""
    percent = str(ask["percent"])
    if control.options.protocol == 2:
        return ["stdin", f"set_default_active_thread_percentage {percent}"]
    owner = 0 if control.options.multiuser else ask["uid"]
    server, name = place or (f"uid_{owner}", DEFAULT_NAMESPACE)
    limit = f"--active-thread-percentage={percent}"
    return ["arguments", "namespace", "set", name, f"--server={server}", limit]
