"""Processes that use claims, as a test says; a claim that nobody uses is free."""

from collections.abc import Iterable

from dra_driver.base.errors import ClaimInUse, NodeError
from dra_driver.k8s.claims import ClaimUid, Pod
from dra_driver.model.records import ClaimRecord
from dra_driver.plugin.claims.in_use import InUseCheck


class FakeUsers(InUseCheck):
    """Which pods have a process that uses which claim."""

    def __init__(self) -> None:
        self.alive: dict[ClaimUid, set[Pod]] = {}
        self.hidden: NodeError | None = None

    def refuse_while_used(self, record: ClaimRecord) -> None:
        if self.hidden:
            raise self.hidden
        for pod in sorted(self.alive.get(record.claim.uid, ())):
            raise ClaimInUse(f"pod {record.claim.namespace}/{pod.name}: process 7 still runs")

    def pods_using(self, record: ClaimRecord) -> tuple[Pod, ...]:
        if self.hidden:
            raise self.hidden
        return tuple(sorted(self.alive.get(record.claim.uid, ())))

    def still_using(self, claim: ClaimUid, pods: Iterable[Pod]) -> tuple[Pod, ...]:
        if self.hidden:
            raise self.hidden
        return tuple(sorted(set(pods) & self.alive.get(claim, set())))
