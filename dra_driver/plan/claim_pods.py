"""Who uses a claim: its record's pods, with those whose containers were given something of it.

The kubelet prepares a claim for its first pod and says nothing of those that come later. What each
source covers:

``status.reservedFor`` of the claim
    Known before any container starts, and written into the record when the claim is prepared. Of
    pods that come later it is read again only where they are meant to come (claims that are not
    from templates) or where it matters who is on an MPS server. A PodGroup is one consumer without
    pods, so there it names nobody.
The OCI bundles of containers (``dra_driver.node.containers``)
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

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dra_driver.kubeletplugin.claims import ClaimUid, Pod
from dra_driver.kubeletplugin.pods import Container
from dra_driver.model.holdings import Record


def with_pods(records: Sequence[Record], containers: Iterable[Container]) -> Sequence[Record]:
    """*records* with the pods of those *containers* that were given their claims.

    A claim is used in its own namespace only, so whatever else a container mounts is not believed.
    """
    given: dict[ClaimUid, dict[Pod, str]] = {}
    for container in containers:
        for uid in container.claims:
            given.setdefault(uid, {})[container.pod] = container.namespace
    if not given:
        return records
    return tuple(
        _with(record, its) if (its := given.get(record.claim.uid)) else record for record in records
    )


def _with(record: Record, given: dict[Pod, str]) -> Record:
    known = {pod.uid for pod in record.pods}
    more = {
        pod
        for pod, namespace in given.items()
        if namespace == record.claim.namespace and pod.uid not in known
    }
    return replace(record, pods=tuple(sorted({*record.pods, *more}))) if more else record
