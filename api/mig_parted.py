"""The configuration file of NVIDIA's mig-parted, ``version: v1``, field by field as it has it.

::

    version: v1
    mig-configs:
      half-balanced:                           # a layout; nodes choose it by its name
        - device-filter: ["0x20B010DE"]        # device and vendor, as of PCI
          devices: [0, 1, 2, 3]                # or all
          mig-enabled: true
          mig-devices: {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}
        - devices: [4, 5, 6, 7]
          mig-enabled: false
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from api.strict import ConfigError, StrictModel, field_path, show_value, validated

MIG_CONFIGS = "mig-configs"

_PROFILE = re.compile(r"(?:(\d+)c\.)?(\d+)g\.\d+gb([+-][a-z][a-z0-9.,]*)?")
_PCI_ID = re.compile(r"0[xX][0-9a-fA-F]{5,8}")


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _listed(value: Any) -> Any:
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, int) and not isinstance(each, bool):
            problem = "is a number" if each is value else f"has {each}, which is a number"
            raise ValueError(f'{problem} to YAML; write it in quotes: "0x{each:X}"')
    return [value] if isinstance(value, str) else value


def _filters(values: list[str]) -> list[str]:
    """An empty text filters nothing, as in mig-parted."""
    named = [value for value in values if value]
    for value in named:
        if not _PCI_ID.fullmatch(value):
            raise ValueError(
                "has what is no PCI ID of device and vendor; write for example 0x20B010DE"
            )
    return named


def _names(value: Any) -> Any:
    """``7`` is a name as good as ``"7"``, as in mig-parted; what else is no text is refused."""
    if not isinstance(value, dict):
        return value
    named = {str(key) if type(key) is int else key: value[key] for key in value}
    if len(named) < len(value):
        raise ValueError("has a name twice, as a number and as text; remove one of them")
    return named


def _devices(value: Any) -> Any:
    numbers = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    if value != "all" and not numbers:
        raise ValueError("should be all, or a list of the numbers of GPUs")
    return value


def _profiles(counts: dict[str, int]) -> dict[str, int]:
    for name in counts:
        match = _PROFILE.fullmatch(name)
        if not match:
            raise ValueError(
                f"has {show_value(name)}, which is no profile; write for example 1g.10gb"
            )
        compute, slices, _ = match.groups()
        if compute not in (None, slices):
            whole = name.partition(".")[2]
            raise ValueError(
                f"has {name!r}: compute instances that do not fill their GPU instance are "
                f"nothing that claims can have; write {whole}"
            )
    summed: dict[str, int] = {}
    for name, count in counts.items():
        whole = _without_compute(name)
        summed[whole] = summed.get(whole, 0) + count
    return summed


def _without_compute(name: str) -> str:
    """``1c.1g.5gb`` is another way to write ``1g.5gb``."""
    return re.sub(r"^\d+c\.", "", name)


class _Kebab(StrictModel):
    """Fields are written with dashes."""

    model_config = ConfigDict(alias_generator=_kebab)


class MigConfig(_Kebab):
    """What becomes of some GPUs."""

    device_filter: Annotated[list[str], BeforeValidator(_listed), AfterValidator(_filters)] = Field(
        default=[]
    )
    devices: Annotated[Any, AfterValidator(_devices)]
    mig_enabled: bool
    mig_devices: (
        Annotated[dict[str, Annotated[int, Field(ge=0)]], AfterValidator(_profiles)] | None
    ) = None

    @model_validator(mode="after")
    def _fits_together(self) -> "MigConfig":
        if self.mig_enabled and self.mig_devices is None:
            raise ValueError("has mig-enabled: true and no mig-devices; write {} for none")
        if not self.mig_enabled and self.mig_devices:
            raise ValueError("has mig-devices and mig-enabled: false; remove one of them")
        return self


class _Layout(StrictModel):
    """What stands under one name."""

    entries: Annotated[list[MigConfig], Field(min_length=1)]


class _File(_Kebab):
    """All of it; what stands under each name is looked at one by one."""

    version: Literal["v1"]
    mig_configs: Annotated[dict[str, Any], BeforeValidator(_names), Field(min_length=1)]


def is_mig_parted(document: Any) -> bool:
    """Whether *document* is such a file, whatever is wrong with it."""
    return isinstance(document, dict) and MIG_CONFIGS in document


def layouts(document: Mapping[str, Any]) -> dict[str, list[MigConfig] | tuple[str, ...]]:
    """By name, what each layout says, or everything that is wrong with it.

    ConfigError: what is wrong with the file as such, and so with all of them.
    """
    configs = validated(_File, document).mig_configs
    return {
        name: _layout(configs[name], field_path("", MIG_CONFIGS, name)) for name in sorted(configs)
    }


def _layout(entries: Any, path: str) -> list[MigConfig] | tuple[str, ...]:
    try:
        return validated(_Layout, {"entries": entries}).entries
    except ConfigError as e:
        return tuple(path + problem.removeprefix("entries") for problem in e.problems)
