"""The NodeProfile that administrators write: how the GPUs of a node are offered.

The API is ``resource.nvidia.com/v1beta1``::

    apiVersion: resource.nvidia.com/v1beta1
    kind: NodeProfile
    metadata: {name: inference}
    spec:
      gpus:
        - select: {product: ["*L40S*"]}
          replicas: 4
          memoryGuard: {policy: Warn}
        - select: {product: ["*H100*"]}
          mig: {mode: Dynamic, profiles: ["1g.10gb", "3g.*"]}
        - fractions: Never

The first entry that selects a GPU holds for it; one without ``select`` selects every GPU, and a
GPU that no entry selects is offered as if there were no profile. What is left out keeps its
default. Words are read in any case, ``never`` for ``Never``.

A profile in a file is chosen by name. One that is an object of the API server says in its ``spec``
which nodes it holds for, too (``NodeProfileObjectSpec``).
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from api.claim_configs import QUANTITY_PATTERN
from api.strict import StrictModel, Text, all_defaults

DURATION_PATTERN = r"([0-9]+(\.[0-9]+)?(ms|s|m|h))+"
_LABEL_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DNS_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NODES_AT_ONCE = "(100|[1-9][0-9]?)%"
MOST_ENTRIES = 64  # of a profile, and of each list and map in it
MAX_REPLICAS = 1000
"""Of one GPU. Each is a device of its own where the API server keeps no consumable capacity."""
MOST_NODES = 100_000
"""That a number of nodes can say. More than Kubernetes has in a cluster."""


def _words(annotation: Any) -> Iterator[str]:
    """The words that a field with *annotation* can have, itself or in its list."""
    for inner in get_args(annotation):
        if isinstance(inner, str):
            yield inner
        else:
            yield from _words(inner)


class _Section(StrictModel):
    """A part of a profile, whose words are read in any case."""

    @field_validator("*", mode="before")
    @classmethod
    def _spelled(cls, value: Any, field: ValidationInfo) -> Any:
        annotation = cls.model_fields[field.field_name or ""].annotation
        words = {word.casefold(): word for word in _words(annotation)}
        if value is False and words:
            value = "Off"  # YAML 1.1 takes a bare Off for false

        def spelled(value: Any) -> Any:
            return words.get(value.casefold(), value) if isinstance(value, str) else value

        if isinstance(value, dict) and words:
            return {key: spelled(each) for key, each in value.items()}
        return [spelled(each) for each in value] if isinstance(value, list) else spelled(value)


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _mode_alone(value: Any) -> Any:
    """``mig: Dynamic`` for ``mig: {mode: Dynamic}``."""
    return {"mode": value} if isinstance(value, str | bool) else value


def _optional(description: str) -> Any:
    return Field(default=None, description=description)


Name = Annotated[
    str,
    Field(max_length=63),
    Text(_LABEL_VALUE, "is no name that a node's label can have as its value"),
]
Quantity = Annotated[
    str,
    Field(max_length=64),
    BeforeValidator(_number_as_text),
    Text(QUANTITY_PATTERN, "is not a quantity; write for example 1Gi", "quantity"),
]
Duration = Annotated[
    str,
    Field(max_length=32),
    Text(r"([0-9]+(\.[0-9]+)?(ms|s|m|h))+", "is not a duration; write for example 10s", "duration"),
]
Strategy = Literal["TimeSlicing", "MPS"]
_SomeOf = Field(min_length=1, max_length=MOST_ENTRIES)
_Patterns = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], _SomeOf]
_Count = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
_Uuid = Annotated[str, Field(max_length=64), Text("GPU-.+", "is no GPU; write GPU-…")]
Effect = Literal["None", "NoSchedule", "NoExecute"]
_XidNumber = Annotated[
    str,
    Field(max_length=4),
    BeforeValidator(_number_as_text),
    Text("[1-9][0-9]*", "is no number of an Xid; write for example 79", "Xid"),
]
_MigProfile = Annotated[
    str,
    Field(max_length=40),
    Text(
        r"[0-9]+g\.[0-9]+gb([-+][a-z.]+)?",
        "is no MIG profile; write for example 1g.10gb",
        "MIG profile",
    ),
]


class GpuSelectorConfig(_Section):
    """GPUs that match every field that is given, each by one item of its list."""

    index: Annotated[list[Annotated[int, Field(ge=0, le=255)]], _SomeOf] | None = _optional(
        "The entry is for these GPUs, by the number in `/dev/nvidia<N>`."
    )
    uuid: Annotated[list[_Uuid], _SomeOf] | None = _optional(
        "The entry is for these GPUs, by UUID."
    )
    product: _Patterns | None = _optional(
        "The entry is for GPUs whose product name matches one of these shell patterns, for "
        "example `*H100*`."
    )


class MemoryConfig(_Section):
    """In which amounts memory is given out."""

    least: Quantity | None = _optional("The least memory that a claim gets. Default: `1Gi`.")
    step: Quantity | None = _optional("Every share is a multiple of this. Default: `1Mi`.")


class MemoryGuardConfig(_Section):
    """What is done about a claim whose processes use more memory than its share."""

    policy: Literal["Off", "Warn", "Kill"] | None = _optional(
        "What the memory guard does about a claim that uses more than its share: nothing; an "
        "event, a metric and a line in the log; or all of that, and after the grace period it "
        "ends the largest process of the claim. Default: `Kill`."
    )
    grace: Duration | None = _optional(
        "How long a claim may use more than its share before the guard ends a process. Default: "
        "`10s`."
    )


class MigSectionConfig(_Section):
    """What becomes of GPUs that can be partitioned. Those that exist are always offered."""

    mode: Literal["Dynamic", "Off"] | None = _optional(
        "Whether partitions are created for claims. Partitions that exist are always offered. "
        "In a file, `mig: Dynamic` is short for `mig: {mode: Dynamic}`. Default: `Off`."
    )
    profiles: _Patterns | None = _optional(
        "Shell patterns of the MIG profiles that are created for claims. Default: all without a "
        "suffix (`+me`) and without double memory."
    )
    layout: Name | None = _optional(
        "The layout that divides the GPUs once: a name of `mig-configs`. Default: none."
    )
    strategy: Literal["Mixed", "Single"] | None = _optional(
        "With `Single`, a claim for a GPU can get a partition that exists, if all of these have "
        "the same MIG profile. Default: `Mixed`."
    )
    replicas: Annotated[dict[_MigProfile, _Count], _SomeOf] | None = _optional(
        "How many claims that name no capacity share a partition of this MIG profile. Default: one."
    )


def _effect(of: str, default: str = "NoSchedule") -> Any:
    return _optional(f"The effect of this problem: {of}. Default: `{default}`.")


class HealthEffectsConfig(_Section):
    """What follows from each problem that a GPU can have."""

    gpu_lost: Effect | None = _effect("the GPU does not answer")
    xid: Effect | None = _effect(
        "NVIDIA's driver reported an Xid that is not one of the application; `health.xids` goes "
        "before"
    )
    uncorrectable_ecc: Effect | None = _effect("an ECC error that could not be corrected")
    row_remap_failed: Effect | None = _effect("a bad row of memory could not be replaced")
    recovery_action: Effect | None = _effect(
        "NVIDIA's driver asks for a recovery action, such as a reset"
    )
    row_remap_pending: Effect | None = _effect(
        "a bad row of memory is replaced at the next reset", "None"
    )
    correctable_ecc: Effect | None = _effect("ECC errors that were corrected", "None")
    thermal_slowdown: Effect | None = _effect("the GPU is slow because it is hot", "None")
    power_brake: Effect | None = _effect(
        "the GPU is slow because the node's power supply asks for it", "None"
    )
    nvlink_down: Effect | None = _effect("fewer NVLink connections are active than before", "None")
    fabric: Effect | None = _effect("the NVLink fabric is not in order", "None")
    pcie_replays: Effect | None = _effect("more than 8 PCIe replays in a minute", "None")
    unmonitored: Effect | None = _effect("NVML reports no events of the GPU", "None")


class HealthSectionConfig(_Section):
    """What follows from problems of the GPUs, and of their partitions."""

    effects: HealthEffectsConfig = all_defaults(HealthEffectsConfig)
    xids: Annotated[dict[_XidNumber, Effect], _SomeOf] | None = _optional(
        "The effect of this Xid. Default: that of `health.effects.xid`, and `None` for those of "
        "applications."
    )
    recovery: Duration | None = _optional(
        "A problem has to be over for this long before its taint is removed. Default: `60s`."
    )


class GpuRules(_Section):
    """What holds for the GPUs that are selected."""

    select: GpuSelectorConfig | None = None
    include: bool | None = _optional(
        "With `false`, this driver does not offer the GPUs. Default: `true`."
    )
    fractions: Literal["Capacity", "Never"] | None = _optional(
        "With `Never`, one claim at a time takes all of a GPU. Default: `Capacity`."
    )
    replicas: _Count | None = _optional(
        "A claim that names no memory gets this part of a GPU: with 4, a quarter. Default: `1`."
    )
    rename: bool | None = _optional(
        "With `true`, the replicas have the class `shared.gpu.nvidia.com` and the resource name "
        "`nvidia.com/gpu.shared`. By the device-plugin API, replicas of partitions are renamed, "
        "too: `nvidia.com/mig-1g.10gb.shared`. Default: `false`."
    )
    fail_requests_greater_than_one: bool | None = _optional(
        "With `true`, a request for more than one replica is refused. Default: `false`."
    )
    allocation_policy: Literal["Auto", "Packed", "Distributed"] | None = _optional(
        "Which replicas or partitions a container gets by the device-plugin API: of the GPU of "
        "which most is given out, several of different GPUs; as many as possible of one GPU; of "
        "the GPUs of which least is given out. Of several values on one node, that of the GPU with "
        "the lowest number counts. Default: `Auto`."
    )
    strategies: Annotated[list[Strategy], _SomeOf] | None = _optional(
        "The strategies that a claim can choose. Default: `[TimeSlicing, MPS]`."
    )
    default_strategy: Strategy | None = _optional(
        "The strategy of a fraction if neither its claim nor its class chooses one, and the "
        "claim reserves no cores. Default: `TimeSlicing`."
    )
    mps_tenants: Literal["Any", "NonRoot", "UserNamespaces"] | None = _optional(
        "Whose pods may use MPS: all; those that are not root on the node; those with a user "
        "namespace. Default: `Any`."
    )
    time_slice_interval: Literal["WholeGPUs", "Any"] | None = _optional(
        "Which claims may set the interval of time slices. With `Any`, fractions may too; the "
        "interval then holds for all claims on the GPU. Default: `WholeGPUs`."
    )
    mps_server: Literal["PerNamespace", "Shared"] | None = _optional(
        "Who shares an MPS server, with drivers before 615: the claims of a namespace, or all "
        "claims. Default: `PerNamespace`."
    )
    shares: _Count | None = _optional(
        "The most claims on a GPU at once. Default: the most clients that MPS serves on it."
    )
    memory: MemoryConfig = all_defaults(MemoryConfig)
    memory_guard: MemoryGuardConfig = all_defaults(MemoryGuardConfig)
    memory_limit: Literal["BestEffort", "Strict"] | None = _optional(
        "With `Strict`, a fraction is refused where NVIDIA's driver cannot limit its memory. "
        "Default: `BestEffort`."
    )
    mig: Annotated[MigSectionConfig, BeforeValidator(_mode_alone)] = all_defaults(MigSectionConfig)
    health: HealthSectionConfig = all_defaults(HealthSectionConfig)


def _not_in_a_file(value: Any) -> Any:
    raise ValueError("has no effect in a file; apply the profile with kubectl, or remove it")


_ObjectOnly = Annotated[SkipJsonSchema[Any], AfterValidator(_not_in_a_file)]


EMPTY_SPEC = "says nothing of GPUs; write gpus, or api"


class NodeProfileSpec(_Section):
    """The rules, first match first. The last fields are those of objects, refused in a file."""

    api: Literal["Auto", "DRA", "DevicePlugin"] | None = _optional(
        "By which API of Kubernetes a node gives its GPUs out: by claims, or by the device-plugin "
        "API. With `Auto`, by claims where Kubernetes makes them for pods that ask for "
        "`nvidia.com/gpu`. Default: `Auto`."
    )
    gpus: Annotated[list[GpuRules], _SomeOf] | None = Field(
        default=None,
        description="What holds for which GPUs: for each GPU the first entry that selects it.",
    )
    node_selector: _ObjectOnly = None
    priority: _ObjectOnly = None
    rollout: _ObjectOnly = None
    revision_history_limit: _ObjectOnly = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.gpus is None and self.api is None:
            raise ValueError(EMPTY_SPEC)
        return self


class NodeProfileMetadata(StrictModel):
    """Without a name the profile is called like its file."""

    name: Name | None = None


class NodeProfile(StrictModel):
    """One document."""

    api_version: Literal["resource.nvidia.com/v1beta1"]
    kind: Literal["NodeProfile"]
    metadata: NodeProfileMetadata = all_defaults(NodeProfileMetadata)
    spec: NodeProfileSpec


_NEITHER = "is no number of nodes from 1 on, and no percentage; write for example 10%"


def _nodes_at_once(value: Any) -> Any:
    """Told in one message: pydantic would have one for each type."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number and 1 <= value <= MOST_NODES:
        return value
    if isinstance(value, str) and re.fullmatch(_NODES_AT_ONCE, value):
        return value
    raise ValueError(_NEITHER)


_LabelKey = Annotated[
    str,
    Field(max_length=317),
    Text(
        rf"({_DNS_LABEL}(\.{_DNS_LABEL})*/)?{_LABEL_VALUE}",
        "is no key that a node's label can have",
        "label",
    ),
]
_LabelValue = Annotated[
    str,
    Field(max_length=63),
    Text(f"({_LABEL_VALUE})?", "is no value that a node's label can have"),
]


class RolloutConfig(StrictModel):
    """How a change reaches the nodes."""

    max_unavailable: Annotated[
        int | str,
        BeforeValidator(_nodes_at_once),
        WithJsonSchema(
            {
                "type": ["integer", "string"],
                "minimum": 1,
                "maximum": MOST_NODES,
                "matches": _NODES_AT_ONCE,
                "otherwise": _NEITHER,
                "format": "number or percentage",
            }
        ),
    ] = Field(
        default="10%",
        description="A change is given to this many nodes at a time: a number, or a percentage of "
        "the nodes of the profile. Default: `10%`.",
    )
    max_failures: int = Field(
        default=3,
        ge=1,
        le=MOST_NODES,
        description="The rollout of a change stops when this many nodes have failed. Default: `3`.",
    )
    progress_deadline_seconds: int = Field(
        default=600,
        ge=1,
        le=24 * 3600,
        description="A node that does not report within this many seconds has failed. Default: "
        "`600`.",
    )
    paused: bool = Field(
        default=False,
        description="With `true`, no further node is given a change. Default: `false`.",
    )


class NodeProfileObjectSpec(NodeProfileSpec):
    """What holds for GPUs, for those of which nodes, and how a change reaches them.

    In the API server. ``gpus`` is as it is written; ``decode_profile`` says what it means.
    """

    gpus: Annotated[list[Any], _SomeOf] | None = None
    node_selector: Annotated[dict[_LabelKey, _LabelValue], Field(max_length=MOST_ENTRIES)] = Field(
        default={},
        description="The profile holds for the nodes that have all of these labels. Default: every "
        "node.",
    )
    priority: int = Field(
        default=0,
        ge=-1_000_000,
        le=1_000_000,
        description="Of several profiles that select a node, the one with the highest priority "
        "holds, and of these the oldest. Default: `0`.",
    )
    rollout: RolloutConfig = all_defaults(RolloutConfig)
    revision_history_limit: int = Field(
        default=10,
        ge=0,
        le=100,
        description="How many revisions are kept to go back to. Default: `10`.",
    )
