"""What a real API server does: our client, our slices, and the fake that our other tests trust."""

import base64
import re
import subprocess
import threading
import time

import pytest

from dra_driver.base.errors import Conflict, Forbidden, NotFound, Refused, Unreachable
from dra_driver.k8s.access import load_in_cluster, load_kubeconfig
from dra_driver.k8s.api import FROM_WATCH_CACHE
from dra_driver.k8s.client import ApiClient
from dra_driver.k8s.events import Event, EventRecorder, NodeRef
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.k8s.resource_versions import VERSIONS, convert_slice_from_v1, convert_slice_to_v1
from dra_driver.kubeletplugin.slices.comparison import dropped_fields
from dra_driver.kubeletplugin.slices.pool_writer import PoolWriter
from dra_driver.kubeletplugin.slices.publisher import Publisher
from dra_driver.kubeletplugin.slices.reconcile import (
    Pool,
    SliceContent,
    SliceOwner,
    plan_writes,
    split_into_slices,
)
from dra_driver.model.health import Effect, Fault, HealthRules, Problem
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import GpuSelector, Profile, ProfileEntry, Rules
from dra_driver.plan.health.state import label_value
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.slice_documents import published_devices
from tests.builders import gpu_uuid, inventory
from tests.fakes.pool_rules import validate_pool
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]  # it is built on first use

DRIVER = "probe.example.com"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
STRICT = {"dryRun": "All", "fieldValidation": "Strict"}


@pytest.fixture(scope="module")
def api(cluster):
    client = ApiClient(load_kubeconfig(cluster.kubeconfig))
    yield client
    for each in client.list(SLICES, {"fieldSelector": f"spec.driver={DRIVER}"})["items"]:
        client.delete(f"{SLICES}/{each['metadata']['name']}")
    client.close()


@pytest.fixture(scope="module")
def home(api):
    node = api.list("/api/v1/nodes")["items"][0]["metadata"]
    return SliceOwner(DRIVER, node["name"], node["uid"])


POLICY = {"default": "2048Mi", "validRange": {"min": "1Gi", "max": "80Gi", "step": "1024Ki"}}
RICH = {
    "name": "gpu-0",
    "attributes": {
        "type": {"string": "gpu"},
        "driverVersion": {"version": "580.95.5"},
        "no": {"bool": False},
        "resource.kubernetes.io/numaNode": {"int": 0},
    },
    "capacity": {"memory": {"value": "81920Mi", "requestPolicy": POLICY}},
    "allowMultipleAllocations": True,
    "taints": [{"key": "a.b/c", "value": "", "effect": "NoExecute"}],
}
PART = {
    "name": "part",
    "consumesCounters": [{"counterSet": "gpu-0", "counters": {"units": {"value": "1000m"}}}],
}
COUNTERS = [{"name": "gpu-0", "counters": {"units": {"value": "7.0"}}}]


@pytest.mark.point(62)
@pytest.mark.parametrize("version", VERSIONS)
def test_our_slices_are_taken_strictly_in_every_version_and_nothing_is_lost(api, home, version):
    pool = split_into_slices(home.node, [RICH, PART], COUNTERS)
    assert validate_pool(pool, DRIVER) == ()

    for document in plan_writes(pool, [], home).create:
        path = f"/apis/resource.k8s.io/{version}/resourceslices"
        made = convert_slice_to_v1(
            api.create(path, convert_slice_from_v1(version, dict(document)), STRICT)
        )
        assert dropped_fields(document["spec"], made["spec"]) == ()
        assert dropped_fields(made["spec"], document["spec"]) == ()


def device(**more):
    return {"name": "gpu-0", **more}


def taint(value):
    return {"key": "gpu.nvidia.com/fabric", "value": value, "effect": "NoSchedule"}


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param([RICH], id="a rich device"),
        pytest.param([device()], id="a bare device"),
        pytest.param([], id="no devices"),
        pytest.param([{"name": f"d{i}"} for i in range(128)], id="128 devices"),
        pytest.param([{"name": f"d{i}"} for i in range(129)], id="129 devices"),
        pytest.param(
            [{"name": f"d{i}"} for i in range(64)] + [RICH], id="65 devices, one with a taint"
        ),
        pytest.param([device(), device()], id="a name twice"),
        pytest.param([{"name": "GPU"}], id="a name in capitals"),
        pytest.param([device(attributes={"v": {"version": "1.2"}})], id="two numbers"),
        pytest.param([device(attributes={"v": {"version": "580.95.05"}})], id="a leading zero"),
        pytest.param([device(attributes={"s": {"string": "x" * 64}})], id="64 bytes"),
        pytest.param([device(attributes={"s": {"string": "ü" * 33}})], id="66 bytes"),
        pytest.param([device(attributes={"s": {}})], id="no value"),
        pytest.param([device(attributes={"a-b": {"int": 1}})], id="a key with a dash"),
        pytest.param([device(attributes={"a" * 33: {"int": 1}})], id="a long key"),
        pytest.param(
            [device(attributes={f"a{i}": {"int": i} for i in range(33)})], id="33 attributes"
        ),
        pytest.param([device(taints=[{"key": "k", "effect": "No"}])], id="an unknown effect"),
        pytest.param([device(taints=[taint("x" * 63)])], id="63 characters of a taint"),
        pytest.param([device(taints=[taint("x" * 64)])], id="64 characters of a taint"),
        pytest.param([device(taints=[taint("a b")])], id="a taint with a blank"),
        pytest.param(
            [device(capacity={"m": {"value": "1Gi", "requestPolicy": {"default": "0"}}})],
            id="a policy on an exclusive device",
        ),
    ],
)
def test_our_check_and_our_fake_take_and_refuse_what_the_real_one_does(api, fake, home, devices):
    pool = Pool(home.node, (SliceContent(tuple(devices)),))
    (document,) = plan_writes(pool, [], home).create

    real, faked = stored(api, document), stored(fake, document)

    assert (real is None) == (faked is None)
    assert (real is None) == bool(validate_pool(pool, DRIVER))
    if real and faked:
        assert dropped_fields(real, faked) == dropped_fields(faked, real) == ()


def test_all_taints_of_a_sick_gpu_are_kept_with_the_times_that_we_give(api, home):
    """As many as it can have, the values as long as they may be; also if only the times change."""
    rules = HealthRules(effects=tuple((problem, Effect.NO_SCHEDULE) for problem in Problem))
    profile = Profile("strict", (ProfileEntry(GpuSelector(), Rules(health=rules), "spec.gpus[0]"),))
    value = label_value("route unhealthy: " + "x" * 100)

    def publish(since):
        faults = [
            Fault(gpu_uuid(), problem, "79" if problem is Problem.XID else value, since=since + at)
            for at, problem in enumerate(Problem)
        ]
        offer = build_offer(inventory(1), profile, ApiFeatures(), {}, faults=tuple(faults))
        pool = split_into_slices(home.node, published_devices(offer))
        writes = plan_writes(pool, existing(), home)
        for each in writes.create:
            api.create(SLICES, dict(each), {"fieldValidation": "Strict"})
        for each in writes.update:
            api.update(f"{SLICES}/{each['metadata']['name']}", dict(each))
        assert len(plan_writes(pool, existing(), home)) == 0
        return len(writes), pool.devices[0]["taints"]

    def existing():
        return api.list(SLICES, {"fieldSelector": f"spec.driver={DRIVER}"})["items"]

    for each in existing():
        api.delete(f"{SLICES}/{each['metadata']['name']}")
    for since in (1764000000.9, 1764003600.0):
        number, taints = publish(since)
        (kept,) = existing()

        assert (number, len(taints)) == (1, len(Problem))
        assert max(len(each.get("value", "")) for each in taints) == 63
        assert kept["spec"]["devices"][0]["taints"] == taints


def stored(api, document):
    """The spec as it would be stored; None if it is refused."""
    try:
        return api.create(SLICES, dict(document), STRICT)["spec"]
    except Refused:
        return None


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({"default": "1Gi", "validRange": {"min": "1Gi"}}, id="an open range"),
        pytest.param({"validRange": {"min": "1Gi"}}, id="no default"),
        pytest.param({"default": "0", "validRange": {"min": "1Gi"}}, id="a default below min"),
        pytest.param(
            {"default": "1.5Gi", "validRange": {"min": "1Gi", "step": "1Gi"}}, id="between steps"
        ),
        pytest.param(
            {"default": "1Gi", "validRange": {"min": "1Gi", "max": "2.5Gi", "step": "1Gi"}},
            id="a maximum between steps",
        ),
        pytest.param(
            {"default": "1Gi", "validRange": {"min": "1Gi", "step": "8Gi"}}, id="a long step"
        ),
        pytest.param({"default": "1Gi", "validValues": ["1Gi", "2Gi"]}, id="values"),
        pytest.param({"default": "3Gi", "validValues": ["1Gi", "2Gi"]}, id="not one of them"),
        pytest.param({"default": "2Gi", "validValues": ["2Gi", "1Gi"]}, id="out of order"),
        pytest.param({"default": "1Gi", "validValues": ["1Gi", "9Gi"]}, id="more than there is"),
        pytest.param({"default": "1Gi"}, id="only a default"),
    ],
)
def test_our_check_knows_which_policies_are_taken(api, home, policy):
    capacity = {"m": {"value": "8Gi", "requestPolicy": policy}}
    pool = split_into_slices(home.node, [device(capacity=capacity, allowMultipleAllocations=True)])
    (document,) = plan_writes(pool, [], home).create

    assert (stored(api, document) is None) == bool(validate_pool(pool, DRIVER))


@pytest.mark.parametrize(
    "policy", [{"default": "9Gi"}, {"default": "9Gi", "validRange": {"min": "0"}}]
)
def test_a_default_that_nobody_can_get_is_refused_by_us_alone(api, home, policy):
    capacity = {"m": {"value": "8Gi", "requestPolicy": policy}}
    pool = split_into_slices(home.node, [device(capacity=capacity, allowMultipleAllocations=True)])
    (document,) = plan_writes(pool, [], home).create

    assert stored(api, document)
    assert "default is more than value" in "".join(validate_pool(pool, DRIVER))


def test_preconditions_hold(api, home):
    (document,) = plan_writes(split_into_slices(home.node, [RICH]), [], home).create
    made = api.create(SLICES, dict(document))["metadata"]
    path = f"{SLICES}/{made['name']}"

    with pytest.raises(Conflict):
        api.delete(path, uid="0" * 8 + made["uid"][8:])
    with pytest.raises(Conflict):
        api.delete(path, uid=made["uid"], resource_version="1")
    api.delete(path, uid=made["uid"], resource_version=made["resourceVersion"])
    with pytest.raises(NotFound):
        api.get(path)


def test_an_event_of_a_node_is_taken_and_kubectl_shows_it_by_either_uid(api, cluster, home):
    events = EventRecorder(api, DRIVER, home.node)
    for uid in (home.node_uid, ""):
        about = f"probe with {uid or 'no uid'}"
        events.emit(Event(NodeRef(home.node, uid), "ProbeFailed", about, about))
    path = "/api/v1/namespaces/default/events"
    try:
        assert eventually(lambda: len(probes(api, path)) == 2)
        kubectl = [cluster.kubectl, "--kubeconfig", cluster.kubeconfig]
        answer = subprocess.run(
            [*kubectl, "describe", "node", home.node], capture_output=True, text=True, timeout=60
        )
        assert "probe with no uid" in answer.stdout, answer.stderr
        assert f"probe with {home.node_uid}" in answer.stdout
    finally:
        events.stop()
        for each in probes(api, path):
            api.delete(f"{path}/{each['metadata']['name']}")


@pytest.mark.parametrize("namespace", ["default", "kube-system"])
def test_our_fake_takes_events_of_nodes_where_the_real_one_does(api, fake, home, namespace):
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": "probe.", "namespace": namespace},
        "involvedObject": {"kind": "Node", "name": home.node},
        "reason": "ProbeFailed",
    }
    path = f"/api/v1/namespaces/{namespace}/events"

    taken = [is_taken(server, path, event) for server in (api, fake)]

    assert taken == [namespace == "default"] * 2


def is_taken(server, path, document):
    try:
        return bool(server.create(path, document, STRICT))
    except Refused:
        return False


def probes(api, path):
    return api.list(path, {"fieldSelector": "reason=ProbeFailed"})["items"]


def test_a_blocked_watch_over_tls_ends_at_once_when_it_is_closed(api):
    watch = api.watch("/api/v1/namespaces/none/pods", {}, 60)
    threading.Timer(0.2, watch.close).start()
    began = time.monotonic()

    assert list(watch) == []
    assert 0.1 < time.monotonic() - began < 2


def test_a_ca_that_was_replaced_counts_from_the_next_connection(cluster, tmp_path):
    admin = load_kubeconfig(cluster.kubeconfig).cluster
    host, port = admin["server"].removeprefix("https://").split(":")
    make_another_ca(tmp_path)
    (tmp_path / "token").write_text("nobody's")
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    client = ApiClient(load_in_cluster(tmp_path, environ))
    with pytest.raises(Unreachable, match="no trusted connection"):
        client.get("/api", deadline_seconds=1)

    (tmp_path / "ca.crt").write_bytes(base64.b64decode(admin["certificate-authority-data"]))

    with pytest.raises(Forbidden):
        client.get("/api")
    client.close()


def make_another_ca(directory):
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-days", "1"),
            *("-subj", "/CN=another", "-keyout", directory / "ca.key"),
            *("-out", directory / "ca.crt"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )


READS = 50


def test_claims_in_the_memory_of_the_api_server_cost_etcd_nothing(api, cluster):
    resources, name = ResourceApi(api), "read-again-and-again"
    requests = [{"name": "gpu", "exactly": {"deviceClassName": "probe"}}]
    claim = {"metadata": {"name": name}, "spec": {"devices": {"requests": requests}}}
    api.create(CLAIMS, claim)
    try:
        assert eventually(lambda: is_in_memory(resources, name), seconds=120)

        live = etcd_reads(cluster, lambda: resources.claim("default", name))
        # Others may read claims, too, while we count.
        in_memory = min(
            etcd_reads(cluster, lambda: resources.claim("default", name, FROM_WATCH_CACHE))
            for _ in range(3)
        )
    finally:
        api.delete(f"{CLAIMS}/{name}")

    assert live >= READS
    assert in_memory < READS / 2


def is_in_memory(resources, name):
    try:
        return resources.claim("default", name, FROM_WATCH_CACHE)
    except NotFound:
        return None


def etcd_reads(cluster, read):
    """How many reads of claims the API server sent to etcd while it was asked so often."""
    before = etcd_gets(cluster)
    for _ in range(READS):
        assert read()["metadata"]["name"]
    return etcd_gets(cluster) - before


def etcd_gets(cluster):
    kubectl = [cluster.kubectl, "--kubeconfig", cluster.kubeconfig, "get", "--raw", "/metrics"]
    text = subprocess.run(kubectl, check=True, capture_output=True, text=True, timeout=60).stdout
    of_claims = re.compile(
        r"^etcd_requests_total\{[^}]*operation=.get.,[^}]*"
        r'(?:="resourceclaims"|ResourceClaim")\} (.+)$',
        re.MULTILINE,
    )
    return sum(float(count) for count in of_claims.findall(text))


@pytest.mark.point(64, 65, 68, 69)
def test_slices_are_published_and_come_back_within_two_seconds(api, home):
    resources = ResourceApi(api)
    publisher = Publisher(PoolWriter(resources, DRIVER, home.node))
    devices = [{"name": f"d{i}"} for i in range(150)]
    publisher.want(split_into_slices(home.node, devices))
    publisher.start()
    try:
        assert published(api, devices, 0.5)
        for each in api.list(SLICES, {"fieldSelector": f"spec.driver={DRIVER}"})["items"]:
            api.delete(f"{SLICES}/{each['metadata']['name']}")
        assert published(api, devices, 2.0)
        there = api.list(SLICES, {"fieldSelector": f"spec.driver={DRIVER}"})["items"][0]
        there["spec"]["devices"].pop()
        api.update(f"{SLICES}/{there['metadata']['name']}", there)
        assert published(api, devices, 2.0)
    finally:
        assert publisher.stop()


def published(api, devices, seconds):
    """Whether the devices are all there, in order, before *seconds* are over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        slices = api.list(SLICES, {"fieldSelector": f"spec.driver={DRIVER}"})["items"]
        if [d["name"] for each in slices for d in each["spec"]["devices"]] == [
            d["name"] for d in devices
        ]:
            return True
        time.sleep(0.02)
    return False
