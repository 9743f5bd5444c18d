"""What the containers of this node's pods were given, remembered while they have a cgroup.

A container that was once read is not read again: what it was given never changes. One that cannot
be read now is not taken for one that was given nothing.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final

from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import ClaimUid, Pod, PodUid
from dra_driver.kubeletplugin.pods import Container
from dra_driver.node.containers import Absent

log = logging.getLogger(__name__)

Find = Callable[[str], Container | Absent]
"""What there is of a container, by its id; NodeError: not now. ``Containers.find``."""

_NOTHING: Final[frozenset[ClaimUid]] = frozenset()


class PodContainers:
    """For several threads."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._read: dict[str, Container | None] = {}  # None: one that is given nothing
        self._known: tuple[Container, ...] = ()
        self._hidden: frozenset[PodUid] = frozenset()
        self._error = ""

    @property
    def known(self) -> tuple[Container, ...]:
        """Those that were given claims: the same object until that changes."""
        return self._known

    @property
    def hidden(self) -> frozenset[PodUid]:
        """The pods with containers of which nothing could be told, at the last ``learn``."""
        return self._hidden

    def given(self, container: str) -> frozenset[ClaimUid]:
        """The claims that *container* was given, as far as known."""
        found = self._read.get(container)
        return found.claims if found else _NOTHING

    def learn(self, look: Callable[[], Mapping[PodUid, Collection[str]]]) -> bool:
        """Read the containers that are new; *look* says which have cgroups. Those that were there
        before and went are forgotten: who appears meanwhile is not.

        False: not all could be read, which may work the next time. What *look* raises is raised,
        and what was known stays.
        """
        with self._lock:
            before = frozenset(self._read)
        there = look()
        ids = {id_ for containers in there.values() for id_ in containers}
        with self._lock:
            gone = before - ids
            self._read = {id_: one for id_, one in self._read.items() if id_ not in gone}
            self._hidden = frozenset()
        read = [self.learn_new(pod, containers) for pod, containers in sorted(there.items())]
        self._changed()
        return all(read)

    def learn_new(self, pod: PodUid, containers: Collection[str]) -> bool:
        """Read those of *containers* of *pod* that are new. False: not all could be read."""
        well = True
        for id_ in sorted(containers):
            try:
                told = id_ in self._read or self._learn(pod, id_)
            except NodeError as error:
                self._say(str(error))
                told = well = False
            if not told:
                with self._lock:
                    self._hidden |= {pod}
        self._changed()
        return well

    def _learn(self, pod: PodUid, id_: str) -> bool:
        """False: nothing is known of it."""
        found = self._find(id_)
        if found is Absent.GONE or found is Absent.NOWHERE:
            return found is Absent.GONE
        # Of which pod it is, its cgroup says for sure.
        its = replace(found, pod=Pod(found.pod.name, pod)) if isinstance(found, Container) else None
        with self._lock:
            self._read[id_] = its
        return True

    def _changed(self) -> None:
        with self._lock:
            given = [one for one in self._read.values() if one is not None and one.claims]
            known = tuple(sorted(given, key=lambda one: one.id))
            if known != self._known:
                self._known = known

    def _say(self, error: str) -> None:
        if error != self._error:
            log.warning("who uses GPU memory is not known: %s", error)
        self._error = error
