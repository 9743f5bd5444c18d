"""Steps in the ledger's file format."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar, assert_never

from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.mig import PartitionKey
from dra_driver.model.mps import Space, SpaceName
from dra_driver.model.steps import (
    ComputeMode,
    CutPartition,
    EndMps,
    Interval,
    LimitMemory,
    MakeDeviceNodes,
    PodLimit,
    RemovePartition,
    ServeMps,
    SetComputeMode,
    SetMigMode,
    SetTimeSlice,
    Setting,
    Step,
)
from dra_driver.node.mps import wire

STEP_KEYS: Final = ("steps", "partitions", "sharing", "serving")
"""Where the steps stand that version 1, 4, 2 and 3 of the format brought: in the order in which
they are carried out."""


class UnreadableRecord(ValueError):
    """This is no record, or one of a release that this one cannot read."""


def text(value: Any) -> str:
    """*value*, if it is a string."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def step_key(step: Step) -> str:
    """Below which of the ``STEP_KEYS`` it is written."""
    match step:
        case MakeDeviceNodes():
            return STEP_KEYS[0]
        case SetTimeSlice() | LimitMemory():
            return STEP_KEYS[2]
        case SetComputeMode() | ServeMps() | EndMps():
            return STEP_KEYS[3]
        case SetMigMode() | CutPartition() | RemovePartition():
            return STEP_KEYS[1]
        case _:
            assert_never(step)


def readable_from(steps: Iterable[Step]) -> int:
    """The oldest version that can read a record with *steps* and take its claim back.

    What is set for MPS outlives a claim that is taken back without knowing of it: the compute mode
    of a GPU, and a server. So do a partition and the MIG mode.
    """
    keys = {step_key(step) for step in steps}
    return 4 if STEP_KEYS[1] in keys else 3 if STEP_KEYS[3] in keys else 1


def encode_step(step: Step) -> dict[str, Any]:
    """The document of *step*."""
    match step:
        case MakeDeviceNodes(minors=minors):
            return {"step": "MakeDeviceNodes", "minors": list(minors)}
        case SetTimeSlice() | SetComputeMode() | SetMigMode():
            return _encode_setting(step)
        case LimitMemory(gpu=gpu, pods=pods, strict=strict):
            limits = [{"pod": one.pod, "memoryBytes": one.memory_bytes} for one in pods]
            return {"step": "LimitMemory", "gpu": gpu, "pods": limits, "strict": strict}
        case CutPartition(gpu=gpu, key=key):
            return {"step": "CutPartition", "gpu": gpu, "partition": encode_key(key)}
        case RemovePartition(gpu=gpu, key=key, uuid=uuid, unless=unless):
            document = {"step": "RemovePartition", "gpu": gpu, "partition": encode_key(key)}
            return document | {"uuid": uuid, "unless": sorted(unless)}
        case ServeMps(space=space):
            return {"step": "ServeMps", "space": wire.encode(space)}
        case EndMps(space=name):
            return {"step": "EndMps", "space": name}
        case _:
            assert_never(step)


def decode_step(document: Mapping[str, Any]) -> Step:
    """The step in *document*. UnreadableRecord, KeyError, TypeError or ValueError: it is none."""
    kind = text(document["step"])
    if kind not in _DECODERS:
        raise UnreadableRecord(f"its step {kind!r} is unknown")
    return _DECODERS[kind](document)


def _encode_setting(step: Setting) -> dict[str, Any]:
    match step:
        case SetTimeSlice(gpu=gpu, interval=interval, before=before):
            return {"step": "SetTimeSlice", "gpu": gpu, "interval": interval, "before": before}
        case SetComputeMode(gpu=gpu, mode=mode, before=before):
            return {"step": "SetComputeMode", "gpu": gpu, "mode": mode, "before": before}
        case SetMigMode(gpu=gpu, on=on, before=before):
            return {"step": "SetMigMode", "gpu": gpu, "on": on, "before": before}
        case _:
            assert_never(step)


def _time_slice(document: Mapping[str, Any]) -> Step:
    interval, before = Interval(document["interval"]), document["before"]
    return SetTimeSlice(_gpu(document), interval, _unless_none(Interval, before))


def _memory(document: Mapping[str, Any]) -> Step:
    pods = tuple(
        PodLimit(PodUid(text(one["pod"])), _unless_none(int, one["memoryBytes"]))
        for one in document["pods"]
    )
    return LimitMemory(_gpu(document), pods, bool(document["strict"]))


def _compute_mode(document: Mapping[str, Any]) -> Step:
    mode, before = ComputeMode(document["mode"]), document["before"]
    return SetComputeMode(_gpu(document), mode, _unless_none(ComputeMode, before))


def _mig_mode(document: Mapping[str, Any]) -> Step:
    before = _unless_none(bool, document["before"])
    return SetMigMode(_gpu(document), bool(document["on"]), before)


def encode_key(key: PartitionKey) -> dict[str, int]:
    """The document of *key*."""
    return {
        "profile": key.profile_id,
        "start": key.start,
        "size": key.size,
        "slices": key.slices,
    }


def decode_key(document: Mapping[str, Any]) -> PartitionKey:
    """The key in *document*. KeyError, TypeError or ValueError: it is none."""
    return PartitionKey(*(int(document[one]) for one in ("profile", "start", "size", "slices")))


def _gpu(document: Mapping[str, Any]) -> GpuUuid:
    return _uuid(document["gpu"])


def _uuid(value: Any) -> GpuUuid:
    return GpuUuid(text(value))


def _space(document: Any) -> Space:
    try:
        return wire.decode(Space, document, "its space")
    except NodeError as e:
        raise UnreadableRecord(f"it is damaged ({e})") from e


_Value = TypeVar("_Value")


def _unless_none(kind: Callable[[Any], _Value], value: Any) -> _Value | None:
    return None if value is None else kind(value)


_DECODERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Step]]] = {
    "MakeDeviceNodes": lambda one: MakeDeviceNodes(tuple(int(minor) for minor in one["minors"])),
    "SetTimeSlice": _time_slice,
    "LimitMemory": _memory,
    "SetComputeMode": _compute_mode,
    "SetMigMode": _mig_mode,
    "CutPartition": lambda one: CutPartition(_gpu(one), decode_key(one["partition"])),
    "RemovePartition": lambda one: RemovePartition(
        _gpu(one),
        decode_key(one["partition"]),
        _unless_none(_uuid, one.get("uuid")),
        frozenset(map(_uuid, one.get("unless", ()))),
    ),
    "ServeMps": lambda one: ServeMps(_space(one["space"])),
    "EndMps": lambda one: EndMps(SpaceName(text(one["space"]))),
}
