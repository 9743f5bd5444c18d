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
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

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


def _one_of(*words: str) -> BeforeValidator:
    known = {word.casefold(): word for word in words}

    def spelled(value: Any) -> Any:
        if value is False:
            value = "Off"  # YAML 1.1 takes a bare Off for false
        return known.get(value.casefold(), value) if isinstance(value, str) else value

    return BeforeValidator(spelled)


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _mode_alone(value: Any) -> Any:
    """``mig: Dynamic`` for ``mig: {mode: Dynamic}``."""
    return {"mode": value} if isinstance(value, str | bool) else value


Name = Annotated[
    str, _matching(_LABEL_VALUE, "is no name that a node's label can have as its value")
]
Quantity = Annotated[
    str,
    BeforeValidator(_number_as_text),
    _matching(re.compile(QUANTITY_PATTERN), "is not a quantity; write for example 1Gi"),
]
Duration = Annotated[str, _matching(_DURATION, "is not a duration; write for example 10s")]
Strategy = Annotated[Literal["TimeSlicing", "MPS"], _one_of("TimeSlicing", "MPS")]


class GpuSelectorConfig(StrictModel):
    """GPUs that match every field that is given, each by one item of its list."""

    index: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    uuid: (
        Annotated[
            list[Annotated[str, _matching(re.compile("GPU-.+"), "is no GPU; write GPU-…")]],
            Field(min_length=1),
        ]
        | None
    ) = None
    product: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = (
        None  # patterns as of a shell
    )


class MemoryConfig(StrictModel):
    """In which amounts memory is given out."""

    least: Quantity | None = None
    step: Quantity | None = None


class MemoryGuardConfig(StrictModel):
    """What is done about a claim whose processes use more memory than its share."""

    policy: Annotated[Literal["Off", "Warn", "Kill"], _one_of("Off", "Warn", "Kill")] | None = None
    grace: Duration | None = None


class MigSectionConfig(StrictModel):
    """What becomes of GPUs that can be cut into partitions. Those that exist are always offered."""

    mode: Annotated[Literal["Dynamic", "Off"], _one_of("Dynamic", "Off")] | None = None
    profiles: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = (
        None  # that are cut for claims: patterns as of a shell
    )
    layout: Name | None = None  # that is cut once: a name of mig-configs
    strategy: Annotated[Literal["Mixed", "Single"], _one_of("Mixed", "Single")] | None = (
        None  # Single: partitions that exist, all of one kind, serve claims for a GPU, too
    )
    replicas: (
        dict[
            Annotated[str, _matching(_MIG_PROFILE, "is no MIG profile; write for example 1g.10gb")],
            Annotated[int, Field(ge=1, le=MAX_REPLICAS)],
        ]
        | None
    ) = None  # by profile


class GpuRules(StrictModel):
    """What holds for the GPUs that are selected."""

    select: GpuSelectorConfig | None = None
    include: bool | None = None
    fractions: Annotated[Literal["Capacity", "Never"], _one_of("Capacity", "Never")] | None = None
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None = None
    rename: bool | None = None
    fail_requests_greater_than_one: bool | None = None
    strategies: Annotated[list[Strategy], Field(min_length=1)] | None = None
    default_strategy: Strategy | None = None
    mps_tenants: (
        Annotated[
            Literal["Any", "NonRoot", "UserNamespaces"],
            _one_of("Any", "NonRoot", "UserNamespaces"),
        ]
        | None
    ) = None  # whose pods may share by MPS
    time_slice_interval: (
        Annotated[Literal["WholeGPUs", "Any"], _one_of("WholeGPUs", "Any")] | None
    ) = None  # whose claims may set it
    mps_server: (
        Annotated[Literal["PerNamespace", "Shared"], _one_of("PerNamespace", "Shared")] | None
    ) = None  # who shares a server, with drivers before 615
    shares: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None = None
    memory: MemoryConfig = MemoryConfig()
    memory_guard: MemoryGuardConfig = MemoryGuardConfig()
    memory_limit: (
        Annotated[Literal["BestEffort", "Strict"], _one_of("BestEffort", "Strict")] | None
    ) = None
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
