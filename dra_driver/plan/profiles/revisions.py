"""The revisions of a NodeProfile, kept as ControllerRevisions: names, documents, numbers.

A revision keeps the *rules* of the profile: ``api`` and ``gpus`` of its ``spec``. It is named
``<profile>-<hash>`` for them, so that a node that takes a profile by itself finds the name that the
controller finds.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from api.names import CONFIG_VERSION, REVISION_PROFILE_LABEL
from api.strict import ConfigError, problem_message, show_value
from dra_driver.model.node_profiles import NodeProfileObject, Revision, RevisionChange
from dra_driver.model.profiles import Profile
from dra_driver.plan.profiles.rules import decode_profile

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"  # Kubernetes': spells no words, no 0, 1 and 3 for o, l, e
_HASH_LENGTH = 10
RULES = ("api", "gpus")
"""Of a spec: what nodes are given. The rest says which nodes, and how."""


class ApiDocument(BaseModel):
    """A part of a document of the API server: fields of later versions do no harm."""

    model_config = ConfigDict(
        strict=True, extra="ignore", alias_generator=to_camel, defer_build=True
    )


class OwnerReference(ApiDocument):
    """Who an object goes with."""

    uid: str
    controller: bool = False


class ObjectMetadata(ApiDocument):
    """What is read of the metadata of an object."""

    name: str = Field(min_length=1)
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[OwnerReference] | None = None


class _RevisionSpec(ApiDocument):
    model_config = ConfigDict(extra="allow")

    gpus: list[Any] | None = None


class _RevisionData(ApiDocument):
    spec: _RevisionSpec


class _ControllerRevision(ApiDocument):
    metadata: ObjectMetadata
    data: _RevisionData
    revision: int


def canonical_rules(spec: Mapping[str, Any]) -> str:
    """What nodes are given of *spec*: a text that is the same whatever the order of its keys."""
    rules = {key: spec[key] for key in RULES if spec.get(key) is not None}
    return _canonical(rules)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def revisions_path(namespace: str) -> str:
    """Where the API server has the ControllerRevisions of *namespace*; empty: of all namespaces."""
    place = f"/namespaces/{namespace}" if namespace else ""
    return f"/apis/apps/v1{place}/controllerrevisions"


def revision_name(profile: str, rules: str) -> str:
    """The name of the revision of *profile* that keeps *rules*, a canonical JSON.

    >>> revision_name("inference", canonical_rules({"gpus": [{"replicas": 4}]}))
    'inference-p8czbchrsj'
    """
    number = int.from_bytes(hashlib.sha256(rules.encode()).digest())
    digits: list[str] = []
    for _ in range(_HASH_LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return f"{profile}-{''.join(digits)}"


def profile_of_revision(name: str) -> str:
    """The profile that a revision of this name belongs to."""
    return name.rpartition("-")[0]


def decode_rules(rules: str, profile: str) -> Profile:
    """What *rules*, the canonical JSON of a revision, mean. ConfigError: every problem."""
    document = {"apiVersion": CONFIG_VERSION, "kind": "NodeProfile"}
    return decode_profile({**document, "spec": json.loads(rules)}, profile)


def revision_document(revision: Revision, namespace: str) -> dict[str, Any]:
    """The ControllerRevision that keeps *revision*, to be created; it goes with its profile."""
    owner = {
        "apiVersion": CONFIG_VERSION,
        "kind": "NodeProfile",
        "name": revision.profile,
        "uid": revision.owner_uid,
        "controller": True,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": revision.name,
            "namespace": namespace,
            "labels": {REVISION_PROFILE_LABEL: revision.profile},
            "ownerReferences": [owner],
        },
        "data": {"spec": json.loads(revision.rules)},
        "revision": revision.number,
    }


def read_revision(document: Any) -> Revision:
    """The revision that a ControllerRevision keeps. ConfigError: it keeps none, or another one than
    its name says."""
    try:
        parsed = _ControllerRevision.model_validate(document)
    except pydantic.ValidationError as e:
        raise ConfigError(
            [problem_message(error, _ControllerRevision) for error in e.errors()]
        ) from e
    metadata = parsed.metadata
    profile = (metadata.labels or {}).get(REVISION_PROFILE_LABEL, "")
    # What a later release keeps beside it is part of the name.
    rules = _canonical(parsed.data.spec.model_dump(exclude_unset=True))
    if metadata.name != revision_name(profile, rules):
        raise ConfigError(
            [
                f"data.spec: is not what revision {show_value(metadata.name)} of NodeProfile "
                f"{show_value(profile)} keeps; delete the ControllerRevision"
            ]
        )
    owners = [owner.uid for owner in metadata.owner_references or () if owner.controller]
    return Revision(
        name=metadata.name,
        profile=profile,
        number=parsed.revision,
        rules=rules,
        owner_uid=owners[0] if owners else "",
        resource_version=metadata.resource_version,
        created=metadata.creation_timestamp,
    )


def revision_change(
    profile: NodeProfileObject, revisions: Collection[Revision]
) -> RevisionChange | None:
    """What makes the revision of the spec the newest of the profile's *revisions*, if it is not.

    As a DaemonSet does: a revision that becomes current again gets the next number, and one that
    nobody owns becomes the profile's.
    """
    others = [revision.number for revision in revisions if revision.name != profile.revision]
    highest = max(others, default=0)
    for revision in revisions:
        if revision.name == profile.revision:
            number = revision.number if revision.number > highest else highest + 1
            kept = replace(revision, number=number, owner_uid=profile.uid)
            return None if kept == revision else RevisionChange(kept, exists=True)
    revision = Revision(profile.revision, profile.name, highest + 1, profile.rules, profile.uid)
    return RevisionChange(revision, exists=False)


def old_revisions(
    revisions: Collection[Revision], in_use: Collection[str], limit: int
) -> tuple[Revision, ...]:
    """Those that may be deleted, oldest first: all that are not *in_use*, but for the newest
    *limit* of them."""
    unused = [revision for revision in revisions if revision.name not in in_use]
    unused.sort(key=lambda revision: (revision.number, revision.name))
    return tuple(unused[: max(len(unused) - limit, 0)])


def earlier_revision(
    revisions: Sequence[Revision], update_revision: str, number: int | None = None
) -> Revision | None:
    """The revision to go back to: the one of this *number*, or the newest but *update_revision*.

    None: there is no such revision.
    """
    if number is not None:
        return next((revision for revision in revisions if revision.number == number), None)
    earlier = [revision for revision in revisions if revision.name != update_revision]
    return max(earlier, key=lambda revision: revision.number, default=None)
