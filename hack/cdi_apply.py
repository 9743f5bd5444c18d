"""Edits done to an OCI runtime configuration, as container runtimes do them.

Every step follows the Go library (``ContainerEdits.Apply``), which containerd, CRI-O and Podman
share, so that a ``config.json`` edited here starts the container they would start.
"""

import copy
import os
import posixpath
import stat
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from cdi.errors import CdiDeviceError
from cdi.registry import DEFAULT_DIRECTORIES, Directory, load_registry
from cdi.spec import ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice

Config = dict[str, Any]
"""An OCI ``config.json``."""

_NODE_TYPES: Final = {stat.S_IFBLK: "b", stat.S_IFCHR: "c", stat.S_IFIFO: "p"}


def inject(
    config: Config,
    names: Iterable[str],
    directories: Iterable[Directory] = DEFAULT_DIRECTORIES,
) -> Config:
    """Give a container the devices with these qualified names; ``config`` itself is not changed."""
    return apply_edits(config, load_registry(directories).edits(names))


def apply_edits(config: Config, edits: ContainerEdits) -> Config:
    """Give the configuration with the edits done; looks at the host for half-described nodes.

    >>> apply_edits({"process": {"env": ["A=1", "B=1"]}}, ContainerEdits(env=("A=2", "C=2")))
    {'process': {'env': ['A=2', 'B=1', 'C=2']}}
    """
    edited = copy.deepcopy(config)
    _set_env(edited, edits.env)
    for node in edits.device_nodes:
        _add_node(edited, _completed(node))
    _add_net_devices(edited, edits.net_devices)
    _add_mounts(edited, edits.mounts)
    for hook in edits.hooks:
        _child(edited, "hooks").setdefault(hook.hook_name, []).append(_oci_hook(hook))
    if edits.intel_rdt is not None:
        _child(edited, "linux")["intelRdt"] = _oci_rdt(edits.intel_rdt)
    _add_gids(edited, edits.additional_gids)
    return edited


def _set_env(config: Config, env: tuple[str, ...]) -> None:
    if not env:
        return
    # The Go library leaves a variable the container had and appends the new one; runc lets the last
    # win. Replacing gives the process the same, and a reader of the file no riddle.
    entries: list[str] = _child(config, "process").setdefault("env", [])
    index = {_variable(entry): i for i, entry in enumerate(entries)}
    for entry in env:
        at = index.setdefault(_variable(entry), len(entries))
        entries[at : at + 1] = [entry]


def _variable(entry: str) -> str:
    return entry.partition("=")[0]


def _completed(node: DeviceNode) -> DeviceNode:
    """Fill in what the node leaves to the host."""
    is_described = bool(node.type) and (node.major != 0 or node.type == "p")
    host_path = node.host_path or node.path
    try:
        host = os.lstat(host_path)
    except OSError as e:
        if is_described:
            return node
        raise CdiDeviceError(f"device {node.path}: cannot look at {host_path}: {e.strerror}") from e
    if node.file_mode is None:
        node = replace(node, file_mode=stat.S_IMODE(host.st_mode))
    return node if is_described else _identified(node, host_path, host)


def _identified(node: DeviceNode, host_path: str, host: os.stat_result) -> DeviceNode:
    host_type = _NODE_TYPES.get(stat.S_IFMT(host.st_mode))
    if host_type is None:
        raise CdiDeviceError(f"device {node.path}: {host_path} is not a device node")
    if node.type not in ("", host_type):
        raise CdiDeviceError(
            f"device {node.path}: {host_path} has type {host_type!r}, not {node.type!r}"
        )
    if host_type == "p" or node.major != 0:
        return replace(node, type=host_type)
    major, minor = os.major(host.st_rdev), os.minor(host.st_rdev)
    return replace(node, type=host_type, major=major, minor=minor)


def _add_node(config: Config, node: DeviceNode) -> None:
    linux = _child(config, "linux")
    others = [device for device in linux.get("devices") or [] if device["path"] != node.path]
    linux["devices"] = [*others, _oci_node(node, config)]
    if node.type in ("b", "c"):
        _child(linux, "resources").setdefault("devices", []).append(
            {
                "allow": True,
                "type": node.type,
                "major": node.major,
                "minor": node.minor,
                "access": node.permissions or "rwm",
            }
        )


def _oci_node(node: DeviceNode, config: Config) -> Config:
    # A node belongs to the user of the container unless the spec names an owner.
    user = config.get("process", {}).get("user", {})
    owner = {
        "fileMode": node.file_mode,
        "uid": (user.get("uid") or None) if node.uid is None else node.uid,
        "gid": (user.get("gid") or None) if node.gid is None else node.gid,
    }
    required = {"path": node.path, "type": node.type, "major": node.major, "minor": node.minor}
    return required | {name: value for name, value in owner.items() if value is not None}


def _add_net_devices(config: Config, net_devices: tuple[NetDevice, ...]) -> None:
    for device in net_devices:
        net_devices_of_config = _child(_child(config, "linux"), "netDevices")
        net_devices_of_config[device.host_interface_name] = {"name": device.name}


def _add_mounts(config: Config, mounts: tuple[Mount, ...]) -> None:
    if not mounts:
        return
    existing: list[Config] = config.get("mounts") or []
    for mount in mounts:
        existing = [entry for entry in existing if entry["destination"] != mount.container_path]
        existing.append(_oci_mount(mount))
    # Stable: what is mounted below a directory comes behind that directory.
    config["mounts"] = sorted(existing, key=lambda mount: _depth(mount["destination"]))


def _depth(destination: str) -> int:
    return posixpath.normpath(destination).count("/")


def _oci_mount(mount: Mount) -> Config:
    return _filled(
        destination=mount.container_path,
        type=mount.type,
        source=mount.host_path,
        options=list(mount.options),
    )


def _oci_hook(hook: Hook) -> Config:
    return _filled(path=hook.path, args=list(hook.args), env=list(hook.env), timeout=hook.timeout)


def _oci_rdt(rdt: IntelRdt) -> Config:
    return _filled(
        closID=rdt.clos_id,
        schemata=list(rdt.schemata),
        l3CacheSchema=rdt.l3_cache_schema,
        memBwSchema=rdt.mem_bw_schema,
        enableMonitoring=rdt.enable_monitoring,
    )


def _filled(**values: object) -> Config:
    return {name: value for name, value in values.items() if value}


def _add_gids(config: Config, gids: tuple[int, ...]) -> None:
    # 0 would be the group root, and is ignored: CDI SPEC, "additionalGids".
    additional = [gid for gid in gids if gid != 0]
    if additional:
        user = _child(_child(config, "process"), "user")
        user["additionalGids"] = list(dict.fromkeys([*user.get("additionalGids", []), *additional]))


def _child(parent: Config, name: str) -> Config:
    if parent.get(name) is None:
        parent[name] = {}
    child: Config = parent[name]
    return child
