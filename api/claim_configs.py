"""The opaque configuration that users write in claims, and how it is decoded.

It is ``resource.nvidia.com/v1beta1``, field by field as NVIDIA's driver has it; a field that that
driver lacks stands last and says so. ``decode_config`` turns raw parameters into a configuration,
or into every problem with its field path. Unknown fields are errors, and so are the fields of
another strategy than the chosen one: what the type excludes needs no further check.
"""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Discriminator, Field, StringConstraints, Tag

from api.names import CONFIG_GROUP, CONFIG_VERSION
from api.strict import (
    ConfigError,
    StrictModel,
    all_defaults,
    show_name,
    show_value,
    suggestion,
)

QUANTITY_PATTERN = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?$"
"""A positive Kubernetes quantity (k8s.io/apimachinery/pkg/api/resource): ``10Gi``, ``500M``,
``1e9``."""

_LONGEST_QUANTITY = 64  # characters; the API server writes 30 at most
_MOST_DEVICES = 64  # twice what a claim can be allocated: each by its UUID, and by its index

Quantity = Annotated[str, StringConstraints(pattern=QUANTITY_PATTERN, max_length=_LONGEST_QUANTITY)]


class TimeSlicingConfig(StrictModel):
    """How long a process runs before the next one has its turn. An empty one means ``Default``."""

    interval: Literal["Default", "Short", "Medium", "Long"] = "Default"


class TimeSlicing(StrictModel):
    """Processes take turns. Without a configuration: at whatever interval the GPU has."""

    strategy: Literal["TimeSlicing"]
    time_slicing_config: TimeSlicingConfig | None = None


class MpsConfig(StrictModel):
    """Limits of the clients of one MPS server."""

    default_active_thread_percentage: Annotated[int, Field(ge=0, le=100)] | None = None
    default_pinned_device_memory_limit: Quantity | None = None
    default_per_device_pinned_memory_limit: dict[str, Quantity] = Field(
        default_factory=dict, max_length=_MOST_DEVICES
    )  # by UUID, or index of the UUID-sorted GPUs
    multi_user: bool | None = None
    client_priority: Literal["Normal", "BelowNormal"] = "Normal"  # NVIDIA's driver lacks it


class Mps(StrictModel):
    """Processes run at the same time under CUDA's Multi-Process Service."""

    strategy: Literal["MPS"]
    mps_config: MpsConfig = all_defaults(MpsConfig)


class MigTimeSlicing(StrictModel):
    """On a MIG device: accepted, without effect, as in NVIDIA's driver."""

    strategy: Literal["TimeSlicing"]


def _strategy(sharing: Any) -> str | None:
    """What tells the strategies apart. pydantic's own way writes out whatever stands there instead
    of a word, nested lists included."""
    strategy = sharing.get("strategy") if isinstance(sharing, dict) else None
    return strategy if isinstance(strategy, str) else None


_MPS = Annotated[Mps, Tag("MPS")]
_Sharing = Annotated[Annotated[TimeSlicing, Tag("TimeSlicing")] | _MPS, Discriminator(_strategy)]
_MigSharing = Annotated[
    Annotated[MigTimeSlicing, Tag("TimeSlicing")] | _MPS, Discriminator(_strategy)
]


class GpuConfig(StrictModel):
    """Configuration of a whole GPU."""

    api_version: Literal["resource.nvidia.com/v1beta1"]
    kind: Literal["GpuConfig"]
    sharing: _Sharing | None = None


class MigDeviceConfig(StrictModel):
    """Configuration of a MIG device."""

    api_version: Literal["resource.nvidia.com/v1beta1"]
    kind: Literal["MigDeviceConfig"]
    sharing: _MigSharing | None = None


class Iommu(StrictModel):
    """Which IOMMU interface a virtual machine monitor is given."""

    backend_policy: Literal["LegacyOnly", "PreferIommuFD"] = "LegacyOnly"
    enable_api_device: Annotated[bool, Field(alias="enableAPIDevice")] = False


class VfioDeviceConfig(StrictModel):
    """Configuration of a GPU that is passed through to a virtual machine."""

    api_version: Literal["resource.nvidia.com/v1beta1"]
    kind: Literal["VfioDeviceConfig"]
    iommu: Iommu = all_defaults(Iommu)


Config = GpuConfig | MigDeviceConfig | VfioDeviceConfig
KINDS: dict[str, type[GpuConfig] | type[MigDeviceConfig] | type[VfioDeviceConfig]] = {
    "GpuConfig": GpuConfig,
    "MigDeviceConfig": MigDeviceConfig,
    "VfioDeviceConfig": VfioDeviceConfig,
}


_MOST_PROBLEMS = 17  # of one configuration: more than anybody reads
_LEVELS = 4  # of objects in a configuration
# pydantic names the chosen case in its paths; users never wrote it
_TAGS = frozenset({"TimeSlicing", "MPS"})


def decode_config(parameters: Any, path: str = "parameters") -> Config:
    """The configuration in *parameters*, a JSON object as the API server stored it.

    *path* stands before every field path in the ConfigError. Whoever can create a claim writes what
    this reads, so its time is linear in the length, whatever is there.
    """
    if not isinstance(parameters, dict):
        raise ConfigError([f"{path}: must be an object with apiVersion and kind"])
    _check_version(parameters.get("apiVersion"), path)
    kind = parameters.get("kind")
    model = KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise ConfigError(
            [f"{path}.kind: {show_value(kind)} is unknown; write one of {', '.join(KINDS)}"]
        )
    try:
        return model.model_validate(_without_nulls(parameters, _LEVELS))
    except pydantic.ValidationError as e:
        first = e.errors(include_url=False)[:_MOST_PROBLEMS]
        raise ConfigError([_problem(error, path, model) for error in first]) from e


def _without_nulls(value: Any, levels: int) -> Any:
    """An absent field and a null one are the same in the API conventions of Kubernetes.

    No configuration has a list, or more than *levels* of objects: what is in those is refused
    without a look.
    """
    if levels == 0 or not isinstance(value, dict):
        return value
    return {k: _without_nulls(inner, levels - 1) for k, inner in value.items() if inner is not None}


def _check_version(version: Any, path: str) -> None:
    if version == CONFIG_VERSION:
        return
    if isinstance(version, str) and version.startswith("gpu.nvidia.com/"):
        hint = f"; the group of this API is {CONFIG_GROUP}"
    else:
        hint = ""
    raise ConfigError(
        [f"{path}.apiVersion: {show_value(version)} is unknown; write {CONFIG_VERSION}{hint}"]
    )


def _problem(error: Any, path: str, model: type[pydantic.BaseModel]) -> str:
    where, value = _where(path, error["loc"]), error["input"]
    match error["type"]:
        case "extra_forbidden":
            why = _not_of_this_strategy(error["loc"]) or f"; {suggestion(error['loc'][-1], model)}"
            return f"{where}: unknown field{why}"
        case "string_pattern_mismatch" | "string_too_long":
            return f"{where}: {show_value(value)} is not a quantity; write for example 10Gi"
        case "too_long":
            return f"{where}: has more entries than a claim has GPUs; write one for each"
        case "union_tag_not_found" if not isinstance(value, dict):
            return f"{where}: {show_value(value)} should be an object with a strategy"
        case "union_tag_not_found" if "strategy" not in value:
            return f"{where}.strategy: missing; write TimeSlicing or MPS"
        case "union_tag_not_found" | "union_tag_invalid":
            tag = show_value(value["strategy"])
            return f"{where}.strategy: {tag} is unknown; write TimeSlicing or MPS"
    message = error["msg"].removeprefix("Input ")
    return f"{where}: {show_value(value)} {message}"


def _where(path: str, loc: tuple[str, ...]) -> str:
    """No configuration has a list, so all are names."""
    return ".".join((path, *(show_name(part) for part in loc if part not in _TAGS)))


def _not_of_this_strategy(loc: tuple[str | int, ...]) -> str:
    chosen = next((part for part in loc if part in _TAGS), None)
    strategy = {"mpsConfig": "MPS", "timeSlicingConfig": "TimeSlicing"}.get(str(loc[-1]))
    if strategy is None or chosen is None:
        return ""
    remedy = "" if strategy == chosen else ", or change the strategy"
    return f" with strategy {chosen}: remove it{remedy}"
