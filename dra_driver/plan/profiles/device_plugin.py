"""What a configuration of NVIDIA's device plugin means for the GPUs of this node."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from api.device_plugin import DevicePluginConfig, ReplicatedResource, ReplicatedResources, unused
from api.strict import ConfigError, field_path, show_value, valid_part, validated
from dra_driver.model.profiles import (
    AllocationPolicy,
    GpuSelector,
    GuardPolicy,
    GuardRules,
    MigRules,
    Profile,
    ProfileEntry,
    Rules,
    SharingStrategy,
)

_PREFIX = "nvidia.com/"
_GPU = f"{_PREFIX}gpu"
_PARTITION = f"{_PREFIX}mig-"
_TIME_SLICING, _MPS = "sharing.timeSlicing", "sharing.mps"
_STRATEGY = "flags.migStrategy"
_POLICY = "flags.plugin.sharedDevicesAllocationPolicy"
_ANY = "*"  # a pattern for every profile


def from_device_plugin(document: dict[str, Any], name: str) -> Profile:
    """The profile called *name* that *document* amounts to. ConfigError: every problem it has.

    Without ``sharing`` there are no rules, that is the defaults: pods that ask for
    ``nvidia.com/gpu`` get whole GPUs from that plugin and from us, and that claims can ask for
    fractions as well takes nothing from them.
    """
    problems: list[str] = []
    try:
        config = validated(DevicePluginConfig, document)
    except ConfigError as e:
        config, problems = valid_part(DevicePluginConfig, document), list(e.problems)
    sharing = config.sharing
    if sharing.time_slicing and sharing.mps:
        problems.append(
            f"{_TIME_SLICING} and {_MPS} exclude each other, as in NVIDIA's device plugin; "
            "remove one of them"
        )
    problems += _resource_problems(sharing.time_slicing, _TIME_SLICING)
    problems += _resource_problems(sharing.mps, _MPS)
    if problems:
        raise ConfigError(problems)
    warnings = [f"{path}: has no meaning here: {why}" for path, why in unused(config)]
    warnings += _partition_warnings(config)
    entries = (
        *_entries(sharing.time_slicing, _TIME_SLICING, _time_slicing),
        *_entries(sharing.mps, _MPS, _mps),
    )
    entries = _with_policy(_with_partitions(entries, config), config)
    return Profile(name, entries, tuple(warnings))


def _time_slicing(section: ReplicatedResources, replicas: int) -> Rules:
    return Rules(
        replicas=replicas,
        rename=section.rename_by_default,
        one_share=section.fail_requests_greater_than_one or False,
        limited=False,  # replicas of a time-sliced GPU never had a limit: pods rely on that
        guard=GuardRules(GuardPolicy.OFF),
    )


def _mps(section: ReplicatedResources, replicas: int) -> Rules:
    one_share = section.fail_requests_greater_than_one
    return Rules(
        replicas=replicas,
        rename=section.rename_by_default,
        one_share=True if one_share is None else one_share,  # the plugin's default under MPS
        default_strategy=SharingStrategy.MPS,
        guard=GuardRules(GuardPolicy.KILL),
    )


def _entries(
    section: ReplicatedResources | None,
    path: str,
    rules: Callable[[ReplicatedResources, int], Rules],
) -> tuple[ProfileEntry, ...]:
    return tuple(
        ProfileEntry(GpuSelector(), rules(section, resource.replicas), where, _named(path))
        for where, resource in _resources(section, path)
        if section and _full_name(resource) == _GPU
    )


def _named(section: str) -> tuple[tuple[str, str], ...]:
    """Where a file says whether replicas are renamed."""
    return (("rename", field_path(section, "renameByDefault")),)


def _with_partitions(
    entries: tuple[ProfileEntry, ...], config: DevicePluginConfig
) -> tuple[ProfileEntry, ...]:
    """*entries*, with what the file says of partitions; where it says nothing else, that alone."""
    section = config.sharing.time_slicing
    single = config.flags.mig_strategy == "single"
    parts = sorted(_partitions(section, _TIME_SLICING), key=lambda part: _profile(part[1]))
    replicas = tuple((_profile(resource), resource.replicas) for _, resource in parts)
    if single:  # then pods know every partition as a GPU
        resources = _resources(section, _TIME_SLICING)
        replicas += tuple(
            (_ANY, resource.replicas) for _, resource in resources if _full_name(resource) == _GPU
        )
    rules = MigRules(single=single, replicas=replicas)
    if rules == MigRules():
        return entries
    places = {f"mig.replicas.{_profile(resource)}": f"{where}.name" for where, resource in parts}
    every = ", ".join(([_STRATEGY] if single else []) + sorted(places.values()))
    elsewhere = (("mig", every), ("mig.strategy", _STRATEGY), *places.items())
    if not entries:
        alone = _time_slicing(section, 1) if section else Rules()
        where = parts[0][0] if parts else _STRATEGY
        named = _named(_TIME_SLICING) if section else ()
        entries = (ProfileEntry(GpuSelector(), alone, where, named),)
    return tuple(
        replace(
            entry,
            rules=replace(entry.rules, mig=rules),
            elsewhere=(*entry.elsewhere, *elsewhere),
        )
        for entry in entries
    )


def _with_policy(
    entries: tuple[ProfileEntry, ...], config: DevicePluginConfig
) -> tuple[ProfileEntry, ...]:
    """*entries*, with what the file says of which replicas and partitions are given out."""
    word = config.flags.plugin and config.flags.plugin.shared_devices_allocation_policy
    if not word:
        return entries
    policy = AllocationPolicy(word.capitalize())
    return tuple(
        replace(
            entry,
            rules=replace(entry.rules, allocation_policy=policy),
            elsewhere=(*entry.elsewhere, ("allocationPolicy", _POLICY)),
        )
        for entry in entries or (ProfileEntry(GpuSelector(), Rules(), _POLICY),)
    )


def _resource_problems(section: ReplicatedResources | None, path: str) -> list[str]:
    problems: list[str] = []
    paths: dict[str, str] = {}
    for where, resource in _resources(section, path):
        name = _full_name(resource)
        if name != _GPU and not name.startswith(_PARTITION):
            problems.append(
                f"{where}.name: {show_value(resource.name)} is not known here; write {_GPU}"
            )
        elif name in paths:
            problems.append(
                f"{where}.name: {name} is in {paths[name]} already; a NodeProfile can divide GPUs "
                "of one node differently"
            )
        else:
            paths[name] = where
    return problems


def _partition_warnings(config: DevicePluginConfig) -> list[str]:
    """What of partitions is not as with the plugin. That nobody gets more than one share of those
    that take turns (failRequestsGreaterThanOne) is."""
    strategy, sharing = config.flags.mig_strategy, config.sharing
    warnings = [*_mps_warnings(sharing.mps, strategy)]
    if strategy == "none":
        warnings.append(
            f"{_STRATEGY}: has no meaning here: partitions that exist are always offered"
        )
    return warnings


def _mps_warnings(section: ReplicatedResources | None, strategy: str | None) -> Iterator[str]:
    why = (
        "as with NVIDIA's plugin, no partition is divided for MPS; by DRA, claims share one by MPS "
        "as they ask for it"
    )
    parts = _partitions(section, _MPS)
    for where, resource in parts:
        yield f"{where}.name: {show_value(resource.name)} has no meaning here: {why}"
    if not section:
        return
    if len(parts) < len(section.resources):
        if strategy == "single":
            yield f"{_STRATEGY}: single has no effect on {_MPS}: {why}"
        return
    fields = {
        "renameByDefault": section.rename_by_default,
        "failRequestsGreaterThanOne": section.fail_requests_greater_than_one is not None,
    }
    for name in (name for name, is_given in fields.items() if is_given):
        path = field_path(_MPS, name)
        yield f"{path}: has no meaning here: nothing that the file names is divided"


def _partitions(
    section: ReplicatedResources | None, path: str
) -> list[tuple[str, ReplicatedResource]]:
    """The resources that are partitions."""
    resources = _resources(section, path)
    return [
        (where, resource)
        for where, resource in resources
        if _full_name(resource).startswith(_PARTITION)
    ]


def _profile(resource: ReplicatedResource) -> str:
    """As the board calls it: names of resources have a dot for the plus of ``1g.10gb+me``."""
    name = _full_name(resource).removeprefix(_PARTITION)
    return re.sub(r"^(\d+g\.\d+gb)\.", r"\1+", name)


def _resources(
    section: ReplicatedResources | None, path: str
) -> tuple[tuple[str, ReplicatedResource], ...]:
    resources = section.resources if section else []
    return tuple(
        (field_path(path, "resources", number), resource)
        for number, resource in enumerate(resources)
    )


def _full_name(resource: ReplicatedResource) -> str:
    """The plugin takes ``gpu`` for ``nvidia.com/gpu``."""
    return resource.name if resource.name.startswith(_PREFIX) else f"{_PREFIX}{resource.name}"
