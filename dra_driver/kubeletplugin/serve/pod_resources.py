"""The kubelet's pod-resources socket: which container of which pod has which claims and devices."""

from collections.abc import Mapping
from pathlib import Path

import grpc

from api.kubelet import pod_resources_v1_pb2
from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.k8s.pods import ClaimName, KubeletPod

_LIST = "/v1.PodResourcesLister/List"
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # the path may lead to another kubelet by now
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),  # as the kubelet's own client has it
)


class PodResourcesClient:
    """The kubelet's list of its pods. A connection lives as long as one question."""

    def __init__(self, kubelet_dir: Path, timeout_seconds: float = 2.0) -> None:
        self._socket = kubelet_dir / "pod-resources" / "kubelet.sock"
        self._timeout_seconds = timeout_seconds

    def is_there(self) -> bool:
        """Whether the kubelet has a socket for it."""
        return self._socket.exists()

    def pods(self) -> tuple[KubeletPod, ...]:
        """The pods that run on this node now. NodeError: the kubelet does not answer."""
        with grpc.insecure_channel(f"unix:{self._socket}", options=_OPTIONS) as channel:
            ask = channel.unary_unary(
                _LIST,
                request_serializer=pod_resources_v1_pb2.ListPodResourcesRequest.SerializeToString,
                response_deserializer=pod_resources_v1_pb2.ListPodResourcesResponse.FromString,
            )
            try:
                answer = ask(
                    pod_resources_v1_pb2.ListPodResourcesRequest(), timeout=self._timeout_seconds
                )
            except grpc.RpcError as error:
                raise self._error(error) from error
        return tuple(_pod(pod) for pod in answer.pod_resources)

    def _error(self, error: grpc.RpcError) -> NodeError:
        source = f"the kubelet's list of pods at {self._socket}"
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return TimedOut(f"{source}: no answer within {self._timeout_seconds:g} s")
        return NodeError(
            f"{source}: {error.details()}; it has to be mounted, and the kubelet has to run"
        )


def _pod(pod: pod_resources_v1_pb2.PodResources) -> KubeletPod:
    return KubeletPod(
        pod.namespace,
        pod.name,
        {
            container.name: frozenset(
                ClaimName(resource.claim_namespace, resource.claim_name)
                for resource in container.dynamic_resources
            )
            for container in pod.containers
        },
        _devices(pod),
    )


def _devices(
    pod: pod_resources_v1_pb2.PodResources,
) -> Mapping[tuple[str, str], frozenset[str]]:
    """There is one entry for each device, or for those of one NUMA node."""
    devices: dict[tuple[str, str], frozenset[str]] = {}
    for container in pod.containers:
        for entry in container.devices:
            key = (container.name, entry.resource_name)
            devices[key] = devices.get(key, frozenset()) | frozenset(entry.device_ids)
    return devices
