"""Everything a cluster leaves behind when its programs are gone, and its removal."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from hack.testbed.errors import ClusterError
from hack.testbed.machine import cgroup_directories
from hack.testbed.network import BRIDGE
from hack.testbed.waits import wait_for

KILL_SECONDS = 30
UNMOUNT_PASSES = 5
COMMAND_SECONDS = 60


def kill_containers(socket: Path) -> None:
    """Kill what runs in our cgroup, and the shims of our containerd (told by its socket)."""

    def none_left() -> bool:
        pids = _pids_in_cgroups() | _pids_with_argument(str(socket))
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not pids

    wait_for("the containers' processes to end", none_left, timeout_seconds=KILL_SECONDS)


def _pids_in_cgroups() -> set[int]:
    pids: set[int] = set()
    for top in cgroup_directories():
        for directory, _, _ in os.walk(top):  # which, unlike rglob, bears that some go meanwhile
            try:
                listing = Path(directory, "cgroup.procs").read_text()
            except OSError:
                continue  # the cgroup went meanwhile
            pids.update(int(word) for word in listing.split())
    return pids - {0}


def _pids_with_argument(argument: str) -> set[int]:
    """Processes with exactly this argument: only the shims get containerd's socket as one."""
    pids = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if argument.encode() in arguments and b"containerd-shim" in arguments[0]:
            pids.add(int(process.name))
    return pids


def remove_bridge() -> None:
    """The bridge, and the ends of the pods' links that hang on it."""
    device = Path("/sys/class/net", BRIDGE)
    if not device.exists():
        return
    for port in sorted((device / "brif").iterdir()):
        _run("ip", "link", "delete", port.name, may_fail=True)  # may go with its pod meanwhile
    _run("ip", "link", "delete", BRIDGE)


def mounts_below(root: Path) -> list[str]:
    """Where something is mounted below a directory, the last one first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split(" ")[4].encode().decode("unicode_escape") for line in lines]
    return [point for point in reversed(points) if root in Path(point).parents]


def unmount(root: Path) -> None:
    """Nothing is mounted below this directory afterwards, or an error says what."""
    for _ in range(UNMOUNT_PASSES):
        points = mounts_below(root)
        if not points:
            return
        # Mounts that propagate go with the one they came from, so some are gone already.
        _run("umount", "--lazy", *dict.fromkeys(points), may_fail=True)
    raise ClusterError(f"cannot unmount: {', '.join(mounts_below(root))}")


def remove_cgroups() -> None:
    """Our cgroup in each hierarchy, from the leaves up."""

    def gone() -> bool:
        for top in cgroup_directories():
            for directory, _, _ in os.walk(top, topdown=False):
                try:
                    os.rmdir(directory)
                except OSError:
                    continue  # still busy for a moment: the next look will tell
        return not any(top.exists() for top in cgroup_directories())

    wait_for("the cgroups to become empty", gone, timeout_seconds=KILL_SECONDS)


def empty(root: Path) -> None:
    """What is in the run directory; never through something that is mounted there."""
    if mounted := mounts_below(root):
        raise ClusterError(f"not removing {root}: mounted there is {', '.join(mounted)}")
    for path in sorted(root.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _run(*command: str, may_fail: bool = False) -> None:
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    if answer.returncode != 0 and not may_fail:
        raise ClusterError(f"{' '.join(command)}: {answer.stderr.strip()}")
