"""The daemon's file (``--apply``): servers and namespaces that it starts with."""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from dra_driver.node.sim.mps.control import DEFAULT, Control
from dra_driver.node.sim.mps.protocol3 import changes
from dra_driver.node.sim.mps.refusals import Refused

_LIMITS: Final = ("pinned_memory_limit", "active_thread_percentage", "client_priority")
_SERVER: Final[Mapping[str, type]] = {
    "allowed_devices": str, "uid": int, "locality_domains": bool, "namespaces": dict,
    "devices": list, **dict.fromkeys(_LIMITS, str),
}  # fmt: skip
_FEATURES: Final[Mapping[str, Mapping[str, type]]] = {
    "memacct": {"enabled": bool, "audit_log": bool},
    "context-share": {"enabled": bool, "default_socket": str},
}


def read_config(path: Path) -> Mapping[str, Any]:
    """The file. Refused: every reason why it is none."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"Cannot read {path}: {error}") from error
    _check(document, {"schema_version": str, "servers": dict, "features": dict}, "")
    if document.get("schema_version") != "1.0":
        raise Refused('schema_version has to be "1.0"')
    for name, server in document.get("servers", {}).items():
        _check(server, _SERVER, f"servers.{name}.")
        for inner, one in server.get("namespaces", {}).items():
            _check(one, dict.fromkeys(_LIMITS, str), f"servers.{name}.namespaces.{inner}.")
    for name, feature in document.get("features", {}).items():
        _check({name: feature}, dict.fromkeys(_FEATURES, dict), "features.")
        _check(feature, _FEATURES[name], f"features.{name}.")
    return document


def apply(document: Mapping[str, Any], control: Control, uid: int) -> None:
    """Make the servers and namespaces of a file."""
    for name, server in document.get("servers", {}).items():
        devices = tuple(filter(None, server.get("allowed_devices", "").split(",")))
        made = control.create_server(name, server.get("uid", uid), devices)
        made.locality_domains = server.get("locality_domains", False)
        _change(server)(made.default.limits)
        for inner, limits in server.get("namespaces", {}).items():
            if inner != DEFAULT:
                control.create_namespace(name, inner)
            _change(limits)(made.namespaces[inner].limits)


def _change(limits: Mapping[str, Any]) -> Callable[[Any], None]:
    return changes({key.replace("_", "-"): limits[key] for key in _LIMITS if key in limits})


def _check(table: Any, known: Mapping[str, type], where: str) -> None:
    if not isinstance(table, dict):
        raise Refused(f"{where.rstrip('.')} has to be a table")
    for key, value in table.items():
        if key not in known:
            raise Refused(f"Unknown key {where}{key}")
        if type(value) is not known[key]:
            raise Refused(f"{where}{key} has to be a {known[key].__name__}")
