"""Raw opaque parameters to a configuration, or every problem with its field path."""

from typing import Any

import pydantic

from api.names import CONFIG_GROUP, CONFIG_VERSION
from api.strict import ConfigError as ConfigError
from api.strict import meant, show, without_nulls
from api.v1beta1 import KINDS, Config

_TAGS = frozenset(
    {"TimeSlicing", "MPS"}
)  # pydantic names the chosen case in its paths; users never wrote it


def decode(parameters: Any, path: str = "parameters") -> Config:
    """The configuration in *parameters*, a JSON object as the API server stored it.

    *path* stands before every field path in the ConfigError.
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
        return model.model_validate(without_nulls(parameters))
    except pydantic.ValidationError as e:
        raise ConfigError([_problem(error, path, model) for error in e.errors()]) from e


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
    where = path
    for part in error["loc"]:
        where += f"[{part}]" if isinstance(part, int) else "" if part in _TAGS else f".{part}"
    if error["type"] == "extra_forbidden":
        why = _not_of_this_strategy(error["loc"]) or f"; {meant(error['loc'][-1], model)}"
        return f"{where}: unknown field{why}"
    if error["type"] == "string_pattern_mismatch":
        return f"{where}: {show(error['input'])} is not a quantity; write for example 10Gi"
    if error["type"] == "union_tag_not_found":
        return f"{where}.strategy: missing; write TimeSlicing or MPS"
    if error["type"] == "union_tag_invalid":
        return f"{where}.strategy: {show(error['ctx']['tag'])} is unknown; write TimeSlicing or MPS"
    message = error["msg"].removeprefix("Input ")
    return f"{where}: {show(error['input'])} {message}"


def _not_of_this_strategy(loc: tuple[str | int, ...]) -> str:
    chosen = next((part for part in loc if part in _TAGS), None)
    strategy = {"mpsConfig": "MPS", "timeSlicingConfig": "TimeSlicing"}.get(str(loc[-1]))
    if strategy is None or chosen is None:
        return ""
    other = "" if strategy == chosen else ", or change the strategy"
    return f" with strategy {chosen}: remove it{other}"
