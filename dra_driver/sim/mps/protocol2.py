"""Protocol 2: commands on standard input."""

import os
from collections.abc import Callable
from typing import Final

from dra_driver.sim.mps import limits as values
from dra_driver.sim.mps.command_line import CommandRefused
from dra_driver.sim.mps.control_daemon import NoAnswer, SimulatedControlDaemon
from dra_driver.sim.mps.limits import format_memory
from dra_driver.sim.mps.servers import ServedClient, SimulatedServer

Verb = Callable[[list[str]], str]
_TIMEOUT: Final = "-t"


class SimulatedProtocol2:
    """Answers for *control*. *finish* ends the daemon."""

    def __init__(self, control: SimulatedControlDaemon, finish: Callable[[], None]) -> None:
        self._control = control
        self._finish = finish
        self._verbs: dict[str, tuple[int, int, Verb]] = {  # fewest and most arguments
            "get_server_list": (0, 0, self._get_server_list),
            "start_server": (2, 2, self._start_server),
            "shutdown_server": (1, 2, self._shutdown_server),
            "get_client_list": (1, 1, self._get_client_list),
            "get_device_client_list": (0, 1, self._get_device_client_list),
            "ps": (0, 0, self._ps),
            "device_query": (0, 1, self._device_query),
            "set_default_active_thread_percentage": (1, 1, self._set_default_percent),
            "get_default_active_thread_percentage": (0, 0, self._get_default_percent),
            "set_active_thread_percentage": (2, 2, self._set_percent),
            "get_active_thread_percentage": (1, 1, self._get_percent),
            "set_default_device_pinned_mem_limit": (2, 2, self._set_default_memory),
            "get_default_device_pinned_mem_limit": (1, 1, self._get_default_memory),
            "set_device_pinned_mem_limit": (3, 3, self._set_memory),
            "get_device_pinned_mem_limit": (2, 2, self._get_memory),
            "set_default_client_priority": (1, 1, self._set_default_priority),
            "get_default_client_priority": (0, 0, self._get_default_priority),
            "terminate_client": (2, 2, self._terminate_client),
            "quit": (0, 2, self._quit),
        }

    def answer(self, words: list[str], uid: int) -> str:
        """Answer the lines of standard input. CommandRefused: the first that is wrong, and why."""
        if words[:1] != ["stdin"]:
            raise CommandRefused(
                f"Unknown option '{' '.join(words[1:])}': commands come on standard input"
            )
        if uid not in (0, self._control.options.uid):
            raise CommandRefused(f"Insufficient privileges for UID {uid}")
        return "\n".join(filter(None, map(self._line, words[1:])))

    def _line(self, line: str) -> str:
        name, *arguments = line.split() or [""]
        if not name:
            return ""
        if name not in self._verbs:
            raise CommandRefused(f"Unrecognized command: {name}")
        fewest, most, verb = self._verbs[name]
        if not fewest <= len(arguments) <= most:
            raise CommandRefused(f"Wrong number of arguments: {line}")
        return verb(arguments)

    def _server(self, pid: str) -> SimulatedServer:
        for server in self._control.servers.values():
            if str(server.pid) == pid:
                return server
        raise CommandRefused(f"Server {pid} does not exist")

    def _get_server_list(self, _: list[str]) -> str:
        return "\n".join(str(server.pid) for server in self._control.servers.values())

    def _start_server(self, arguments: list[str]) -> str:
        if arguments[0] not in ("-uid", "--uid") or not arguments[1].isdecimal():
            raise CommandRefused("Usage: start_server -uid <user id>")
        uid = 0 if self._control.options.multiuser else int(arguments[1])
        if f"uid_{uid}" in self._control.servers:
            raise CommandRefused(f"A server of UID {uid} is running already")
        server = self._control.launch(uid)
        self._control.wait_until_ready(server)
        if server.name not in self._control.servers:
            raise CommandRefused("The server could not be started")
        return ""

    def _shutdown_server(self, arguments: list[str]) -> str:
        self._control.delete_server(self._server(arguments[0]).name, "-f" in arguments[1:])
        return ""

    def _clients(self, server: SimulatedServer) -> list[ServedClient]:
        return [client for _, client in server.clients()]

    def _get_client_list(self, arguments: list[str]) -> str:
        clients = self._clients(self._server(arguments[0]))
        return "\n".join(str(client.pid) for client in clients)

    def _servers(self, arguments: list[str]) -> list[SimulatedServer]:
        return [self._server(arguments[0])] if arguments else [*self._control.servers.values()]

    def _get_device_client_list(self, arguments: list[str]) -> str:
        lines = []
        for server in self._servers(arguments):
            for gpu in server.gpus:
                clients = [client for client in self._clients(server) if gpu in client.gpus]
                pids = " ".join(str(client.pid) for client in clients)
                lines.append(f"{gpu.uuid}: {pids}".rstrip())
        return "\n".join(lines)

    def _ps(self, _: list[str]) -> str:
        lines = ["PID\tID\tSERVER\tDEVICE\tNAMESPACE\tCOMMAND"]
        for server in self._control.servers.values():
            for place, client in enumerate(self._clients(server)):
                for gpu in client.gpus:
                    fields = (client.pid, place, server.pid, gpu.uuid[:17], _linux_ns(client.pid))
                    lines.append("\t".join(map(str, (*fields, client.command))))
        return "\n".join(lines)

    def _device_query(self, arguments: list[str]) -> str:
        return "\n".join(
            f"Device {place}: {gpu.name} (UUID: {gpu.uuid})"
            for server in self._servers(arguments)
            for place, gpu in enumerate(server.gpus)
        )

    def _set_default_percent(self, arguments: list[str]) -> str:
        self._control.defaults.percent = values.parse_percent(arguments[0])
        return ""

    def _get_default_percent(self, _: list[str]) -> str:
        return f"{self._control.defaults.percent or 100.0:.1f}"

    def _set_percent(self, arguments: list[str]) -> str:
        value = values.parse_percent(arguments[1])
        self._server(arguments[0]).default.limits.percent = value
        return ""

    def _get_percent(self, arguments: list[str]) -> str:
        return f"{self._server(arguments[0]).default.limits.percent or 100.0:.1f}"

    def _device(self, name: str) -> str | None:
        """The UUID of the daemon's device with that number.

        Seen: a limit given by UUID is not applied, and a wrong name is passed over in silence.
        """
        devices = self._control.visible()
        place = int(name) if name.isdecimal() else len(devices)
        return devices[place] if place < len(devices) else None

    def _set_default_memory(self, arguments: list[str]) -> str:
        size = values.parse_memory(arguments[1], "MG")
        if device := self._device(arguments[0]):
            self._control.defaults.by_gpu[device] = size
        return ""

    def _get_default_memory(self, arguments: list[str]) -> str:
        device = self._device(arguments[0]) or ""
        return format_memory(self._control.defaults.of(device))

    def _set_memory(self, arguments: list[str]) -> str:
        size = values.parse_memory(arguments[2], "MG")
        server = self._server(arguments[0])
        if device := self._device(arguments[1]):
            server.default.limits.by_gpu[device] = size
        return ""

    def _get_memory(self, arguments: list[str]) -> str:
        limits = self._server(arguments[0]).default.limits
        return format_memory(limits.of(self._device(arguments[1]) or ""))

    def _set_default_priority(self, arguments: list[str]) -> str:
        self._control.defaults.priority = values.parse_priority(arguments[0])
        return ""

    def _get_default_priority(self, _: list[str]) -> str:
        return str(self._control.defaults.priority or 0)

    def _terminate_client(self, arguments: list[str]) -> str:
        server = self._server(arguments[0])
        if not any(str(client.pid) == arguments[1] for client in self._clients(server)):
            raise CommandRefused(f"Client {arguments[1]} does not exist in server {arguments[0]}")
        self._control.terminate(int(arguments[1]))
        return ""

    def _quit(self, arguments: list[str]) -> str:
        """It waits for the clients, at most as long as it is told to."""
        if arguments and (arguments[0] != _TIMEOUT or not arguments[-1].isdecimal()):
            raise CommandRefused("Usage: quit [-t <seconds>]")
        seconds = int(arguments[1]) if arguments else None
        self._control.changed.wait_for(self._idle, seconds)
        if arguments == [] and not self._idle():
            raise NoAnswer
        self._finish()
        return ""

    def _idle(self) -> bool:
        return not any(any(server.clients()) for server in self._control.servers.values())


def _linux_ns(pid: int) -> str:
    try:
        return str(os.stat(f"/proc/{pid}/ns/pid").st_ino)
    except OSError:
        return "-"
