"""A directory that stands for the host of a simulated node: its root and its driver root.

Programs of a simulated host are run by their path in that directory.
"""

import contextlib
import json
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, assert_never

from dra_driver.base.errors import SettingsError
from dra_driver.base.files import write_atomically
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.driver.commands import Command, RunCommand, run_command
from dra_driver.sim.health.boots import follow_boot
from dra_driver.sim.health.kernel_log import write_kernel_log
from dra_driver.sim.host.files import (
    CharacterDevice,
    SimulatedDirectory,
    SimulatedEntry,
    SimulatedFile,
    SimulatedLink,
)
from dra_driver.sim.host.tools import SETTINGS_DIRECTORY, current_settings
from dra_driver.sim.host.tree import host_tree
from dra_driver.sim.live_node import LiveNode
from dra_driver.sim.mig.host_files import mig_lines
from dra_driver.sim.node_spec import SimulatedNode


def run_on_simulated_host(
    command: Command, timeout_seconds: float, host_root: Path = Path("/")
) -> str:
    """What stands for ``commands.run``.

    A simulated host is no root that one could change to: it has no shell. Its tools find their own
    root by the path that they are called by. Its libraries hold nothing, and must not be loaded.
    """
    return run_command(program_path(command, host_root), timeout_seconds)


def run_on_live_node(live: LiveNode, host_root: Path = Path("/")) -> RunCommand:
    """Like :func:`run_on_simulated_host`, on a host that is first made what the node file says
    now.
    """

    def run_there(command: Command, timeout_seconds: float) -> str:
        live.current()
        return run_on_simulated_host(command, timeout_seconds, host_root)

    return run_there


def program_path(command: Command, host_root: Path = Path("/")) -> Command:
    """*command* by its path on this machine.

    >>> program_path(Command("/usr/bin/nvidia-smi", ("-L",), root="/tmp/h")).argv
    ('/tmp/h/usr/bin/nvidia-smi', '-L')

    In a container, which sees the host below *host_root* and its processes, the host's shell runs
    it: the image has none. The files of the container are reached through this process.
    """
    program = command.root.rstrip("/") + command.program
    if host_root == Path("/") or not (host_root / "bin/sh").exists():
        return replace(command, program=program, root="/", library_path="")
    program = f"/proc/{os.getpid()}/root{program}"
    return replace(command, program=program, root=str(host_root), library_path="")


MARKER: Final = ".simulated-host.json"  # what was put here: only that is ever taken away
Mknod = Callable[[str, int, int], None]


class SimulatedHost:
    """Keeps *directory* what the host of *live* would be, whenever that changes.

    It writes below *directory* alone, and takes away only what it put there itself, earlier
    processes included, besides what the simulated nvidia-modprobe and nvidia-smi made for a GPU or
    a driver that is gone. SettingsError: *directory* holds something else, or cannot be written.
    """

    def __init__(self, live: LiveNode, directory: Path, mknod: Mknod = os.mknod) -> None:
        self._directory = directory
        self._mknod = mknod
        self._inside: set[Path] = set()  # directories that are below ours, links followed
        self._lock = threading.Lock()
        live.on_change(self.materialise)
        self.materialise(live.current())
        follow_boot(directory, live.current(), boot_id(Path("/")))

    def materialise(self, node: SimulatedNode) -> None:
        """Make the directory the host of *node*. Doing it again changes nothing."""
        try:
            with self._lock:
                before = self._open()
                tree = host_tree(node, mig_lines(self._directory, node))
                self._inside.clear()
                # Written down before it is done: after a crash the next one still knows what is its
                # own.
                self._remember(before | tree.keys())
                self._forget_settings(node)
                for path in sorted(before - tree.keys(), key=_removal_order):
                    self._remove(path)
                for path in sorted(tree, key=_removal_order, reverse=True):
                    self._put(path, tree[path])
                self._remove_nodes_of_gone_gpus(node)
                self._remember(set(tree))
                if node.driver == "ready":
                    write_kernel_log(self._directory, node)
        except (OSError, ValueError) as error:  # ValueError: the marker is no JSON
            raise SettingsError(f"no simulated host in {self._directory}: {error}") from error

    def _open(self) -> set[str]:
        """What was put here before. SettingsError: the directory is somebody else's."""
        self._directory.mkdir(parents=True, exist_ok=True)
        marker = self._directory / MARKER
        if marker.is_file():
            return set(json.loads(marker.read_text()))
        if any(self._directory.iterdir()):
            raise SettingsError(
                f"{self._directory} is not empty and no simulated host: name an empty directory"
            )
        return set()

    def _remember(self, paths: set[str]) -> None:
        text = json.dumps(sorted(paths), indent=0)
        marker = self._directory / MARKER
        if not (marker.is_file() and marker.read_text() == text):
            _replace(marker, text.encode(), 0o644)

    def _put(self, path: str, entry: SimulatedEntry) -> None:
        place = self._place(path)
        if not place.parent.is_dir():
            place.parent.mkdir(parents=True)
        match entry:
            case SimulatedFile(content, mode):
                _put_file(place, content, mode)
            case SimulatedLink(target):
                _put_link(place, target)
            case CharacterDevice(major, minor):
                self._put_device(place, os.makedev(major, minor))
            case SimulatedDirectory():
                place.mkdir(exist_ok=True)
            case _:
                assert_never(entry)

    def _put_device(self, place: Path, device: int) -> None:
        if os.path.lexists(place):
            return
        try:
            self._mknod(str(place), stat.S_IFCHR | 0o666, device)
            place.chmod(0o666)
        except PermissionError:
            # a character device too, which is all that is asked of it
            place.symlink_to("/dev/null")

    def _remove(self, path: str) -> None:
        place = self._place(path)
        if place.is_dir() and not place.is_symlink():
            with contextlib.suppress(OSError):
                place.rmdir()  # not ours alone: somebody else's file is in it
            return
        place.unlink(missing_ok=True)
        for parent in place.relative_to(self._directory).parents:
            if str(parent) == ".":
                return
            try:
                (self._directory / parent).rmdir()
            except OSError:
                return  # something else is in it

    def _remove_nodes_of_gone_gpus(self, node: SimulatedNode) -> None:
        ready = node.driver == "ready"
        device_files = {f"nvidia{gpu.minor}" for gpu in node.gpus if gpu.listed and ready}
        for place in (self._directory / "dev").glob("nvidia[0-9]*"):
            if place.name not in device_files:
                place.unlink()
        if not ready:
            shutil.rmtree(self._directory / "dev/nvidia-caps", ignore_errors=True)

    def _forget_settings(self, node: SimulatedNode) -> None:
        current = {self._directory / path for path in current_settings(node)}
        for place in (self._directory / SETTINGS_DIRECTORY).glob("*/*"):
            if place not in current:
                place.unlink()

    def _place(self, path: str) -> Path:
        """*path* below the directory. SettingsError: a link would lead out of it."""
        place = self._directory / path
        if place.parent not in self._inside:
            if not place.parent.resolve().is_relative_to(self._directory.resolve()):
                raise SettingsError(f"{place.parent} leads out of {self._directory}: unlink it")
            self._inside.add(place.parent)
        return place


def _removal_order(path: str) -> tuple[bool, tuple[int, ...]]:
    """In which order paths go; they come in the other.

    What is in a directory goes before it, and the links of sys/bus before the devices they lead
    to, as in the kernel: whoever finds a device finds all of it.
    """
    return path.startswith("sys/devices"), tuple(-ord(letter) for letter in path)


def _put_file(place: Path, content: bytes, mode: int) -> None:
    if not os.path.lexists(place):
        with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        return
    if place.is_symlink() or not place.is_file() or place.read_bytes() != content:
        _replace(place, content, mode)


def _put_link(place: Path, target: str) -> None:
    if place.is_symlink() and os.readlink(place) == target:
        return
    place.unlink(missing_ok=True)
    place.symlink_to(target)


def _replace(place: Path, content: bytes, mode: int) -> None:
    """Several processes may do it at the same time."""
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    write_atomically(place, content, mode=mode, temporary=temporary)
