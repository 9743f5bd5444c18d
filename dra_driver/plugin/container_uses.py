"""Which claims the containers of processes were given, remembered while they have processes."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.kubeletplugin.pods import Container
from dra_driver.model.processes import Process
from dra_driver.node.containers import Absent
from dra_driver.plan.memory_shares import Holder, Uses, uses

log = logging.getLogger(__name__)


class Containers(Protocol):
    """Knows what containers were given; ``dra_driver.node.containers``."""

    def find(self, id_: str) -> Container | Absent: ...


@dataclass(frozen=True, slots=True)
class Users:
    """What containers use, by their ids, and the pods that are known by their containers."""

    uses: Mapping[str, Uses] = field(default_factory=dict)
    pods: Mapping[PodUid, Holder] = field(default_factory=dict)


class ContainerUses:
    """Reads each container once; what cannot be read now, at the next look again."""

    def __init__(self, containers: Containers) -> None:
        self._containers = containers
        self._known: dict[str, Container] = {}
        self._error = ""

    def of(self, processes: Iterable[Process], holders: Mapping[PodUid, Holder]) -> Users:
        """Of each container with *processes*; *holders*: the pods that are recorded with claims."""
        ids = {process.container: process.pod for process in processes}
        read = ((id_, self._known.get(id_) or self._find(id_)) for id_ in sorted(ids))
        found = {id_: one for id_, one in read}
        self._known = {id_: one for id_, one in found.items() if one is not None}
        return Users(
            {id_: uses(one, holders.get(ids[id_])) for id_, one in found.items()},
            {
                ids[id_]: Holder(one.namespace, one.pod.name, ())
                for id_, one in self._known.items()
                if one.claims and ids[id_] not in holders
            },
        )

    def _find(self, id_: str) -> Container | None:
        try:
            found = self._containers.find(id_)
        except NodeError as error:
            if str(error) != self._error:
                log.warning("which container uses which claim is not known: %s", error)
            self._error = str(error)
            return None
        return found if isinstance(found, Container) else None
