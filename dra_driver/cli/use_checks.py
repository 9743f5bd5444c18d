"""Which claims does a process keep although they are nobody's any more?"""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from dra_driver.cli.cluster_checks import Cluster
from dra_driver.cli.findings import Finding, ok, some, warn
from dra_driver.errors import InUse, NotFound
from dra_driver.model.holdings import Record

IN_USE = "claims in use"
_MEND = (
    "end that process; one that no signal ends (state D) waits for something in the kernel, such "
    "as a GPU that hangs: see dmesg, or reboot the node"
)


class Users(Protocol):
    """Who still uses claims; ``dra_driver.plugin.claim_users``."""

    def refuse_while_used(self, record: Record) -> None: ...


def claims_in_use(
    cluster: Cluster, records: Callable[[], Iterable[Record]], users: Users
) -> Iterator[Finding]:
    """Of claims that pods are to use nothing is said: there it is as it should be."""
    number = 0
    for record in records():
        try:
            users.refuse_while_used(record)
        except InUse as error:
            if (why := _nobodys(cluster, record)) is not None:
                number += 1
                devices = some(sorted({holding.device for holding in record.holdings}))
                yield warn(
                    IN_USE, f"claim {record.claim} {why} and holds {devices}: {error}", _MEND
                )
    if not number:
        yield ok(IN_USE, "none that is nobody's any more")


def _nobodys(cluster: Cluster, record: Record) -> str | None:
    """Why no pod is to use it; None: one is."""
    claim = record.claim
    try:
        document = cluster.resources.claim(claim.namespace, claim.name)
    except NotFound:
        return "is deleted"
    if document["metadata"]["uid"] != claim.uid:
        return "is deleted"
    if not (document.get("status") or {}).get("reservedFor"):
        return "is reserved for no pod"
    return None
