"""Raw opaque parameters to a configuration, or every problem with its field path."""

from typing import Any

import pydantic

from api.names import CONFIG_GROUP, CONFIG_VERSION
from api.strict import ConfigError as ConfigError
from api.strict import meant, show, show_name
from api.v1beta1 import KINDS, Config

_MOST_PROBLEMS = 17  # of one configuration: more than anybody reads
_LEVELS = 4  # of objects in a configuration
_TAGS = frozenset(
    {"TimeSlicing", "MPS"}
)  # pydantic names the chosen case in its paths; users never wrote it


def decode(parameters: Any, path: str = "parameters") -> Config:
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
            [f"{path}.kind: {show(kind)} is unknown; write one of {', '.join(KINDS)}"]
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
        [f"{path}.apiVersion: {show(version)} is unknown; write {CONFIG_VERSION}{hint}"]
    )


def _problem(error: Any, path: str, model: type[pydantic.BaseModel]) -> str:
    where, found = _where(path, error["loc"]), error["input"]
    match error["type"]:
        case "extra_forbidden":
            why = _not_of_this_strategy(error["loc"]) or f"; {meant(error['loc'][-1], model)}"
            return f"{where}: unknown field{why}"
        case "string_pattern_mismatch" | "string_too_long":
            return f"{where}: {show(found)} is not a quantity; write for example 10Gi"
        case "too_long":
            return f"{where}: has more entries than a claim has GPUs; write one for each"
        case "union_tag_not_found" if not isinstance(found, dict):
            return f"{where}: {show(found)} should be an object with a strategy"
        case "union_tag_not_found" if "strategy" not in found:
            return f"{where}.strategy: missing; write TimeSlicing or MPS"
        case "union_tag_not_found" | "union_tag_invalid":
            tag = show(found["strategy"])
            return f"{where}.strategy: {tag} is unknown; write TimeSlicing or MPS"
    message = error["msg"].removeprefix("Input ")
    return f"{where}: {show(found)} {message}"


def _where(path: str, loc: tuple[str, ...]) -> str:
    """No configuration has a list, so all are names."""
    return ".".join((path, *(show_name(part) for part in loc if part not in _TAGS)))


def _not_of_this_strategy(loc: tuple[str | int, ...]) -> str:
    chosen = next((part for part in loc if part in _TAGS), None)
    strategy = {"mpsConfig": "MPS", "timeSlicingConfig": "TimeSlicing"}.get(str(loc[-1]))
    if strategy is None or chosen is None:
        return ""
    other = "" if strategy == chosen else ", or change the strategy"
    return f" with strategy {chosen}: remove it{other}"
