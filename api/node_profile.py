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
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from api.claim_configs import QUANTITY_PATTERN
from api.strict import StrictModel

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_MIG_PROFILE = re.compile(r"[0-9]+g\.[0-9]+gb([-+][a-z.]+)?")
_DURATION = re.compile(r"([0-9]+(\.[0-9]+)?(ms|s|m|h))+")
MAX_REPLICAS = 1000
"""Of one GPU. Each is a device of its own where the API server keeps no consumable capacity."""


def _matching(pattern: re.Pattern[str], otherwise: str) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(otherwise)
        return text

    return AfterValidator(check)


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

        return [spelled(each) for each in value] if isinstance(value, list) else spelled(value)


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _mode_alone(value: Any) -> Any:
    """``mig: Dynamic`` for ``mig: {mode: Dynamic}``."""
    return {"mode": value} if isinstance(value, str | bool) else value


def _optional(description: str) -> Any:
    return Field(default=None, description=description)


Name = Annotated[
    str, _matching(_LABEL_VALUE, "is no name that a node's label can have as its value")
]
Quantity = Annotated[
    str,
    BeforeValidator(_number_as_text),
    _matching(re.compile(QUANTITY_PATTERN), "is not a quantity; write for example 1Gi"),
    WithJsonSchema({"type": "string", "format": "quantity"}),
]
Duration = Annotated[
    str,
    _matching(_DURATION, "is not a duration; write for example 10s"),
    WithJsonSchema({"type": "string", "format": "duration"}),
]
Strategy = Literal["TimeSlicing", "MPS"]
_Patterns = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
_Count = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
_Uuid = Annotated[str, _matching(re.compile("GPU-.+"), "is no GPU; write GPU-…")]
_MigProfile = Annotated[
    str,
    _matching(_MIG_PROFILE, "is no MIG profile; write for example 1g.10gb"),
    WithJsonSchema({"type": "string", "format": "MIG profile"}),
]


class GpuSelectorConfig(_Section):
    """GPUs that match every field that is given, each by one item of its list."""

    index: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = _optional(
        "The entry is for these GPUs, by the number in `/dev/nvidia<N>`."
    )
    uuid: Annotated[list[_Uuid], Field(min_length=1)] | None = _optional(
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
        "`mig: Dynamic` is short for `mig: {mode: Dynamic}`. Default: `Off`."
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
    replicas: dict[_MigProfile, _Count] | None = _optional(
        "How many claims that name no capacity share a partition of this MIG profile. Default: one."
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
        "`nvidia.com/gpu.shared`. Default: `false`."
    )
    fail_requests_greater_than_one: bool | None = _optional(
        "With `true`, a request for more than one replica is refused. Default: `false`."
    )
    strategies: Annotated[list[Strategy], Field(min_length=1)] | None = _optional(
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
    memory: MemoryConfig = MemoryConfig()
    memory_guard: MemoryGuardConfig = MemoryGuardConfig()
    memory_limit: Literal["BestEffort", "Strict"] | None = _optional(
        "With `Strict`, a fraction is refused where NVIDIA's driver cannot limit its memory. "
        "Default: `BestEffort`."
    )
    mig: Annotated[MigSectionConfig, BeforeValidator(_mode_alone)] = MigSectionConfig()


class NodeProfileSpec(StrictModel):
    """The rules, first match first."""

    gpus: Annotated[list[GpuRules], Field(min_length=1)]


class NodeProfileMetadata(StrictModel):
    """Without a name the profile is called like its file."""

    name: Name | None = None


class NodeProfile(StrictModel):
    """One document."""

    api_version: Literal["resource.nvidia.com/v1beta1"]
    kind: Literal["NodeProfile"]
    metadata: NodeProfileMetadata = NodeProfileMetadata()
    spec: NodeProfileSpec
