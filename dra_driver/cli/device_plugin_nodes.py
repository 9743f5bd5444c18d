"""Nodes on which pods get GPUs by the device-plugin API, and the pods that have some.

Which device a pod has, its node alone knows. The API server knows what the plugin of this driver
wrote on the Node, and what pods ask for.
"""

from collections.abc import Iterable, Mapping, Sequence

from api.names import DEVICE_PLUGIN_ANNOTATION, GPUS_ALLOCATED_BY
from dra_driver.base.codec import Undecodable
from dra_driver.base.frozen import frozen
from dra_driver.k8s.api import Document, KubernetesApi
from dra_driver.k8s.pods import NodePod
from dra_driver.model.profiles import AllocationApi
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_annotation import DEVICE_PLUGIN_USES, DevicePluginUse
from dra_driver.plan.node_api import OTHER_DEVICE_PLUGIN, asks_for_ours
from dra_driver.plan.node_conditions import bounded, condition_of

_PROBLEM_ROOM = 200  # bytes: anybody who can patch the Node writes part of it


@frozen
class DevicePluginNode:
    """One on which pods get GPUs by that API."""

    name: str
    is_ours: bool  # else another device plugin gives its GPUs out
    use: DevicePluginUse | None  # None: that is not known, and why says *problem*
    problem: str = ""


def device_plugin_node(node: Document) -> DevicePluginNode | None:
    """By what the plugin of this driver wrote on *node*. None: it wrote nothing, or gives GPUs out
    by DRA."""
    name, annotations = str(node["metadata"]["name"]), node["metadata"].get("annotations") or {}
    reason = condition_of(node, GPUS_ALLOCATED_BY).get("reason")
    if reason not in (AllocationApi.DEVICE_PLUGIN.value, OTHER_DEVICE_PLUGIN):
        return None
    is_ours = reason != OTHER_DEVICE_PLUGIN
    if DEVICE_PLUGIN_ANNOTATION not in annotations:
        return DevicePluginNode(name, is_ours, None, "it is missing")
    try:
        text = str(annotations[DEVICE_PLUGIN_ANNOTATION]).encode(errors="replace")
        use = DEVICE_PLUGIN_USES.decode(text)
    except Undecodable as e:
        problem = bounded(ascii(str(e))[1:-1], _PROBLEM_ROOM)  # on one line, too
        return DevicePluginNode(name, is_ours, None, problem)
    return DevicePluginNode(name, is_ours, use)


def device_plugin_nodes(api: KubernetesApi) -> Sequence[DevicePluginNode]:
    """Those of the cluster; needs the right to list nodes."""
    nodes = (node for page in api.pages("/api/v1/nodes") for node in page.get("items") or ())
    return [each for node in nodes if (each := device_plugin_node(node))]


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
