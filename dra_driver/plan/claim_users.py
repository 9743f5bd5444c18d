"""Which processes keep a claim from being given back.

* Whatever lives in a container that was given the claim, or may have been: of a container that
  lives and whose claims cannot be told, that is every container of the claim's pods.
* What computes on a GPU of the claim from elsewhere in these pods, unless its container was given
  another claim on that GPU.
"""

from collections.abc import Iterable, Mapping, Sequence

from dra_driver.kubeletplugin.claims import ClaimUid, Pod
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.processes import CgroupProcesses


def in_given_containers(
    claim: ClaimUid, cgroups: Iterable[CgroupProcesses]
) -> tuple[CgroupProcesses, ...]:
    """Of the cgroups of the claim's pods, those of the containers that were given it."""
    return tuple(one for one in cgroups if one.claims is None or claim in one.claims)


def must_not_compute(
    record: Record, others: Sequence[Record], cgroups: Iterable[CgroupProcesses]
) -> Mapping[GpuUuid, Mapping[int, Pod]]:
    """For each GPU of the claim, the processes of its pods that have no business there.

    *others*: the records of the claims that share a GPU with it. A claim that only looks on brings
    nobody to compute.
    """
    elsewhere = [
        one for one in cgroups if one.claims is not None and record.claim.uid not in one.claims
    ]
    found = {
        gpu: {
            pid: one.pod
            for one in elsewhere
            if not _given_another(gpu, one, others)
            for pid in one.pids
        }
        for gpu in sorted(_computed_on(record))
    }
    return {gpu: processes for gpu, processes in found.items() if processes}


def _given_another(gpu: GpuUuid, cgroup: CgroupProcesses, others: Sequence[Record]) -> bool:
    return any(
        other.claim.uid in (cgroup.claims or ()) and gpu in _computed_on(other) for other in others
    )


def _computed_on(record: Record) -> frozenset[GpuUuid]:
    found = (holding.memory_of for holding in record.holdings if not holding.admin)
    return frozenset(gpu for gpu in found if gpu is not None)
