"""NodeProfiles as documents of the API server: what is read of them, and the status written."""

from typing import Any, Literal

import pydantic
from pydantic import Field

from api.node_profile import NodeProfileObjectSpec, RolloutConfig
from api.strict import ConfigError, problem_message, validated
from dra_driver.model.node_profiles import (
    NodeFailure,
    NodeProfileObject,
    ProfileCondition,
    ProfileStatus,
    RolloutRules,
)
from dra_driver.plan.profiles.revisions import (
    ApiDocument,
    ObjectMetadata,
    canonical_rules,
    revision_name,
)


class _Failure(ApiDocument):
    node: str
    reason: str = ""


class _Condition(ApiDocument):
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""
    observed_generation: int = 0


class _Status(ApiDocument):
    observed_generation: int = 0
    current_revision: str = ""
    update_revision: str = ""
    nodes: int = 0
    updated: int = 0
    pending: int = 0
    failed: int = 0
    updating: list[str] = Field(default_factory=list)
    failures: list[_Failure] = Field(default_factory=list)
    conditions: list[_Condition] = Field(default_factory=list)


class _NodeProfileDocument(ApiDocument):
    metadata: ObjectMetadata
    spec: Any = None
    status: Any = None


def read_node_profile(document: Any) -> NodeProfileObject:
    """The NodeProfile in *document*. One whose spec cannot be read, since a newer release wrote it,
    says so as its ``problem``. ConfigError: it is no object at all."""
    try:
        parsed = _NodeProfileDocument.model_validate(document)
    except pydantic.ValidationError as e:
        problems = [problem_message(error, _NodeProfileDocument) for error in e.errors()]
        raise ConfigError(problems) from e
    metadata = parsed.metadata
    fields: dict[str, Any] = {
        "name": metadata.name,
        "uid": metadata.uid,
        "resource_version": metadata.resource_version,
        "generation": metadata.generation,
        "created": metadata.creation_timestamp,
        "deleting": metadata.deletion_timestamp is not None,
        "status": _read_status(parsed.status),
    }
    try:
        spec = validated(NodeProfileObjectSpec, parsed.spec)
    except ConfigError as e:
        problem = "; ".join(f"spec.{problem}".replace("spec.:", "spec:") for problem in e.problems)
        return NodeProfileObject(**fields, problem=problem)
    rules = canonical_rules(parsed.spec)
    return NodeProfileObject(
        **fields,
        rules=rules,
        revision=revision_name(metadata.name, rules),
        node_selector=spec.node_selector,
        priority=spec.priority,
        rollout=_rollout(spec.rollout),
        revision_history_limit=spec.revision_history_limit,
    )


def status_document(status: ProfileStatus) -> dict[str, Any]:
    """What *status* is in a NodeProfile. Every field is there, so that a merge patch clears."""
    conditions = [
        {
            "type": condition.type,
            "status": str(condition.status),
            "reason": condition.reason,
            "message": condition.message,
            "lastTransitionTime": condition.last_transition,
            "observedGeneration": condition.observed_generation,
        }
        for condition in status.conditions
    ]
    return {
        "observedGeneration": status.observed_generation,
        "currentRevision": status.current_revision,
        "updateRevision": status.update_revision,
        "nodes": status.nodes,
        "updated": status.updated,
        "pending": status.pending,
        "failed": status.failed,
        "updating": list(status.updating),
        "failures": [{"node": each.node, "reason": each.reason} for each in status.failures],
        "conditions": conditions,
    }


def _read_status(document: Any) -> ProfileStatus:
    """One that cannot be read is as none: it is written anew."""
    try:
        status = _Status.model_validate(document or {})
    except pydantic.ValidationError:
        return ProfileStatus()
    return ProfileStatus(
        observed_generation=status.observed_generation,
        current_revision=status.current_revision,
        update_revision=status.update_revision,
        nodes=status.nodes,
        updated=status.updated,
        pending=status.pending,
        failed=status.failed,
        updating=tuple(status.updating),
        failures=tuple(NodeFailure(each.node, each.reason) for each in status.failures),
        conditions=tuple(
            ProfileCondition(
                type=condition.type,
                status=condition.status == "True",
                reason=condition.reason,
                message=condition.message,
                last_transition=condition.last_transition_time,
                observed_generation=condition.observed_generation,
            )
            for condition in status.conditions
        ),
    )


def _rollout(config: RolloutConfig) -> RolloutRules:
    limit = str(config.max_unavailable)
    return RolloutRules(
        max_unavailable=int(limit.removesuffix("%")),
        in_percent=limit.endswith("%"),
        max_failures=config.max_failures,
        progress_deadline_seconds=float(config.progress_deadline_seconds),
        paused=config.paused,
    )
