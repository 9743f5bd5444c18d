"""What a configuration of NVIDIA's device plugin means for the GPUs of this node."""

from collections.abc import Callable
from typing import Any

from api.device_plugin import (
    DevicePluginConfig,
    ReplicatedResource,
    ReplicatedResources,
    unused,
)
from api.strict import ConfigError, field, show, validated
from dra_driver.model.profiles import (
    Entry,
    Guard,
    GuardPolicy,
    Profile,
    Rules,
    Selection,
    Strategy,
)

_PREFIX = "nvidia.com/"
_GPU = f"{_PREFIX}gpu"
_PARTITION = f"{_PREFIX}mig-"
_TIME_SLICING, _MPS = "sharing.timeSlicing", "sharing.mps"


def from_device_plugin(document: dict[str, Any], name: str) -> Profile:
    """The profile called *name* that *document* amounts to. ConfigError: every problem it has.

    Without ``sharing`` there are no rules, that is the defaults: pods that ask for
    ``nvidia.com/gpu`` get whole GPUs from that plugin and from us, and that claims can ask for
    fractions as well takes nothing from them.
    """
    config = validated(DevicePluginConfig, document)
    sharing = config.sharing
    problems: list[str] = []
    if sharing.time_slicing and sharing.mps:
        problems.append(
            f"{_TIME_SLICING} and {_MPS} exclude each other, as in NVIDIA's device plugin; "
            "remove one of them"
        )
    problems += _resource_problems(sharing.time_slicing, _TIME_SLICING)
    problems += _resource_problems(sharing.mps, _MPS)
    if problems:
        raise ConfigError(problems)
    notes = [f"{path}: has no meaning here: {why}" for path, why in unused(config)]
    notes += _partition_notes(sharing.time_slicing, _TIME_SLICING)
    notes += _partition_notes(sharing.mps, _MPS)
    return Profile(
        name,
        (
            *_entries(sharing.time_slicing, _TIME_SLICING, _time_slicing),
            *_entries(sharing.mps, _MPS, _mps),
        ),
        tuple(notes),
    )


def _time_slicing(said: ReplicatedResources, replicas: int) -> Rules:
    return Rules(
        replicas=replicas,
        rename=said.rename_by_default,
        one_share=said.fail_requests_greater_than_one or False,
        limited=False,  # replicas of a time-sliced GPU never had a limit: pods rely on that
        guard=Guard(GuardPolicy.OFF),
    )


def _mps(said: ReplicatedResources, replicas: int) -> Rules:
    one_share = said.fail_requests_greater_than_one
    return Rules(
        replicas=replicas,
        rename=said.rename_by_default,
        one_share=True if one_share is None else one_share,  # the plugin's default under MPS
        default_strategy=Strategy.MPS,
        guard=Guard(GuardPolicy.KILL),
    )


def _entries(
    said: ReplicatedResources | None,
    path: str,
    rules: Callable[[ReplicatedResources, int], Rules],
) -> tuple[Entry, ...]:
    return tuple(
        Entry(Selection(), rules(said, resource.replicas), where)
        for where, resource in _resources(said, path)
        if said and _full_name(resource) == _GPU
    )


def _resource_problems(said: ReplicatedResources | None, path: str) -> list[str]:
    problems: list[str] = []
    first = ""
    for where, resource in _resources(said, path):
        name = _full_name(resource)
        if name == _GPU and first:
            problems.append(
                f"{where}.name: {_GPU} is in {first} already; a NodeProfile can divide GPUs of one "
                "node differently"
            )
        elif name == _GPU:
            first = where
        elif not name.startswith(_PARTITION):
            problems.append(f"{where}.name: {show(resource.name)} is not known here; write {_GPU}")
    return problems


def _partition_notes(said: ReplicatedResources | None, path: str) -> list[str]:
    return [
        f"{where}.name: {show(resource.name)} has no meaning here: no MIG partitions are offered"
        for where, resource in _resources(said, path)
        if _full_name(resource).startswith(_PARTITION)
    ]


def _resources(
    said: ReplicatedResources | None, path: str
) -> tuple[tuple[str, ReplicatedResource], ...]:
    found = said.resources if said else []
    return tuple((field(path, "resources", number), each) for number, each in enumerate(found))


def _full_name(resource: ReplicatedResource) -> str:
    """The plugin takes ``gpu`` for ``nvidia.com/gpu``."""
    return resource.name if resource.name.startswith(_PREFIX) else f"{_PREFIX}{resource.name}"
