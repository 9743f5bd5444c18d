"""Who may compute on a GPU that is shared by MPS: its server alone, where no one else has a claim.

In EXCLUSIVE_PROCESS a program that does not find its server fails instead of running without
limits. It also bars every other process, a second server too: so it is set only while one claim
holds the whole GPU under MPS, or where the node's profile allows MPS alone and did so for every
claim that is there.
"""

from collections.abc import Iterable, Iterator, Sequence

from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.profiles import Strategy
from dra_driver.model.steps import ComputeMode, ServeMps, SetComputeMode
from dra_driver.plan.mps import Grant
from dra_driver.plan.sharing import ByMps


def mode_steps(grants: Sequence[Grant], others: Sequence[Record]) -> tuple[SetComputeMode, ...]:
    """The GPUs that are the server's alone."""
    mine = {frozenset(grant.space.gpus) for grant in grants if grant.space is not None}
    found = set()
    for grant in grants:
        gpu = grant.device.gpu
        if grant.space is None or sum(gpu.uuid in server for server in mine) > 1:
            continue
        here = (record for record in others if _computes(gpu, record))
        only = grant.device.rules.strategies == (Strategy.MPS,)
        if grant.amount.whole or (only and all(_alone(gpu.uuid, record) for record in here)):
            found.add(gpu.uuid)
    mode = ComputeMode.EXCLUSIVE_PROCESS
    return tuple(SetComputeMode(gpu, mode) for gpu in sorted(found))


def barred(grants: Iterable[Grant], others: Sequence[Record]) -> Iterator[str]:
    """The GPUs on which another claim's server is alone, and this claim cannot be."""
    for grant in grants:
        gpu = grant.device.gpu
        space = grant.space
        holders = [record.claim for record in others if _alone(gpu.uuid, record)]
        same = space is not None and _servers(gpu.uuid, others) <= {frozenset(space.gpus)}
        if holders and not same and not grant.allocation.admin:
            by_mps = isinstance(grant.sharing, ByMps)
            why = "a second MPS server" if by_mps else "a process that takes turns"
            yield (
                f"{gpu.name} is in compute mode EXCLUSIVE_PROCESS for the MPS server of claim "
                f"{', '.join(f'{holder} (UID {holder.uid})' for holder in holders)}, which bars "
                f"{why}"
            )


def _alone(gpu: GpuUuid, record: Record) -> bool:
    return any(isinstance(step, SetComputeMode) and step.gpu == gpu for step in record.steps)


def _computes(gpu: Gpu, record: Record) -> bool:
    here = (gpu.uuid, gpu.name)
    return any(holding.of_gpu in here and not holding.admin for holding in record.holdings)


def _servers(gpu: GpuUuid, records: Iterable[Record]) -> set[frozenset[GpuUuid]]:
    """The MPS servers on *gpu*, each by the GPUs that it is over."""
    steps = (step for record in records for step in record.steps)
    return {
        frozenset(step.space.gpus)
        for step in steps
        if isinstance(step, ServeMps) and gpu in step.space.gpus
    }
