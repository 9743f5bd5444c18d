"""The chart's policies on a real API server: what a plugin's token can write, and in which words
the rest is refused."""

import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from api.names import (
    CLEAR_FAULTS_ANNOTATION,
    DEVICE_PLUGIN_ANNOTATION,
    GPUS_ALLOCATED_BY,
    PROFILE_LABEL,
    PROFILE_REVISION_ANNOTATION,
    RELEASE_ANNOTATION,
    RELEASED_ANNOTATION,
)
from dra_driver.base.errors import ApiServerError
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient
from dra_driver.k8s.events import Event as PodEvent
from dra_driver.k8s.events import EventRecorder, PodRef
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_annotation import DEVICE_PLUGIN_USES, DevicePluginUse
from hack.testbed.cluster import Cluster
from tests.deploy.chart import REPOSITORY
from tests.deploy.policies import (
    CONDITION,
    DEFAULT_EVENTS,
    DRIVER,
    EVENTS,
    MINE,
    NAME,
    NEW_DEFAULT_EVENTS,
    NEW_EVENTS,
    NODES,
    OTHER,
    REVISIONS,
    SLICES,
    STATE_LABEL,
    STATUS,
    THERE,
    Call,
    Clients,
    Document,
    apply_devices,
    claim_device,
    condition,
    create,
    daemonset_revision,
    delete,
    event,
    is_there,
    labels,
    metadata_of_node,
    new_event,
    new_profile_event,
    open_clients,
    patch,
    patch_node,
    place,
    pool,
    profile_event,
    remove,
    revision,
    slice_of,
    spec_of_node,
    status_of_claim,
    status_of_node,
    try_out,
    update,
)
from tests.waiting import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),  # helm is built on first use
    pytest.mark.refused(
        "resourceslices.resource.k8s.io",
        "nodes",
        "nodes/status",
        "events",
        "events.events.k8s.io",
        "controllerrevisions.apps",
        "resourceclaims/status.resource.k8s.io",
    ),
]


OTHER_NODE = (
    f"spec.nodeName is '{OTHER}', and a plugin writes slices of its own node, '{MINE}': "
    "have --node-name be the pod's spec.nodeName"
)
NO_NODE = OTHER_NODE.replace(f"'{OTHER}'", "''")
OTHER_POOL = (
    f"spec.pool.name is '{OTHER}', and a plugin writes slices of the pool of its node: "
    f"name it '{MINE}'"
)
OTHER_DRIVER = (
    f"spec.driver is 'other.test', and this plugin writes slices of {DRIVER}: "
    "have --driver-name be the chart's driverName"
)
OF_NODE = (
    "a plugin writes one label of its node and the annotations gpu.nvidia.com/released and "
    "gpu.nvidia.com/device-plugin, removes gpu.nvidia.com/clear-faults and gpu.nvidia.com/release, "
    "and changes nothing else; leave the rest as it is"
)
OF_LABELS = f"metadata.labels: a plugin writes {STATE_LABEL} and no other label; leave "
OF_STATUS = (
    "a plugin writes two conditions into the status of its node and nothing else; leave the rest "
    "as it is"
)
OF_CONDITIONS = (
    f"status.conditions: a plugin writes GPUsAllocatedBy and {CONDITION} and no other condition; "
    "leave "
)
OTHER_INSTANCE = (
    f"reportingInstance or the source's host is '{OTHER}', and a plugin tells events as its own "
    f"node, '{MINE}': have --node-name be the pod's spec.nodeName"
)
NO_INSTANCE = OTHER_INSTANCE.replace(f"'{OTHER}'", "''")
COMPONENT = (
    "reportingComponent or the source's component is 'kubelet', and this plugin tells events as "
    f"{DRIVER}: have --driver-name be the chart's driverName"
)
CONTROLLER = COMPONENT.replace("reportingComponent", "reportingController")
OF_CLAIM = (
    "a plugin writes of devices into the status of a claim and nothing else; leave the rest as it "
    "is"
)
OF_DEVICES = (
    f"status.devices: a plugin writes of devices of {DRIVER} in the pool of its own node, "
    f"'{MINE}'; leave "
)
OWNER = {"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "1"}
SELECTED: Document = {
    "nodeSelectorTerms": [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [MINE]}]}
    ]
}

REFUSED: dict[str, tuple[Call, str]] = {
    "slice: another node's": (create(SLICES, slice_of(OTHER)), OTHER_NODE),
    "slice: of v1beta1": (
        create(
            SLICES.replace("v1", "v1beta1"),
            {**slice_of(OTHER), "apiVersion": "resource.k8s.io/v1beta1"},
        ),
        OTHER_NODE,
    ),
    "slice: of all nodes": (create(SLICES, slice_of(nodeName=None, allNodes=True)), NO_NODE),
    "slice: of selected nodes": (
        create(SLICES, slice_of(nodeName=None, nodeSelector=SELECTED)),
        NO_NODE,
    ),
    "slice: in another pool": (create(SLICES, slice_of(pool=pool(OTHER))), OTHER_POOL),
    "slice: of another driver": (create(SLICES, slice_of(driver="other.test")), OTHER_DRIVER),
    "slice: another node's changed": (update("slice-theirs", pool=pool(OTHER)), OTHER_NODE),
    "slice: another node's patched": (patch("slice-theirs", pool={"generation": 3}), OTHER_NODE),
    "slice: another node's taken over": (
        update("slice-theirs", nodeName=MINE, pool=pool(MINE)),
        "spec.nodeName",
    ),
    "slice: given to another node": (
        update("slice-mine", nodeName=OTHER, pool=pool(OTHER)),
        "spec.nodeName",
    ),
    "slice: another node's removed": (delete("slice-theirs"), OTHER_NODE),
    "slice: another driver's changed": (update("slice-driver", pool=pool(MINE)), OTHER_DRIVER),
    "slice: another driver's removed": (delete("slice-driver"), OTHER_DRIVER),
    "node: another one": (
        patch_node(labels(), OTHER),
        f"metadata.name is '{OTHER}', and a plugin writes to its own node, '{MINE}': "
        "have --node-name be the pod's spec.nodeName",
    ),
    "node: another label": (
        patch_node(labels(**{"policy.test/a": "x"})),
        f"{OF_LABELS}policy.test/a as it is",
    ),
    "node: the label of its layout": (
        patch_node(labels(**{"nvidia.com/mig.config": "all-1g.10gb"})),
        f"{OF_LABELS}nvidia.com/mig.config as it is",
    ),
    "node: a label less": (
        patch_node(labels(**{"policy.test/kept": None})),
        f"{OF_LABELS}policy.test/kept as it is",
    ),
    "node: an annotation": (
        metadata_of_node(annotations={"a": "b"}),
        f"metadata.annotations: {OF_NODE}",
    ),
    "node: an annotation that it may remove": (
        metadata_of_node(annotations={CLEAR_FAULTS_ANNOTATION: "all"}),
        f"metadata.annotations: {OF_NODE}",
    ),
    "node: that GPUs are to be released": (
        metadata_of_node(annotations={RELEASE_ANNOTATION: "all"}),
        f"metadata.annotations: {OF_NODE}",
    ),
    "node: another annotation less": (
        metadata_of_node(annotations={"policy.test/kept": None}),
        f"metadata.annotations: {OF_NODE}",
    ),
    "node: a finalizer": (
        metadata_of_node(finalizers=["policy.test/a"]),
        f"metadata.finalizers: {OF_NODE}",
    ),
    "node: an owner": (
        metadata_of_node(ownerReferences=[OWNER]),
        f"metadata.ownerReferences: {OF_NODE}",
    ),
    "node: out of service": (spec_of_node(unschedulable=True), f"spec: {OF_NODE}"),
    "node: a taint": (
        spec_of_node(taints=[{"key": "a", "effect": "NoSchedule"}]),
        f"spec: {OF_NODE}",
    ),
    "status: another node's": (
        status_of_node(condition(), OTHER),
        f"metadata.name is '{OTHER}', and a plugin writes to its own node, '{MINE}': "
        "have --node-name be the pod's spec.nodeName",
    ),
    "status: another condition": (
        status_of_node(condition("False", "Ready")),
        f"{OF_CONDITIONS}Ready",
    ),
    "status: a new condition": (
        status_of_node(condition(kind="policy.test/New")),
        f"{OF_CONDITIONS}policy.test/New as it is",
    ),
    "status: a condition less": (
        status_of_node(condition(None, "MemoryPressure")),
        f"{OF_CONDITIONS}MemoryPressure as it is",
    ),
    "status: its own condition and another": (
        status_of_node(
            {
                "status": {
                    "conditions": [
                        *condition()["status"]["conditions"],
                        *condition("False", "Ready")["status"]["conditions"],
                    ]
                }
            }
        ),
        f"{OF_CONDITIONS}Ready",
    ),
    "status: a capacity": (
        status_of_node({"status": {"capacity": {"nvidia.com/gpu": "8"}}}),
        f"status.capacity: {OF_STATUS}",
    ),
    "status: images": (
        status_of_node({"status": {"images": [{"names": ["other"], "sizeBytes": 1}]}}),
        f"status.images: {OF_STATUS}",
    ),
    "status: an address": (
        status_of_node({"status": {"addresses": [{"type": "InternalIP", "address": "10.1.2.3"}]}}),
        f"status.addresses: {OF_STATUS}",
    ),
    "status: a label": (
        status_of_node(labels(**{"gpu.nvidia.com/profile": "x"})),
        f"metadata.labels: {OF_STATUS}",
    ),
    "status: the revision that the node was given": (
        status_of_node({"metadata": {"annotations": {"gpu.nvidia.com/profile-revision": "x"}}}),
        f"metadata.annotations: {OF_STATUS}",
    ),
    "claim: a device of another node": (
        apply_devices("claim-theirs", claim_device(pool=OTHER)),
        f"{OF_DEVICES}{DRIVER}/{OTHER}/gpu-0 as it is",
    ),
    "claim: a device of another driver": (
        apply_devices("claim-mine", claim_device("other.test", reason="Other")),
        f"{OF_DEVICES}other.test/{MINE}/nic-0",
    ),
    "claim: what another driver says is removed": (
        status_of_claim("claim-mine", devices=[]),
        f"{OF_DEVICES}other.test/{MINE}/nic-0 as it is",
    ),
    "claim: it is freed": (
        status_of_claim("claim-mine", allocation=None, devices=None),
        f"status.allocation: {OF_CLAIM}",
    ),
    "claim: it is reserved": (
        status_of_claim("claim-mine", reservedFor=[{"resource": "pods", "name": "a", "uid": "1"}]),
        f"status.reservedFor: {OF_CLAIM}",
    ),
    "event: another node's": (create(EVENTS, event(OTHER)), OTHER_INSTANCE),
    "event: of no node": (create(EVENTS, event(reportingInstance="")), NO_INSTANCE),
    "event: its source is another node": (
        create(EVENTS, event(source={"component": DRIVER, "host": OTHER})),
        OTHER_INSTANCE,
    ),
    "event: another component's": (create(EVENTS, event(component="kubelet")), COMPONENT),
    "event: its source is another component": (
        create(EVENTS, event(source={"component": "kubelet", "host": MINE})),
        COMPONENT,
    ),
    "event: of no component": (
        create(EVENTS, event(reportingComponent="", source={})),
        COMPONENT.replace("'kubelet'", "''"),
    ),
    "event: another node's counted": (patch("event-theirs", count=7), OTHER_INSTANCE),
    "event: another node's taken over": (
        update("event-theirs", reportingInstance=MINE, source={"component": DRIVER, "host": MINE}),
        OTHER_INSTANCE,
    ),
    "event: another component's changed": (patch("event-component", message="no"), COMPONENT),
    "event: given to another node": (patch("event-mine", reportingInstance=OTHER), OTHER_INSTANCE),
    "new event: another node's": (create(NEW_EVENTS, new_event(OTHER)), OTHER_INSTANCE),
    "new event: another controller's": (
        create(NEW_EVENTS, new_event(component="kubelet")),
        CONTROLLER,
    ),
    "new event: another node's patched": (
        patch("new-theirs", series={"count": 2, "lastObservedTime": "2026-01-02T03:04:06.000000Z"}),
        OTHER_INSTANCE,
    ),
    "new event: another controller's patched": (
        patch(
            "new-component", series={"count": 2, "lastObservedTime": "2026-01-02T03:04:06.000000Z"}
        ),
        CONTROLLER,
    ),
}


OF_A_TOKEN_WITHOUT_A_NODE = {
    "slice": try_out(SLICES, slice_of()),
    "slice removed": delete("slice-mine"),
    "node": patch_node(labels()),
    "status": status_of_node(condition()),
    "claim": apply_devices("claim-mine", claim_device()),
    "event": try_out(EVENTS, event()),
    "new event": try_out(NEW_EVENTS, new_event()),
}
NO_NODE_OF_TOKEN = (
    "this token belongs to no node: use the one that is projected into the pod, not that of a "
    "Secret"
)


@pytest.fixture(scope="module")
def clients(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    with open_clients(cluster, tmp_path_factory.mktemp("policies")) as clients:
        yield clients


@pytest.fixture(scope="module")
def there(clients: Clients) -> Iterator[Mapping[str, Document]]:
    """What was there before a plugin writes, by its name in THERE; the policies are in force."""
    for path, document in THERE.values():
        clients.admin.create(path, document)
        if "status" in document:
            path = f"{path}/{document['metadata']['name']}/status"
            clients.admin.patch(path, {"status": document["status"]})
    stored = {name: clients.admin.get(place(name)) for name in THERE}
    for call in OF_A_TOKEN_WITHOUT_A_NODE.values():
        eventually(lambda c=call: NO_NODE_OF_TOKEN in refusal(clients.nobody, stored, c))  # type: ignore[misc]
    yield stored
    for name in THERE:
        remove(clients.admin, place(name))
    for path, name in ((SLICES, "new"), (EVENTS, "new"), (EVENTS, "new-shape")):
        remove(clients.admin, f"{path}/{NAME}-{name}")


def refusal(client: ApiClient, there: Mapping[str, Document], call: Call) -> str:
    """What the API server says to a request; empty where it did as it was told."""
    try:
        call(client, there)
    except ApiServerError as error:
        return str(error)
    return ""


@pytest.mark.point(103)
@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_what_belongs_to_others_is_refused_with_the_field_and_what_to_do(
    clients: Clients, there: Mapping[str, Document], call: Call, words: str
) -> None:
    assert words in refusal(clients.plugin, there, call)


@pytest.mark.parametrize("call", OF_A_TOKEN_WITHOUT_A_NODE.values(), ids=OF_A_TOKEN_WITHOUT_A_NODE)
def test_a_token_without_a_node_writes_nothing(
    clients: Clients, there: Mapping[str, Document], call: Call
) -> None:
    assert NO_NODE_OF_TOKEN in refusal(clients.nobody, there, call)


ADMITTED: dict[str, Call] = {
    "slice": create(SLICES, slice_of()),
    "slice: tried out": try_out(SLICES, slice_of(name="dry")),
    "slice: of v1beta2": try_out(
        SLICES.replace("v1", "v1beta2"),
        {**slice_of(name="beta"), "apiVersion": "resource.k8s.io/v1beta2"},
    ),
    "slice: changed": update("slice-mine", pool=pool(MINE)),
    "slice: patched": patch("slice-mine", pool={"generation": 3}),
    "node: a state": patch_node(labels()),
    "node: another state": patch_node({"metadata": {"labels": {STATE_LABEL: "failed"}}}),
    "node: no state": patch_node({"metadata": {"labels": {STATE_LABEL: None}}}),
    "node: GPUs that are well again": metadata_of_node(annotations={CLEAR_FAULTS_ANNOTATION: None}),
    "node: GPUs that it lets go of": metadata_of_node(annotations={RELEASED_ANNOTATION: "gpu-0"}),
    "node: others": metadata_of_node(annotations={RELEASED_ANNOTATION: "gpu-1"}),
    "node: GPUs that it has again": metadata_of_node(
        annotations={RELEASED_ANNOTATION: None, RELEASE_ANNOTATION: None}
    ),
    "node: how pods get GPUs": metadata_of_node(annotations={DEVICE_PLUGIN_ANNOTATION: "{}"}),
    "node: they get claims": metadata_of_node(annotations={DEVICE_PLUGIN_ANNOTATION: None}),
    "status: the condition": status_of_node(condition()),
    "status: the condition again": status_of_node(condition()),
    "status: another one of it": status_of_node(condition("False")),
    "status: it goes": status_of_node(condition(None)),
    "claim: its own device": apply_devices("claim-mine", claim_device()),
    "claim: its own device changed": apply_devices("claim-mine", claim_device(reason="Again")),
    "claim: its own device forgotten": apply_devices("claim-mine"),
    "event": create(EVENTS, event()),
    "event: without a source": try_out(EVENTS, event(name="plain", source={})),
    "event: counted": patch("event-mine", count=2, message="it is tested again"),
    "event: changed": update("event-mine", count=3),
    "new event": create(NEW_EVENTS, new_event(name="new-shape")),
    "new event: goes on": patch(
        "new-mine", series={"count": 2, "lastObservedTime": "2026-01-02T03:04:06.000000Z"}
    ),
}


@pytest.mark.point(103)
@pytest.mark.parametrize("call", ADMITTED.values(), ids=ADMITTED)
def test_a_plugin_writes_for_its_own_node(
    clients: Clients, there: Mapping[str, Document], call: Call
) -> None:
    call(clients.plugin, there)


def test_a_plugin_removes_what_is_its_own_and_what_an_earlier_release_left_in_another_pool(
    clients: Clients, there: Mapping[str, Document]
) -> None:
    for document in (slice_of(name="own"), slice_of(name="left", pool=pool("an-older-pool"))):
        clients.admin.create(SLICES, document)
        clients.plugin.delete(f"{SLICES}/{document['metadata']['name']}")
        assert not is_there(clients.admin, f"{SLICES}/{document['metadata']['name']}")


def test_others_write_as_before(clients: Clients, there: Mapping[str, Document]) -> None:
    """The policies are about one account."""
    for path, document in (
        (SLICES, slice_of(OTHER, "else")),
        (EVENTS, event(OTHER, "kubelet", "else")),
    ):
        clients.admin.create(path, document, {"dryRun": "All"})
    for change in ({"status": STATUS}, labels(**{"policy.test/by": "x"}), condition("False")):
        status_of_node(change, OTHER)(clients.admin, there)


def test_what_happens_again_is_counted_in_the_event_that_the_plugin_wrote(
    clients: Clients, there: Mapping[str, Document]
) -> None:
    client = ApiClient(load_kubeconfig(clients.plugin_kubeconfig))
    events = EventRecorder(client, DRIVER, MINE, min_update_seconds=0)
    pod = PodRef(NAME, f"{NAME}-again", "1")

    def is_counted(count: int) -> bool:
        found = clients.admin.list(EVENTS, {"fieldSelector": f"involvedObject.name={pod.name}"})
        return [each["count"] for each in found["items"]] == [count]

    for count in (1, 2):
        events.emit(PodEvent(pod, "Tested", "a test", "it happened"))
        eventually(lambda c=count: is_counted(c))  # type: ignore[misc]
    events.stop()
    client.close()


OF_CONTROLLER = "the controller writes one annotation of a node and nothing else"
OF_ANNOTATIONS = f"metadata.annotations: the controller writes {PROFILE_REVISION_ANNOTATION} and no"
REFUSED_TO_THE_CONTROLLER: dict[str, tuple[Call, str]] = {
    "another annotation": (metadata_of_node(annotations={"a": "b"}), OF_ANNOTATIONS),
    "a label": (patch_node(labels(**{PROFILE_LABEL: "x"})), f"metadata.labels: {OF_CONTROLLER}"),
    "a finalizer": (
        metadata_of_node(finalizers=["policy.test/a"]),
        f"metadata.finalizers: {OF_CONTROLLER}",
    ),
    "an owner": (
        metadata_of_node(ownerReferences=[OWNER]),
        f"metadata.ownerReferences: {OF_CONTROLLER}",
    ),
    "out of service": (spec_of_node(unschedulable=True), f"spec: {OF_CONTROLLER}"),
    "a taint": (
        spec_of_node(taints=[{"key": "a", "effect": "NoSchedule"}]),
        f"spec: {OF_CONTROLLER}",
    ),
}


LABELS_OF_REVISION = "metadata.labels: the controller writes revisions of NodeProfiles"
NO_REVISION = f"'{NAME}-revision-of-daemonset' is no revision of a NodeProfile"
REVISIONS_REFUSED_TO_THE_CONTROLLER: dict[str, tuple[Call, str]] = {
    "of a DaemonSet": (try_out(REVISIONS, daemonset_revision()), LABELS_OF_REVISION),
    "of both": (try_out(REVISIONS, revision(app="x")), LABELS_OF_REVISION),
    "given to a DaemonSet": (
        update("revision", metadata=revision("revision", app="x")["metadata"]),
        LABELS_OF_REVISION,
    ),
    "a DaemonSet's changed": (update("revision-of-daemonset", revision=2), NO_REVISION),
    "a DaemonSet's taken over": (
        update("revision-of-daemonset", metadata=revision("revision-of-daemonset")["metadata"]),
        NO_REVISION,
    ),
    "a DaemonSet's deleted": (delete("revision-of-daemonset"), NO_REVISION),
}


@pytest.mark.parametrize(
    ("call", "words"),
    REVISIONS_REFUSED_TO_THE_CONTROLLER.values(),
    ids=REVISIONS_REFUSED_TO_THE_CONTROLLER,
)
def test_the_controller_writes_no_revision_of_anything_else(
    clients: Clients, there: Mapping[str, Document], call: Call, words: str
) -> None:
    other = REVISIONS_REFUSED_TO_THE_CONTROLLER["of a DaemonSet"][0]
    eventually(lambda: LABELS_OF_REVISION in refusal(clients.controller, there, other))
    assert words in refusal(clients.controller, there, call)


EVENT_OF_KUBELET = "the event is of 'kubelet', and the controller tells events as dra-driver-gpu"
EVENT_ABOUT_POD = "the event is about a 'Pod', and the controller tells of NodeProfiles only"
EVENTS_REFUSED_TO_THE_CONTROLLER: dict[str, tuple[Call, str]] = {
    "of another component": (try_out(DEFAULT_EVENTS, profile_event("kubelet")), EVENT_OF_KUBELET),
    "about a pod": (try_out(DEFAULT_EVENTS, profile_event(kind="Pod")), EVENT_ABOUT_POD),
    "of another component, new": (
        try_out(NEW_DEFAULT_EVENTS, new_profile_event("kubelet")),
        EVENT_OF_KUBELET,
    ),
    "about a pod, new": (
        try_out(NEW_DEFAULT_EVENTS, new_profile_event(kind="Pod")),
        EVENT_ABOUT_POD,
    ),
    "another component's changed": (update("event-component", message="x"), EVENT_OF_KUBELET),
}


@pytest.mark.parametrize(
    ("call", "words"),
    EVENTS_REFUSED_TO_THE_CONTROLLER.values(),
    ids=EVENTS_REFUSED_TO_THE_CONTROLLER,
)
def test_the_controller_speaks_for_nobody_else(
    clients: Clients, there: Mapping[str, Document], call: Call, words: str
) -> None:
    other = try_out(DEFAULT_EVENTS, profile_event("kubelet"))
    eventually(lambda: EVENT_OF_KUBELET in refusal(clients.controller, there, other))
    assert words in refusal(clients.controller, there, call)


def test_the_controller_tells_of_nodeprofiles(clients: Clients) -> None:
    clients.controller.create(DEFAULT_EVENTS, profile_event(), {"dryRun": "All"})
    clients.controller.create(NEW_DEFAULT_EVENTS, new_profile_event(), {"dryRun": "All"})


def test_the_controller_writes_and_deletes_revisions_of_nodeprofiles(
    clients: Clients, there: Mapping[str, Document]
) -> None:
    clients.controller.create(REVISIONS, revision())
    clients.controller.update(f"{REVISIONS}/{NAME}-new", {**revision(), "revision": 2})
    clients.controller.delete(f"{REVISIONS}/{NAME}-new")


@pytest.mark.parametrize(
    ("call", "words"), REFUSED_TO_THE_CONTROLLER.values(), ids=REFUSED_TO_THE_CONTROLLER
)
def test_the_controller_changes_nothing_else_of_a_node(
    clients: Clients, there: Mapping[str, Document], call: Call, words: str
) -> None:
    eventually(lambda: OF_ANNOTATIONS in refusal(clients.controller, there, OTHER_ANNOTATION))
    assert words in refusal(clients.controller, there, call)


OTHER_ANNOTATION = metadata_of_node(annotations={"policy.test/in-force": "x"})


@pytest.mark.parametrize(
    "given", ["inference-5d8fbz7k2x", "", None], ids=["one", "none", "no word"]
)
@pytest.mark.parametrize("node", [MINE, OTHER])
def test_the_controller_gives_every_node_its_revision(
    clients: Clients, there: Mapping[str, Document], given: str | None, node: str
) -> None:
    change = {"metadata": {"annotations": {PROFILE_REVISION_ANNOTATION: given}}}
    clients.controller.patch(f"{NODES}/{node}", change)


def test_the_check_before_an_uninstall_needs_no_more_than_its_own_account(
    clients: Clients, there: Mapping[str, Document]
) -> None:
    said = {"type": GPUS_ALLOCATED_BY, "status": "True", "reason": "DevicePlugin"}
    status_of_node({"status": {"conditions": [said]}})(clients.admin, there)  # it lists pods then
    use = DEVICE_PLUGIN_USES.encode(DevicePluginUse(ResourceNames())).decode()
    metadata_of_node(annotations={DEVICE_PLUGIN_ANNOTATION: use})(clients.admin, there)
    command = [
        "uninstall-check",
        "--driver-name=unused.test",
        f"--kubeconfig={clients.uninstall_kubeconfig}",
    ]
    answer = subprocess.run(
        [sys.executable, "-m", "dra_driver", *command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
