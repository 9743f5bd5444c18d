"""The kubelet's pod-resources socket: its list of pods, over real gRPC on a real unix socket."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from api.kubelet import pod_resources_v1_pb2 as messages
from dra_driver.k8s.claims import ClaimRef

SERVICE = "v1.PodResourcesLister"

Containers = Mapping[str, Sequence[ClaimRef]]


class FakePodResources:
    """Serves ``<kubelet_dir>/pod-resources/kubelet.sock`` while it is entered."""

    def __init__(self, kubelet_dir: Path) -> None:
        self.pods: dict[tuple[str, str], Containers] = {}  # by namespace and name
        # By namespace, name and container: resource and ids, an entry for each device.
        self.devices: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
        self.names_claims = True  # false: Kubernetes before 1.34
        self.silent = False  # true: it takes calls and does not answer
        self._gone = threading.Event()
        self._path = kubelet_dir / "pod-resources" / "kubelet.sock"
        self._server: Any = None

    def __enter__(self) -> "FakePodResources":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handler = grpc.unary_unary_rpc_method_handler(
            self._list,
            request_deserializer=messages.ListPodResourcesRequest.FromString,
            response_serializer=messages.ListPodResourcesResponse.SerializeToString,
        )
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"List": handler}),)
        )
        self._server.add_insecure_port(f"unix:{self._path}")
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._gone.set()
        self._server.stop(None).wait()

    def _list(self, request: object, context: object) -> messages.ListPodResourcesResponse:
        if self.silent:
            self._gone.wait()
        return messages.ListPodResourcesResponse(
            pod_resources=[
                messages.PodResources(
                    namespace=namespace,
                    name=name,
                    containers=[
                        messages.ContainerResources(
                            name=container,
                            dynamic_resources=self._resources(claims),
                            devices=[
                                messages.ContainerDevices(resource_name=resource, device_ids=[id_])
                                for resource, id_ in self.devices.get(
                                    (namespace, name, container), ()
                                )
                            ],
                        )
                        for container, claims in containers.items()
                    ],
                )
                for (namespace, name), containers in self.pods.items()
            ]
        )

    def _resources(self, claims: Sequence[ClaimRef]) -> list[messages.DynamicResource]:
        return [
            messages.DynamicResource(claim_name=claim.name, claim_namespace=claim.namespace)
            for claim in claims
            if self.names_claims
        ]
