"""Programs run in a container: by an OCI runtime, or in a chroot where none can be used.

Both get the same OCI configuration, with the edits of our CDI spec done to it.
"""

import json
import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.rootfs import PYTHON, stdlib

Config = dict[str, Any]
Run = Callable[[Config, Sequence[str]], "Ran"]
"""Runs a command with what a configuration gives it."""

SECONDS = 120.0  # the first CUDA program after boot may wait for firmware


@dataclass(frozen=True)
class Ran:
    """How a program ended, and what it said."""

    code: int
    out: str
    err: str


def base_config() -> Config:
    """A container as containerd makes one, without networks and limits, and without devices."""
    library = str(stdlib())
    read_only = ["rbind", "ro", "rprivate", "nosuid", "nodev"]
    return {
        "ociVersion": "1.0.2",
        "root": {"path": "rootfs", "readonly": False},
        "hostname": "gpu-test",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "args": [],
            "env": ["PATH=/usr/bin:/bin", f"PYTHONHOME={python_home()}", "LC_ALL=C"],
            "noNewPrivileges": True,
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {
                "destination": "/dev",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
            },
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid"]},
            {"destination": library, "type": "bind", "source": library, "options": read_only},
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        },
    }


def runtime() -> str | None:
    """The OCI runtime: the file that OCI_RUNTIME names, else runc or crun on the PATH."""
    named = os.environ.get("OCI_RUNTIME")
    return named or shutil.which("runc") or shutil.which("crun")


class Bundle:
    """An OCI bundle at *directory*, whose ``rootfs`` is there already."""

    def __init__(self, directory: Path, program: str) -> None:
        self._directory = directory
        self._state = directory / "state"
        self._program = program

    def run(self, config: Config, args: Sequence[str]) -> Ran:
        """Run *args* in a container of *config* to its end."""
        config = {**config, "process": {**config["process"], "args": list(args)}}
        (self._directory / "config.json").write_text(json.dumps(config, indent=2))
        name = f"gpu-test-{uuid.uuid4().hex[:12]}"
        root = [self._program, "--root", str(self._state)]
        try:
            return _run([*root, "run", "--bundle", str(self._directory), name])
        finally:
            _run([*root, "delete", "--force", name])


class Chroot:
    """A chroot into *rootfs* in a mount namespace of its own, which takes its mounts with it.

    It shows what the mounts and device files of a spec do. It does not keep a program from other
    devices: that takes the device cgroup of a container.
    """

    def __init__(self, rootfs: Path) -> None:
        self._rootfs = rootfs

    def run(self, config: Config, args: Sequence[str]) -> Ran:
        script = chroot_script(config, self._rootfs, args)
        unshare = ["unshare", "--mount", "--propagation", "private", "--fork"]
        return _run([*unshare, "bash", "-euc", script])


def chroot_script(config: Config, rootfs: Path, args: Sequence[str]) -> str:
    """What `bash -eu` does in the new mount namespace: binds, then the program in the chroot."""
    lines = [
        f"mount -t tmpfs tmpfs {_at(rootfs, '/dev')}",
        f"mount --rbind /proc {_at(rootfs, '/proc')}",
    ]
    binds = [m for m in config["mounts"] if m.get("type") not in ("proc", "tmpfs")]
    pairs = [(mount["source"], mount["destination"]) for mount in binds]
    pairs += [(f"/dev/{name}", f"/dev/{name}") for name in ("null", "zero", "urandom")]
    for source, destination in pairs:
        target = _at(rootfs, destination)
        make = f"mkdir -p {target}" if Path(source).is_dir() else f"touch {target}"
        lines.append(f"mkdir -p $(dirname {target}); {make}")
        lines.append(f"mount --rbind {shlex.quote(source)} {target}")
    lines += [_node(rootfs, node) for node in config["linux"].get("devices", ())]
    env = " ".join(shlex.quote(entry) for entry in config["process"]["env"])
    lines.append(f"exec chroot {shlex.quote(str(rootfs))} /usr/bin/env -i {env} {shlex.join(args)}")
    return "\n".join(lines)


def why_not(run: Run) -> str:
    """Why not even an empty container starts; nothing where one does."""
    try:
        ran = run(base_config(), [PYTHON, "-c", "import ctypes; print('started')"])
    except (OSError, subprocess.TimeoutExpired) as e:
        return str(e)
    return "" if ran.out.strip() == "started" else (ran.err or ran.out).strip()[-500:]


def _run(args: Sequence[str]) -> Ran:
    ran = subprocess.run(
        args, capture_output=True, text=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def _node(rootfs: Path, node: Config) -> str:
    """Make a device file, or, where that is not permitted, mount this machine's own."""
    target, same = _at(rootfs, node["path"]), shlex.quote(node["path"])
    number = f"{node['type']} {node['major']} {node['minor']}"
    folder = f"mkdir -p $(dirname {target})"
    bound = f"{{ touch {target}; mount --bind {same} {target}; }}"
    return f"{folder}; mknod -m 666 {target} {number} || {bound}"


def _at(rootfs: Path, path: str) -> str:
    return shlex.quote(f"{rootfs}{path}")


def python_home() -> str:
    # …/lib/python3.11 is below the prefix that Python has to be told, since it lies elsewhere.
    return str(stdlib().parent.parent)
