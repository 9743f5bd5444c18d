"""What `up` changes outside its own directory, and how `down` puts it back."""

import subprocess
from pathlib import Path

from hack.testbed.assets import minor
from hack.testbed.components import NODE_NAME
from hack.testbed.configs import FIRST_WITH_FIELD, NETWORK
from hack.testbed.errors import ClusterError
from hack.testbed.layout import Layout
from hack.testbed.leftovers import mounts_below
from hack.testbed.machine import DEVICE_PLUGINS, POD_LOGS

MOUNT_SECONDS = 30
_HOSTS = Path("/etc/hosts")
_HOSTS_LINE = f"127.0.0.1 {NODE_NAME} # by hack/cluster, while it is up\n"

# Built into the kubelet and the runtime; we can only tidy up there.
_SHARED_DIRECTORIES = (
    str(DEVICE_PLUGINS),
    "/var/lib/kubelet",
    str(POD_LOGS),
    "/var/log/containers",
    "/var/lib/cni/results",
    "/var/lib/cni",
    "/run/containerd",
)
# Those that the kubelet and the bridge plugin set.
_SYSCTLS = (
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "net/ipv4/ip_forward",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)


def shared_directories_to_make() -> list[str]:
    """Those that are not there before `up`, deepest first: they go again."""
    return [path for path in _SHARED_DIRECTORIES if not Path(path).exists()]


def remove_shared_directories(made: list[str], root: Path) -> None:
    """Empty ones that were not there before, and in the others what is ours."""
    for link in Path("/var/log/containers").glob("*.log"):
        # Those by way of POD_LOGS lead nowhere, as that is not mounted any more.
        if link.is_symlink() and (link.readlink().is_relative_to(root) or not link.exists()):
            link.unlink()
    for record in Path("/var/lib/cni/results").glob(f"{NETWORK}-*"):
        record.unlink()
    for name in made:
        directory = Path(name)
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


def sysctls() -> dict[str, str]:
    """The settings of the kernel that our programs will change."""
    return {
        name: path.read_text().strip()
        for name in _SYSCTLS
        if (path := Path("/proc/sys", name)).exists()
    }


def restore_sysctls(before: dict[str, str]) -> None:
    for name, value in before.items():
        path = Path("/proc/sys", name)
        if path.read_text().strip() != value:
            path.write_text(value)


def root_is_shared() -> bool:
    """Whether mounts below / are seen where / is mounted elsewhere, as systemd has it."""
    rows = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    of_root = [row[6 : row.index("-")] for row in rows if row[4] == "/"]
    return any(option.startswith("shared:") for option in of_root[-1])  # the one on top


def set_root_shared(shared: bool) -> None:
    """Volumes that propagate mounts (Bidirectional, HostToContainer) need a shared one."""
    _run("mount", "--make-shared" if shared else "--make-private", "/")


def places(layout: Layout, version: str) -> dict[Path, Path]:
    """Paths that are built into this kubelet, with the directories of ours to be mounted there."""
    logs_have_a_setting = minor(version) >= FIRST_WITH_FIELD["podLogsDir"]
    logs = {} if logs_have_a_setting else {POD_LOGS: layout.pod_logs}
    return {DEVICE_PLUGINS: layout.device_plugins} | logs


def mount_shared(directory: Path, path: Path) -> None:
    """Make a directory of ours a mount that propagates, so that a driver's pod can mount for
    others; at its own path, or over another one, whose contents are back after `unmount_places`.
    """
    for each in (directory, path):
        each.mkdir(parents=True, exist_ok=True)
    if not _is_mounted(directory, path):
        _run("mount", "--bind", str(directory), str(path))
    _run("mount", "--make-rshared", str(path))


def unmount_places(layout: Layout, version: str) -> None:
    for path, directory in places(layout, version).items():
        while _is_mounted(directory, path):
            _run("umount", "--lazy", str(path))


def _is_mounted(directory: Path, path: Path) -> bool:
    there = directory.exists() and path.exists() and path.samefile(directory)
    return there and str(path) in mounts_below(path.parent)


def _run(*command: str) -> None:
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=MOUNT_SECONDS, check=False
    )
    if answer.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {answer.stderr.strip()}")


def name_node() -> None:
    """Let the node's name lead to loopback."""
    text = _HOSTS.read_text() if _HOSTS.exists() else ""
    if _HOSTS_LINE in text:
        return
    separator = "" if not text or text.endswith("\n") else "\n"
    _write_hosts(f"{text}{separator}{_HOSTS_LINE}")


def forget_node() -> None:
    text = _HOSTS.read_text() if _HOSTS.exists() else ""
    if _HOSTS_LINE in text:
        _write_hosts(text.replace(_HOSTS_LINE, ""))


def _write_hosts(text: str) -> None:
    # In place: in a container the file is a mount of its own and cannot be replaced.
    try:
        _HOSTS.write_text(text)
    except OSError as e:
        raise ClusterError(f"cannot write {_HOSTS}: {e}") from e
