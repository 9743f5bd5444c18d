"""Tells that a pod came to this node: the kubelet makes its cgroup before anything else of it."""

import threading
from collections.abc import Callable
from pathlib import Path

from dra_driver.node.cgroups import Cgroups, pod_in
from dra_driver.node.new_directories import NewDirectories

Told = Callable[[], None]


class NewPods:
    """Watches where the cgroups of pods appear, while somebody wants to be told."""

    def __init__(self, cgroups: Cgroups) -> None:
        self._cgroups = cgroups
        self._new = NewDirectories(self._appeared)
        self._lock = threading.Lock()  # of one change at a time
        self._told: Told | None = None

    def tell(self, told: Told | None) -> bool:
        """Call *told* for every pod that comes from now on; None: no longer.

        Doing it again changes nothing, but for places that are new. False: nobody is told of pods,
        or not of all.
        """
        with self._lock:
            self._told = told
            places = self._cgroups.levels() if told else ()
            watched = [self._new.watch(place) for place in places]
            for gone in self._new.watched() - frozenset(places):
                self._new.unwatch(gone)
            return bool(watched) and all(watched)

    def stop(self) -> None:
        self._new.stop()

    def _appeared(self, directory: Path, name: str) -> None:
        told = self._told
        if told is not None and pod_in(name, directory.name):
            told()
