"""Pods as an API server has them, in memory."""

from collections.abc import Iterable

from dra_driver.base.errors import Forbidden, NotFound
from dra_driver.k8s.claims import PodUid
from dra_driver.k8s.pods import ContainerSpec, PodReader, PodSpec


class FakePods(PodReader):
    """Answers with the pods that it was given. *allowed*: whether we may read them."""

    def __init__(self, pods: Iterable[PodSpec] = (), allowed: bool = True) -> None:
        self.pods = {(pod.namespace, pod.name): pod for pod in pods}
        self.allowed = allowed
        self.read_names: list[str] = []

    def read(self, namespace: str, name: str) -> PodSpec:
        self.read_names.append(name)
        if not self.allowed:
            raise Forbidden("pods may not be read")
        if (namespace, name) not in self.pods:
            raise NotFound(f"there is no pod {namespace}/{name}")
        return self.pods[namespace, name]

    def read_cached(self, namespace: str, name: str) -> PodSpec:
        return self.read(namespace, name)


NO_PODS = FakePods()


def container(name: str, *uses: tuple[str, str], root: bool = True) -> ContainerSpec:
    return ContainerSpec(name, frozenset(uses), root)


def pod_spec(name: str, *containers: ContainerSpec, host_users: bool = True) -> PodSpec:
    return PodSpec("default", name, PodUid(f"uid-{name}"), containers, host_users)


NOBODY = (pod_spec("p", container("without a claim")),)
"""The pods of a claim, of which no container uses it."""
