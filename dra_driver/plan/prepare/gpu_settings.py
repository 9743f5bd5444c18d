"""Settings of a GPU that claims change, restored with the last claim that needs them.

What a GPU had before the first claim is written into the record of each. So it does not matter in
which order they go, or what happens in between.

The compute mode says who may compute on a GPU. Under MPS that is its server alone, where no one
else has a claim: in EXCLUSIVE_PROCESS a program that does not find its server fails instead of
running without limits. It also bars every other process, a second server too: so it is set only
while one claim holds the whole GPU under MPS, or where the node's profile allows MPS alone and did
so for every claim that is there, and one server serves them all. A claim that could not be served
beside a server that is alone opens the GPU again: the mode is a further guard, and no reason to
refuse anybody.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import Gpu, GpuUuid
from dra_driver.model.mps import PROTOCOL_3_DRIVER_VERSION, MpsNamespace
from dra_driver.model.profiles import SharingStrategy
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import (
    ComputeMode,
    GpuSetting,
    SetComputeMode,
    SetMigMode,
    SetTimeSlice,
    Step,
    TimeSliceInterval,
)
from dra_driver.plan.prepare.sharing import DeviceGrant


@frozen
class _ServerKey:
    gpus: frozenset[GpuUuid]
    tenant: str  # empty: everybody


def compute_mode_steps(
    grants: Sequence[DeviceGrant], others: Sequence[ClaimRecord]
) -> tuple[SetComputeMode, ...]:
    """The GPUs that are the server's alone from now on, and those that are no longer."""
    grants = [g for g in grants if not g.allocation.admin and g.device.partition is None]
    modes: dict[GpuUuid, ComputeMode] = {}
    for grant in grants:
        gpu = grant.device.gpu
        sharers = [record for record in others if _computes(gpu, record)]
        own_servers = _servers(gpu, (g.namespace for g in grants if g.namespace is not None))
        server = _server(gpu, grant.namespace) if grant.namespace else None
        other_servers = _servers(
            gpu, (namespace for record in sharers for namespace in record.namespaces)
        )
        if server is not None and _alone_with(
            grant, len(own_servers), other_servers <= {server}, sharers
        ):
            modes[gpu.uuid] = ComputeMode.EXCLUSIVE_PROCESS
        elif _is_closed(gpu.uuid, sharers) and other_servers != {server}:
            modes[gpu.uuid] = ComputeMode.DEFAULT
    return tuple(SetComputeMode(gpu, mode) for gpu, mode in sorted(modes.items()))


def _alone_with(grant: DeviceGrant, own: int, same: bool, sharers: Sequence[ClaimRecord]) -> bool:
    """Whether one server is all that will be on the GPU. *own*: how many servers the claim has
    there; *same*: all *sharers* of the GPU are on it."""
    if own > 1:
        return False
    if grant.amount.whole:
        return True
    modes = {_mode(grant.device.gpu.uuid, record) for record in sharers}
    only = grant.device.rules.strategies == (SharingStrategy.MPS,)
    return only and same and modes <= {ComputeMode.EXCLUSIVE_PROCESS}


def _is_closed(gpu: GpuUuid, records: Iterable[ClaimRecord]) -> bool:
    return any(_mode(gpu, record) is ComputeMode.EXCLUSIVE_PROCESS for record in records)


def _mode(gpu: GpuUuid, record: ClaimRecord) -> ComputeMode | None:
    steps = (step for step in record.steps if isinstance(step, SetComputeMode))
    return next((step.mode for step in steps if step.gpu == gpu), None)


def _computes(gpu: Gpu, record: ClaimRecord) -> bool:
    return any(holding.gpu == gpu.uuid and not holding.admin for holding in record.holdings)


def _servers(gpu: Gpu, namespaces: Iterable[MpsNamespace]) -> set[_ServerKey]:
    """The MPS servers on *gpu*."""
    return {_server(gpu, namespace) for namespace in namespaces if gpu.uuid in namespace.gpus}


def _server(gpu: Gpu, namespace: MpsNamespace) -> _ServerKey:
    """With protocol 3 there is one for everybody."""
    old = gpu.driver_version.major < PROTOCOL_3_DRIVER_VERSION
    return _ServerKey(frozenset(namespace.gpus), namespace.tenant if old else "")


_Key = tuple[type[GpuSetting], GpuUuid]


def with_inherited_values(steps: Iterable[Step], others: Iterable[ClaimRecord]) -> tuple[Step, ...]:
    """*steps*, with what *others* found before them, where they have the same kind of setting.

    A setting is made even where it should hold already: a claim that is just being given back may
    have restored it.
    """
    set_by_others = _set_by(others)

    def inherited(step: Step) -> Step:
        match step:
            case SetTimeSlice() | SetComputeMode() | SetMigMode() if _key(step) in set_by_others:
                return _with_previous(step, set_by_others[_key(step)].before)
            case _:
                return step

    return tuple(map(inherited, steps))


def settings_to_read(
    steps: Iterable[Step], others: Iterable[ClaimRecord]
) -> tuple[GpuSetting, ...]:
    """The settings whose present value has to be looked up before *steps* are recorded.

    Where other claims have set one, what the GPU says now is theirs and not what was there before.
    """
    set_by_others = _set_by(others)
    return tuple(step for step in _settings(steps) if _key(step) not in set_by_others)


def with_previous_values(
    steps: Iterable[Step], current: Mapping[GpuSetting, int | None]
) -> tuple[Step, ...]:
    """*steps*, with the *current* values of those that had to be looked up."""
    return tuple(
        _with_previous(step, current[step])
        if isinstance(step, GpuSetting) and step in current
        else step
        for step in steps
    )


def restore_steps(record: ClaimRecord, others: Iterable[ClaimRecord]) -> tuple[GpuSetting, ...]:
    """What brings back what was there before *record*'s claim, newest first.

    Nothing, as long as one of *others* has the same kind of setting on the same GPU.
    """
    needed = _set_by(others)
    steps = reversed(tuple(_settings(record.steps)))
    return tuple(_back(step) for step in steps if _key(step) not in needed)


def _back(step: GpuSetting) -> GpuSetting:
    """A GPU that does not say is taken to have been as the driver sets it up."""
    match step:
        case SetTimeSlice(gpu=gpu, before=before):
            return SetTimeSlice(gpu, TimeSliceInterval.DEFAULT if before is None else before)
        case SetComputeMode(gpu=gpu, before=before):
            return SetComputeMode(gpu, ComputeMode.DEFAULT if before is None else before)
        case SetMigMode(gpu=gpu, on=on, before=before):
            # Found on, and turned off for a GPU as a whole: the next partition turns it on.
            return SetMigMode(gpu, on and bool(before))
        case _:
            assert_never(step)


def _with_previous(step: GpuSetting, before: int | None) -> GpuSetting:
    match step:
        case SetTimeSlice():
            return replace(step, before=None if before is None else TimeSliceInterval(before))
        case SetComputeMode():
            return replace(step, before=None if before is None else ComputeMode(before))
        case SetMigMode():
            return replace(step, before=None if before is None else bool(before))
        case _:
            assert_never(step)


def _set_by(records: Iterable[ClaimRecord]) -> dict[_Key, GpuSetting]:
    return {_key(step): step for record in records for step in _settings(record.steps)}


def _key(step: GpuSetting) -> _Key:
    return type(step), step.gpu


def _settings(steps: Iterable[Step]) -> Iterator[GpuSetting]:
    return (step for step in steps if isinstance(step, GpuSetting))
