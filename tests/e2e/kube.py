"""Short words for what end-to-end tests ask of the API server."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dra_driver.base.errors import ApiServerError, Conflict, NotFound
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient
from dra_driver.k8s.connections import open_connections

Document = dict[str, Any]

GROUP = "resource.k8s.io"
ADMIN_ACCESS = {"resource.kubernetes.io/admin-access": "true"}
# What tests use beside "default", and the labels of these namespaces.
NAMESPACES: dict[str, dict[str, str]] = {"team-a": {}, "team-b": {}, "monitoring": ADMIN_ACCESS}
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "Node": "/api/v1/nodes",
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "ValidatingAdmissionPolicy": (
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    ),
    "ValidatingAdmissionPolicyBinding": (
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
    ),
    "MutatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies",
    "MutatingAdmissionPolicyBinding": (
        "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings"
    ),
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "NodeProfile": "/apis/resource.nvidia.com/v1beta1/nodeprofiles",
    "ControllerRevision": "/apis/apps/v1/namespaces/{namespace}/controllerrevisions",
    "DeviceClass": "/apis/resource.k8s.io/v1/deviceclasses",
    "ResourceSlice": "/apis/resource.k8s.io/v1/resourceslices",
    "ResourceClaim": "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims",
    "ResourceClaimTemplate": (
        "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaimtemplates"
    ),
    "DaemonSet": "/apis/apps/v1/namespaces/{namespace}/daemonsets",
    "Deployment": "/apis/apps/v1/namespaces/{namespace}/deployments",
    "StatefulSet": "/apis/apps/v1/namespaces/{namespace}/statefulsets",
    "Job": "/apis/batch/v1/namespaces/{namespace}/jobs",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
}


_PATIENCE_SECONDS = 8.0
_NUDGE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 0.5


def wait(
    condition: str, check: Callable[[], Any], seconds: float = 60.0, pause: float = 0.1
) -> Any:
    """The first true answer of *check*; an AssertionError that says what was waited for. It is
    asked the less often the longer that takes, since asking costs the API server time, too."""
    begun = time.monotonic()
    while True:
        try:
            if answer := check():
                return answer
        except ApiServerError:
            if time.monotonic() >= begun + seconds:
                raise
        waited = time.monotonic() - begun
        if waited >= seconds:
            raise AssertionError(f"waited {seconds:g} s for {condition}")
        time.sleep(max(pause, min(waited / 5, _LONGEST_PAUSE_SECONDS)))


def every(seconds: float, act: Callable[[], None]) -> Callable[[], None]:
    """Does *act* when it is called, but not within so many seconds of the last time, or of now."""
    due = time.monotonic() + seconds

    def perhaps() -> None:
        nonlocal due
        if time.monotonic() > due:
            due = time.monotonic() + seconds
            act()

    return perhaps


class Kube:
    """The cluster, as its administrator."""

    def __init__(self, config: Path, kubectl: Path) -> None:
        self.config = config
        self.api = ApiClient(load_kubeconfig(config))
        self._connections = open_connections(load_kubeconfig(config))
        self._kubectl = kubectl

    def kubectl(self, *arguments: str, timeout: float = 60) -> str:
        return subprocess.run(
            [self._kubectl, "--kubeconfig", self.config, *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=timeout,
        ).stdout

    def path(self, kind: str, namespace: str = "") -> str:
        return PATHS[kind].format(namespace=namespace)

    def apply(self, document: Document, namespace: str = "default") -> Document:
        """Create *document*, or replace what is there under its name."""
        meta = document["metadata"]
        path = self.path(document["kind"], meta.get("namespace", namespace))
        try:
            return self.api.create(path, document)
        except Conflict:
            existing = self.api.get(f"{path}/{meta['name']}")
            version = {"resourceVersion": existing["metadata"]["resourceVersion"]}
            return self.api.update(
                f"{path}/{meta['name']}", {**document, "metadata": {**meta, **version}}
            )

    def get(self, kind: str, name: str, namespace: str = "default") -> Document:
        return self.api.get(f"{self.path(kind, namespace)}/{name}")

    def find(self, kind: str, name: str, namespace: str = "default") -> Document | None:
        try:
            return self.get(kind, name, namespace)
        except NotFound:
            return None

    def all(self, kind: str, namespace: str = "default", **query: str) -> list[Document]:
        """Of a kind that this API server does not serve (claims, before 1.34) there are none."""
        try:
            return self.api.list(self.path(kind, namespace), query)["items"]
        except NotFound:
            return []

    def delete(self, kind: str, name: str, namespace: str = "default") -> None:
        with contextlib.suppress(NotFound):
            self.api.delete(f"{self.path(kind, namespace)}/{name}")

    def clean_up(self) -> None:
        """Delete what a test left, as its user would."""
        for kind in (
            "Deployment",
            "StatefulSet",
            "Job",
            "Pod",
            "ResourceClaim",
            "ResourceClaimTemplate",
        ):
            for document in self._of_tests(kind):
                meta = document["metadata"]
                self.delete(kind, meta["name"], meta["namespace"])
        for kind in ("Pod", "ResourceClaim"):
            wait(f"every {kind} to go", lambda k=kind: not self._of_tests(k), 90)  # type: ignore[misc]

    def _of_tests(self, kind: str) -> list[Document]:
        """Those in all the namespaces that tests use, by one request."""
        try:
            everywhere = self.api.list(PATHS[kind].replace("/namespaces/{namespace}", ""))["items"]
        except NotFound:
            return []
        ours = ("default", *NAMESPACES)
        return [document for document in everywhere if document["metadata"]["namespace"] in ours]

    def delete_now(self, pod: str, namespace: str = "default") -> None:
        """As ``kubectl delete pod --force --grace-period=0``: the object is gone at once."""
        self.kubectl("delete", "pod", "-n", namespace, pod, "--force", "--grace-period=0")

    def phase(self, pod: str, namespace: str = "default") -> str:
        document = self.find("Pod", pod, namespace)
        return document["status"].get("phase", "") if document else "gone"

    def wait_pod(
        self, pod: str, *phases: str, namespace: str = "default", seconds: float = 120
    ) -> str:
        """The phase of *pod* when it is one of *phases* (default: it runs, or ran)."""
        expected = phases or ("Running", "Succeeded")
        patience = every(_PATIENCE_SECONDS, lambda: self._look_again_at(pod, namespace))

        def reached() -> str:
            now = self.phase(pod, namespace)
            if now == "Pending":
                patience()
            return now if now in expected else ""

        try:
            return str(wait(f"pod {pod} to be {' or '.join(expected)}", reached, seconds))
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.explain(pod, namespace)}") from e

    def _patience(self) -> Callable[[], None]:
        """Whoever waits for pods asks for the next one all the time; now and then that helps."""
        return every(_PATIENCE_SECONDS, self.wake_scheduler)

    def _look_again_at(self, pod: str, namespace: str) -> None:
        """Have the scheduler look, and what makes the claims of a pod that no kubelet has yet: once
        it made none for two minutes, without a word."""
        self.wake_scheduler()
        document = self.find("Pod", pod, namespace)
        if document and "nodeName" not in document["spec"]:
            self.nudge(pod, namespace)

    def wake_scheduler(self) -> None:
        """Have every pod looked at again that did not fit: a DeviceClass is another one now.

        The scheduler counts what a claim consumes twice for a moment, while it is both on its way
        and there already (1.36). A pod that is refused by that is looked at again when a claim
        goes or a slice changes, or after five minutes.
        """
        change = {"metadata": {"annotations": {"dra.test/nudge": str(time.time())}}}
        for device_class in self.all("DeviceClass")[:1]:
            self.api.patch(f"{self.path('DeviceClass')}/{device_class['metadata']['name']}", change)

    def wait_pods(self, pods: Iterable[str], phase: str, seconds: float = 100) -> None:
        """Until all *pods* are *phase*, for pods whose preparation failed on the way.

        After a failure the kubelet itself tries again after 60 to 90 s, or at once when the pod is
        changed: so it is, every two seconds.
        """
        waiting = set(pods)
        patience = self._patience()
        nudge = every(_NUDGE_SECONDS, lambda: self.nudge_all(waiting))

        def reached() -> bool:
            documents = self.all("Pod")
            there = {p["metadata"]["name"] for p in documents if p["status"].get("phase") == phase}
            waiting.difference_update(there)
            nudge()
            patience()
            return not waiting

        try:
            wait(f"pods to be {phase}", reached, seconds, 0.5)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{[self.explain(p) for p in sorted(waiting)]}") from e

    def nudge_all(self, pods: Iterable[str]) -> None:
        """Have the kubelet look at these pods now: what failed is tried again."""
        for pod in sorted(pods):
            self.nudge(pod)

    def nudge(self, pod: str, namespace: str = "default") -> None:
        """Change an annotation, so that the kubelet looks at the pod now."""
        change = {"metadata": {"annotations": {"dra.test/nudge": str(time.time())}}}
        with contextlib.suppress(NotFound):
            self.api.patch(f"{self.path('Pod', namespace)}/{pod}", change)

    def wait_gone(self, kind: str, name: str, namespace: str = "default", seconds: float = 60):
        wait(f"{kind} {name} to go", lambda: self.find(kind, name, namespace) is None, seconds)

    def logs(self, pod: str, container: str | None = None, namespace: str = "default") -> str:
        """As ``kubectl logs``, for a twentieth of its CPU time: tests ask for little else."""
        chosen = container or self.get("Pod", pod, namespace)["spec"]["containers"][0]["name"]
        answer = self._connections.pool.request(
            "GET",
            f"{self._connections.url}{self.path('Pod', namespace)}/{pod}/log",
            fields={"container": chosen},
            timeout=60,
            retries=False,
        )
        text = answer.data.decode()
        assert answer.status == 200, f"no log of {chosen} in {pod}: {text}"
        return text

    def explain(self, pod: str, namespace: str = "default") -> str:
        """Why a pod is what it is: its phase, its containers, its events."""
        document = self.find("Pod", pod, namespace)
        events = self.events(pod, namespace)
        status = document["status"] if document else {}
        containers = status.get("containerStatuses", ())
        states = [(each.get("state"), each.get("lastState")) for each in containers]
        return f"phase {status.get('phase')}, containers {states}, events {events}"

    def events(self, name: str, namespace: str = "default") -> list[str]:
        """What was told of a pod; not of an earlier one with its name, whose events stay."""
        pod = self.find("Pod", name, namespace)
        uid = f",involvedObject.uid={pod['metadata']['uid']}" if pod else ""
        query = {"fieldSelector": f"involvedObject.name={name}{uid}"}
        items = self.api.list(f"/api/v1/namespaces/{namespace}/events", query)["items"]
        return [f"{event['reason']}: {event.get('message', '')}" for event in items]

    def slices(self) -> list[Document]:
        slices = self.all("ResourceSlice")
        return sorted(slices, key=lambda each: each["metadata"]["name"])

    def published(self) -> dict[str, Document]:
        """The devices in all slices, in their order, by name; without what the API server adds."""
        devices = {d["name"]: d for s in self.slices() for d in s["spec"].get("devices") or ()}
        for taint in (taint for device in devices.values() for taint in device.get("taints", ())):
            taint.pop("timeAdded", None)
        return devices

    def devices(self) -> list[str]:
        """The names of what claims can be given; monitors are for admin access."""
        return [name for name in self.published() if not name.endswith("-mon")]

    def uuid(self, device: str) -> str:
        wait(f"{device} to be published", lambda: device in self.published())  # as profiles change
        return str(self.published()[device]["attributes"]["uuid"]["string"])

    def label_node(self, node: str, **labels: str | None) -> None:
        """Set labels of *node*, or take them away (None)."""
        self.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": labels}})
