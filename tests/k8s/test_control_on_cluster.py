"""What a controller needs of the real API server: a collection to follow, a Lease to lead by, and
writes that our fake takes and refuses alike."""

import contextlib
import math
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from dra_driver.base.errors import Conflict, NotFound, Refused
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import MERGE_PATCH, STRATEGIC_MERGE_PATCH, ApiClient
from dra_driver.k8s.collection import Collection
from tests.k8s.lease_candidate import LEASE
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]  # it is built on first use


@pytest.fixture(scope="module")
def api(cluster):
    client = ApiClient(load_kubeconfig(cluster.kubeconfig))
    yield client
    client.close()


NODES = "/api/v1/nodes"
NODE = f"{NODES}/probe-node"
STRATEGIC = STRATEGIC_MERGE_PATCH
REVISIONS = "/apis/apps/v1/namespaces/default/controllerrevisions"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
READY = {"type": "Ready", "status": "True"}


@pytest.fixture
def probe_node(api, fake):
    """A node on both API servers, with a condition."""
    for server in (api, fake):
        server.create(NODES, {"metadata": {"name": "probe-node", "labels": {"a": "1"}}})
        server.patch(f"{NODE}/status", {"status": {"conditions": [READY]}}, {}, STRATEGIC)
    yield
    api.delete(NODE)


@pytest.mark.parametrize("kind", [MERGE_PATCH, STRATEGIC])
@pytest.mark.parametrize("path", [NODE, f"{NODE}/status"])
@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param({"resourceVersion": "1"}, id="of another version"),
        pytest.param({"uid": "of another node"}, id="of another UID"),
        pytest.param({"labels": {"b": "2"}, "annotations": {"probe": "3"}}, id="of metadata"),
    ],
)
def test_our_fake_takes_patches_of_nodes_where_the_real_one_does(
    api, fake, probe_node, path, kind, metadata
):
    condition = {"type": "Probed", "status": "True", "reason": "R", "message": "m"}
    patch = {"metadata": metadata, "status": {"conditions": [condition]}}
    if path == NODE:
        del patch["status"]

    def result(server):
        try:
            server.patch(path, patch, {}, kind)
        except (Conflict, Refused) as e:
            return type(e)
        node = server.get(NODE)
        labels, conditions = node["metadata"]["labels"], node["status"]["conditions"]
        return labels, {each["type"]: each["status"] for each in conditions}

    assert result(fake) == result(api)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda server, made: server.patch(made.path, {"revision": 2}), id="patch"),
        pytest.param(
            lambda server, made: server.patch(made.path, {"revision": 2}, {}, STRATEGIC),
            id="strategic patch",
        ),
        pytest.param(lambda server, made: made.put(server, revision=2), id="revision"),
        pytest.param(lambda server, made: made.put(server, revision=-1), id="negative revision"),
        pytest.param(lambda server, made: made.put(server, data={"a": 2}), id="other data"),
        pytest.param(lambda server, made: made.put(server, data=None), id="no data"),
        pytest.param(lambda server, made: made.put(server, "1", revision=2), id="stale version"),
        pytest.param(lambda server, made: made.put(server, "", revision=2), id="no version"),
    ],
)
def test_our_fake_changes_revisions_where_the_real_one_does(api, fake, write):
    def result(server):
        made = MadeRevision(server)
        try:
            return write(server, made)["revision"]
        except (Conflict, Refused) as e:
            return type(e)
        finally:
            server.delete(made.path)

    assert result(fake) == result(api)


class MadeRevision:
    """A ControllerRevision that was just created."""

    def __init__(self, server):
        head = {"apiVersion": "apps/v1", "kind": "ControllerRevision"}
        metadata = {"name": "probe-revision"}
        self.path = f"{REVISIONS}/probe-revision"
        revision = {**head, "metadata": metadata, "data": {"a": 1}, "revision": 1}
        self.document = server.create(REVISIONS, revision)

    def put(self, server, version=None, **fields):
        metadata = dict(self.document["metadata"])
        if version is not None:
            metadata["resourceVersion"] = version
        return server.update(self.path, {**self.document, **fields, "metadata": metadata})


@pytest.mark.parametrize("seconds", [0, 1])
def test_our_fake_takes_leases_where_the_real_one_does(api, fake, seconds):
    lease = {"metadata": {"name": "probe"}, "spec": {"leaseDurationSeconds": seconds}}

    def is_taken(server):
        try:
            return bool(server.create(LEASES, lease, {"dryRun": "All"}))
        except Refused:
            return False

    assert is_taken(api) == is_taken(fake) == (seconds > 0)


CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUP = "k8s.probe.example.com"
PROBES = f"/apis/{GROUP}/v1beta1/probes"
ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
VERSION = {
    "name": "v1beta1",
    "served": True,
    "storage": True,
    "subresources": {"status": {}},
    "schema": {"openAPIV3Schema": {**ANYTHING, "properties": {"spec": ANYTHING}}},
}
CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"probes.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Cluster",
        "names": {"plural": "probes", "kind": "Probe"},
        "versions": [VERSION],
    },
}
PROBE = {"apiVersion": f"{GROUP}/v1beta1", "kind": "Probe", "metadata": {"name": "p"}}


@pytest.fixture
def crd(api):
    """Makes the definition of the custom resource "probes"; and removes it."""

    def make():
        api.create(CRDS, CRD)
        eventually(lambda: is_served(api))

    def remove():
        with contextlib.suppress(NotFound):
            api.delete(f"{CRDS}/probes.{GROUP}")
        eventually(lambda: not is_served(api))

    yield make, remove
    remove()


def is_served(api):
    try:
        return api.list(PROBES)
    except NotFound:
        return None


def test_our_fake_keeps_custom_resources_as_the_real_one_does(api, fake, crd):
    make, _ = crd
    make()
    profile = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "NodeProfile"}
    profiles = "/apis/resource.nvidia.com/v1beta1/nodeprofiles"

    of_real = custom_resource_answers(api, PROBES, PROBE)

    assert custom_resource_answers(fake, profiles, {**PROBE, **profile}) == of_real


def custom_resource_answers(server, path, document):
    """What comes of one write after the other."""
    changes = {"metadata": {"labels": {"a": "b"}}, "spec": {"x": 2}, "status": {"y": 1}}
    stale = {"metadata": {"resourceVersion": "1"}, "status": {"y": 2}}
    other = {"metadata": {"uid": "another"}, "status": {"y": 3}}
    writes = [
        lambda: server.create(path, {**document, "spec": {"x": 1}, "status": {"y": 0}}),
        lambda: server.patch(f"{path}/p/status", changes),
        lambda: server.patch(f"{path}/p", changes),
        lambda: server.patch(f"{path}/p", {"other": 1}),
        lambda: server.patch(f"{path}/p/status", stale),
        lambda: server.patch(f"{path}/p/status", other),
        lambda: server.patch(f"{path}/p", {"spec": {}}, {}, STRATEGIC),
        lambda: server.update(f"{path}/p", {**document, "spec": {}}),
        lambda: server.create(path, {**document, "kind": "Other"}),
        lambda: server.create(path, {"metadata": {"name": "q"}}),
    ]
    answers: list[Any] = []
    for write in writes:
        try:
            made = write()
        except (Conflict, Refused) as e:
            answers.append(type(e))
            continue
        metadata = made.pop("metadata")
        fields = {name: made.get(name) for name in ("spec", "status", "other")}
        answers.append((metadata["generation"], metadata.get("labels"), fields))
    return answers


def test_a_collection_is_empty_while_its_definition_is_gone(api, crd):
    make, remove = crd
    make()
    api.create(PROBES, PROBE)
    probes = Collection(api, PROBES, lambda document: document["metadata"]["uid"])
    changes = []
    probes.start(lambda name, before, after: changes.append((before, after)))
    try:
        assert eventually(lambda: len(changes) == 1)
        remove()
        assert eventually(lambda: not probes.is_served)
        assert (probes.now(), changes[1]) == ({}, (changes[0][1], None))

        make()
        made = api.create(PROBES, PROBE)
        assert eventually(lambda: probes.now() == {"p": made["metadata"]["uid"]})
        assert probes.is_served
    finally:
        assert probes.stop()


@pytest.fixture
def candidates(cluster, api):
    """Processes that want the same Lease, by their names."""
    started = {}

    def start(name):
        command = [sys.executable, "-m", "tests.k8s.lease_candidate", cluster.kubeconfig, name]
        started[name] = Candidate(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[name]

    yield start
    for candidate in started.values():
        candidate.kill()
    with contextlib.suppress(NotFound):
        api.delete(f"{LEASES}/{LEASE.name}")


class Candidate:
    """One of them, and when it led: [began, ended]."""

    def __init__(self, process):
        self.process = process
        self.led = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            event, moment = line.split()
            self.led = [*self.led, [float(moment), math.inf]] if event == "begin" else self.led
            if event == "end":
                self.led[-1][1] = float(moment)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()

    @property
    def leads(self):
        return bool(self.led) and self.led[-1][1] == math.inf


def test_one_process_leads_whoever_is_stopped_or_killed(candidates):
    first = candidates("a")
    eventually(lambda: first.leads)
    second = candidates("b")

    first.process.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    eventually(lambda: second.leads)
    first.process.send_signal(signal.SIGCONT)
    eventually(lambda: not first.leads)
    assert first.led[-1][1] < stopped_at + 0.1 < second.led[0][0]

    second.process.kill()
    killed_at = time.monotonic()
    eventually(lambda: first.leads)
    assert first.led[-1][0] > killed_at
