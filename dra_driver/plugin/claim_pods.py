"""The pods of a claim, read where what it gets depends on them."""

from collections.abc import Collection, Sequence

from dra_driver.errors import ClaimError, ClusterError, NodeError, NotFound
from dra_driver.kubeletplugin.claims import Claim, ClaimUid, Pod
from dra_driver.kubeletplugin.pods import PodSpec
from dra_driver.model.holdings import Record
from dra_driver.node.ledger import Ledger
from dra_driver.plan.mps import served_steps, two_directories
from dra_driver.plugin.tools import PodSpecs


class ClaimPods:
    """Reads pods, and looks at claims of one pod together."""

    def __init__(self, pods: PodSpecs, ledger: Ledger) -> None:
        self._pods = pods
        self._ledger = ledger

    def of(self, claim: Claim) -> tuple[PodSpec, ...]:
        """The pods that *claim* is reserved for; those that are gone need nothing. NodeError: they
        cannot be read."""
        return tuple(self._read(claim, claim.pods))

    def refuse_two_servers(self, claim: Claim) -> None:
        """ClaimError: a container would be sent to two MPS servers at once.

        To be called once *claim* is recorded: of two claims that are prepared at the same time,
        one at least sees the other.
        """
        mine = {pod.uid for pod in claim.pods}
        others = [r for r in self._served_to(mine) if r.claim.uid != claim.ref.uid]
        if not others or not self._serves(claim.ref.uid):
            return
        shared = {pod.uid for record in others for pod in record.pods}
        pods = self._read(claim, [pod for pod in claim.pods if pod.uid in shared])
        if problems := two_directories(claim.ref, [record.claim for record in others], pods):
            raise ClaimError(f"claim {claim.ref}: " + "; ".join(problems))

    def _serves(self, uid: ClaimUid) -> bool:
        record = self._ledger.known(uid)
        return record is not None and any(served_steps(record))

    def _served_to(self, pods: Collection[str]) -> Sequence[Record]:
        """The claims that are shared by MPS and that one of *pods* uses."""
        return [
            record
            for record in self._ledger.records()
            if any(pod.uid in pods for pod in record.pods) and any(served_steps(record))
        ]

    def _read(self, claim: Claim, pods: Sequence[Pod]) -> list[PodSpec]:
        found = []
        for pod in pods:
            try:
                spec = self._pods.read(claim.ref.namespace, pod.name)
            except NotFound:
                continue
            except ClusterError as e:
                raise NodeError(
                    f"claim {claim.ref} is shared by MPS, and which container of pod {pod.name} "
                    f"uses what of it cannot be read: {e}"
                ) from e
            if spec.uid == pod.uid:
                found.append(spec)
        return found
