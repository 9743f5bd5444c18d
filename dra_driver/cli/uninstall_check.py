"""``dra-driver uninstall-check``: who still needs the driver, anywhere in the cluster."""

from collections.abc import Sequence

from dra_driver.base.errors import NotServed
from dra_driver.cli.device_plugin_nodes import device_plugin_nodes, pods_with_devices_by_node
from dra_driver.cli.findings import abbreviated
from dra_driver.k8s.api import KubernetesApi
from dra_driver.k8s.claims import HeldClaim, held_claims
from dra_driver.k8s.pods import PodReader
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.settings import UninstallSettings

_MAX_SHOWN = 20  # claims, or pods; the kubelet keeps 2 KiB of what a container says at its end


def uninstall_problem(api: KubernetesApi, settings: UninstallSettings) -> str:
    """Which claims the driver has to go on serving, and which pods with GPUs by the device-plugin
    API; empty: none. ApiServerError: it is not known."""
    driver = settings.driver_name
    claims, pods = _held_claims(api, driver), _pods_with_devices(api, settings)
    lines = []
    if claims:
        lines += [
            f"{len(claims)} claims hold devices of {driver}. Without the driver their pods cannot "
            "end, and containers of theirs that were restarted may lack devices:"
            if len(claims) > 1
            else f"a claim holds devices of {driver}. Without the driver its pods cannot end:",
            *_shown([_line(claim) for claim in claims]),
        ]
    if pods:
        lines += [
            f"{'a pod has' if len(pods) == 1 else f'{len(pods)} pods have'} GPUs by the "
            "device-plugin API. Without the driver no container with a GPU is started again, and "
            "nobody takes back what the node keeps for it:",
            *_shown(pods),
        ]
    if lines:
        wait = ", and wait two minutes until the driver has taken their GPUs back" if pods else ""
        lines += [f"Delete these pods first{wait}. `helm uninstall --no-hooks` does not ask."]
    return "\n".join(lines)


def _held_claims(api: KubernetesApi, driver: str) -> Sequence[HeldClaim]:
    try:
        return sorted(held_claims(ResourceApi(api), driver))
    except NotServed:  # all GPUs are given out by the device-plugin API
        return ()


def _pods_with_devices(api: KubernetesApi, settings: UninstallSettings) -> Sequence[str]:
    names = ResourceNames(
        settings.extended_resource_name,
        settings.shared_extended_resource_name,
        settings.mig_extended_resource_prefix,
    )
    nodes = device_plugin_nodes(api)
    if nodes and settings.plugin_selector:  # a node that the plugin has left says still what it was
        plugin_nodes = PodReader(api).nodes_of(settings.plugin_selector)
        nodes = [node for node in nodes if node in plugin_nodes]
    pods = pods_with_devices_by_node(api, nodes, names)
    return [f"{pod}  on node {node}" for node, pod in pods]


def _shown(lines: Sequence[str]) -> Sequence[str]:
    more = [f"and {len(lines) - _MAX_SHOWN} more"] if len(lines) > _MAX_SHOWN else []
    return [f"  {line}" for line in [*lines[:_MAX_SHOWN], *more]]


def _line(claim: HeldClaim) -> str:
    pods = f"pods: {abbreviated(claim.pods)}" if claim.pods else "no pod: delete the claim"
    return f"{claim.namespace}/{claim.name}  {pods}"
