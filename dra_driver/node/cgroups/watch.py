"""Watches the cgroup file system for pods and containers as they appear (inotify(7)).

The kubelet makes the cgroup of a pod before anything else of it, and the kernel reports it at once.
Watching costs nothing while nothing happens.
"""

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from dra_driver.base import inotify
from dra_driver.base.errors import NodeError
from dra_driver.base.inotify import Inotify
from dra_driver.k8s.claims import PodUid
from dra_driver.node.cgroups.tree import (
    Cgroups,
    container_id_of,
    pod_uid_of,
    subdirectories,
)

log = logging.getLogger(__name__)

OnDirectory = Callable[[Path, str], None]
"""What is called with the directory that is watched, and the name of the new one in it."""

_APPEARED: Final = inotify.CREATED | inotify.MOVED_THERE


class DirectoryWatcher:
    """Watches directories on a thread of its own, which there is once something is watched."""

    def __init__(
        self, on_directory: OnDirectory, on_removed: Callable[[], None] | None = None
    ) -> None:
        """*on_directory* is called on that thread, and *on_removed* when a directory is gone; what
        they raise is logged."""
        self._callback = on_directory
        self._removed = on_removed
        self._mask = _APPEARED | (inotify.DELETED if on_removed else 0)
        self._lock = threading.Lock()
        self._inotify: Inotify | None = None
        self._wake: int | None = None  # an eventfd that ends the thread
        self._watches: dict[Path, int] = {}
        self._directories: dict[int, Path] = {}
        self._failed: set[int | None] = set()

    def watch(self, directory: Path) -> bool:
        """Report what appears in *directory* from now on; a second call changes nothing.

        False: it is gone, or the kernel has no more watches.
        """
        with self._lock:
            if directory in self._watches:
                return True
            try:
                watch = self._started().watch(directory, self._mask | inotify.ONLY_DIRECTORIES)
            except FileNotFoundError:
                return False
            except OSError as e:
                self._log_once(directory, e)
                return False
            self._watches[directory] = watch
            self._directories[watch] = directory
            return True

    def unwatch(self, directory: Path) -> None:
        """Watch *directory* no longer."""
        with self._lock:
            if (watch := self._watches.pop(directory, None)) is not None:
                self._directories.pop(watch, None)
                self._started().unwatch(watch)

    def watched(self) -> frozenset[Path]:
        """The directories that are watched; one that went is none of them."""
        with self._lock:
            return frozenset(self._watches)

    def stop(self) -> None:
        """End the thread, and with it every watch. It does not wait for that."""
        with self._lock:
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)
            self._inotify = self._wake = None
            self._watches, self._directories = {}, {}

    def _started(self) -> Inotify:
        if self._inotify is None:
            wake = os.eventfd(0, os.EFD_CLOEXEC)
            try:
                self._inotify, self._wake = Inotify(), wake
            except OSError:
                os.close(wake)
                raise
            threading.Thread(
                target=self._run,
                args=(self._inotify, wake),
                name="new-directories",
                daemon=True,
            ).start()
        return self._inotify

    def _run(self, watches: Inotify, wake: int) -> None:
        poll = select.poll()
        poll.register(watches.file, select.POLLIN)
        poll.register(wake, select.POLLIN)
        try:
            while not any(ready == wake for ready, _ in poll.poll()):
                for watch, mask, name in watches.events():
                    self._handle(watch, mask, name)
        finally:
            watches.close()
            os.close(wake)

    def _handle(self, watch: int, mask: int, name: str) -> None:
        if mask & inotify.OVERFLOW:  # some events are lost: whatever is there may be new
            for directory in self.watched():
                with contextlib.suppress(NodeError):
                    for path in subdirectories(directory):
                        self._call(partial(self._callback, directory, path.name), path)
            return
        with self._lock:
            parent = self._directories.get(watch)
            if parent is not None and mask & inotify.IGNORED:
                del self._directories[watch], self._watches[parent]
        if parent is None or not mask & inotify.DIRECTORY:
            return
        if mask & _APPEARED:
            self._call(partial(self._callback, parent, name), parent / name)
        elif self._removed is not None:
            self._call(self._removed, parent / name)

    def _log_once(self, directory: Path, error: OSError) -> None:
        if error.errno not in self._failed:  # of each kind
            self._failed.add(error.errno)
            facts = {"directory": str(directory), "error": error.strerror}
            log.warning("a directory is not watched", extra=facts)

    def _call(self, act: Callable[[], None], directory: Path) -> None:
        try:
            act()
        except Exception:
            # Whatever is wrong with one, the next may be well.
            log.exception("a directory was not dealt with", extra={"directory": directory.name})


class NewPodWatcher:
    """Watches where the cgroups of pods appear, while they are to be reported."""

    def __init__(self, cgroups: Cgroups) -> None:
        self._cgroups = cgroups
        self._new = DirectoryWatcher(self._appeared)
        self._lock = threading.Lock()  # of one change at a time
        self._on_new_pod: Callable[[], None] | None = None

    def report(self, on_new_pod: Callable[[], None] | None) -> bool:
        """Call *on_new_pod* for every pod that comes from now on; None: no longer.

        Calling it again changes nothing, but for directories that are new. False: pods, or some of
        them, are not reported.
        """
        with self._lock:
            self._on_new_pod = on_new_pod
            levels = self._cgroups.levels() if on_new_pod else ()
            watched = [self._new.watch(level) for level in levels]
            for gone in self._new.watched() - frozenset(levels):
                self._new.unwatch(gone)
            return bool(watched) and all(watched)

    def stop(self) -> None:
        self._new.stop()

    def _appeared(self, directory: Path, name: str) -> None:
        on_new_pod = self._on_new_pod
        if on_new_pod is not None and pod_uid_of(name, directory.name):
            on_new_pod()


INNER_CGROUP: Final = "container"  # crun may put the processes into this one, inside CRI-O's

OnPodCgroup = Callable[[PodUid, str | None], None]
"""What is called with the pod whose directory is new, or in which one of a container is new (its
id), or one inside that (None)."""


class PodCgroupWatcher:
    """Watches the directories of pods, and those in which pods appear."""

    def __init__(self, cgroups: Cgroups, on_pod_cgroup: OnPodCgroup) -> None:
        """*on_pod_cgroup* is called on a thread of its own."""
        self._cgroups = cgroups
        self._callback = on_pod_cgroup
        self._new = DirectoryWatcher(self._appeared)
        self._lock = threading.Lock()
        self._pods: dict[Path, PodUid] = {}  # by the directory that is watched
        self._missed = False

    @property
    def complete(self) -> bool:
        """Whether everything that appeared since the last ``find`` was reported."""
        return not self._missed

    def find(self) -> Mapping[PodUid, Path]:
        """The directories of all pods. What appears in them, and other pods, is reported."""
        levels = self._cgroups.levels()
        self._missed = not levels
        for level in levels:  # before they are looked for: between look and watch, none is missed
            self._watch(level)
        pods = self._cgroups.all_pods()
        for pod, directory in pods.items():
            self.watch(directory, pod)
        self._unwatch_others(levels)
        return pods

    def watch(self, directory: Path, pod: PodUid) -> None:
        """Report what appears in *directory* of *pod* from now on."""
        with self._lock:
            self._pods[directory] = pod
        self._watch(directory)

    def forget(self) -> None:
        """Report nothing any more."""
        self._missed = False
        with self._lock:
            self._pods = {}
        for directory in self._new.watched():
            self._new.unwatch(directory)

    def stop(self) -> None:
        self._new.stop()

    def _unwatch_others(self, levels: tuple[Path, ...]) -> None:
        with self._lock:
            self._pods = {path: pod for path, pod in self._pods.items() if os.path.isdir(path)}
            parents = {*self._pods, *levels}
        for directory in self._new.watched() - parents:
            self._new.unwatch(directory)

    def _watch(self, directory: Path) -> None:
        if not self._new.watch(directory):
            self._missed = True

    def _appeared(self, directory: Path, name: str) -> None:
        with self._lock:
            pod = self._pods.get(directory)
        if pod is not None:
            if (container := container_id_of(name)) or name == INNER_CGROUP:
                self._callback(pod, container)
        elif (new_pod := pod_uid_of(name, directory.name)) is not None:
            self.watch(directory / name, new_pod)
            self._callback(new_pod, None)
        else:
            self._missed = True  # it may be the one of a QoS class, in which pods will appear
