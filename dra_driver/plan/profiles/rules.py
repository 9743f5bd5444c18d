"""Which profile is chosen, what its document means, and which rules hold for which GPU."""

import fnmatch
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from api.names import CONFIG_VERSION
from api.node_profile import (
    GpuRules,
    GpuSelectorConfig,
    HealthSectionConfig,
    MemoryGuardConfig,
    MigSectionConfig,
    NodeProfile,
)
from api.strict import ConfigError, show_value, valid_part, validated
from dra_driver.k8s import quantity
from dra_driver.model.gpus import Gpu, GpuUuid
from dra_driver.model.health import DEFAULT_HEALTH_RULES, Effect, HealthRules, Problem
from dra_driver.model.profiles import (
    DEFAULT_RULES,
    AllocationApi,
    AllocationPolicy,
    GpuSelector,
    GuardPolicy,
    GuardRules,
    MigRules,
    MpsServerScope,
    MpsTenants,
    Profile,
    ProfileEntry,
    Rules,
    SharingStrategy,
)
from dra_driver.plan.health.problems import PROBLEMS
from dra_driver.plan.profiles import validation
from dra_driver.plan.profiles.device_plugin import from_device_plugin


def _mig_rules(section: MigSectionConfig) -> MigRules:
    """What it does not say is as without a profile."""
    return MigRules(
        dynamic=section.mode == "Dynamic",
        profiles=tuple(dict.fromkeys(section.profiles or ())),
        layout=section.layout or "",
        single=section.strategy == "Single",
        replicas=tuple(sorted((section.replicas or {}).items())),
    )


def profile_name(document: Any, otherwise: str) -> str:
    """The name that *document* gives its profile, whatever else is wrong with it."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if name and isinstance(name, str) else otherwise


def decode_profile(document: Any, name: str) -> Profile:
    """The profile that *document* describes: a NodeProfile, or a configuration of NVIDIA's device
    plugin. ConfigError: every problem that it has, with its field path."""
    if not isinstance(document, dict):
        raise ConfigError([f"{show_value(document)} is no profile; write a NodeProfile"])
    if "apiVersion" not in document and "kind" not in document:
        return from_device_plugin(document, name)
    head = {"apiVersion": CONFIG_VERSION, "kind": "NodeProfile"}
    problems = [
        f"{key}: {show_value(document.get(key))} is unknown; write {expected}"
        for key, expected in head.items()
        if document.get(key) != expected
    ]
    try:
        spec = validated(NodeProfile, document | head).spec
        entries, api = spec.gpus or [], spec.api
    except ConfigError as e:
        entries, api = _valid_entries(document), None
        problems += e.problems
    problems += validation.problems(entries)
    if problems:
        raise ConfigError(problems)
    return Profile(
        name,
        tuple(
            ProfileEntry(_selection(entry.select), _rules(entry), f"spec.gpus[{number}]")
            for number, entry in enumerate(entries)
        ),
        api=AllocationApi(api) if api else AllocationApi.AUTO,
    )


def _valid_entries(document: dict[str, Any]) -> list[GpuRules]:
    """The entries of *document* without what is wrong by itself, and what depends on that."""
    spec = document.get("spec")
    entries = spec.get("gpus") if isinstance(spec, dict) else None
    return [_valid_entry(entry) for entry in entries] if isinstance(entries, list) else []


def _valid_entry(entry: Any) -> GpuRules:
    rules = valid_part(GpuRules, entry)
    fields = entry if isinstance(entry, dict) else {"select": "unknown"}
    changes: dict[str, Any] = {}
    if fields.get("select") is not None and rules.select is None:
        changes["select"] = GpuSelectorConfig(product=["*"])  # some GPUs, and not all
    divides = [field for field in ("replicas", "mig") if fields.get(field) is not None]
    if not rules.model_fields_set.issuperset(divides):
        changes["rename"] = None  # which is without effect only where there are no replicas
    return rules.model_copy(update=changes)


def rules_by_gpu(
    profile: Profile, gpus: Sequence[Gpu]
) -> tuple[dict[GpuUuid, Rules], tuple[str, ...]]:
    """What holds for each of *gpus*: the first entry that selects it, else the defaults.

    And a line for each entry that holds for none of them; of several in one place, for all
    together.
    """
    rules: dict[GpuUuid, Rules] = {}
    idle: list[str] = []
    used: set[str] = set()
    for entry in profile.entries:
        selected = [gpu for gpu in gpus if _selects(entry.selection, gpu)]
        fresh = [gpu for gpu in selected if gpu.uuid not in rules]
        rules.update((gpu.uuid, entry.rules) for gpu in fresh)
        used |= {entry.path} if fresh else set()
        if gpus and entry.path not in used:
            why = "earlier entries hold for all that it selects" if selected else "selects no GPU"
            idle.append(f"profile {profile.name!r}, {entry.path}: {why} of this node")
    return {gpu.uuid: rules.get(gpu.uuid, DEFAULT_RULES) for gpu in gpus}, tuple(idle)


def _selection(select: GpuSelectorConfig | None) -> GpuSelector:
    if select is None:
        return GpuSelector()
    return GpuSelector(
        frozenset(select.index or ()),
        frozenset(GpuUuid(uuid) for uuid in select.uuid or ()),
        tuple(select.product or ()),
    )


def _selects(selection: GpuSelector, gpu: Gpu) -> bool:
    if selection.minors and gpu.minor not in selection.minors:
        return False
    if selection.uuids and gpu.uuid not in selection.uuids:
        return False
    patterns = selection.products
    return not patterns or any(
        fnmatch.fnmatchcase(gpu.product_name, pattern) for pattern in patterns
    )


def _rules(entry: GpuRules) -> Rules:
    """The rules of *entry*; what it does not say is as without a profile."""
    default = _default_strategy(entry)
    fields: dict[str, Any] = {
        "include": entry.include,
        "fractions": entry.fractions and entry.fractions == "Capacity",
        "replicas": entry.replicas,
        "rename": entry.rename,
        "one_share": entry.fail_requests_greater_than_one,
        "allocation_policy": entry.allocation_policy and AllocationPolicy(entry.allocation_policy),
        "strategies": entry.strategies
        and tuple(map(SharingStrategy, dict.fromkeys(entry.strategies))),
        "default_strategy": default and SharingStrategy(default),
        "tenants": entry.mps_tenants and MpsTenants(entry.mps_tenants),
        "fractions_set_interval": entry.time_slice_interval and entry.time_slice_interval == "Any",
        "mps_servers": entry.mps_server and MpsServerScope(entry.mps_server),
        "shares": entry.shares,
        "memory_least": _bytes(entry.memory.least),
        "memory_step": _bytes(entry.memory.step),
        "guard": _guard(entry.memory_guard),
        "strict": entry.memory_limit and entry.memory_limit == "Strict",
        "mig": _mig_rules(entry.mig),
        "health": _health_rules(entry.health),
    }
    return replace(Rules(), **{key: value for key, value in fields.items() if value is not None})


def _health_rules(section: HealthSectionConfig) -> HealthRules:
    """A problem is called as its field, in camel case: ``gpuLost`` is ``gpu-lost``. Effects that it
    has anyhow are left out."""
    effects = {
        Problem(field.replace("_", "-")): Effect(word)
        for field, word in section.effects
        if word is not None
    }
    return HealthRules(
        tuple(sorted(item for item in effects.items() if item[1] is not PROBLEMS[item[0]].effect)),
        tuple(sorted((int(xid), Effect(effect)) for xid, effect in (section.xids or {}).items())),
        validation.seconds(section.recovery)
        if section.recovery
        else DEFAULT_HEALTH_RULES.recovery_seconds,
    )


def _default_strategy(entry: GpuRules) -> str | None:
    """What is named, else the usual one, unless it is not allowed."""
    usual = Rules().default_strategy
    if entry.default_strategy or not entry.strategies or usual in entry.strategies:
        return entry.default_strategy
    return entry.strategies[0]


def _guard(section: MemoryGuardConfig) -> GuardRules:
    usual = Rules().guard
    return GuardRules(
        GuardPolicy(section.policy) if section.policy else usual.policy,
        validation.seconds(section.grace) if section.grace else usual.grace_seconds,
    )


def _bytes(text: str | None) -> int | None:
    return quantity.rounded_up(text) if text else None
