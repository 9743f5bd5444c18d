"""The doctor on simulated nodes and a fake API server: all in order, and what is not."""

import errno
import socket
import tempfile
import threading
from pathlib import Path

import pytest
import yaml

from dra_driver.__main__ import node_opener
from dra_driver.base.errors import NodeError
from dra_driver.cli.doctor.cluster_checks import NEEDED_PERMISSIONS, CheckedCluster
from dra_driver.cli.doctor.run import doctor, examine_cluster, run_checks
from dra_driver.cli.findings import Level, ok
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.kubeletplugin.serve.plugin import KubeletPlugin
from dra_driver.kubeletplugin.serve.rolling_update import PluginInstances
from dra_driver.kubeletplugin.serve.services import DraService
from dra_driver.kubeletplugin.serve.sockets import socket_paths
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.health import Fault, HealthState, Problem
from dra_driver.model.mig_layouts import MigState
from dra_driver.model.mps import MpsStatus
from dra_driver.model.profiles import AllocationApi, Profile
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.health_file import HealthFile
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.node.state.node_api_file import ServedApi, ServedApiFile
from dra_driver.node.state.profile_files import LastProfileFile
from dra_driver.plan.profiles.revisions import canonical_rules, revision_name
from dra_driver.settings import DoctorSettings
from dra_driver.sim.node_spec import read_node
from tests.cli.findings import levels
from tests.cli.mps import server as server_of
from tests.cli.profiles import profiles
from tests.cli.scheduling import DRIVER, GPU_CLASS, capacity, claim, request, slices
from tests.fakes import api_server
from tests.fakes.poison import own_host
from tests.fakes.registrar import Registrar
from tests.fakes.simulated import h100
from tests.fakes.user import locked_out

NODE = "n1"
# What the test's node lacks, and what is told to who runs tests as somebody else than root.
UNMOUNTED = {"[warn] cgroups", "[warn] pod-resources socket", "[warn] user"}


class World:
    """The directories of a node in order, and the doctor who looks at them."""

    def __init__(self, directory: Path, type_in):
        self.kubelet = directory / "k"
        self.registry = self.kubelet / "plugins_registry"
        self.cdi = directory / "cdi"
        self.home = self.kubelet / "plugins" / DRIVER
        self.host = own_host(directory / "host")
        self.records = self.home / "state/claims" / boot_id(self.host)
        self.node_file = directory / "node.yaml"
        self._type_in = type_in
        self.runtime = self.host / "runtime"
        bundles = self.runtime / "io.containerd.runtime.v2.task/k8s.io"
        for each in (self.registry, self.cdi, self.records, bundles):
            each.mkdir(parents=True)
        self.gpus()

    def gpus(self, **node):
        self.node_file.write_text(yaml.safe_dump({"gpus": [h100("1b"), h100("43")], **node}))

    def ask(self, *words):
        return self._type_in(
            "doctor",
            *("--host-root", self.host, "--runtime-dir", "/runtime"),
            *("--sim", self.node_file, "--node-name", NODE),
            *("--kubelet-dir", self.kubelet, "--cdi-dir", self.cdi),
            *("--mps-socket", ""),
            *words,
        )


@pytest.fixture
def world(type_in, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    # Not pytest's own directory, whose name is too long for sockets.
    with tempfile.TemporaryDirectory(prefix="doctor-") as directory:
        yield World(Path(directory), type_in)


@pytest.fixture
def server():
    with api_server.ApiServer() as running:
        running.put({"kind": "Node", "metadata": {"name": NODE}})
        running.put({"kind": "DeviceClass", "metadata": {"name": DRIVER}, "spec": {}})
        yield running


@pytest.fixture
def client(server, tmp_path):
    connected = ApiClient(load_kubeconfig(server.kubeconfig(tmp_path / "kubeconfig")))
    yield connected
    connected.close()


class Reviewed:
    """The API server with an authorizer: every right is ours but those that are *missing*."""

    def __init__(self, client, missing=()):
        self._client = client
        self._missing = missing

    def __getattr__(self, name):
        return getattr(self._client, name)

    def create(self, path, document, query=None):
        if not path.endswith("/selfsubjectaccessreviews"):
            return self._client.create(path, document, query or {})
        right = document["spec"]["resourceAttributes"]
        allowed = (right["verb"], right["resource"], right["group"]) not in self._missing
        return {**document, "status": {"allowed": allowed}}


def examine(client, missing=()):
    reviewed = Reviewed(client, missing)
    return list(examine_cluster(CheckedCluster(reviewed, ResourceApi(reviewed), DRIVER, NODE)))


def lines(answer, *tags):
    return [line for line in answer.out.splitlines() if line.startswith(tags)]


def line(answer, tag):
    """The only one of its kind."""
    (only,) = lines(answer, tag)
    return only


def test_a_node_in_order_ends_with_zero_and_each_finding_has_its_line(world):
    answer = world.ask()

    assert (answer.code, answer.err) == (0, "")
    assert lines(answer, "[FAIL]") == []
    assert "[ok]   driver root: driver 580.95.05 in " in answer.out
    assert "[ok]   kernel module: 580.95.05, as the libraries" in answer.out
    assert "[ok]   GPUs: 2 NVIDIA H100 80GB HBM3: gpu-0, gpu-1" in answer.out
    assert "[ok]   profile: default (nothing chooses another)" in answer.out
    assert "[ok]   GPUs as offered: sliceable: gpu-0, gpu-1" in answer.out
    assert lines(answer, "[skip]") == [
        "[skip] PID namespace: simulated GPUs have no processes",
        "[skip] API server: not in a pod (KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is "
        "not set): name a kubeconfig with --kubeconfig",
    ]
    warned = lines(answer, "[warn]")
    assert {line.partition(":")[0] for line in warned} <= UNMOUNTED | {"[warn] plugin"}
    assert answer.out.splitlines()[-1].startswith(f"0 failed, {len(warned)} warnings, ")


def test_asking_changes_nothing(world):
    def everything():
        return sorted(str(path) for path in world.kubelet.parent.rglob("*"))

    before = everything()
    world.ask()

    assert everything() == before


@pytest.mark.parametrize(
    ("state", "failed"), [("not-loaded", "kernel module"), ("no-library", "driver root")]
)
def test_a_missing_driver_is_told_once_and_what_needs_it_is_not_looked_at(world, state, failed):
    world.gpus(driver=state)

    answer = world.ask("--mps-socket", world.kubelet / "agent.sock")

    assert answer.code == 1
    failure = line(answer, "[FAIL]")
    assert failure.startswith(f"[FAIL] {failed}: ")
    assert (
        "[skip] GPUs, device files, MIG mode, MIG instances, MIG device files, MIG layouts, memory "
        "limits, MPS programs, compute modes: needs the driver, which is to be mended first\n"
    ) in answer.out
    assert answer.out.count(failure.partition(": ")[2].partition("(")[0]) == 1
    assert "NVML" not in answer.out
    assert "[ok]   ledger: " in answer.out
    assert lines(answer, "[warn] MPS agent"), "what does not need the driver is looked at"


def test_a_node_without_driver_and_gpu_is_told_where_it_was_looked_and_that_it_has_none(world):
    world.gpus(driver="no-library", gpus=[])

    answer = world.ask("--driver-root", "/nowhere")

    assert "/nowhere does not exist" in line(answer, "[FAIL]")
    assert "[warn] GPUs: this node has none" in answer.out
    assert "[skip] device files, MIG mode, " in answer.out


def test_a_lost_gpu_is_a_warning_while_another_is_offered(world):
    world.gpus(gpus=[h100("1b"), h100("43", fails="GPU_IS_LOST")])

    answer = world.ask()

    assert answer.code == 0
    assert "0000:43:00.0" in line(answer, "[warn] GPUs")


@pytest.mark.parametrize(
    ("change", "words", "problem"),
    [
        pytest.param(
            None,
            ("--nvidia-cdi-hook", "/usr/bin/nvidia-cdi-hook"),
            "nvidia-cdi-hook: /usr/bin/nvidia-cdi-hook is no program",
            id="no hook",
        ),
        pytest.param(
            lambda world: (world.cdi.rmdir(), world.cdi.write_text("a file")),
            ("--cdi-dir", "{world.cdi}/below"),
            "CDI directory: ",
            id="a CDI directory that cannot be made",
        ),
        pytest.param(
            None,
            ("--kubelet-dir", "/nowhere"),
            "kubelet directory: /nowhere/plugins_registry does not exist",
            id="no directory of the kubelet",
        ),
        pytest.param(
            None,
            ("--kubelet-dir", "/long" * 30),
            "kubelet directory: no socket fits",
            id="too long a name for sockets",
        ),
        pytest.param(
            lambda world: (
                world.records.rmdir(),
                world.records.parent.rmdir(),
                world.records.parent.write_text("a file in the way"),
            ),
            (),
            "ledger: {world.records} cannot be made",
            id="a ledger that cannot be made",
        ),
        pytest.param(
            None, ("--kubeconfig", "/nowhere"), "API server: ", id="a kubeconfig that is none"
        ),
    ],
)
def test_what_is_not_where_it_should_be_fails(world, change, words, problem):
    if change:
        change(world)

    answer = world.ask(*(word.format(world=world) for word in words))

    assert answer.code == 1
    assert f"[FAIL] {problem.format(world=world)}" in answer.out


def test_a_missing_cdi_directory_is_a_warning_with_what_to_look_at(world):
    world.cdi.rmdir()

    answer = world.ask()

    assert answer.code == 0
    assert str(world.cdi) in line(answer, "[warn] CDI directory")


def test_an_unreadable_record_fails_and_stays_where_it_is(world):
    damaged = world.records / "0b7e.json"
    damaged.write_text('{"holdings": [{"device":"gpu-1","gpu":"GPU-1"}], "co')

    answer = world.ask()

    assert answer.code == 1
    assert str(damaged) in line(answer, "[FAIL] ledger")
    assert "-> gpu-1 takes no new claim" in answer.out
    assert damaged.exists()


def test_cdi_files_of_nvidias_driver_are_told_from_ours(world):
    (world.cdi / f"k8s.{DRIVER}-claim_0b7e.yaml").write_text("")

    answer = world.ask()

    assert "NVIDIA's driver" in line(answer, "[warn] other drivers")


def test_another_driver_with_our_name_fails(world):
    with Registrar(world.registry / f"{DRIVER}-reg.sock", DRIVER, "/plugins/dra.sock"):
        answer = world.ask()

    assert answer.code == 1
    assert f"{DRIVER}-reg.sock" in line(answer, "[FAIL] other drivers")


class Nobody:
    """A preparer that is never asked."""

    def prepare(self, ref):
        raise AssertionError(ref)

    unprepare = prepare


class Uncounted:
    def observe(self, operation, outcome, seconds):
        """Nobody looks."""


def test_our_own_plugin_is_found_by_its_lock_and_asked_over_its_sockets(world):
    paths = socket_paths(DRIVER, world.home, world.registry, "0b7e-pod")
    fatal = []
    instances = PluginInstances(world.home / "instances", "0b7e-pod")
    plugin = KubeletPlugin(paths, DraService(Nobody(), Uncounted()), fatal.append)
    plugin.start()
    try:
        well = world.ask()
    finally:
        plugin.stop()
    ill = world.ask()
    instances.leave()

    assert "[ok]   plugin: pod 0b7e-pod answers over both its sockets" in well.out
    assert "nobody else speaks for gpu.nvidia.com" in well.out
    assert (well.code, ill.code) == (0, 1)
    assert lines(ill, "[FAIL] plugin")
    assert not fatal


def test_a_plugin_that_serves_the_device_plugin_api_alone_needs_no_dra_sockets(world):
    instances = PluginInstances(world.home / "instances", "0b7e-pod")
    ServedApiFile(world.home / "state/api.json").write(ServedApi(AllocationApi.DEVICE_PLUGIN))

    asked = world.ask()
    instances.leave()

    assert "[ok]   plugin: pod 0b7e-pod runs, and serves the device-plugin API" in asked.out
    assert not lines(asked, "[FAIL] plugin")


def test_a_hung_check_is_given_up_and_the_next_goes_on():
    release = threading.Event()
    checks = [
        ("slow", lambda: iter([ok("slow", str(release.wait(10)))])),
        ("next", lambda: [ok("next", "made")]),
    ]

    slow, following = run_checks(checks, deadline_seconds=0.05)
    release.set()

    assert (slow.level, following.message) == (Level.FAIL, "made")
    assert "no answer within" in slow.message


def raising(error):
    def check():
        raise error

    return check


def test_a_check_that_breaks_does_not_take_the_others_with_it(caplog):
    disk, hidden = NodeError("the disk is gone"), PermissionError(errno.EACCES, "Denied", "/sys/x")
    checks = [
        ("broken", raising(KeyError("a fault of ours"))),
        ("disk", raising(disk)),
        ("hidden", raising(hidden)),
        ("disk again", raising(disk)),
        ("last", lambda: [ok("last", "")]),
    ]

    broken, *others = run_checks(checks)

    assert "fault of ours" in broken.remedy and "a check broke" in caplog.text
    assert [(finding.level, finding.message) for finding in others] == [
        (Level.FAIL, "cannot be looked at: the disk is gone"),
        (Level.FAIL, "cannot be looked at: [Errno 13] Denied: '/sys/x'"),
        (Level.SKIP, "cannot be looked at, for the same reason as disk"),
        (Level.OK, ""),
    ]


def of(findings, subject):
    return [finding for finding in findings if finding.subject == subject]


def test_a_cluster_in_order_has_a_line_for_each_check(client):
    findings = examine(client)

    assert levels(findings) == [Level.OK] * 8
    assert findings[0].message.endswith("serves resource.k8s.io/v1")
    assert [finding.subject for finding in findings[-3:]] == [
        *("pending claims", "pending pods", "tainted devices")
    ]
    assert findings[-4].message.startswith(
        "kept: device taints, consumable capacity, shared counters"
    )


def test_exactly_the_rights_that_are_missing_are_named(client):
    missing = {
        ("list", "resourceclaims", "resource.k8s.io"),
        ("delete", "resourceslices", "resource.k8s.io"),
        ("get", "pods", ""),
    }

    failed = [finding for finding in examine(client, missing) if finding.level is Level.FAIL]

    pods, claims, slices = failed
    assert pods.message == "this account may not get pods (no role allows it)"
    assert "may not delete resourceslices.resource.k8s.io (" in slices.message
    assert 'verb "list" on "resourceclaims" in API group "resource.k8s.io"' in claims.remedy
    assert all("ClusterRole" in finding.remedy for finding in failed)


def test_every_right_that_the_plugin_uses_is_in_the_charts_role():
    chart = Path(__file__).parents[2] / "deploy/helm/dra-driver-gpu/templates"
    text = (chart / "kubelet-plugin-clusterrole.yaml").read_text()
    (_, rules) = text.split("rules:\n")
    rules = "\n".join(line for line in rules.splitlines() if "{{" not in line)
    granted = {
        (group, resource, verb)
        for rule in yaml.safe_load(rules)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }

    used = {(right.group, right.resource, right.verb) for right in NEEDED_PERMISSIONS}
    assert used <= granted


def test_an_api_server_that_does_not_review_rights_skips_that_alone(server, client):
    findings = list(examine_cluster(CheckedCluster(client, ResourceApi(client), DRIVER, NODE)))

    assert levels(findings) == [Level.OK, Level.OK, Level.SKIP, *[Level.OK] * 5]


@pytest.mark.parametrize(
    ("resource", "name", "subject", "level"),
    [
        ("nodes", NODE, "Node object", Level.FAIL),
        ("deviceclasses", DRIVER, "DeviceClass", Level.WARN),
    ],
)
def test_an_object_that_the_api_server_does_not_have_is_told(
    server, client, resource, name, subject, level
):
    server.remove(resource, name)

    assert [
        (finding.subject, finding.level)
        for finding in examine(client)
        if finding.level is not Level.OK
    ] == [(subject, level)]


def test_what_we_may_not_read_is_skipped(server, client):
    for resource in ("nodes", "deviceclasses"):
        server.deny("get", resource)
    server.deny("create", "resourceslices")

    skipped = [finding.subject for finding in examine(client) if finding.level is Level.SKIP]

    assert skipped == ["Node object", "DeviceClass", "API features", "pending claims"]


def test_a_gate_that_is_off_is_told(server, client):
    server.disable("DRAConsumableCapacity")

    assert (
        "consumable capacity (DRAConsumableCapacity)"
        in of(examine(client), "API features")[0].message
    )


def test_of_an_api_server_without_dra_nothing_of_that_is_asked(server, client):
    server.served.clear()

    findings = examine(client)

    assert levels(findings) == [Level.OK] * 3
    assert findings[0].message == "answers, and knows no resource.k8s.io"


def test_a_slice_that_is_refused_says_who_may_have_refused_it(server, client):
    server.fail(422, "POST", "resourceslices")

    assert "validatingadmissionpolicies" in of(examine(client), "API features")[0].remedy


def put_slice(server):
    """As a node with two GPUs publishes it."""
    devices, _ = slices(node=NODE)
    pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    server.put(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": "n1-slice"},
            "spec": {**devices["spec"], "pool": pool},
        }
    )


def put_claim(server, name, device_class=DRIVER, **fields):
    document = claim(request(device_class, **fields))
    server.put(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"namespace": "team-a", "name": name},
            "spec": document["spec"],
        }
    )


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_claims_that_can_never_be_placed_are_named_with_the_field(server, client, version):
    server.put({"kind": "DeviceClass", **GPU_CLASS})
    put_slice(server)
    put_claim(server, "fine", **capacity(memory="10Gi"))
    put_claim(server, "large", **capacity(memory="200Gi"))
    put_claim(server, "theirs", "other.example", **capacity(memory="200Gi"))
    server.served = [version]

    warned, summary = of(examine(client), "pending claims")

    assert (warned.level, summary.level) == (Level.WARN, Level.OK)
    assert warned.message.startswith(
        "team-a/large can never be served as it is: "
        "spec.devices.requests[0].exactly.capacity.requests[memory]: asks for 200Gi"
    )
    assert summary.message.startswith("1 wait")


def test_claims_that_wait_where_nothing_is_published_are_counted(server, client):
    server.put({"kind": "DeviceClass", **GPU_CLASS})
    put_claim(server, "fine")

    (finding,) = of(examine(client), "pending claims")

    assert (finding.level, finding.message) == (
        Level.WARN,
        f"1 wait, and no node publishes a device of {DRIVER}",
    )


def put_pod(server, name, resource, **spec):
    main = {"name": "main", "resources": {"limits": {resource: "1"}}}
    server.put(
        {
            "kind": "Pod",
            "metadata": {"namespace": "team-a", "name": name},
            "spec": {"containers": [main], **spec},
            "status": {"phase": "Pending"},
        }
    )


def test_pods_that_can_never_be_scheduled_are_named_with_the_resource(server, client):
    server.put({"kind": "DeviceClass", **GPU_CLASS})
    put_slice(server)
    put_pod(server, "old", "nvidia.com/mig-1g.10gb")
    put_pod(server, "runs", "nvidia.com/mig-1g.10gb", nodeName=NODE)
    put_pod(server, "by-its-class", f"deviceclass.resource.kubernetes.io/{DRIVER}")
    put_pod(server, "cpu", "cpu")

    warned, summary = of(examine(client), "pending pods")

    assert warned.level is Level.WARN
    assert warned.message.startswith(
        "team-a/old can never be scheduled: container main, nvidia.com/mig-1g.10gb: no DeviceClass"
    )
    assert (summary.level, summary.message.partition(" wait ")[0]) == (Level.OK, "1")


@pytest.mark.parametrize(
    ("capacity", "allocatable", "served"),
    [
        pytest.param("8", "8", True, id="it runs"),
        pytest.param("8", "0", True, id="it starts anew, or no GPU is well"),
        pytest.param("0", "0", False, id="it is gone, and the kubelet keeps the name"),
    ],
)
def test_a_device_plugin_on_some_node_serves_its_own_resource(
    server, client, capacity, allocatable, served
):
    put_slice(server)
    put_pod(server, "old", "nvidia.com/gpu")
    status = {
        "capacity": {"nvidia.com/gpu": capacity, "cpu": "8"},
        "allocatable": {"nvidia.com/gpu": allocatable, "cpu": "8"},
    }
    server.put({"kind": "Node", "metadata": {"name": "n2"}, "status": status})

    (finding,) = of(examine(client), "pending pods")

    assert finding.level is (Level.OK if served else Level.WARN)


def test_slices_and_classes_are_listed_once_for_claims_and_pods(server, client):
    server.put({"kind": "DeviceClass", **GPU_CLASS})
    put_slice(server)
    put_claim(server, "large", **capacity(memory="200Gi"))
    put_pod(server, "old", "nvidia.com/mig-1g.10gb")

    examine(client)

    assert server.count("GET", "resourceslices") == 1
    assert server.count("GET", "deviceclasses") == 2  # and the one that claims usually name


def test_pods_that_may_not_be_listed_are_skipped_and_not_asked_for(server, client):
    server.deny("list", "pods")

    for missing, asked in (({("list", "pods", "")}, 0), ((), 1)):
        (finding,) = of(examine(client, missing), "pending pods")
        assert finding.level is Level.SKIP
        assert "--kubeconfig" in finding.message
        assert server.count("GET", "pods") == asked


@pytest.fixture
def profile(tmp_path):
    """The words that choose a profile with this entry."""

    def words(**entry):
        return ("--profiles", profiles(tmp_path, mine=[entry]), "--profile", "mine")

    return words


def test_what_the_kubelet_is_not_told_is_a_warning_unless_the_node_serves_dra(world, profile):
    unlisted = "[warn] GPUs as offered: by the device-plugin API, part is not listed: gpu-0, gpu-1"
    words = (*profile(fractions="Never"), "--extended-resource-name", "")
    chosen = ServedApiFile(world.home / "state/api.json")

    assert lines(world.ask(*words), unlisted)  # where nobody has chosen, the profile allows both
    for api, is_told in ((AllocationApi.DRA, False), (AllocationApi.DEVICE_PLUGIN, True)):
        chosen.write(ServedApi(api))
        assert bool(lines(world.ask(*words), unlisted)) is is_told


def test_the_label_of_the_node_chooses_the_profile(world, server, tmp_path):
    where = profiles(tmp_path / "profiles", mine=[{"fractions": "Never"}])
    labels = {"gpu.nvidia.com/profile": "mine"}
    server.put({"kind": "Node", "metadata": {"name": NODE, "labels": labels}})

    answer = world.ask(
        *("--profiles", where, "--kubeconfig", server.kubeconfig(tmp_path / "config"))
    )

    assert f"[ok]   profile: mine (label gpu.nvidia.com/profile of node {NODE})" in answer.out
    assert "[ok]   GPUs as offered: exclusive: gpu-0, gpu-1" in answer.out


def with_condition(server, status, message, **metadata):
    condition = {"type": "GPUsConfigured", "status": status, "message": message}
    server.put(
        {
            "kind": "Node",
            "metadata": {"name": NODE, **metadata},
            "status": {"conditions": [condition]},
        }
    )


def test_the_revision_in_force_is_named_with_who_chose_it(world, server, tmp_path):
    spec = {"gpus": [{"fractions": "Never"}]}
    server.put(
        {
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "NodeProfile",
            "metadata": {"name": "training"},
            "spec": spec,
        }
    )
    revision = revision_name("training", canonical_rules(spec))
    said = f"NodeProfile training, revision {revision}: in force"
    with_condition(server, "True", said, labels={"gpu.nvidia.com/profile": "training"})

    answer = world.ask(
        *("--kubeconfig", server.kubeconfig(tmp_path / "config"), "--revision-namespace", "gpus")
    )

    origin = f"label gpu.nvidia.com/profile of node {NODE}"
    assert f"[ok]   profile: the plugin reports: {said}" in answer.out
    assert f"[ok]   profile: training, revision {revision} ({origin})" in answer.out
    assert "[ok]   GPUs as offered: exclusive: gpu-0, gpu-1" in answer.out


def test_a_revision_that_cannot_be_used_fails_with_what_the_plugin_reports(world, server, tmp_path):
    said = "NodeProfile training, revision training-1: refused: not found"
    given = {"gpu.nvidia.com/profile-revision": "training-1"}
    with_condition(server, "False", said, annotations=given)

    answer = world.ask(
        *("--kubeconfig", server.kubeconfig(tmp_path / "config"), "--revision-namespace", "gpus")
    )

    [reported, looked_up] = lines(answer, "[FAIL] profile")
    assert reported.startswith(f"[FAIL] profile: the plugin reports: {said}")
    origin = f"annotation gpu.nvidia.com/profile-revision of node {NODE}"
    assert looked_up.startswith(f"[FAIL] profile: {origin}: get controllerrevisions")


def test_what_was_reported_before_nodeprofiles_were_switched_off_is_not_told(
    world, server, tmp_path
):
    with_condition(server, "False", "NodeProfile training, revision training-1: refused: no")

    answer = world.ask("--kubeconfig", server.kubeconfig(tmp_path / "config"))

    assert "the plugin reports" not in answer.out
    assert "[ok]   profile: default (nothing chooses another)" in answer.out


def test_a_profile_that_cannot_be_used_fails_with_who_chose_it_and_the_field(world, profile):
    answer = world.ask(*profile(replicas="many"))

    failed = line(answer, "[FAIL]")
    assert answer.code == 1
    assert failed.startswith("[FAIL] profile: --profile: profile 'mine': ")
    assert "spec.gpus[0].replicas" in failed
    assert "no last good one is known here" in answer.out

    LastProfileFile(world.home / "state/profile.json").keep(
        Profile("quarters", revision="quarters-7")
    )
    answer = world.ask(*profile(replicas="many"))
    assert "keeps the last good one, quarters, revision quarters-7, also" in answer.out


def test_what_a_profile_says_to_nobody_is_told(world, profile):
    answer = world.ask(*profile(select={"index": [7]}, fractions="Never"))

    assert answer.code == 0
    assert "spec.gpus[0]: selects no GPU" in line(answer, "[warn] profile")


def test_a_profile_that_insists_on_what_the_driver_lacks_fails(world, profile):
    failed = line(world.ask(*profile(memoryLimit="Strict")), "[FAIL]")

    assert failed.startswith("[FAIL] memory limits: the profile insists on the driver's own")
    assert "too old" in failed


def test_a_node_without_mps_says_so_and_shares_its_gpus_by_turns(world, profile):
    answer = world.ask(*profile(defaultStrategy="MPS"))

    assert lines(answer, "[ok]   MPS", "[warn] MPS", "[FAIL] MPS") == [
        "[ok]   MPS agent: switched off (--mps-socket is empty): this node offers no MPS"
    ]
    assert "[ok]   compute modes: DEFAULT: gpu-0, gpu-1" in answer.out
    warned = line(answer, "[warn] profile")
    assert "the default strategy is MPS" in warned and "this node runs no MPS agent" in warned


def test_an_agent_that_does_not_run_is_told_with_its_socket(world):
    socket_ = world.kubelet / "agent.sock"

    answer = world.ask("--mps-socket", socket_)

    assert answer.code == 0, "no claim misses it"
    assert str(socket_) in line(answer, "[warn] MPS agent")
    assert "[ok]   MPS programs: the driver has nvidia-cuda-mps-control" in answer.out
    assert "MPS servers" not in answer.out


def test_what_the_agent_tells_is_told(world, capsys):
    settings = DoctorSettings.model_validate(
        {
            "sim": str(world.node_file),
            "host_root": world.host,
            "node_name": NODE,
            "kubelet_dir": world.kubelet,
            "cdi_dir": world.cdi,
            "mps_socket": "/run/agent.sock",
        }
    )
    sockets = []

    def ask(where):
        sockets.append(where)
        return MpsStatus((server_of(),), unmanaged=("nvidia-cuda-mps-control (process 7)",))

    doctor(settings, node_opener(settings, copy=True), ask)
    output = capsys.readouterr().out

    assert sockets == [Path("/run/agent.sock")]
    assert "[ok]   MPS agent: answers at /run/agent.sock" in output
    assert "[ok]   MPS servers: s" in output
    assert "[warn] other MPS daemons: nvidia-cuda-mps-control (process 7) is none" in output
    assert "[ok]   MPS claims: 0 are prepared" in output


def test_gpus_that_no_guard_looks_at_are_told(world, profile):
    answer = world.ask(*profile(memoryGuard={"policy": "Off"}))

    assert answer.code == 0
    assert "the memory guard does not look at gpu-0, gpu-1" in answer.out


def test_labels_that_cannot_be_read_leave_the_profile_open(world, server, tmp_path):
    server.deny("get", "nodes")

    answer = world.ask("--kubeconfig", server.kubeconfig(tmp_path / "config"))

    assert lines(answer, "[skip] profile: which one the Node's labels choose cannot be read: ")


def test_an_api_server_without_consumable_capacity_gets_whole_gpus(world, server, tmp_path):
    server.disable("DRAConsumableCapacity")

    answer = world.ask("--kubeconfig", server.kubeconfig(tmp_path / "config"))

    assert "[ok]   GPUs as offered: exclusive: gpu-0, gpu-1" in answer.out


def test_the_command_asks_the_api_server_that_the_kubeconfig_names(world, server, tmp_path):
    answer = world.ask("--kubeconfig", server.kubeconfig(tmp_path / "config"))

    assert "[ok]   API server: answers, and serves resource.k8s.io/v1" in answer.out
    assert f"[ok]   Node object: {NODE} has UID " in answer.out
    assert server.objects("resourceslices") == []


def test_an_api_server_that_is_not_there_fails_in_time(world, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = api_server.ApiServer()
        nobody._port = taken.getsockname()[1]
        answer = world.ask("--kubeconfig", nobody.kubeconfig(tmp_path / "config"))

    assert answer.code == 1
    assert "cannot be reached" in line(answer, "[FAIL] API server")


def test_a_board_with_mig_is_looked_at_with_its_instances_and_its_layout(world):
    board = h100("1b") | {"mig": True, "instances": [{"profile": "1g.10gb", "start": 0}]}
    world.node_file.write_text(yaml.safe_dump({"gpus": [board]}))
    mig_state = MigStateFile(world.home / "state/mig.json", boot_id(world.host))
    mig_state.write(MigState(problem="there is no layout 'x'"))

    answer = world.ask()

    assert [text for text in answer.out.splitlines() if "] " in text and " MIG " in text] == [
        "[ok]   MIG mode: on: gpu-0",
        "[ok]   MIG instances: not created for claims, offered and left as they are: "
        "gpu-0-mig-1g10gb-19-0",
        "[ok]   MIG device files: 2 that the instances need, 2 of them made when a claim does",
        "[FAIL] MIG layouts: there is no layout 'x'",
    ]
    assert "[ok]   GPUs as offered: partitions that exist: gpu-0" in answer.out


def test_nothing_is_said_of_mig_where_no_gpu_can_be_partitioned(world):
    world.node_file.write_text(yaml.safe_dump({"gpus": [h100("1b") | {"product": "L40S"}]}))
    (world.home / "state/mig.json").write_text("not for us")

    assert " MIG " not in world.ask().out


def test_who_may_not_look_is_told_to_ask_as_root_and_of_no_fault_of_ours(world):
    world.kubelet.parent.chmod(0o755)
    world.ask()

    with locked_out(world.kubelet, 0o000):
        answer = world.ask()

    assert answer.code == 1
    assert "broke" not in answer.out + answer.err
    refused = lines(answer, "[FAIL]")
    for subject in ("CDI files", "kubelet directory", "state directory", "ledger"):
        (entry,) = (entry for entry in refused if entry.startswith(f"[FAIL] {subject}: "))
        assert (
            "Permission denied" in entry
            and "; ask as root" in entry
            and str(world.kubelet) in entry
        )
    cause = line(answer, "[warn] user")
    assert "the plugin is root" in cause
    assert answer.out.startswith(cause), "it comes before what it explains"


def test_a_container_runtime_that_may_not_be_read_is_named_and_no_fault_of_ours(world):
    world.kubelet.parent.chmod(0o755)
    world.ask()

    with locked_out(world.runtime, 0o000):
        answer = world.ask()

    assert "broke" not in answer.out + answer.err
    warned = line(answer, "[warn] container runtime")
    assert str(world.runtime) in warned and "Permission denied" in warned
    assert f"{warned}\n       -> ask as root" in answer.out


def test_what_the_plugin_recorded_of_the_health_of_gpus_is_told(world):
    gpu = read_node(world.node_file).gpus[0].uuid
    fault = Fault(GpuUuid(str(gpu)), Problem.XID, "79")
    HealthFile(world.home / "state/health.json", boot_id(world.host)).write(HealthState((fault,)))

    (line,) = lines(world.ask(), "[warn] GPU health")

    assert line.startswith("[warn] GPU health: gpu-0: Xid 79: ")
    assert line.endswith("; a taint NoSchedule")


def test_a_node_with_the_device_plugin_api_needs_no_device_class_and_has_no_taints(
    world, server, tmp_path
):
    gpu = read_node(world.node_file).gpus[0].uuid
    fault = Fault(GpuUuid(str(gpu)), Problem.XID, "79")
    HealthFile(world.home / "state/health.json", boot_id(world.host)).write(HealthState((fault,)))
    ServedApiFile(world.home / "state/api.json").write(ServedApi(AllocationApi.DEVICE_PLUGIN))
    server.remove("deviceclasses", DRIVER)

    answer = world.ask(
        *("--kubeconfig", server.kubeconfig(tmp_path / "config")),
        *("--device-plugin-dir", tmp_path / "device-plugins"),
    )

    (health,) = lines(answer, "[warn] GPU health")
    assert health.endswith("; makes it unhealthy (no new pod gets it)")
    assert "[ok]   DeviceClass: none, and this node needs none to give GPUs out by" in answer.out
