"""A node that gives its GPUs out by the device-plugin API, and what its pods have of it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import yaml

from api.kubelet import pod_resources_v1_pb2
from dra_driver.sim.node_spec import node_file
from hack.testbed.assets import minor
from hack.testbed.cluster import Cluster
from tests.deploy.examples import uuids
from tests.e2e.driver import Driver
from tests.e2e.kube import Kube, wait
from tests.e2e.manifests import container, pod_of

Document = dict[str, Any]

GPU, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"
# By which a node chooses one of the configurations of a ConfigMap.
CONFIG_LABEL = "nvidia.com/device-plugin.config"
SHOW = "nvidia-smi -L; trap 'exit 0' TERM; while :; do sleep 1 & wait; done"
PROFILE = """
apiVersion: resource.nvidia.com/v1beta1
kind: NodeProfile
spec: {api: DevicePlugin}
"""
ALLOCATABLE_SECONDS = 30.0  # within which the Node says what became of its devices: every ten
CHANGE_SECONDS = 90.0  # from one API to the other: ten seconds of draining, a busy machine
_PROFILE_NAME = "by-device-plugin"
RESOURCE_NAME = {"extended-resource-name": ""}  # the flag: there is no such resource
_FIRST_WITH_DRA = 34
_FIRST_WITH_EXTENDED_RESOURCES = 36  # by DRA, without a feature gate
_LIST = "/v1.PodResourcesLister/List"


def has_dra(cluster: Cluster) -> bool:
    """Whether the API server serves ``resource.k8s.io``."""
    return minor(cluster.version) >= _FIRST_WITH_DRA


def needs_claims(cluster: Cluster) -> bool:
    """Whether pods get GPUs by DRA only by claims, and not by their number."""
    return _FIRST_WITH_DRA <= minor(cluster.version) < _FIRST_WITH_EXTENDED_RESOURCES


def asking(limits: Mapping[str, int], command: str = SHOW, name: str = "main") -> Document:
    """A container that asks for devices: ``asking({GPU: 2})``."""
    resources = {"limits": {resource: str(count) for resource, count in limits.items()}}
    return container(command, name) | {"resources": resources}


def pod(
    name: str, count: int = 1, resource: str = GPU, command: str = SHOW, **spec: Any
) -> Document:
    """A pod of one container that shows its GPUs and stays."""
    return pod_of(name, [asking({resource: count}, command)], [], **spec)


def running(kube: Kube, *names: str, seconds: float = 60) -> None:
    for name in names:
        kube.wait_pod(name, "Running", seconds=seconds)


def restarts(kube: Kube, name: str) -> int:
    """How often the only container of a pod was started again."""
    (status,) = kube.get("Pod", name)["status"].get("containerStatuses") or [{"restartCount": 0}]
    return int(status["restartCount"])


def shown(kube: Kube, pod: str, container: str | None = None, kind: str = "GPU") -> frozenset[str]:
    """The UUIDs of the GPUs that a container saw, or of its partitions (*kind* "partition")."""
    return wait(f"GPUs in the log of {pod}", lambda: uuids(kube.logs(pod, container), kind), 15)


def wait_allocatable(
    driver: Driver, expected: dict[str, int], seconds: float = ALLOCATABLE_SECONDS
) -> None:
    try:
        wait(f"allocatable {expected}", lambda: driver.allocatable() == expected, seconds)
    except AssertionError as e:
        raise AssertionError(f"{e}: it is {driver.allocatable()}\n{driver.log[-3000:]}") from e


def devices(cluster: Cluster) -> dict[str, dict[str, tuple[str, ...]]]:
    """By pod and container, the sorted ids of the devices that the kubelet gave them."""
    with grpc.insecure_channel(f"unix:{cluster.pod_resources_socket}") as channel:
        ask = channel.unary_unary(
            _LIST,
            request_serializer=pod_resources_v1_pb2.ListPodResourcesRequest.SerializeToString,
            response_deserializer=pod_resources_v1_pb2.ListPodResourcesResponse.FromString,
        )
        answer = ask(pod_resources_v1_pb2.ListPodResourcesRequest(), timeout=5)
    return {
        pod.name: {
            container.name: tuple(sorted(i for d in container.devices for i in d.device_ids))
            for container in pod.containers
            if container.devices
        }
        for pod in answer.pod_resources
        if any(container.devices for container in pod.containers)
    }


def doctor(driver: Driver) -> str:
    """What `dra-driver doctor` says of the node."""
    cluster = driver.cluster
    return driver.command(
        "doctor",
        f"--kubeconfig={cluster.kubeconfig}",
        f"--node-name={cluster.node_name}",
        f"--device-plugin-dir={cluster.device_plugins_dir}",
        f"--sim={driver.node_file}",
    ).stdout


@contextlib.contextmanager
def serving(driver: Driver, node: str) -> Iterator[None]:
    """Plugin and agent serve another simulated node meanwhile."""
    text = driver.node_file.read_text()
    driver.serve(node_file(node).read_text())
    try:
        yield
    finally:
        driver.kube.clean_up()
        wait("ledger records to go", lambda: not driver.claims(), 70)
        driver.serve(text)


@contextlib.contextmanager
def by_device_plugin(driver: Driver) -> Iterator[None]:
    """The node gives its GPUs out by the device-plugin API: where there is DRA, because its profile
    says so."""
    with _instead_of_dra(driver, _in_file(driver, PROFILE)):
        yield


@contextlib.contextmanager
def by_default(driver: Driver) -> Iterator[None]:
    """The node gives its GPUs out by the device-plugin API, whatever profile it follows: where
    there is DRA, because no DeviceClass has the name of a resource."""
    with _instead_of_dra(driver, _without_resource_names(driver.kube)):
        yield


@contextlib.contextmanager
def _instead_of_dra(
    driver: Driver, chosen: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    if not has_dra(driver.cluster):
        yield
        return
    usual, kube = driver.usual, driver.kube
    for flag in RESOURCE_NAME:
        driver.flags.pop(flag, None)
    with chosen:
        driver.stop()
        driver.start()
        wait("slices to go", lambda: not kube.published(), CHANGE_SECONDS)
        driver.usual, driver.usual_allocatable = {}, wait("its GPUs", driver.allocatable)
        try:
            yield
        finally:
            driver.usual, driver.usual_allocatable = usual, {}
            kube.clean_up()
            wait("ledger records to go", lambda: not driver.claims(), 70)
    if needs_claims(driver.cluster):
        driver.flags.update(RESOURCE_NAME)
    driver.stop()
    driver.start()
    try:
        wait("its slices", lambda: kube.published() == usual, CHANGE_SECONDS)
    except AssertionError as e:
        raise AssertionError(f"{e}\n{driver.log[-3000:]}") from e


@contextlib.contextmanager
def _in_file(driver: Driver, profile: str) -> Iterator[None]:
    """The node follows *profile* where nothing chooses another one."""
    file = driver.profiles / f"{_PROFILE_NAME}.yaml"
    file.write_text(profile)
    driver.flags["profile"] = _PROFILE_NAME
    try:
        yield
    finally:
        del driver.flags["profile"]
        file.unlink()


@contextlib.contextmanager
def _without_resource_names(kube: Kube) -> Iterator[None]:
    """No DeviceClass says which resource of old it stands for."""
    classes = kube.all("DeviceClass")
    names = {
        each["metadata"]["name"]: each["spec"]["extendedResourceName"]
        for each in classes
        if "extendedResourceName" in each["spec"]
    }

    def name(device_class: str, resource: str | None) -> None:
        change = {"spec": {"extendedResourceName": resource}}
        kube.api.patch(f"{kube.path('DeviceClass')}/{device_class}", change)

    for device_class in names:
        name(device_class, None)
    try:
        yield
    finally:
        for device_class, resource in names.items():
            name(device_class, resource)


def described(gpus: list[Document], **fields: Any) -> str:
    """The text of a NodeProfile."""
    spec = {"gpus": gpus, **fields}
    kind = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "NodeProfile"}
    return yaml.safe_dump({**kind, "spec": spec})
