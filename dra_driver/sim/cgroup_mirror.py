"""The pods of a real kubelet in the cgroup tree of a simulated node, as they come and go.

A simulated driver cannot limit the cgroups of this machine; on copies of them it shows what a real
one would do.
"""

import errno
import logging
import os
from pathlib import Path
from typing import Final

from dra_driver.node.cgroups.tree import Cgroups
from dra_driver.node.cgroups.watch import DirectoryWatcher
from dra_driver.sim.memory_limits import CgroupTree

log = logging.getLogger(__name__)

_DEEPEST: Final = 4  # below kubepods: QoS class, pod, container, and what some runtimes put there


class CgroupMirror:
    """Copies the directories of *real* that are pods', and what is in them, to *tree*.

    What a kubelet does that is started later is not seen.
    """

    def __init__(self, real: Cgroups, tree: CgroupTree) -> None:
        self._tree = tree
        self._copies: dict[Path, Path] = {}  # by what they are copies of
        self._watcher = DirectoryWatcher(self._appeared, self._remove_gone)
        levels = real.levels()
        # One for each kubelet: there may be another cluster on this machine.
        self._bases = [level for level in levels if level.parent not in levels]
        # On cgroup v1 there is a tree for each controller, and one is enough.
        self._root = real.root
        if self._bases and not real.unified:
            self._root /= self._bases[0].relative_to(real.root).parts[0]
        for base in self._bases:
            self._copy(base)
            self._remove_old(base)

    def stop(self) -> None:
        """Copy nothing any more."""
        self._watcher.stop()

    def _appeared(self, directory: Path, name: str) -> None:
        self._copy(directory / name)
        self._remove_gone()

    def _remove_gone(self) -> None:
        for original, copy in sorted(self._copies.items(), reverse=True):  # what is inside first
            if not original.is_dir():
                del self._copies[original]
                self._remove(copy)

    def _remove_old(self, base: Path) -> None:
        """What an earlier process copied of *base*, and has gone since."""
        copies = {*self._copies.values()}
        # os.walk passes over what goes meanwhile: another process mirrors the same, maybe.
        levels = os.walk(self._copies[base])
        inside = [Path(directory, name) for directory, names, _ in levels for name in names]
        for copy in sorted(inside, reverse=True):
            if copy not in copies:
                self._remove(copy)

    def _remove(self, copy: Path) -> None:
        try:
            self._tree.remove(copy)
        except OSError as error:  # another process mirrors the same, maybe
            if error.errno not in (errno.ENOENT, errno.EBUSY):
                raise

    def _copy(self, original: Path) -> None:
        base = next(base for base in self._bases if original.is_relative_to(base))
        if len(original.relative_to(base).parts) <= _DEEPEST:
            self._watcher.watch(original)  # first: nothing that appears in it is missed
            self._copies[original] = self._tree.make(original.relative_to(self._root))
            for inside in _directories_in(original):
                self._copy(inside)


def _directories_in(cgroup: Path) -> list[Path]:
    """None where its pod has ended since it was seen: its copy goes with the next look."""
    try:
        return sorted(path for path in cgroup.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
