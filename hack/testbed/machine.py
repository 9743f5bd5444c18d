"""What this machine lets us do: run containers, limit them, or only a control plane."""

import os
import socket
import subprocess
import tempfile
from pathlib import Path

CGROUP = os.environ.get("TESTBED_CGROUP", "dra-testbed")  # hack/lib/apart sets another
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_V2_CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
_V1_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "devices", "memory", "pids")

# From linux/capability.h.
_CAP_NET_ADMIN = 12
_CAP_SYS_ADMIN = 21
_CAP_SYS_RESOURCE = 24

# The kubelet has these paths built in (that of the logs before 1.30), whatever its --root-dir is.
DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
POD_LOGS = Path("/var/log/pods")


def why_no_node() -> str | None:
    """The reason why a kubelet and containers cannot run here; None when they can."""
    if os.geteuid() != 0:
        return "not root: containers need root"
    if not (_has_capability(_CAP_SYS_ADMIN) and _has_capability(_CAP_NET_ADMIN)):
        return "root without CAP_SYS_ADMIN or CAP_NET_ADMIN: mounts or networks cannot be made"
    if not Path("/dev/kmsg").exists():
        return "no /dev/kmsg: the kubelet reads the kernel's messages there"
    return _why_no_cgroups() or _why_no_second_kubelet()


def _has_capability(number: int) -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> number & 1)


def may_lower_oom_score() -> bool:
    """Whether a process of ours may be protected from the OOM killer; else runc must not try."""
    return _has_capability(_CAP_SYS_RESOURCE)


def cgroup_v1() -> bool:
    return not (_CGROUP_ROOT / "cgroup.controllers").exists()


def cgroup_directories() -> list[Path]:
    """Our cgroup, in each hierarchy that is mounted."""
    return [root / CGROUP for root in _hierarchies()]


def _hierarchies() -> list[Path]:
    if not cgroup_v1():
        return [_CGROUP_ROOT]
    rows = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    # Beside version 1 there may be an (empty) version 2: runc makes its directories there too.
    kinds = ("cgroup", "cgroup2")
    return sorted({Path(row[4]) for row in rows if row[row.index("-") + 1] in kinds})


def make_cgroups() -> None:
    """Our own root for the kubelet's cgroups: what is in it is ours to kill."""
    for directory in cgroup_directories():
        directory.mkdir(exist_ok=True)
        # A cpuset of version 1 starts empty, and nothing can run in an empty one.
        for name in ("cpuset.cpus", "cpuset.mems"):
            setting = directory / name
            if cgroup_v1() and setting.exists() and not setting.read_text().strip():
                setting.write_text((directory.parent / name).read_text())
    if not cgroup_v1():
        _delegate(_CGROUP_ROOT)
        _delegate(_CGROUP_ROOT / CGROUP)


def _delegate(directory: Path) -> None:
    """Let the cgroups below this one limit something (cgroup version 2)."""
    setting = directory / "cgroup.subtree_control"
    enabled = setting.read_text().split()
    if missing := [f"+{name}" for name in _V2_CONTROLLERS if name not in enabled]:
        setting.write_text(" ".join(missing))


def _why_no_cgroups() -> str | None:
    missing = _missing_controllers()
    if missing:
        return f"no cgroup controllers {', '.join(missing)}"
    new = [directory for directory in cgroup_directories() if not directory.exists()]
    try:
        make_cgroups()
    except OSError as e:
        return (
            f"cgroups cannot be made: {e} (in a container: run it privileged, with a private "
            "cgroup namespace and its processes in a cgroup below the root)"
        )
    finally:
        for directory in new:
            if directory.exists():
                directory.rmdir()
    return None


def _missing_controllers() -> list[str]:
    if not cgroup_v1():
        available = (_CGROUP_ROOT / "cgroup.controllers").read_text().split()
        return [name for name in _V2_CONTROLLERS if name not in available]
    mounted = {part for path in _hierarchies() for part in path.name.split(",")}
    return [name for name in _V1_CONTROLLERS if name not in mounted]


def _why_no_second_kubelet() -> str | None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(DEVICE_PLUGINS / "kubelet.sock"))
        except OSError:
            return None
    return "a kubelet runs on this machine already, and two would share /var/lib/kubelet"


def snapshotter(directory: Path) -> str:
    """`overlayfs`, or `native` (copies) where an overlay cannot be mounted in this directory."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        parts = [Path(scratch, name) for name in ("lower", "upper", "work", "merged")]
        for part in parts:
            part.mkdir()
        options = "lowerdir={},upperdir={},workdir={}".format(*parts[:3])
        mount = ["mount", "-t", "overlay", "-o", options, "overlay", str(parts[3])]
        if subprocess.run(mount, capture_output=True, timeout=30, check=False).returncode:
            return "native"
        subprocess.run(["umount", str(parts[3])], capture_output=True, timeout=30, check=True)
    return "overlayfs"
