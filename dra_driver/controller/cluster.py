"""What the controller follows: Nodes, NodeProfiles and their revisions, as values."""

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from api.names import NODE_PROFILES_PATH, REVISION_PROFILE_LABEL
from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import DriverError
from dra_driver.base.frozen import frozen
from dra_driver.controller.writes import NODES, Kind, ObjectVersion
from dra_driver.k8s.api import KubernetesApi
from dra_driver.k8s.collection import Collection
from dra_driver.k8s.watch import WatchIntervals
from dra_driver.model.node_profiles import NodeProfileObject, NodeView, Revision
from dra_driver.plan.profiles.objects import read_node_profile
from dra_driver.plan.profiles.report import read_node
from dra_driver.plan.profiles.revisions import read_revision, revisions_path

log = logging.getLogger(__name__)

_VERSION_SECONDS: Final = 3600.0  # between two looks at the version of the API server
_VERSION_AGAIN_SECONDS: Final = 60.0
_VERSION = re.compile(r"v?([0-9]+)\.([0-9]+)\.")

Followed = NodeView | NodeProfileObject | Revision


@frozen
class ClusterView:
    """What is there now, each by its name."""

    nodes: Mapping[str, NodeView]
    profiles: Mapping[str, NodeProfileObject]
    revisions: Mapping[str, Revision]

    def has_changed(self, version: ObjectVersion) -> bool:
        """Whether the object is seen to be another one than that *version*."""
        objects: Mapping[str, Followed]
        match version.kind:
            case Kind.NODE:
                objects = self.nodes
            case Kind.PROFILE:
                objects = self.profiles
            case Kind.REVISION:
                objects = self.revisions
        seen = objects.get(version.name)
        return (seen.resource_version if seen else "") != version.resource_version


class FollowedCluster:
    """Follows what the controller decides from. Any thread may call its methods."""

    def __init__(
        self, api: KubernetesApi, namespace: str, intervals: WatchIntervals | None = None
    ) -> None:
        """*namespace*: of the revisions."""
        intervals = intervals or WatchIntervals()
        self._profiles = Collection(api, NODE_PROFILES_PATH, read_node_profile, intervals=intervals)
        self._nodes = Collection(api, NODES, read_node, intervals=intervals)
        self._revisions = Collection(
            api,
            revisions_path(namespace),
            read_revision,
            {"labelSelector": REVISION_PROFILE_LABEL},
            intervals,
        )
        self._collections: Mapping[Kind, Collection[Any]] = {
            Kind.NODE: self._nodes,
            Kind.PROFILE: self._profiles,
            Kind.REVISION: self._revisions,
        }

    def start(self, on_change: Callable[[Kind, str, bool], None]) -> None:
        """Begin. *on_change*: the kind and name of what changed, and whether anything but its
        resource version did; in one of our threads."""

        def changed(kind: Kind, name: str, before: Followed | None, after: Followed | None) -> None:
            on_change(kind, name, _differ(before, after))

        for kind, collection in self._collections.items():
            collection.start(partial(changed, kind))

    def stop(self) -> None:
        for collection in self._collections.values():
            collection.stop(0.5)

    def problem(self) -> str | None:
        """What was not seen yet; None: everything was, once."""
        missing = [
            kind.value
            for kind, collection in self._collections.items()
            if not collection.wait_until_listed(0)
        ]
        return f"not listed yet: {', '.join(missing)}" if missing else None

    def wait_until_listed(self, seconds: float) -> bool:
        deadline = Deadline(seconds)
        return all(
            each.wait_until_listed(deadline.remaining) for each in self._collections.values()
        )

    def now(self) -> ClusterView:
        return ClusterView(self._nodes.now(), self._profiles.now(), self._revisions.now())

    def skipped(self) -> Mapping[str, Callable[[], int]]:
        """How many objects cannot be read now, by resource."""
        return {
            kind.value: partial(getattr, collection, "skipped")
            for kind, collection in self._collections.items()
        }


class ServerVersion:
    """The minor version of the API server, looked at once an hour. For one thread."""

    def __init__(self, api: KubernetesApi, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._minor: int | None = None
        self._again_at = clock()

    def minor(self) -> int | None:
        """36 of 1.36; None: it is not known."""
        if self._clock() >= self._again_at:
            self._again_at = self._clock() + _VERSION_SECONDS
            try:
                match = _VERSION.match(str(self._api.get("/version").get("gitVersion")))
            except DriverError as error:
                log.warning("the version of the API server is not known: %s", error)
                self._again_at = self._clock() + _VERSION_AGAIN_SECONDS
            else:
                self._minor = int(match[2]) if match and match[1] == "1" else None
        return self._minor


def _differ(before: Followed | None, after: Followed | None) -> bool:
    if before is None or after is None:
        return True
    return replace(before, resource_version=after.resource_version) != after
