"""Nodes that give GPUs out by the device-plugin API, and the pods that have some.

Which device a pod has, its node alone knows. The API server knows the condition by which a Node
says that API is served there, and what pods ask for.
"""

from collections.abc import Collection, Sequence

from api.names import GPUS_ALLOCATED_BY
from dra_driver.k8s.api import Document, KubernetesApi
from dra_driver.k8s.pods import NodePod, PodReader
from dra_driver.model.profiles import AllocationApi
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_api import asks_for_ours


def is_device_plugin_node(node: Document) -> bool:
    """By what the plugin of this driver wrote there."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    reasons = [each.get("reason") for each in conditions if each["type"] == GPUS_ALLOCATED_BY]
    return reasons == [AllocationApi.DEVICE_PLUGIN.value]


def device_plugin_nodes(api: KubernetesApi) -> Sequence[str]:
    """Those of the cluster; needs the right to list nodes."""
    pages = api.pages("/api/v1/nodes")
    nodes = (each for page in pages for each in page.get("items") or ())
    return sorted(str(each["metadata"]["name"]) for each in nodes if is_device_plugin_node(each))


def pods_with_devices(api: KubernetesApi, node: str, names: ResourceNames) -> Sequence[str]:
    """The pods of a *node* with that API which have GPUs, or get some as they start; needs the
    right to list pods."""
    pods = PodReader(api).on_node(node)
    return sorted(_name(each) for each in pods if _has_devices(each, names))


def pods_with_devices_by_node(
    api: KubernetesApi, nodes: Collection[str], names: ResourceNames
) -> Sequence[tuple[str, str]]:
    """The same of many *nodes*: (node, pod). However many they are, the pods are listed once."""
    if not nodes:
        return ()
    pods = PodReader(api).on_nodes(frozenset(nodes))
    return sorted((node, _name(each)) for node, each in pods if _has_devices(each, names))


def _has_devices(pod: NodePod, names: ResourceNames) -> bool:
    return not pod.ended and bool(asks_for_ours(pod, names))


def _name(pod: NodePod) -> str:
    return f"{pod.namespace}/{pod.pod.name}"
