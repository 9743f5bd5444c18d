"""What the controller writes, each write only while this process leads.

Every one has the resource version of what it was decided with, so that one which comes late, from a
process that was paused, changes nothing. A conflict is no error: it is looked again.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

from api.names import NODE_PROFILES_PATH, PROFILE_REVISION_ANNOTATION
from dra_driver.base.errors import ApiServerError, Conflict, NotFound
from dra_driver.base.frozen import frozen
from dra_driver.k8s.api import KubernetesApi
from dra_driver.model.node_profiles import (
    NodeChange,
    NodeProfileObject,
    ProfileStatus,
    Revision,
    RevisionChange,
)
from dra_driver.plan.profiles.objects import status_document
from dra_driver.plan.profiles.revisions import revision_document, revisions_path

NODES: Final = "/api/v1/nodes"


class Kind(StrEnum):
    """What is followed, and written."""

    NODE = "nodes"
    PROFILE = "nodeprofiles"
    REVISION = "controllerrevisions"


@frozen
class ObjectVersion:
    """An object as it was when something was decided."""

    kind: Kind
    name: str
    resource_version: str  # empty: it was not there


class NotLeading(ApiServerError):
    """Another replica leads, or may lead by now."""


class WriteCounter:
    """Counts writes, and those that failed; ``controller.metrics`` has the one of the process."""

    def written(self, kind: Kind) -> None:
        """The API server did as it was told."""

    def failed(self, kind: Kind) -> None:
        """It did not, or nobody knows."""


class ControllerWrites:
    """Writes for the leader. Any thread may call its methods.

    Each answers with what has to be seen changed before it makes sense to decide again. NotLeading:
    nothing was written. ApiServerError: it failed.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        leads: Callable[[], bool],
        counter: WriteCounter,
    ) -> None:
        """*namespace*: of the revisions."""
        self._api = api
        self._namespace = namespace
        self._revisions = revisions_path(namespace)
        self._leads = leads
        self._counter = counter

    def revision(self, change: RevisionChange) -> ObjectVersion:
        revision = change.revision
        version = ObjectVersion(Kind.REVISION, revision.name, revision.resource_version)
        document = revision_document(revision, self._namespace)
        if change.exists:
            # Not by a patch: the API server takes none of a ControllerRevision.
            document["metadata"]["resourceVersion"] = revision.resource_version
            self._write(version, lambda: self._api.update(self._revision_path(revision), document))
        else:
            self._write(version, lambda: self._api.create(self._revisions, document))
        return version

    def status(
        self, profile: NodeProfileObject, status: ProfileStatus, then: Callable[[], None]
    ) -> ObjectVersion:
        """*then* is called once it is written."""
        version = ObjectVersion(Kind.PROFILE, profile.name, profile.resource_version)
        patch = _changed(profile.resource_version, {"status": status_document(status)})
        path = f"{NODE_PROFILES_PATH}/{profile.name}/status"
        if self._write(version, lambda: self._api.patch(path, patch)):
            then()
        return version

    def node(self, change: NodeChange) -> ObjectVersion:
        version = ObjectVersion(Kind.NODE, change.node, change.resource_version)
        patch = _changed(change.resource_version, {})
        patch["metadata"]["annotations"] = {PROFILE_REVISION_ANNOTATION: change.revision}
        self._write(version, lambda: self._api.patch(f"{NODES}/{change.node}", patch))
        return version

    def deletion(self, revision: Revision) -> ObjectVersion:
        version = ObjectVersion(Kind.REVISION, revision.name, revision.resource_version)
        path = self._revision_path(revision)
        self._write(
            version,
            lambda: self._api.delete(path, resource_version=revision.resource_version),
        )
        return version

    def _revision_path(self, revision: Revision) -> str:
        return f"{self._revisions}/{revision.name}"

    def _write(self, version: ObjectVersion, write: Callable[[], object]) -> bool:
        """False: somebody else wrote first, which what is followed will show."""
        if not self._leads():
            raise NotLeading("nothing is written: this replica does not lead any more")
        try:
            write()
        except (Conflict, NotFound) as error:
            if version.resource_version:
                return False
            self._counter.failed(version.kind)
            text = f"{version.kind} {version.name} was not created: {error}"
            raise ApiServerError(text) from error
        except ApiServerError:
            self._counter.failed(version.kind)
            raise
        self._counter.written(version.kind)
        return True


def _changed(resource_version: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A merge patch that holds for an object of this version only."""
    return {"metadata": {"resourceVersion": resource_version}, **fields}
