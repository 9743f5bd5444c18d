"""What no NodeProfile may say, although each of its values is of the right type.

The rules are tables where they can be: the CRD's rules in CEL are written from the same ones
(``hack/crd.py``), so that the API server refuses what a node would refuse.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, assert_never

from api.node_profile import GpuRules
from api.strict import show_value
from dra_driver.base.frozen import frozen
from dra_driver.k8s import quantity
from dra_driver.model.profiles import SharingStrategy

CUDA_CONTEXT_BYTES = 256 * 1024 * 1024
"""What a process takes of a GPU before it allocates anything: 200 to 500 MiB, by board, driver and
the kernels that it loads. Less cannot be used."""

MIB = 1024 * 1024
LONGEST_GRACE_HOURS = 24
LONGEST_RECOVERY_HOURS = 24
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

EMPTY_SELECT = "is empty; say which GPUs are meant, or leave it out for all"
TOO_LITTLE = f"is less than a CUDA context takes; write {CUDA_CONTEXT_BYTES // MIB}Mi or more"
NO_STEP = "is no multiple of 1Mi; write for example 256Mi"
TOO_LONG = "is more than a day; policy Warn never ends a process"
RECOVERS_TOO_LATE = "is more than a day; write 24h or less"


@frozen
class Condition:
    """A field of an entry is *given*, or has a value: it *is* this one, is *over* it, or is a list
    that *lacks* it.

    A field that is not given fulfils none of these; with ``holds=False`` all that does not.
    """

    field: str
    relation: Literal["given", "is", "over", "lacks"]
    value: Any = None
    holds: bool = True

    def fulfilled(self, entry: Mapping[str, Any]) -> bool:
        value = given(entry, self.field)
        if value is None:
            return not self.holds
        match self.relation:
            case "given":
                return self.holds
            case "is":
                return (value == self.value) is self.holds
            case "over":
                return (value > self.value) is self.holds
            case "lacks":
                return (self.value not in value) is self.holds
            case _:
                assert_never(self.relation)


@frozen
class NoEffect:
    """These fields have no effect under all of these conditions; *text* says what to do then."""

    fields: tuple[str, ...]
    when: tuple[Condition, ...]
    text: str


_NOT_OFFERED = Condition("include", "is", False)
_WHOLE = Condition("fractions", "is", "Never")
_DIVIDED = Condition("replicas", "over", 1)
_UNDIVIDED = Condition("replicas", "over", 1, holds=False)
_PARTITIONS_UNDIVIDED = Condition("mig.replicas", "given", holds=False)

# Of the rules that name a field, or what it is part of, the first one that applies is told.
NO_EFFECT = (
    NoEffect(
        tuple(
            field.alias or name
            for name, field in GpuRules.model_fields.items()
            if name not in ("select", "include")
        ),
        (_NOT_OFFERED,),
        "has no effect with include: false; remove one of them",
    ),
    NoEffect(
        (
            *("replicas", "rename", "failRequestsGreaterThanOne", "timeSliceInterval", "shares"),
            *("memory", "memoryGuard", "memoryLimit", "mig.replicas"),
        ),
        (_WHOLE,),
        "has no effect with fractions: Never; remove one of them",
    ),
    NoEffect(
        ("rename",),
        (Condition("rename", "is", True), _UNDIVIDED, _PARTITIONS_UNDIVIDED),
        "has no effect without replicas; write how many, from 2 on",
    ),
    NoEffect(
        ("shares",), (_DIVIDED,), "has no effect with replicas, which are the shares; remove it"
    ),
    NoEffect(
        ("timeSliceInterval",),
        (_DIVIDED,),
        "has no effect with replicas, each of which may set the interval; remove it",
    ),
    NoEffect(
        ("mpsTenants", "mpsServer"),
        (Condition("strategies", "lacks", SharingStrategy.MPS.value),),
        "has no effect where MPS is not among strategies; add it, or remove this",
    ),
    NoEffect(
        ("timeSliceInterval",),
        (Condition("strategies", "lacks", SharingStrategy.TIME_SLICING.value),),
        "has no effect where TimeSlicing is not among strategies; add it, or remove this",
    ),
    NoEffect(
        ("mig.profiles",),
        (Condition("mig.mode", "is", "Dynamic", holds=False),),
        "has no effect without mode: Dynamic; add it, or remove this",
    ),
    NoEffect(
        ("mig.layout",),
        (Condition("mig.mode", "is", "Dynamic"),),
        "has no effect with mode: Dynamic, which creates what claims need; remove one of them",
    ),
    NoEffect(
        ("mig.replicas",),
        (Condition("memoryLimit", "is", "Strict"),),
        "has no effect with memoryLimit: Strict, since the GPU's driver limits no part of a "
        "partition; remove one of them",
    ),
)


def problems(entries: Sequence[GpuRules]) -> list[str]:
    """What is wrong with *entries*, the values of which are of the right type, with field paths."""
    everything = next(
        (number for number, entry in enumerate(entries) if entry.select is None), len(entries)
    )
    return [
        *(
            f"spec.gpus[{number}].{problem}"
            for number, entry in enumerate(entries)
            for problem in _problems(entry.model_dump(by_alias=True, exclude_unset=True))
        ),
        *(
            f"spec.gpus[{number}]: is never reached, because spec.gpus[{everything}] has no select "
            "and holds for every GPU; put that last"
            for number in range(everything + 1, len(entries))
        ),
    ]


def seconds(duration: str) -> float:
    """``1m30s`` is 90."""
    parts = re.findall(r"([0-9.]+)(ms|s|m|h)", duration)
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def given(entry: Mapping[str, Any], field: str) -> Any:
    """What *entry* says of *field*, ``mig.mode``; None: nothing."""
    value: Any = entry
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _problems(entry: Mapping[str, Any]) -> Iterator[str]:
    if entry.get("select") == {}:
        yield f"select: {EMPTY_SELECT}"
    yield from _without_effect(entry)
    strategies, strategy = entry.get("strategies"), entry.get("defaultStrategy")
    if strategies and strategy and strategy not in strategies:
        yield f"defaultStrategy: {strategy} is not among strategies: {', '.join(strategies)}"
    least, step = given(entry, "memory.least"), given(entry, "memory.step")
    if least and quantity.rounded_up(least) < CUDA_CONTEXT_BYTES:
        yield f"memory.least: {least} {TOO_LITTLE}"
    if step and (quantity.parse(step) % MIB or not quantity.parse(step)):
        yield f"memory.step: {step} {NO_STEP}"
    grace = given(entry, "memoryGuard.grace")
    if grace and seconds(grace) > LONGEST_GRACE_HOURS * 3600:
        yield f"memoryGuard.grace: {show_value(grace)} {TOO_LONG}"
    recovery = given(entry, "health.recovery")
    if recovery and seconds(recovery) > LONGEST_RECOVERY_HOURS * 3600:
        yield f"health.recovery: {show_value(recovery)} {RECOVERS_TOO_LATE}"


def _without_effect(entry: Mapping[str, Any]) -> Iterator[str]:
    named: set[str] = set()
    for rule in NO_EFFECT:
        for field in rule.fields:
            is_named = not named.isdisjoint((field, field.partition(".")[0]))
            if is_named or given(entry, field) is None:
                continue
            if all(condition.fulfilled(entry) for condition in rule.when):
                named.add(field)
                yield f"{field}: {rule.text}"
