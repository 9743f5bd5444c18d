"""A preparer of claims, with fakes for all that a test does not name."""

import contextlib
from collections.abc import Iterator
from typing import Any

from dra_driver.node.state.claim_files import ClaimFiles
from dra_driver.node.state.ledger import Ledger
from dra_driver.plugin.claims.dependencies import DriverIdentity, PrepareDependencies
from dra_driver.plugin.claims.prepared_claims import CallTimeouts
from dra_driver.plugin.claims.preparer import Preparer
from tests.builders import POOL
from tests.fakes.pods import NO_PODS
from tests.fakes.users import FakeUsers

DRIVER = "gpu.nvidia.com"


@contextlib.contextmanager
def free_lease(seconds: float) -> Iterator[None]:
    """No other process wants it."""
    yield


def preparer_of(
    node: Any,
    offers: Any,
    claims: Any,
    ledger: Ledger,
    files: ClaimFiles,
    timeouts: CallTimeouts | None = None,
    **fields: Any,
) -> Preparer:
    """*fields*: others of ``PrepareDependencies``; where they do not say, no pod can be read, no
    process uses a claim and nobody else wants the lease."""
    others: dict[str, Any] = {
        "pods": NO_PODS,
        "lease": free_lease,
        "changed": lambda record: None,
        "users": FakeUsers(),
    }
    dependencies = PrepareDependencies(
        node=node, offers=offers, claims=claims, ledger=ledger, files=files, **others | fields
    )
    return Preparer(
        DriverIdentity(DRIVER, POOL), dependencies, timeouts or CallTimeouts(all=5, hand_over=0.1)
    )
