"""Records that cannot be read, in the way of claims that may be given the same device."""

from collections.abc import Iterable

from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import Claim
from dra_driver.node.ledger_files import SetAside


def refuse_unsettled(claim: Claim, set_aside: Iterable[SetAside]) -> None:
    """A damaged record may be of any device that it names, or of any at all if it names none."""
    wanted = {allocation.device for allocation in claim.allocations if not allocation.admin}
    for aside in set_aside:
        if aside.uid != claim.ref.uid and any(map(aside.may_hold, wanted)):
            held = f"claim {claim.ref} has to wait: its device may be held by"
            then = "it is settled as soon as the API server can be asked about that claim"
            raise NodeError(
                f"{held} the claim with UID {aside.uid}, whose record {aside.path} cannot be read "
                f"({aside.reason}); {then}",
                f"{held} a claim whose record cannot be read; {then}",
            )
