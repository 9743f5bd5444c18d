"""``dra-driver uninstall-check``: who still needs the driver, anywhere in the cluster."""

from collections.abc import Iterator, Sequence

from api.names import DEVICE_PLUGIN_ANNOTATION
from dra_driver.base.errors import ApiServerError, NotServed
from dra_driver.base.frozen import frozen
from dra_driver.cli.device_plugin_nodes import (
    DevicePluginNode,
    device_plugin_nodes,
    pods_with_devices,
)
from dra_driver.cli.findings import abbreviated
from dra_driver.k8s.api import KubernetesApi
from dra_driver.k8s.claims import HeldClaim, held_claims
from dra_driver.k8s.pods import PodReader
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.plan.node_annotation import DevicePluginHolders
from dra_driver.plan.node_conditions import bounded, first_names
from dra_driver.settings import UninstallSettings

_MAX_LINES = 12  # of claims and of pods together
_ROOM = 1900  # characters: the kubelet keeps the last 2048 bytes of what a container says
_NODES_ROOM = 1400  # of these, for the nodes of which something is not known


@frozen
class PodLine:
    """One line about pods that need the driver."""

    text: str
    pods: int = 1  # that it is about


def uninstall_problem(api: KubernetesApi, settings: UninstallSettings) -> str:
    """Which claims the driver has to go on serving, and which pods with GPUs by the device-plugin
    API; empty: none. ApiServerError: it is not known."""
    driver = settings.driver_name
    return describe(
        driver, _held_claims(api, driver), _pods_with_devices(api, settings.plugin_selector)
    )


def describe(driver: str, claims: Sequence[HeldClaim], pods: Sequence[PodLine]) -> str:
    """What is wrong, and what to do, around some names."""
    if not claims and not pods:
        return ""
    half = _MAX_LINES // 2
    claim_lines = [_line(claim) for claim in claims[: _MAX_LINES - min(len(pods), half)]]
    pod_lines = pods[: _MAX_LINES - min(len(claims), half)]
    pod_count, shown_count = (sum(each.pods for each in lines) for lines in (pods, pod_lines))
    heads = _claims_head(driver, len(claims)), _pods_head(pod_count)
    mend = _mend(after_pods=bool(pods))
    room = _ROOM - sum(map(len, (*heads, mend)))
    width = room // (len(claim_lines) + len(pod_lines))
    lines = (
        heads[0],
        *_shown(claim_lines, len(claims) - len(claim_lines), width),
        heads[1],
        *_shown([each.text for each in pod_lines], pod_count - shown_count, width),
        mend,
    )
    return "\n".join(line for line in lines if line)


def _claims_head(driver: str, number: int) -> str:
    if number > 1:
        return (
            f"{number} claims hold devices of {driver}. Without the driver their pods cannot end, "
            "and containers of theirs that were restarted may lack devices:"
        )
    if number:
        return f"a claim holds devices of {driver}. Without the driver its pods cannot end:"
    return ""


def _pods_head(number: int) -> str:
    if not number:
        return ""
    return (
        f"{'a pod has' if number == 1 else f'{number} pods have'} GPUs by the device-plugin API. "
        f"Without the driver no container of {'this pod' if number == 1 else 'these pods'} is "
        "started again, and nobody takes back what the node keeps for it:"
    )


def _mend(*, after_pods: bool) -> str:
    first = "Delete these pods first"
    if after_pods:
        first += ", and wait two minutes until the driver has taken their GPUs back"
    return f"{first}. `helm uninstall --no-hooks` does not ask."


def _held_claims(api: KubernetesApi, driver: str) -> Sequence[HeldClaim]:
    try:
        return sorted(held_claims(ResourceApi(api), driver))
    except NotServed:  # all GPUs are given out by the device-plugin API
        return ()


def _pods_with_devices(api: KubernetesApi, plugin_selector: str) -> Sequence[PodLine]:
    """However many nodes there are, the pods are listed once."""
    nodes = device_plugin_nodes(api)
    if nodes and plugin_selector:  # a node that the plugin has left says what it was
        plugin_nodes = PodReader(api).nodes_of(plugin_selector)
        nodes = [node for node in nodes if node.name in plugin_nodes]
    if problems := [f"{node.name} ({why})" for node in nodes if (why := _why_unknown(node))]:
        raise ApiServerError(_unknown(problems))
    names = {node.name: node.use.resources for node in nodes if node.use and node.is_ours}
    having = pods_with_devices(PodReader(api).on_nodes(names.keys()), names) if names else ()
    # Of the others the pods ask for the same: the node alone knows those of this driver.
    others = (line for node in nodes if not node.is_ours for line in _named(node))
    return [*others, *(PodLine(f"{pod}  on node {node}") for node, pod in having)]


def _named(node: DevicePluginNode) -> Iterator[PodLine]:
    holders = (node.use and node.use.holders) or DevicePluginHolders()
    for pod in holders.pods:
        yield PodLine(f"{pod}  on node {node.name}")
    if unnamed := holders.count - len(holders.pods):
        pods = "a pod" if unnamed == 1 else f"{unnamed} pods"
        yield PodLine(f"{pods} that the Node does not name  on node {node.name}", unnamed)


def _why_unknown(node: DevicePluginNode) -> str:
    """Why it is not known which pods have GPUs of *node*; empty: it is."""
    if node.use is None or node.is_ours:
        return node.problem
    if node.use.holders is None:
        return (
            "`holders` is null: the plugin does not know who has GPUs of this driver beside "
            "another device plugin"
        )
    return node.use.holders.problem


def _unknown(problems: Sequence[str]) -> str:
    return (
        f"it is not known which pods have GPUs, by the annotation {DEVICE_PLUGIN_ANNOTATION} of "
        f"{'node' if len(problems) == 1 else 'nodes'} "
        f"{first_names(problems, len(problems), _NODES_ROOM)}: wait until the plugin there "
        "has written it, and look at its log if that lasts. `helm uninstall --no-hooks` does "
        "not ask"
    )


def _shown(lines: Sequence[str], more: int, width: int) -> Sequence[str]:
    """*lines*, each of *width* characters at most, and how many *more* there are."""
    shown = [bounded(f"  {line}", width) for line in lines]
    return [*shown, f"  and {more} more"] if more else shown


def _line(claim: HeldClaim) -> str:
    pods = f"pods: {abbreviated(claim.pods)}" if claim.pods else "no pod: delete the claim"
    return f"{claim.namespace}/{claim.name}  {pods}"
