"""Nodes that give GPUs out by the device-plugin API, and the pods that have some.

Which device a pod has, its node alone knows. The API server knows the condition by which a Node
says that API is served there, and what pods ask for.
"""

from collections.abc import Sequence

from api.names import GPUS_ALLOCATED_BY
from dra_driver.k8s.api import Document, KubernetesApi
from dra_driver.k8s.pods import PodReader
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
    return sorted(
        f"{each.namespace}/{each.pod.name}"
        for each in PodReader(api).on_node(node)
        if not each.ended and asks_for_ours(each, names)
    )
