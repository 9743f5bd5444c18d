"""``dra-driver profile``: how far the rollout of a NodeProfile is; to pause, resume and undo it.

Everything is read from the API server and written there, with the rights of who asks. The
controller need not run: what is written, it finds when it does.

``status -o json`` prints one object::

    {"name", "generation", "observedGeneration",   different: the controller has not seen the change
     "paused",
     "nodes", "updated", "failed",                 how many nodes
     "pending",                                    how many GPUs change when no claim holds them
     "conditions": [{"type", "status", "reason", "message"}],    status: true or false
     "nodeStates": [{"node", "why",                those of which something is to be said; null: not
                     "state",                      known. failed, not ready, updating,
                                                   pending or partly
                     "revision"}],                 what the node has; empty: none of a NodeProfile
     "revisions": [{"number", "name", "created",   the newest first
                    "current",                     the last one that every node had
                    "update"}]}                    what the spec says
"""

import json
import time
from collections.abc import Iterator

from api.names import NODE_PROFILES_PATH, REVISION_PROFILE_LABEL
from api.strict import ConfigError
from dra_driver.base.errors import Conflict, DriverError, Forbidden, NotFound
from dra_driver.cli.findings import abbreviated
from dra_driver.cli.profile.text import Rollout, rollout_json, rollout_text
from dra_driver.k8s.api import Document, KubernetesApi
from dra_driver.model.node_profiles import NodeProfileObject, NodeView, Revision
from dra_driver.plan.profiles.objects import read_node_profile
from dra_driver.plan.profiles.report import read_node
from dra_driver.plan.profiles.revisions import (
    RULES,
    earlier_revision,
    read_revision,
    revisions_path,
)

_NODES = "/api/v1/nodes"
_TRIES = 10  # of a write; the controller writes the status of a profile once a second at most


class ProfileError(DriverError):
    """What was asked cannot be done with this NodeProfile."""


class ProfileCommand:
    """One NodeProfile, and what is asked of it. ApiServerError: the API server refuses, or does not
    answer. ProfileError: there is no such NodeProfile, or it cannot be read."""

    def __init__(self, api: KubernetesApi, name: str, revision_namespace: str = "") -> None:
        """*revision_namespace*: where its revisions are; empty: they are looked for in all."""
        self._api = api
        self._name = name
        self._revisions_path = revisions_path(revision_namespace)

    def status(self, output: str) -> str:
        """How far the rollout is; *output*: ``table`` or ``json``."""
        profile = self._read()
        revisions = self._revisions(profile)
        try:
            rollout = Rollout(profile, revisions, list(self._nodes()))
        except Forbidden as e:
            rollout = Rollout(profile, revisions, (), str(e))
        if output == "json":
            return rollout_json(rollout)
        return rollout_text(rollout, self._api.now() or time.time())

    def set_paused(self, paused: bool) -> str:
        """No further node is given a change while it is *paused*."""
        if self._read().rollout.paused == paused:
            return f'NodeProfile "{self._name}" is {"paused already" if paused else "not paused"}'
        self._api.patch(self._path, {"spec": {"rollout": {"paused": paused}}})
        return f'NodeProfile "{self._name}" {"paused" if paused else "resumed"}'

    def undo(self, number: int | None) -> str:
        """Have the spec say what the revision of that *number* keeps; None: the newest but that of
        the spec. The change is rolled out as any other."""
        profile = self._read()
        generation = profile.generation
        for _ in range(_TRIES):
            if profile.generation != generation:
                break
            target = self._target(profile, number)
            if target.name == profile.revision:
                return f'NodeProfile "{self._name}": its spec is revision {target.number} already'
            try:
                self._write_rules(profile, target)
            except Conflict:  # with a status of the controller, mostly
                profile = self._read()
                continue
            waits = "; it is paused, and rolled out when it is resumed"
            return (
                f'NodeProfile "{self._name}" is back at revision {target.number} ({target.name})'
                f"{waits if profile.rollout.paused else ''}"
            )
        raise ProfileError(
            f'NodeProfile "{self._name}" was changed by somebody else meanwhile; nothing was '
            f"undone: see dra-driver profile status {self._name}, and ask again"
        )

    @property
    def _path(self) -> str:
        return f"{NODE_PROFILES_PATH}/{self._name}"

    def _read(self) -> NodeProfileObject:
        try:
            return read_node_profile(self._api.get(self._path))
        except NotFound as e:
            raise ProfileError(self._why_not_found()) from e
        except ConfigError as e:
            raise ProfileError(f'NodeProfile "{self._name}" cannot be read: {e}') from e

    def _why_not_found(self) -> str:
        """That there is no such NodeProfile, and which there are."""
        try:
            documents = self._api.list(NODE_PROFILES_PATH, {})["items"]
        except NotFound:
            return (
                "the API server knows no NodeProfiles: install the chart with "
                "controller.enabled=true, which brings their CustomResourceDefinition"
            )
        names = abbreviated(sorted(each["metadata"]["name"] for each in documents))
        others = f"there are: {names}" if names else "there is none"
        return f'there is no NodeProfile "{self._name}"; {others}'

    def _revisions(self, profile: NodeProfileObject) -> list[Revision]:
        """Those of *profile* that can be read, not those of an earlier one of its name."""
        query = {"labelSelector": f"{REVISION_PROFILE_LABEL}={self._name}"}
        documents = self._api.list(self._revisions_path, query)["items"]
        return [each for each in _readable(documents) if each.owner_uid == profile.uid]

    def _nodes(self) -> Iterator[NodeView]:
        for page in self._api.pages(_NODES):
            for document in page.get("items") or ():
                if node := read_node(document):
                    yield node

    def _target(self, profile: NodeProfileObject, number: int | None) -> Revision:
        revisions = self._revisions(profile)
        target = earlier_revision(revisions, profile.revision, number)
        if target:
            return target
        if number is None:
            raise ProfileError(f'NodeProfile "{self._name}" has no other revision to go back to')
        numbers = ", ".join(str(each) for each in sorted(each.number for each in revisions))
        raise ProfileError(
            f'NodeProfile "{self._name}" has no revision {number}; it has: {numbers or "none"}'
        )

    def _write_rules(self, profile: NodeProfileObject, target: Revision) -> None:
        change = {
            "metadata": {"resourceVersion": profile.resource_version},
            "spec": dict.fromkeys(RULES) | json.loads(target.rules),
        }
        self._api.patch(self._path, change)


def _readable(documents: list[Document]) -> Iterator[Revision]:
    for document in documents:
        try:
            yield read_revision(document)
        except ConfigError:  # it was changed by hand: the controller says so
            continue
