"""Protocol 3: modules and verbs, as arguments of the program, and features that these switch."""

import os
from collections.abc import Callable
from typing import Final

from dra_driver.sim.mps import limits as values
from dra_driver.sim.mps.command_line import (
    CommandRefused,
    ParsedCommand,
    format_table,
    parse_boolean,
    parse_command,
    parse_number,
    select_field,
)
from dra_driver.sim.mps.control_daemon import SimulatedControlDaemon
from dra_driver.sim.mps.limits import ServerLimits, format_memory
from dra_driver.sim.mps.servers import ServedClient, SimulatedNamespace, SimulatedServer
from dra_driver.sim.mps.static_partitions import StaticPartitions


class DaemonFeatures:
    """Both are on at first, and the audit log is off."""

    def __init__(self) -> None:
        self._on = {"memacct": True, "context-share": True}
        self._audit_log = False

    def enable(self, words: ParsedCommand) -> str:
        self._on[self._known(words)] = True
        return ""

    def disable(self, words: ParsedCommand) -> str:
        self._on[self._known(words)] = False
        return ""

    def describe(self, words: ParsedCommand) -> str:
        name = self._known(words)
        return f"{name}: {'enabled' if self._on[name] else 'disabled'}"

    def set_accounting(self, words: ParsedCommand) -> str:
        words.allow(1)
        key, _, value = words.need(0, "audit_log=true|false").partition("=")
        if key != "audit_log":
            raise CommandRefused(f"Unknown setting '{key}'")
        self._audit_log = parse_boolean(value)
        return ""

    def describe_accounting(self, words: ParsedCommand) -> str:
        words.allow(0)
        on = "enabled" if self._on["memacct"] else "disabled"
        return f"memacct: {on}\naudit_log: {str(self._audit_log).lower()}"

    def _known(self, words: ParsedCommand) -> str:
        words.allow(1)
        name = words.need(0, "feature")
        if name not in self._on:
            raise CommandRefused(f"Unknown feature '{name}'; there are context-share, memacct")
        return name


_LIMITS: Final = ("pinned-memory-limit", "active-thread-percentage", "client-priority")
_SERVER: Final = ("name", "uid", "pid", "status", "pipe-directory", "allowed-devices")
_NAMESPACE: Final = ("name", "server", "server-status", *_LIMITS, "pipe-directory")
_CLIENT: Final = ("pid", "server", "device", "namespace", "command")
_DEVICE: Final = (
    "Ordinal", "Server", "PCI ID", "Device UUID", "Name", "Total SMs", "Total Chunks", "Attributes",
)  # fmt: skip
_CHANGES: Final = frozenset({"create", "delete", "set", "terminate", "enable", "disable"})

Verb = Callable[[ParsedCommand], str]


class SimulatedProtocol3:
    """Answers for *control*. *finish* ends the daemon."""

    def __init__(self, control: SimulatedControlDaemon, finish: Callable[[], None]) -> None:
        self._control = control
        self._finish = finish
        features = DaemonFeatures()
        partitions = StaticPartitions(control)
        self._verbs: dict[tuple[str, str], Verb] = {
            ("server", "create"): self._server_create,
            ("server", "delete"): self._server_delete,
            ("server", "list"): self._server_list,
            ("server", "set"): self._server_set,
            ("server", "get"): self._server_get,
            ("namespace", "create"): self._namespace_create,
            ("namespace", "delete"): self._namespace_delete,
            ("namespace", "list"): self._namespace_list,
            ("namespace", "set"): self._namespace_set,
            ("namespace", "get"): self._namespace_get,
            ("client", "list"): self._client_list,
            ("client", "get"): self._client_get,
            ("client", "terminate"): self._client_terminate,
            ("device", "list"): self._device_list,
            ("sm-partition", "create"): partitions.create,
            ("sm-partition", "delete"): partitions.delete,
            ("sm-partition", "list"): partitions.list,
            ("feature", "enable"): features.enable,
            ("feature", "disable"): features.disable,
            ("feature", "describe"): features.describe,
            ("memacct", "set"): features.set_accounting,
            ("memacct", "describe"): features.describe_accounting,
        }

    def answer(self, words: list[str], uid: int) -> str:
        """What the command *words* of user *uid* is answered. CommandRefused: with why."""
        if words[:1] == ["stdin"]:
            raise CommandRefused("This daemon speaks protocol 3: say <module> <verb> as arguments")
        command = _without_protocol(words[1:])
        if "-q" in command or "--quit" in command:
            self._refuse_other_user(uid, "quit")
            return self._quit()
        if len(command) < 2:
            raise CommandRefused("Usage: nvidia-cuda-mps-control <module> <verb>; see help")
        verb = self._verbs.get((command[0], command[1]))
        if verb is None:
            raise CommandRefused(f"Unknown command '{command[0]} {command[1]}'")
        if command[1] in _CHANGES:
            self._refuse_other_user(uid, f"{command[0]} {command[1]}")
        return verb(parse_command(command[2:]))

    def _refuse_other_user(self, uid: int, command: str) -> None:
        if uid not in (0, self._control.options.uid):
            raise CommandRefused(f"Insufficient privileges for UID {uid} to run {command}")

    def _quit(self) -> str:
        for server in self._control.servers.values():
            for _, client in list(server.clients()):
                self._control.terminate(client.pid)
        self._finish()
        return ""

    def _server_create(self, words: ParsedCommand) -> str:
        words.allow(1, "uid", "allowed-devices", "locality-domains")
        uid = parse_number(words.options.get("uid", str(self._control.options.uid)), "uid")
        if not words.plain and "uid" not in words.options:
            raise CommandRefused("A server needs a name or --uid")
        server_name = words.plain[0] if words.plain else f"uid_{uid}"
        facts = self._control.facts()
        names = [name for name in words.options.get("allowed-devices", "").split(",") if name]
        gpus = [facts.find(name) for name in names]
        devices = [gpu.uuid if gpu else name for gpu, name in zip(gpus, names, strict=True)]
        domains = parse_boolean(words.options.get("locality-domains", "false"))
        self._control.create_server(server_name, uid, tuple(devices)).locality_domains = domains
        return ""

    def _server_delete(self, words: ParsedCommand) -> str:
        words.allow(1, "force")
        self._control.delete_server(words.need(0, "name"), words.flag("force"))
        return ""

    def _server_list(self, words: ParsedCommand) -> str:
        words.allow(1, "format")
        servers = sorted(self._control.servers.values(), key=lambda server: server.name)
        if words.plain:
            servers = [self._control.server(words.plain[0])]
        rows = [(*self._server_row(server), "-") for server in servers]
        return format_table(words, (*_SERVER, "context-ids"), rows)

    def _server_row(self, server: SimulatedServer) -> tuple[str, ...]:
        directory = self._control.places.pipe / server.name
        devices = ",".join(server.devices) or "all"
        status = self._control.status(server)
        return server.name, str(server.uid), str(server.pid), status, str(directory), devices

    def _server_set(self, words: ParsedCommand) -> str:
        words.allow(1, *_LIMITS, "uid", "locality-domains")
        server = self._control.server(words.need(0, "name"))
        if not words.options:
            raise CommandRefused("Nothing to set: name at least one option")
        if "uid" in words.options and parse_number(words.options["uid"], "uid") != server.uid:
            raise CommandRefused("The UID of a running server cannot be changed")
        self._control.set_limits(server.name, "default", limit_changes(words.options))
        if "locality-domains" in words.options:
            server.locality_domains = parse_boolean(words.options["locality-domains"])
        return ""

    def _server_get(self, words: ParsedCommand) -> str:
        words.allow(2)
        row = self._server_row(self._control.server(words.need(0, "name")))
        return select_field(_SERVER, row, words.need(1, "field"))

    def _namespace_create(self, words: ParsedCommand) -> str:
        words.allow(1, "server")
        self._control.create_namespace(words.option("server"), words.need(0, "name"))
        return ""

    def _namespace_delete(self, words: ParsedCommand) -> str:
        words.allow(1, "server", "force")
        name, force = words.need(0, "name"), words.flag("force")
        self._control.delete_namespace(words.option("server"), name, force)
        return ""

    def _namespace_list(self, words: ParsedCommand) -> str:
        words.allow(1, "server", "format")
        servers = sorted(self._control.servers.values(), key=lambda server: server.name)
        if "server" in words.options:
            servers = [self._control.server(words.option("server"))]
        rows = [
            self._namespace_row(server, namespace)
            for server in servers
            for _, namespace in sorted(server.namespaces.items())
            if not words.plain or namespace.name == words.plain[0]
        ]
        if words.plain and not rows:
            raise CommandRefused(f"Namespace '{words.plain[0]}' does not exist")
        return format_table(words, _NAMESPACE, rows)

    def _namespace_row(
        self, server: SimulatedServer, namespace: SimulatedNamespace
    ) -> tuple[str, ...]:
        percent = 100.0 if namespace.limits.percent is None else namespace.limits.percent
        return (
            namespace.name,
            server.name,
            self._control.status(server),
            format_memory(namespace.limits.memory_bytes),
            f"{percent:.2f}",
            str(namespace.limits.priority or 0),
            str(self._control.places.pipe / server.name / namespace.name),
        )

    def _namespace_set(self, words: ParsedCommand) -> str:
        words.allow(1, "server", *_LIMITS)
        name, server = words.need(0, "name"), words.option("server")
        if len(words.options) < 2:
            raise CommandRefused("Nothing to set: name at least one option")
        self._control.set_limits(server, name, limit_changes(words.options))
        return ""

    def _namespace_get(self, words: ParsedCommand) -> str:
        words.allow(3)
        name, server = words.need(0, "name"), self._control.server(words.need(1, "server"))
        row = self._namespace_row(server, self._control.namespace(server.name, name))
        return select_field(_NAMESPACE, row, words.need(2, "field"))

    def _client_list(self, words: ParsedCommand) -> str:
        words.allow(0, "server", "all", "format")
        servers = sorted(self._control.servers.values(), key=lambda server: server.name)
        if "server" in words.options:
            servers = [self._control.server(words.option("server"))]
        rows = [
            (str(client.pid), server.name, gpu.uuid, namespace.name, client.command)
            for server in servers
            for namespace, client in server.clients()
            for gpu in client.gpus
        ]
        return format_table(words, _CLIENT, rows)

    def _client_get(self, words: ParsedCommand) -> str:
        words.allow(2)
        client = self._control.find(parse_number(words.need(0, "pid"), "pid"))
        fields = ("pid", "server", "device", "pci-id", "linux-ns", "maws-ns", "cmd")
        return select_field(fields, _client_row(*client), words.need(1, "field"))

    def _client_terminate(self, words: ParsedCommand) -> str:
        words.allow(1)
        self._control.terminate(parse_number(words.need(0, "pid"), "pid"))
        return ""

    def _device_list(self, words: ParsedCommand) -> str:
        words.allow(0, "server", "format")
        names = [words.option("server")] if "server" in words.options else self._control.servers
        rows = []
        for name in sorted(names):
            for gpu in self._control.server(name).gpus:
                sms = str(gpu.multiprocessors), str(gpu.multiprocessors // 8)
                rows.append((str(gpu.index), name, gpu.bus_id, gpu.uuid, gpu.name, *sms, "-"))
        return format_table(words, _DEVICE, rows)


def limit_changes(options: dict[str, str]) -> Callable[[ServerLimits], None]:
    """What these options do to limits. CommandRefused: one is no good, and nothing is changed."""
    memory = options.get("pinned-memory-limit")
    percent = options.get("active-thread-percentage")
    priority = options.get("client-priority")
    size = None if memory is None else values.parse_memory(memory)
    part = None if percent is None else values.parse_percent(percent)
    turn = None if priority is None else values.parse_priority(priority)

    def change(limits: ServerLimits) -> None:
        limits.memory_bytes = limits.memory_bytes if size is None else size
        limits.percent = limits.percent if part is None else part
        limits.priority = limits.priority if turn is None else turn

    return change


def _client_row(
    server: SimulatedServer, namespace: SimulatedNamespace, client: ServedClient
) -> tuple[str, ...]:
    try:
        linux = str(os.stat(f"/proc/{client.pid}/ns/pid").st_ino)
    except OSError:
        linux = "-"
    gpu = client.gpus[0]
    return (
        str(client.pid), server.name, gpu.uuid, gpu.bus_id, linux, namespace.name, client.command,
    )  # fmt: skip


def _without_protocol(words: list[str]) -> list[str]:
    """A command follows the protocol of the daemon, whatever it says itself."""
    others, skip = [], False
    for word in words:
        if skip or word.startswith("--protocol="):
            skip = False
        elif word in ("-p", "--protocol"):
            skip = True
        else:
            others.append(word)
    return others
