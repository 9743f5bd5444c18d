"""Who may compute on a GPU that is shared by MPS: its server alone, where no one else has a claim.

In EXCLUSIVE_PROCESS a program that does not find its server fails instead of running without
limits. It also bars every other process, a second server too: so it is set only while one claim
holds the whole GPU under MPS, or where the node's profile allows MPS alone and did so for every
claim that is there, and one server serves them all. A claim that could not be served beside a
server that is alone opens the GPU again: the mode is a further guard, and no reason to refuse
anybody.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.mps import PROTOCOL_3_FROM, Space
from dra_driver.model.profiles import Strategy
from dra_driver.model.steps import ComputeMode, SetComputeMode
from dra_driver.plan.mps import Grant


@dataclass(frozen=True, slots=True)
class _Server:
    gpus: frozenset[GpuUuid]
    tenant: str  # empty: everybody


def mode_steps(grants: Sequence[Grant], others: Sequence[Record]) -> tuple[SetComputeMode, ...]:
    """The GPUs that are the server's alone from now on, and those that are no longer."""
    grants = [g for g in grants if not g.allocation.admin and g.device.partition is None]
    found: dict[GpuUuid, ComputeMode] = {}
    for grant in grants:
        gpu = grant.device.gpu
        here = [record for record in others if _computes(gpu, record)]
        mine = _servers(gpu, (g.space for g in grants if g.space is not None))
        server = _server(gpu, grant.space) if grant.space else None
        there = _servers(gpu, (space for record in here for space in record.spaces))
        if server is not None and _alone_with(grant, len(mine), there <= {server}, here):
            found[gpu.uuid] = ComputeMode.EXCLUSIVE_PROCESS
        elif _is_closed(gpu.uuid, here) and there != {server}:
            found[gpu.uuid] = ComputeMode.DEFAULT
    return tuple(SetComputeMode(gpu, mode) for gpu, mode in sorted(found.items()))


def _alone_with(grant: Grant, mine: int, same: bool, here: Sequence[Record]) -> bool:
    """Whether one server is all that will be on the GPU. *mine*: how many the claim has there;
    *same*: all others there are on it."""
    if mine > 1:
        return False
    if grant.amount.whole:
        return True
    modes = {_mode(grant.device.gpu.uuid, record) for record in here}
    only = grant.device.rules.strategies == (Strategy.MPS,)
    return only and same and modes <= {ComputeMode.EXCLUSIVE_PROCESS}


def _is_closed(gpu: GpuUuid, records: Iterable[Record]) -> bool:
    return any(_mode(gpu, record) is ComputeMode.EXCLUSIVE_PROCESS for record in records)


def _mode(gpu: GpuUuid, record: Record) -> ComputeMode | None:
    steps = (step for step in record.steps if isinstance(step, SetComputeMode))
    return next((step.mode for step in steps if step.gpu == gpu), None)


def _computes(gpu: Gpu, record: Record) -> bool:
    here = (gpu.uuid, gpu.name)
    return any(holding.of_gpu in here and not holding.admin for holding in record.holdings)


def _servers(gpu: Gpu, spaces: Iterable[Space]) -> set[_Server]:
    """The MPS servers on *gpu*."""
    return {_server(gpu, space) for space in spaces if gpu.uuid in space.gpus}


def _server(gpu: Gpu, space: Space) -> _Server:
    """With protocol 3 there is one for everybody."""
    old = gpu.driver_version.major < PROTOCOL_3_FROM
    return _Server(frozenset(space.gpus), space.tenant if old else "")
