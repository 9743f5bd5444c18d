"""The parts of a cluster on record: start them, wait for them, see how they are."""

from collections.abc import Callable, Mapping

from hack.testbed.api import ApiServer, Document
from hack.testbed.components import NODE_NAME, Component, Flags, Site, components, environment
from hack.testbed.errors import ClusterError
from hack.testbed.layout import Layout
from hack.testbed.processes import Process
from hack.testbed.state import State
from hack.testbed.waits import wait_for

HEALTHY_SECONDS = 120
_STATIC_POD_UID = "kubernetes.io/config.hash"  # this annotation of a mirror pod, too


class Running:
    """A cluster whose record and files are there; each of its parts may run or not."""

    def __init__(self, layout: Layout, state: State, flags: Flags | None = None) -> None:
        self._layout = layout
        self._node = state.node
        self._site = Site(state.version, layout, state.ports, state.feature_gates, flags or {})
        self._api = self._site.api()
        self._kubelet = ApiServer(layout.pki, state.ports["kubelet"])
        self.parts: Mapping[str, Component] = {
            part.name: part for part in components(self._site, node=state.node)
        }

    def part(self, name: str) -> Component:
        if name not in self.parts:
            raise ClusterError(f"no component {name!r} in this cluster: {', '.join(self.parts)}")
        return self.parts[name]

    def pids(self) -> dict[str, int | None]:
        return {name: process_of(self._layout, name).pid() for name in self.parts}

    def healthy(self) -> bool:
        return all(part.healthy() for part in self.parts.values()) and self._settled()

    def begin(self, *names: str) -> None:
        """Start those that do not run."""
        for name in names:
            part = self.part(name)
            process = process_of(self._layout, name)
            if process.pid() is None:
                program = str(self._layout.bin / part.program)
                process.spawn([program, *part.arguments], environment(self._site))

    def wait(self, *names: str) -> None:
        """Until they are healthy; an error as soon as one of them has stopped."""
        for name in names:
            part = self.part(name)
            process = process_of(self._layout, name)

            def well(process: Process = process, part: Component = part) -> bool:
                process.check_alive()
                return part.healthy()

            self._wait_for(f"{name} to be healthy", well, name)

    def create(self, path: str, document: Document) -> None:
        self._api.create(path, document)

    def wait_settled(self) -> None:
        """Until pods can be created, and the node takes them."""
        if self._node:
            self._wait_for("the node to be Ready", self._settled, "kubelet")
        else:
            account = "the service account default/default"
            self._wait_for(account, self._settled, "controller-manager")

    def wait_for_pods(self) -> None:
        """A kubelet that just started is healthy before it knows the pods it had (exec fails)."""
        if self._node:
            self._wait_for("the kubelet to know its pods", self._pods_known, "kubelet")

    def _wait_for(self, condition: str, ready: Callable[[], bool], component: str) -> None:
        log = self._layout.log(component)
        wait_for(condition, ready, timeout_seconds=HEALTHY_SECONDS, log=log)

    def _settled(self) -> bool:
        if self._api.get("/api/v1/namespaces/default/serviceaccounts/default") is None:
            return False
        if not self._node:
            return True
        node = self._api.get(f"/api/v1/nodes/{NODE_NAME}") or {}
        conditions = node.get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def _pods_known(self) -> bool:
        pids = self.pids()
        if not (pids["kubelet"] and pids["apiserver"]):
            return True  # stopped on purpose: nobody to wait for
        bound = self._api.get(f"/api/v1/pods?fieldSelector=spec.nodeName={NODE_NAME}")
        known = self._kubelet.get("/pods")
        return bound is not None and known is not None and _uids(bound) <= _uids(known)


def process_of(layout: Layout, name: str) -> Process:
    """The process of a component, by its record."""
    return Process(name, layout.pids / name, layout.log(name))


def _uids(pods: Document) -> set[str]:
    """As the kubelet counts: a static pod and its mirror at the API server are one pod."""
    return {_uid(pod["metadata"]) for pod in pods.get("items") or []}


def _uid(metadata: Document) -> str:
    return str((metadata.get("annotations") or {}).get(_STATIC_POD_UID, metadata["uid"]))
