"""Which pods wait for a GPU that they ask for without a claim, and that no node has?

Read from the API server; nothing is changed.
"""

from collections.abc import Callable, Iterator

from dra_driver.cli.cluster_checks import Cluster
from dra_driver.cli.findings import Finding, ok, skip, some, warn
from dra_driver.cli.market import Market
from dra_driver.cli.pod_placement import PodVerdict, asks_for_gpus, judge_pods, to_be_had
from dra_driver.errors import Forbidden
from dra_driver.kubeletplugin import quantity

PODS = "pending pods"
_MOST_TOLD = 20
_WAITING = {"fieldSelector": "status.phase=Pending,spec.nodeName="}
_WITHOUT_NAMES = (
    "no DeviceClass names a resource: that takes Kubernetes 1.36 (feature DRAExtendedResource) and "
    "the chart's DeviceClasses; else have the pod ask by a ResourceClaim (spec.resourceClaims)"
)


def pending_pods(cluster: Cluster, market: Callable[[], Market]) -> Iterator[Finding]:
    """Those that ask as they would ask a device plugin."""
    try:
        pods = [
            pod
            for page in cluster.server.pages("/api/v1/pods", _WAITING)
            for pod in page.get("items") or ()
            if asks_for_gpus(pod)
        ]
        if not pods:
            yield ok(PODS, "none asks for a GPU by the name of a resource")
            return
        found = market()
        verdict = judge_pods(pods, found, _of_plugins(cluster))
    except Forbidden as e:
        yield skip(
            PODS,
            f"cannot be judged by this account ({e}); name an administrator's --kubeconfig",
        )
        return
    yield from of_pods(verdict, found)


def of_pods(verdict: PodVerdict, market: Market) -> Iterator[Finding]:
    """Whoever wrote such a pod has to change it: that is no fault of this node."""
    if verdict.judged and not market.devices:
        yield warn(
            PODS,
            f"{verdict.judged} wait, and no node publishes a device of {market.driver}",
            "kubectl get resourceslices; see what the plugin's pods log",
        )
        return
    mend = _mend(market) if verdict.problems else ""
    for why, pods in sorted(verdict.problems.items())[:_MOST_TOLD]:
        yield warn(PODS, f"{some(pods)} can never be scheduled: {why}", mend)
    if (more := len(verdict.problems) - _MOST_TOLD) > 0:
        yield warn(PODS, f"{more} more reasons", "mend those first, then ask again")
    rest = verdict.judged - sum(map(len, verdict.problems.values()))
    if rest or not verdict.problems:
        yield ok(PODS, f"{rest} wait for a GPU, and nothing is known that they could not get")


def _mend(market: Market) -> str:
    """Names are what such a pod can choose from."""
    if not any(
        (one.get("spec") or {}).get("extendedResourceName") for one in market.classes.values()
    ):
        return _WITHOUT_NAMES
    listed = some(to_be_had(market)) or "none now"
    return (
        f"have the pod ask for what there is ({listed}), or let a node offer that by its profile; "
        "a kind of partition needs a DeviceClass, too (the chart's mig.profiles)"
    )


def _of_plugins(cluster: Cluster) -> set[str]:
    """What some node has of a device plugin. While that one starts anew, all of it is in the
    capacity and nothing is allocatable; of one that is gone for good a zero stays in both."""
    return {
        name
        for page in cluster.server.pages("/api/v1/nodes")
        for node in page.get("items") or ()
        for amounts in ("capacity", "allocatable")
        for name, amount in ((node.get("status") or {}).get(amounts) or {}).items()
        if "/" in name and quantity.parse(str(amount))
    }
