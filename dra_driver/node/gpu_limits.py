"""The limits that one GPU's driver keeps for cgroups because we set them."""

import logging
import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.shares import PodShare
from dra_driver.node.limit_backend import apply_limit, same_limit
from dra_driver.node.nvml import Nvml
from dra_driver.node.nvml_memory import memory_limit, set_memory_limit

log = logging.getLogger(__name__)

# The driver forgets limits when it is loaded anew or the GPU is reset, and says nothing of that.
_LOOK_AGAIN_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Done:
    memory_bytes: int
    inode: int  # a cgroup of the same name may be another one
    until: float  # when it is looked at again
    problem: str = ""


class GpuLimits:
    """What is wanted of one GPU, and what was done about it. Not for several threads at once."""

    def __init__(self, nvml: Nvml, gpu: GpuUuid, clock: Callable[[], float]) -> None:
        self.shares: dict[PodUid, PodShare] = {}
        self._nvml = nvml
        self._gpu = gpu
        self._clock = clock
        self._done: dict[Path, _Done] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is wanted and nothing has to be taken away."""
        return not self.shares and not self._done

    @property
    def due(self) -> float:
        """When something is to be looked at again, on the clock."""
        return min((done.until for done in self._done.values()), default=math.inf)

    def forget(self) -> None:
        """There is no driver any more that would know of it."""
        self._done.clear()

    def limit(self, cgroup: Path, memory_bytes: int) -> str:
        """See to it that *cgroup* has this limit. Answers with what is wrong, if something is.

        A cgroup that goes meanwhile needs no limit.
        """
        try:
            inode = os.stat(cgroup).st_ino
        except OSError:
            self._done.pop(cgroup, None)
            return ""
        before = self._done.get(cgroup)
        known = before is not None and (before.memory_bytes, before.inode) == (memory_bytes, inode)
        if before is not None and known and self._clock() < before.until:
            return before.problem
        problem = self._attempt(cgroup, memory_bytes, known and not (before and before.problem))
        if problem and not cgroup.is_dir():
            self._done.pop(cgroup, None)
            return ""
        self._say(cgroup, problem, before)
        until = self._clock() + _LOOK_AGAIN_SECONDS
        self._done[cgroup] = _Done(memory_bytes, inode, until, problem)
        return problem

    def clear_others(self, wanted: Collection[Path]) -> None:
        """Take away every limit of ours but those of *wanted*."""
        for cgroup in sorted(self._done.keys() - set(wanted), reverse=True):  # what is inside first
            self.clear(cgroup)

    def clear(self, cgroup: Path) -> None:
        """Take away the limits of *cgroup* and of what is in it, if they are there."""
        inside = [path for path in self._done if path.is_relative_to(cgroup) and path != cgroup]
        for path in (*sorted(inside, reverse=True), cgroup):  # what is inside first
            before = self._done.get(path)
            if not path.is_dir():
                self._done.pop(path, None)
            elif before is None or not before.problem or self._clock() >= before.until:
                self._take_away(path, before)

    def set_here(self, cgroup: Path) -> bool:
        """Whether a limit of ours was set on *cgroup*."""
        return cgroup in self._done

    def _attempt(self, cgroup: Path, memory_bytes: int, there: bool) -> str:
        try:
            if there:
                found = memory_limit(self._nvml, self._gpu, cgroup).hard_bytes
                if same_limit(found, memory_bytes):
                    return ""
                log.warning("a GPU memory limit was lost: it is set again", extra=self._at(cgroup))
            apply_limit(self._nvml, self._gpu, cgroup, memory_bytes)
        except NodeError as error:
            return str(error)
        return ""

    def _take_away(self, cgroup: Path, before: _Done | None) -> None:
        try:
            if cgroup.parent in self._done:  # which keeps its limit, and that may be the answer
                set_memory_limit(self._nvml, self._gpu, cgroup, None)
            else:
                apply_limit(self._nvml, self._gpu, cgroup, None)
        except NodeError as error:
            if not cgroup.is_dir():
                self._done.pop(cgroup, None)
                return
            self._say(cgroup, str(error), before)
            if before is not None:
                until = self._clock() + _LOOK_AGAIN_SECONDS
                self._done[cgroup] = replace(before, until=until, problem=str(error))
            return
        self._done.pop(cgroup, None)

    def _say(self, cgroup: Path, problem: str, before: _Done | None) -> None:
        if problem and (before is None or problem != before.problem):
            log.warning("a GPU memory limit is not as wanted: %s", problem, extra=self._at(cgroup))

    def _at(self, cgroup: Path) -> dict[str, str]:
        return {"gpu": self._gpu, "cgroup": str(cgroup)}
