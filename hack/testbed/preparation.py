"""Everything the components read, written before they start."""

import os
from collections.abc import Mapping
from pathlib import Path

from hack.testbed import audit, configs, host, machine, packages
from hack.testbed.components import NODE_NAME
from hack.testbed.errors import ClusterError
from hack.testbed.layout import Layout
from hack.testbed.network import SERVICE_ADDRESS
from hack.testbed.pki import write_pki
from hack.testbed.state import State

_USERS = ("admin", "controller-manager", "scheduler", "kubelet")


def prepare(layout: Layout, state: State, programs: Mapping[str, Path]) -> None:
    """Directories, links to programs, certificates, configuration. Done again, it heals."""
    for directory in (layout.configs, layout.bin, layout.pids, layout.logs):
        directory.mkdir(parents=True, exist_ok=True)
    for name, program in programs.items():
        _link(layout.bin / name, program)
    write_pki(layout.pki, NODE_NAME, SERVICE_ADDRESS)
    for user in _USERS:
        text = configs.kubeconfig(layout.pki, user, state.ports["apiserver"])
        _write(layout.configs / f"{user}.kubeconfig", text, mode=0o600)
    _write(layout.configs / "audit.yaml", audit.policy())
    if state.node:
        _prepare_node(layout, state)


def _prepare_node(layout: Layout, state: State) -> None:
    ours = (layout.images, layout.kubelet, layout.static_pods, layout.cdi, layout.cni_config)
    for directory in ours:
        directory.mkdir(parents=True, exist_ok=True)
    runtime = configs.Runtime(
        runc=_found(packages.system_program("runc"), "runc"),
        cni_plugins=_found(packages.cni_directory(), "the CNI plugins"),
        snapshotter=machine.snapshotter(layout.root),
        may_lower_oom_score=machine.may_lower_oom_score(),
    )
    _write(layout.configs / "containerd.toml", configs.containerd_config(layout, runtime))
    _write(layout.cni_config / "10-testbed.conflist", configs.cni_config(layout))
    kubelet = configs.kubelet_config(state.version, layout, state.ports, state.feature_gates)
    _write(layout.configs / "kubelet.yaml", kubelet)
    host.name_node()
    machine.make_cgroups()
    host.mount_shared(layout.kubelet, layout.kubelet)
    for path, directory in host.places(layout, state.version).items():
        host.mount_shared(directory, path)
    if state.shares_root:
        host.set_root_shared(True)


def _found(path: Path | None, name: str) -> Path:
    if path is None:
        raise ClusterError(f"{name}: not installed")
    return path


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.chmod(mode)
    os.replace(partial, path)


def _link(link: Path, program: Path) -> None:
    partial = link.with_name(f".{link.name}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(program)
    os.replace(partial, link)
