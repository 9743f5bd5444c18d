"""Requests that the chart's policies are about, and who makes them, on a real API server.

The account has more rights here than the chart gives it: the policies hold by themselves.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.names import CLEAR_FAULTS_ANNOTATION, RELEASE_ANNOTATION, REVISION_PROFILE_LABEL
from dra_driver.base.errors import NotFound
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.api import APPLY_PATCH
from dra_driver.k8s.client import STRATEGIC_MERGE_PATCH, ApiClient
from hack.testbed.cluster import Cluster
from tests.deploy.chart import CHART, documents, helm
from tests.deploy.installed import as_account
from tests.waiting import eventually

Document = dict[str, Any]

NAME = "policy-test"  # of release and namespace, and how what these tests make begins
ACCOUNTS = ("kubelet-plugin", "uninstall", "controller")
MINE, OTHER = f"{NAME}-mine", f"{NAME}-other"  # two nodes; the token belongs to the first
DRIVER = "policy.test"
STATE_LABEL = "nvidia.com/mig.config.state"
CONDITION = "GPUsConfigured"
NODES = "/api/v1/nodes"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
EVENTS = f"/api/v1/namespaces/{NAME}/events"
NEW_EVENTS = f"/apis/events.k8s.io/v1/namespaces/{NAME}/events"
DEFAULT_EVENTS = "/api/v1/namespaces/default/events"  # where those of cluster-scoped objects are
NEW_DEFAULT_EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"
CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/{NAME}/resourceclaims"
REVISIONS = f"/apis/apps/v1/namespaces/{NAME}/controllerrevisions"
OF_RBAC = "/apis/rbac.authorization.k8s.io/v1"
OF_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
PATHS = {
    "ServiceAccount": f"/api/v1/namespaces/{NAME}/serviceaccounts",
    "ClusterRole": f"{OF_RBAC}/clusterroles",
    "ClusterRoleBinding": f"{OF_RBAC}/clusterrolebindings",
    "ValidatingAdmissionPolicy": f"{OF_ADMISSION}/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": f"{OF_ADMISSION}/validatingadmissionpolicybindings",
}
ALL_VERBS: Document = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": f"{NAME}-all-verbs"},
    "rules": [
        {
            "apiGroups": ["", "apps", "resource.k8s.io", "events.k8s.io"],
            "resources": [
                *("nodes", "nodes/status", "events", "resourceslices", "controllerrevisions"),
                *("resourceclaims/status", "resourceclaims/binding", "resourceclaims/driver"),
            ],
            "verbs": ["*"],
        }
    ],
}
STATUS: Document = {  # as a kubelet leaves it, cut short
    "capacity": {"cpu": "8"},
    "conditions": [
        {"type": "MemoryPressure", "status": "False", "reason": "a", "message": "b"},
        {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "it is ready"},
    ],
    "images": [{"names": ["image"], "sizeBytes": 1}],
    "nodeInfo": {"kernelVersion": "6.1"},
}


@dataclass(frozen=True, slots=True)
class Clients:
    """Of one API server."""

    admin: ApiClient
    plugin: ApiClient  # with a token of the plugin's account on node MINE
    nobody: ApiClient  # with one that belongs to no node
    plugin_kubeconfig: Path  # with the token of *plugin*
    uninstall_kubeconfig: Path  # with one of the account of the check before an uninstall
    controller: ApiClient  # with one of the controller's account


@contextmanager
def open_clients(
    cluster: Cluster, directory: Path, *, rights_alone: bool = False
) -> Iterator[Clients]:
    """What of the chart concerns the API server is there, and two nodes without a kubelet.
    *rights_alone*: its rights, and not its policies."""
    admin = ApiClient(load_kubeconfig(cluster.kubeconfig))
    accounts = PATHS["ServiceAccount"]
    plugin, uninstall, controller = (f"{accounts}/{NAME}-dra-driver-gpu-{end}" for end in ACCOUNTS)
    opened = [admin]

    def client(token: str, name: str) -> ApiClient:
        access = load_kubeconfig(as_account(cluster, token, directory / name))
        opened.append(ApiClient(access, user_agent=NAME))
        return opened[-1]

    with made(admin, rights_alone):
        eventually(lambda: is_there(admin, f"{accounts}/default"))
        hook = as_account(cluster, token_of(admin, uninstall), directory / "uninstall")
        bound, free = token_of(admin, plugin, MINE), token_of(admin, plugin)
        plugin_client, nobody = client(bound, "plugin"), client(free, "nobody")
        of_controller = client(token_of(admin, controller), "controller")
        yield Clients(admin, plugin_client, nobody, directory / "plugin", hook, of_controller)
    for each in opened:
        each.close()


@contextmanager
def made(admin: ApiClient, rights_alone: bool) -> Iterator[None]:
    """While it lasts, namespace, nodes and what of the chart concerns the API server are there."""
    objects = [*cluster_objects(), {**ALL_VERBS, "rules": []} if rights_alone else ALL_VERBS]
    if rights_alone:
        objects = [each for each in objects if "AdmissionPolicy" not in each["kind"]]
    bindings = [each for each in objects if each["kind"] == "ClusterRoleBinding"]
    subjects = [
        subject
        for each in bindings
        if each["metadata"]["name"].endswith(("-kubelet-plugin", "-controller"))
        for subject in each["subjects"]
    ]
    role = {**bindings[0]["roleRef"], "name": ALL_VERBS["metadata"]["name"]}
    of_all = {**bindings[0], "metadata": ALL_VERBS["metadata"], "roleRef": role}
    objects.append({**of_all, "subjects": subjects})
    namespace: Document = {"metadata": {"name": NAME}}
    documents = [("/api/v1/namespaces", namespace)]
    documents += [
        (NODES, {"metadata": {"name": name, **KEPT}, "status": STATUS}) for name in (MINE, OTHER)
    ]
    documents += [(PATHS[each["kind"]], each) for each in objects]
    eventually(lambda: not is_there(admin, f"/api/v1/namespaces/{NAME}"))  # of other tests
    try:
        for path, document in documents:
            admin.create(path, document)
        yield
    finally:
        for path, document in reversed(documents):
            remove(admin, f"{path}/{document['metadata']['name']}")


def cluster_objects() -> list[Document]:
    """Of the chart: accounts, rights and the policies on what the plugin's account writes."""
    options = ("--namespace", NAME, "--set", f"driverName={DRIVER}")
    rendered = helm("template", NAME, str(CHART), *options).stdout
    return [
        document
        for document in documents(rendered)
        if document["kind"] in PATHS
        and not document["metadata"]["name"].endswith(("-mps-agent", "-claim-configs"))
    ]


def token_of(admin: ApiClient, account: str, node: str = "") -> str:
    """A token of *account* that is bound to *node*, or to nothing."""
    spec: Document = {"expirationSeconds": 3600}
    if node:
        uid = admin.get(f"{NODES}/{node}")["metadata"]["uid"]
        reference = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
        spec["boundObjectRef"] = reference
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    return str(admin.create(f"{account}/token", request)["status"]["token"])


def is_there(client: ApiClient, path: str) -> bool:
    try:
        client.get(path)
    except NotFound:
        return False
    return True


def remove(client: ApiClient, path: str) -> None:
    if is_there(client, path):
        client.delete(path)


def slice_of(node: str = MINE, name: str = "new", **spec: Any) -> Document:
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    usual = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": []}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{NAME}-{name}"},
        "spec": {**usual, **spec},
    }


def pool(name: str) -> Document:
    return {"name": name, "generation": 2, "resourceSliceCount": 1}


def event(node: str = MINE, component: str = DRIVER, name: str = "new", **fields: Any) -> Document:
    """As the plugin writes it."""
    pod = {"apiVersion": "v1", "kind": "Pod", "namespace": NAME, "name": "pod", "uid": "1"}
    usual = {
        "metadata": {"name": f"{NAME}-{name}", "namespace": NAME},
        "involvedObject": pod,
        "reason": "Tested",
        "type": "Normal",
        "message": "it is tested",
        "source": {"component": component, "host": node},
        "reportingComponent": component,
        "reportingInstance": node,
    }
    return {**usual, **fields}


def new_event(
    node: str = MINE, component: str = DRIVER, name: str = "new", **fields: Any
) -> Document:
    """The same in the shape of events.k8s.io."""
    usual = {
        "metadata": {"name": f"{NAME}-{name}", "namespace": NAME},
        "eventTime": "2026-01-02T03:04:05.000000Z",
        "regarding": {"apiVersion": "v1", "kind": "Pod", "namespace": NAME, "name": "pod"},
        "action": "Testing",
        "reason": "Tested",
        "type": "Normal",
        "note": "it is tested",
        "reportingController": component,
        "reportingInstance": node,
    }
    return {**usual, **fields}


CONTROLLER_COMPONENT = "dra-driver-gpu-controller"


def profile_event(component: str = CONTROLLER_COMPONENT, kind: str = "NodeProfile") -> Document:
    """As the controller writes it."""
    version = "resource.nvidia.com/v1beta1"
    regarding = {"apiVersion": version, "kind": kind, "name": "policy-test", "uid": "1"}
    metadata = {"name": f"{NAME}-of-profile", "namespace": "default"}
    return event("controller-0", component, metadata=metadata, involvedObject=regarding)


def new_profile_event(component: str = CONTROLLER_COMPONENT, kind: str = "NodeProfile") -> Document:
    """The same in the shape of events.k8s.io."""
    regarding = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, "name": "policy-test"}
    metadata = {"name": f"{NAME}-of-profile", "namespace": "default"}
    return new_event("controller-0", component, metadata=metadata, regarding=regarding)


def labels(**changes: str | None) -> Document:
    return {"metadata": {"labels": {STATE_LABEL: "success", **changes}}}


def revision(name: str = "new", **labels: str) -> Document:
    """As the controller writes it, with other labels, too."""
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": f"{NAME}-{name}",
            "labels": {REVISION_PROFILE_LABEL: "policy-test", **labels},
        },
        "data": {"spec": {"gpus": [{}]}},
        "revision": 1,
    }


def daemonset_revision(name: str = "new") -> Document:
    document = revision(name)
    document["metadata"]["labels"] = {"app.kubernetes.io/component": "kubelet-plugin"}
    return document


def claim_device(driver: str = DRIVER, pool: str = MINE, reason: str = "Tested") -> Document:
    """What a driver says of its device of a claim."""
    now = "2026-01-02T03:04:05Z"
    condition = {"type": "Ready", "status": "True", "reason": reason, "message": ""}
    return {
        "driver": driver,
        "pool": pool,
        "device": "nic-0" if driver == "other.test" else "gpu-0",
        "conditions": [{**condition, "lastTransitionTime": now}],
        "data": {"uuid": "GPU-0", "memory": "10Gi"},
    }


def claim(name: str, pool: str = MINE) -> Document:
    """Allocated two devices of a node, of which one is another driver's."""
    drivers = (DRIVER, "other.test")
    requests = [{"name": f"r{n}", "exactly": {"deviceClassName": "policy.test"}} for n in range(2)]
    results = [
        {
            "request": f"r{n}",
            **{k: claim_device(driver, pool)[k] for k in ("driver", "pool", "device")},
        }
        for n, driver in enumerate(drivers)
    ]
    of_node = {"key": "metadata.name", "operator": "In", "values": [pool]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": f"{NAME}-{name}"},
        "spec": {"devices": {"requests": requests}},
        "status": {
            "allocation": {
                "devices": {"results": results},
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [of_node]}]},
            },
            "devices": [claim_device("other.test", pool)],
        },
    }


THERE = {
    "claim-mine": (CLAIMS, claim("claim-mine")),
    "claim-theirs": (CLAIMS, claim("claim-theirs", OTHER)),
    "revision": (REVISIONS, revision("revision")),
    "revision-of-daemonset": (REVISIONS, daemonset_revision("revision-of-daemonset")),
    "slice-mine": (SLICES, slice_of(name="slice-mine")),
    "slice-theirs": (SLICES, slice_of(OTHER, "slice-theirs")),
    "slice-driver": (SLICES, slice_of(name="slice-driver", driver="other.test")),
    "event-mine": (EVENTS, event(name="event-mine")),
    "event-theirs": (EVENTS, event(OTHER, name="event-theirs")),
    "event-component": (EVENTS, event(component="kubelet", name="event-component")),
    "new-mine": (NEW_EVENTS, new_event(name="new-mine")),
    "new-theirs": (NEW_EVENTS, new_event(OTHER, name="new-theirs")),
    "new-component": (NEW_EVENTS, new_event(component="kubelet", name="new-component")),
}


KEPT = {
    "labels": {"policy.test/kept": "x"},
    "annotations": {
        "policy.test/kept": "x",
        CLEAR_FAULTS_ANNOTATION: "gpu-0",
        RELEASE_ANNOTATION: "gpu-0",
    },
}

Call = Callable[[ApiClient, Mapping[str, Document]], object]


def create(path: str, document: Document) -> Call:
    return lambda client, _: client.create(path, document)


def try_out(path: str, document: Document) -> Call:
    """Create it without storing it."""
    return lambda client, _: client.create(path, document, {"dryRun": "All"})


def place(name: str) -> str:
    path, document = THERE[name]
    return f"{path}/{document['metadata']['name']}"


def update(name: str, **fields: Any) -> Call:
    """Replace what is in THERE by one with other fields; in a slice, those of its spec."""

    def call(client: ApiClient, there: Mapping[str, Document]) -> object:
        document = copy.deepcopy(there[name])
        document["metadata"].pop("resourceVersion")
        document.get("spec", document).update(fields)
        return client.update(place(name), document)

    return call


def patch(name: str, **fields: Any) -> Call:
    """Merge other fields into what is in THERE; in a slice, into its spec."""
    is_slice = name.startswith("slice")
    return lambda client, _: client.patch(place(name), {"spec": fields} if is_slice else fields)


def delete(name: str) -> Call:
    return lambda client, _: client.delete(place(name))


def patch_node(change: Document, node: str = MINE) -> Call:
    return lambda client, _: client.patch(f"{NODES}/{node}", change)


def spec_of_node(**fields: Any) -> Call:
    return patch_node({"spec": fields})


def metadata_of_node(**fields: Any) -> Call:
    return patch_node({"metadata": fields})


def condition(status: str | None = "True", kind: str = CONDITION) -> Document:
    """A change of a Node's status by this condition; None: it goes."""
    if status is None:
        return {"status": {"conditions": [{"type": kind, "$patch": "delete"}]}}
    said = {"reason": "Tested", "message": f"it is {status}"}
    return {"status": {"conditions": [{"type": kind, "status": status, **said}]}}


def status_of_node(change: Document, node: str = MINE) -> Call:
    path = f"{NODES}/{node}/status"
    return lambda client, _: client.patch(path, change, content_type=STRATEGIC_MERGE_PATCH)


def apply_devices(name: str, *devices: Document) -> Call:
    """Have the plugin say this of the devices of a claim."""

    def call(client: ApiClient, _: Mapping[str, Document]) -> object:
        document = THERE[name][1]
        kept = {key: document[key] for key in ("apiVersion", "kind", "metadata")}
        status = {"devices": list(devices)} if devices else {}
        query = {"fieldManager": DRIVER, "force": "true"}
        return client.patch(f"{place(name)}/status", {**kept, "status": status}, query, APPLY_PATCH)

    return call


def status_of_claim(name: str, **fields: Any) -> Call:
    return lambda client, _: client.patch(f"{place(name)}/status", {"status": fields})
