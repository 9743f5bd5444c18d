"""Where pods are in the cgroup file system, and who tells of what appears in them."""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.node.cgroups import Cgroups, container_in, pod_in
from dra_driver.node.new_directories import NewDirectories

INNER: Final = "container"  # crun may put the processes into this one, inside CRI-O's

Told = Callable[[PodUid, str | None], None]
"""What is called with the pod whose directory is new, or in which one of a container is new (its
id), or one inside that (None)."""


class PodDirectories:
    """Watches the directories of pods, and those in which pods appear."""

    def __init__(self, cgroups: Cgroups, told: Told) -> None:
        """*told* is called on a thread of its own."""
        self._cgroups = cgroups
        self._told = told
        self._new = NewDirectories(self._appeared)
        self._lock = threading.Lock()
        self._pods: dict[Path, PodUid] = {}  # by the directory that is watched
        self._missed = False

    @property
    def complete(self) -> bool:
        """Whether all that appears is told of, since the last ``find``."""
        return not self._missed

    def find(self) -> Mapping[PodUid, Path]:
        """The directories of all pods; what appears in them, and which other pods, is told."""
        levels = self._cgroups.levels()
        self._missed = not levels
        for level in levels:  # before they are looked for: between look and watch, none is missed
            self._watch(level)
        pods = self._cgroups.all_pods()
        for pod, directory in pods.items():
            self.watch(directory, pod)
        self._keep(levels)
        return pods

    def watch(self, directory: Path, pod: PodUid) -> None:
        """Tell of what appears in *directory* of *pod* from now on."""
        with self._lock:
            self._pods[directory] = pod
        self._watch(directory)

    def forget(self) -> None:
        """Tell of nothing any more."""
        self._missed = False
        with self._lock:
            self._pods = {}
        for directory in self._new.watched():
            self._new.unwatch(directory)

    def stop(self) -> None:
        self._new.stop()

    def _keep(self, levels: tuple[Path, ...]) -> None:
        with self._lock:
            self._pods = {path: pod for path, pod in self._pods.items() if os.path.isdir(path)}
            wanted = {*self._pods, *levels}
        for directory in self._new.watched() - wanted:
            self._new.unwatch(directory)

    def _watch(self, directory: Path) -> None:
        if not self._new.watch(directory):
            self._missed = True

    def _appeared(self, directory: Path, name: str) -> None:
        with self._lock:
            pod = self._pods.get(directory)
        if pod is not None:
            if (container := container_in(name)) or name == INNER:
                self._told(pod, container)
        elif (new := pod_in(name, directory.name)) is not None:
            self.watch(directory / name, new)
            self._told(new, None)
        else:
            self._missed = True  # it may be the one of a QoS class, in which pods will appear
