"""Claims, read from the API server: live, or as it has them in memory where that will do.

A copy kept here might be older than the allocation, and so may be what the API server has in
memory: nothing is prepared or taken back by that.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dra_driver.errors import ClaimError, NotFound
from dra_driver.kubeletplugin.claims import Claim, ClaimRef, ClaimUid, read_claim
from dra_driver.kubeletplugin.resource_api import ResourceApi

Document = dict[str, Any]


class ClaimReader:
    """Reads what claims say to one driver. All methods raise ClusterError where they cannot."""

    def __init__(self, resources: ResourceApi, driver: str, pool: str) -> None:
        """*pool*: the name of this node's pool."""
        self._resources = resources
        self._driver = driver
        self._pool = pool

    def read(self, ref: ClaimRef) -> Claim:
        """The claim that *ref* means, as it is at this moment.

        ClaimError: it does not exist, got replaced, is not allocated, or nothing in it is ours.
        """
        return self._read(ref, self._resources.claim)

    def glance(self, ref: ClaimRef) -> Claim:
        """The claim as the API server has it in memory, for those who look at it again and again.

        It may be a moment old. A ClaimError is as sure as that of ``read``: it is asked for then.
        """
        try:
            return self._read(ref, self._resources.claim_in_memory)
        except ClaimError:
            return self.read(ref)

    def _read(self, ref: ClaimRef, ask: Callable[[str, str], Document]) -> Claim:
        try:
            document = ask(ref.namespace, ref.name)
        except NotFound as e:
            raise ClaimError(
                f"claim {ref} (UID {ref.uid}) does not exist any more: "
                "the pod that used it has to go or be created again"
            ) from e
        return read_claim(document, ref, self._driver)

    def exists(self, ref: ClaimRef) -> bool:
        """Whether that very claim still holds devices of this node.

        True may be a moment old. False is sure: it is gone, replaced, deallocated, or allocated
        elsewhere. Where it cannot be known a ClusterError says why; nothing may be taken from the
        claim's pod then.
        """
        try:
            return self._is_here(self.glance(ref)) or self._is_here(self.read(ref))
        except ClaimError:
            return False

    def _is_here(self, claim: Claim) -> bool:
        return any(allocation.pool == self._pool for allocation in claim.allocations)

    def is_deleted(self, ref: ClaimRef) -> bool:
        """Whether that very claim is gone for good: one that is merely deallocated is not."""
        try:
            document = self._resources.claim(ref.namespace, ref.name)
        except NotFound:
            return True
        return bool(document["metadata"]["uid"] != ref.uid)

    def find_by_uid(self, uid: ClaimUid) -> Claim | None:
        """The claim with *uid*, looked for among all claims of the cluster; None: there is none.

        For a record whose name is lost. ClaimError: it is there, but holds nothing of ours.
        """
        document = self._resources.claim_with_uid(uid)
        if document is None:
            return None
        found = document["metadata"]
        return read_claim(document, ClaimRef(found["namespace"], found["name"], uid), self._driver)

    def allocated(self) -> frozenset[str]:
        """The devices of this node that claims were allocated, whether they were prepared or not;
        without those that only look on. Looked for among all claims of the cluster."""
        return frozenset(
            result["device"]
            for claim in self._resources.claims()
            for result in _results(claim)
            if (result.get("driver"), result.get("pool")) == (self._driver, self._pool)
            and not result.get("adminAccess")
        )


def _results(claim: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return (allocation.get("devices") or {}).get("results") or ()
