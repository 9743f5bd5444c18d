"""Which claims wait for a device that no node has? Read from the API server; nothing is changed."""

from collections.abc import Callable, Iterator

from dra_driver.cli.cluster_checks import Cluster
from dra_driver.cli.findings import Finding, ok, skip, warn
from dra_driver.cli.market import Market
from dra_driver.cli.placement import Verdict, judge
from dra_driver.errors import Forbidden
from dra_driver.kubeletplugin.shapes import claim_from

CLAIMS = "pending claims"
_MOST_TOLD = 20
_NOTE = "CEL selectors are looked at as far as they ask for driver, type and the like"


def pending_claims(cluster: Cluster, market: Callable[[], Market]) -> Iterator[Finding]:
    try:
        found = market()
        claims = (claim_from(each) for each in cluster.listed("resourceclaims"))
        verdict = judge(claims, found)
    except Forbidden as e:
        yield skip(
            CLAIMS,
            f"cannot be judged by this account ({e}); name an administrator's --kubeconfig",
        )
        return
    if found.devices:
        yield from of_verdict(verdict)
    else:
        yield of_nothing(verdict.judged, cluster.driver)


def of_verdict(verdict: Verdict) -> Iterator[Finding]:
    """Whoever wrote such a claim has to change it: that is no fault of this node."""
    for name, why in verdict.problems[:_MOST_TOLD]:
        yield warn(
            CLAIMS,
            f"{name} can never be served as it is: {why}",
            "who made it has to delete it and make another, since what a claim asks for cannot be "
            "changed; or let a node offer it",
        )
    if (more := len(verdict.problems) - _MOST_TOLD) > 0:
        yield warn(CLAIMS, f"{more} more can never be served", "mend those first, then ask again")
    for name, why in verdict.risks[:_MOST_TOLD]:
        yield warn(
            CLAIMS,
            f"{name} may not be served although it could be: {why}",
            "who made it has to delete it and make another with such a selector",
        )
    rest = verdict.judged - len(verdict.problems) - len(verdict.risks)
    if rest or not (verdict.problems or verdict.risks):
        yield ok(CLAIMS, f"{rest} wait, and nothing is known that they could not get ({_NOTE})")


def of_nothing(waiting: int, driver: str) -> Finding:
    if not waiting:
        return ok(CLAIMS, f"none; no node publishes a device of {driver}")
    return warn(
        CLAIMS,
        f"{waiting} wait, and no node publishes a device of {driver}",
        "kubectl get resourceslices; see what the plugin's pods log",
    )
