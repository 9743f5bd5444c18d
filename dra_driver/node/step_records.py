"""Steps in the ledger's file format."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar, assert_never

from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.mps import Space, SpaceName
from dra_driver.model.steps import (
    ComputeMode,
    EndMps,
    Interval,
    LimitMemory,
    MakeDeviceNodes,
    PodLimit,
    ServeMps,
    SetComputeMode,
    SetTimeSlice,
    Step,
)
from dra_driver.node.mps import wire

STEP_KEYS: Final = ("steps", "sharing", "serving")
"""Where the steps stand that version 1, 2 and 3 of the format brought."""


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
            return STEP_KEYS[1]
        case SetComputeMode() | ServeMps() | EndMps():
            return STEP_KEYS[2]
        case _:
            assert_never(step)


def readable_from(steps: Iterable[Step]) -> int:
    """The oldest version that can read a record with *steps* and take its claim back.

    What is set for MPS outlives a claim that is taken back without knowing of it: the compute mode
    of a GPU, and a server.
    """
    return 3 if any(step_key(step) == STEP_KEYS[2] for step in steps) else 1


def encode_step(step: Step) -> dict[str, Any]:
    """The document of *step*."""
    match step:
        case MakeDeviceNodes(minors=minors):
            return {"step": "MakeDeviceNodes", "minors": list(minors)}
        case SetTimeSlice(gpu=gpu, interval=interval, before=before):
            return {"step": "SetTimeSlice", "gpu": gpu, "interval": interval, "before": before}
        case LimitMemory(gpu=gpu, pods=pods, strict=strict):
            limits = [{"pod": one.pod, "memoryBytes": one.memory_bytes} for one in pods]
            return {"step": "LimitMemory", "gpu": gpu, "pods": limits, "strict": strict}
        case SetComputeMode(gpu=gpu, mode=mode, before=before):
            return {"step": "SetComputeMode", "gpu": gpu, "mode": mode, "before": before}
        case ServeMps(space=space):
            return {"step": "ServeMps", "space": wire.encode(space)}
        case EndMps(space=name):
            return {"step": "EndMps", "space": name}
        case _:
            assert_never(step)


def decode_step(document: Mapping[str, Any]) -> Step:
    """The step in *document*. UnreadableRecord, KeyError, TypeError or ValueError: it is none."""
    match document["step"]:
        case "MakeDeviceNodes":
            return MakeDeviceNodes(tuple(int(minor) for minor in document["minors"]))
        case "SetTimeSlice":
            interval, before = Interval(document["interval"]), document["before"]
            return SetTimeSlice(_gpu(document), interval, _unless_none(Interval, before))
        case "LimitMemory":
            pods = tuple(
                PodLimit(PodUid(text(one["pod"])), _unless_none(int, one["memoryBytes"]))
                for one in document["pods"]
            )
            return LimitMemory(_gpu(document), pods, bool(document["strict"]))
        case "SetComputeMode":
            mode, before = ComputeMode(document["mode"]), document["before"]
            return SetComputeMode(_gpu(document), mode, _unless_none(ComputeMode, before))
        case "ServeMps":
            return ServeMps(_space(document["space"]))
        case "EndMps":
            return EndMps(SpaceName(text(document["space"])))
        case other:
            raise UnreadableRecord(f"its step {other!r} is unknown")


def _gpu(document: Mapping[str, Any]) -> GpuUuid:
    return GpuUuid(text(document["gpu"]))


def _space(document: Any) -> Space:
    try:
        return wire.decode(Space, document, "its space")
    except NodeError as e:
        raise UnreadableRecord(f"it is damaged ({e})") from e


_Value = TypeVar("_Value")


def _unless_none(kind: Callable[[Any], _Value], value: Any) -> _Value | None:
    return None if value is None else kind(value)
