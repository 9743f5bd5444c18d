"""What a Preparer works with, and as whom."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import ClaimReader
from dra_driver.k8s.pods import PodReader
from dra_driver.model.records import ClaimRecord
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.state.claim_files import ClaimFiles
from dra_driver.node.state.ledger import Ledger
from dra_driver.plugin.claims.in_use import InUseCheck
from dra_driver.plugin.publish.offers import OfferBuilder

ClaimChanged = Callable[[ClaimRecord | None], None]
"""Called with a claim that is prepared or not any more: what it holds or held, as far as known."""


@frozen
class PrepareDependencies:
    """What a Preparer works with."""

    node: GpuNode
    offers: OfferBuilder
    claims: ClaimReader
    pods: PodReader
    ledger: Ledger
    files: ClaimFiles
    lease: Callable[[float], AbstractContextManager[None]]  # within seconds (rolling update)
    changed: ClaimChanged  # called with every claim that was prepared or given back
    users: InUseCheck


@frozen
class DriverIdentity:
    """As whom it prepares."""

    driver: str
    pool: str  # the pool that this node publishes
    hook: str | None = None  # the host's path of nvidia-cdi-hook
    mps_dir: str = ""  # where the MPS agent has its servers; empty: there is none
