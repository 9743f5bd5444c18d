"""The pods of a claim, read where what it gets depends on them."""

import threading
from collections.abc import Sequence
from functools import partial

from dra_driver.errors import ClaimError, ClusterError, NodeError, NotFound
from dra_driver.kubeletplugin.claims import Claim, Pod
from dra_driver.kubeletplugin.pods import PodSpec
from dra_driver.model.holdings import Record
from dra_driver.node.ledger import Ledger
from dra_driver.plan.mps import Pods, PodsNeeded
from dra_driver.plan.mps_claims import apart_problems, has_gpus
from dra_driver.plugin.side_by_side import side_by_side
from dra_driver.plugin.tools import PodSpecs


class ClaimPods:
    """Reads pods, and looks at claims of one pod together."""

    def __init__(self, pods: PodSpecs, ledger: Ledger) -> None:
        self._pods = pods
        self._ledger = ledger

    def read(self, claim: Claim, why: str) -> Pods:
        """The pods that *claim* is reserved for; those that are gone need nothing. NodeError: they
        cannot be read, and *why* they have to be known.

        To be called while nobody waits for a GPU: an API server may take its time. One that does
        not answer for a pod is not asked for those that are still to come.
        """
        failed = threading.Event()
        found = side_by_side(partial(self._read, claim, why, failed), claim.pods)
        return tuple(spec for spec in found if spec is not None)

    def refuse_two_servers(self, mine: Record, pods: Pods | None) -> None:
        """ClaimError: a container of *pods* would have GPUs on two MPS servers, or on one and on
        none. PodsNeeded: it depends on them.

        To be called once *mine* is recorded: of two claims that are prepared at the same time, one
        at least sees the other. The pods that the others were prepared for say nothing: any pod of
        the namespace can have come to them since.
        """
        if not (others := self._beside(mine)):
            return
        if pods is None:
            raise PodsNeeded("it or a claim of its namespace is shared by MPS")
        if problems := apart_problems(mine, others, pods):
            raise ClaimError(f"claim {mine.claim}: " + "; ".join(problems))

    def _beside(self, mine: Record) -> Sequence[Record]:
        """The claims that no container can have together with *mine*, whoever uses them."""
        if not has_gpus(mine):
            return ()
        # A claim without MPS is in nobody's way but of those with it: most nodes have none.
        candidates = self._ledger.records() if mine.spaces else self._ledger.served()
        return [
            one
            for one in candidates
            if one.claim.namespace == mine.claim.namespace
            and one.claim.uid != mine.claim.uid
            and has_gpus(one)
        ]

    def _read(self, claim: Claim, why: str, failed: threading.Event, pod: Pod) -> PodSpec | None:
        if failed.is_set():
            return None
        try:
            spec = self._pods.read(claim.ref.namespace, pod.name)
        except NotFound:
            return None
        except ClusterError as e:
            failed.set()
            raise NodeError(
                f"claim {claim.ref}: which container of pod {pod.name} uses what cannot be read, "
                f"and has to be known ({why}): {e}"
            ) from e
        return spec if spec.uid == pod.uid else None
