"""Nodes that give GPUs out by the device-plugin API, and the pods that have some.

Which device a pod has, its node alone knows. The API server knows the condition by which a Node
says that API is served there and what pods ask for then, and what pods ask for.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from api.names import GPUS_ALLOCATED_BY
from dra_driver.k8s.api import Document, KubernetesApi
from dra_driver.k8s.pods import NodePod
from dra_driver.model.profiles import AllocationApi
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_api import asks_for_ours, named_holders, named_resources


def is_device_plugin_node(node: Document) -> bool:
    """By what the plugin of this driver wrote there."""
    return bool(_condition(node).get("reason") == AllocationApi.DEVICE_PLUGIN.value)


def resource_names_of(node: Document) -> ResourceNames | None:
    """What pods on *node* ask for to get GPUs by that API. None: the plugin of this driver wrote
    nothing of that there."""
    return named_resources(str(_condition(node).get("message") or ""))


def device_plugin_nodes(api: KubernetesApi) -> Mapping[str, ResourceNames | None]:
    """Those of the cluster, by name, and what pods ask for there; needs the right to list nodes."""
    return _device_plugin_nodes(_nodes(api))


def nodes_and_holders(
    api: KubernetesApi,
) -> tuple[Mapping[str, ResourceNames | None], Mapping[str, Sequence[str]]]:
    """The same, and those where another device plugin is, too, with the pods that have GPUs of this
    driver nevertheless: both plugins' pods ask for the same, but the node knows its own."""
    nodes = tuple(_nodes(api))
    holders = {
        str(node["metadata"]["name"]): named_holders(str(_condition(node).get("message") or ""))
        for node in nodes
    }
    return _device_plugin_nodes(nodes), {node: pods for node, pods in holders.items() if pods}


def _nodes(api: KubernetesApi) -> Iterator[Document]:
    for page in api.pages("/api/v1/nodes"):
        yield from page.get("items") or ()


def _device_plugin_nodes(nodes: Iterable[Document]) -> Mapping[str, ResourceNames | None]:
    return {
        str(node["metadata"]["name"]): resource_names_of(node)
        for node in nodes
        if is_device_plugin_node(node)
    }


def pods_with_devices(
    pods: Iterable[tuple[str, NodePod]], names: Mapping[str, ResourceNames]
) -> Sequence[tuple[str, str]]:
    """Those of *pods*, each after its node, that have GPUs by that API or get some as they start:
    (node, pod). *names*: what pods ask for, by node."""
    return sorted(
        (node, f"{pod.namespace}/{pod.pod.name}")
        for node, pod in pods
        if not pod.ended and asks_for_ours(pod, names[node])
    )


def _condition(node: Document) -> Document:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == GPUS_ALLOCATED_BY), {})
