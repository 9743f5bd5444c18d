"""Who uses a claim, and which processes keep it from being unprepared.

A claim is in use by:

* Whatever lives in a container that was given the claim, or may have been: of a container that
  lives and whose claims are not known, that is every container of the claim's pods.
* What computes on a GPU of the claim from elsewhere in these pods, unless its container was given
  another claim on that GPU.

Its pods are those of its record, and those whose containers were given something of it. The kubelet
prepares a claim for its first pod and says nothing of those that come later. What each source
covers:

``status.reservedFor`` of the claim
    Known before any container starts, and written into the record when the claim is prepared. Of
    pods that come later it is read again only where they are meant to come (claims that are not
    from templates) or where it matters who is on an MPS server. A PodGroup is one consumer without
    pods, so there it names nobody.
The OCI bundles of containers (``dra_driver.node.cgroups.containers``)
    Every container that was given a claim mounts a document of it, so the bundle tells: of pods
    that name a template's claim by ``resourceClaimName``, of members of PodGroups, of init
    containers and ephemeral ones, on every Kubernetes. Known when the container's cgroup appears,
    before its first instruction, and as long as it runs: also of a pod that ``reservedFor`` names
    no longer (deleted by force).
The kubelet's list of pod resources
    Where the bundles are nowhere to be found. It names a pod's claims from Kubernetes 1.34 on,
    leaves out init containers that have ended, and gives neither a pod's UID nor a container's id;
    so it tells which pods use a claim, some seconds late, and nothing of their containers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dra_driver.k8s.claims import ClaimUid, Pod
from dra_driver.k8s.pods import Container
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.processes import CgroupProcesses
from dra_driver.model.records import ClaimRecord


def records_with_pods(
    records: Sequence[ClaimRecord], containers: Iterable[Container]
) -> Sequence[ClaimRecord]:
    """*records* with the pods of those *containers* that were given their claims.

    A claim is used in its own namespace only, so whatever else a container mounts is not believed.
    An allocation is used in the namespace of whoever has it.
    """
    given: dict[ClaimUid, dict[Pod, str]] = {}
    for container in containers:
        for uid in container.claims:
            given.setdefault(uid, {})[container.pod] = container.namespace
    if not given:
        return records
    return tuple(
        _with(record, pods) if (pods := given.get(record.claim.uid)) else record
        for record in records
    )


def _with(record: ClaimRecord, given: dict[Pod, str]) -> ClaimRecord:
    known = {pod.uid for pod in record.pods}
    if record.allocation is not None and not known:
        record = record.used_in(min(given.values()))
    more = {
        pod
        for pod, namespace in given.items()
        if namespace == record.claim.namespace and pod.uid not in known
    }
    return replace(record, pods=tuple(sorted({*record.pods, *more}))) if more else record


def cgroups_given_claim(
    claim: ClaimUid, cgroups: Iterable[CgroupProcesses]
) -> tuple[CgroupProcesses, ...]:
    """Of the cgroups of the claim's pods, those of the containers that were given it."""
    return tuple(cgroup for cgroup in cgroups if cgroup.claims is None or claim in cgroup.claims)


def outside_gpu_processes(
    record: ClaimRecord, others: Sequence[ClaimRecord], cgroups: Iterable[CgroupProcesses]
) -> Mapping[GpuUuid, Mapping[int, Pod]]:
    """For each GPU of the claim, the processes of its pods that have no business there.

    *others*: the records of the claims that share a GPU with it. A claim with admin access alone
    brings nobody to compute.
    """
    elsewhere = [
        cgroup
        for cgroup in cgroups
        if cgroup.claims is not None and record.claim.uid not in cgroup.claims
    ]
    processes_by_gpu = {
        gpu: {
            pid: cgroup.pod
            for cgroup in elsewhere
            if not _given_another(gpu, cgroup, others)
            for pid in cgroup.pids
        }
        for gpu in sorted(_computed_on(record))
    }
    return {gpu: processes for gpu, processes in processes_by_gpu.items() if processes}


def _given_another(gpu: GpuUuid, cgroup: CgroupProcesses, others: Sequence[ClaimRecord]) -> bool:
    return any(
        other.claim.uid in (cgroup.claims or ()) and gpu in _computed_on(other) for other in others
    )


def _computed_on(record: ClaimRecord) -> frozenset[GpuUuid]:
    uuids = (holding.memory_of for holding in record.holdings if not holding.admin)
    return frozenset(gpu for gpu in uuids if gpu is not None)
