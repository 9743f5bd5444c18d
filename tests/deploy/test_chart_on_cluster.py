"""The chart on a real Kubernetes: it installs, its pod starts, its account can do what it should.

In the pod runs a stand-in that answers the probes: the chart is tested here, not the driver.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from api.names import CONFIG_VERSION
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient
from hack.testbed.cluster import Cluster
from hack.testbed.waits import wait_for
from tests.deploy.chart import CHART, chart_in_group
from tests.deploy.installed import (
    ACCOUNT,
    AGENT,
    DRIVER,
    MPS_DIR,
    PLUGIN,
    RELEASE,
    SPACE,
    Installed,
    as_account,
    free_port,
    run,
    stand_in,
    succeed,
)
from tests.deploy.policies import SLICES, slice_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]  # helm is built on first use


@pytest.fixture(scope="module")
def installed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    directory = tmp_path_factory.mktemp("chart")
    stand_in(cluster, directory)
    helm, kubectl = str(cluster.program("helm")), str(cluster.kubectl)
    options = {
        "image.repository": "dra.test/stand-in",
        "image.tag": "v1",
        "image.pullPolicy": "Never",
        "driverName": DRIVER,
        "extendedResourceName": "chart.test/gpu",
        "sharedExtendedResourceName": "chart.test/gpu.shared",
        "mig.extendedResourcePrefix": "chart.test/mig-",
        "sim": "h100x8",
        "kubeletDir": str(cluster.kubelet_dir),
        "cdiDir": str(cluster.cdi_dir),
        "hostNetwork": "true",
        "httpPort": str(free_port()),
        "mps.httpPort": str(free_port()),
        "mps.dir": str(MPS_DIR),
    }
    pairs = ",".join(f"{name}={value}" for name, value in options.items())
    chart = chart_in_group("chart.test", directory)
    install = [helm, "install", RELEASE, str(chart), "--namespace", SPACE]
    try:
        succeed([*install, "--create-namespace", "--set", pairs], cluster.kubeconfig)
        workload = [kubectl, "--namespace", SPACE]
        for name in (PLUGIN, AGENT):
            rollout = ["rollout", "status", f"daemonset/{name}", "--timeout=60s"]
            succeed([*workload, *rollout], cluster.kubeconfig)
        token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
        inside = ["exec", f"daemonset/{PLUGIN}", "--"]
        bound = succeed([*workload, *inside, "cat", token], cluster.kubeconfig)
        yield Installed(cluster, as_account(cluster, bound, directory / "pod.kubeconfig"))
    finally:
        uninstall(cluster)
        shutil.rmtree(cluster.kubelet_dir / "plugins" / DRIVER, ignore_errors=True)
        shutil.rmtree(MPS_DIR, ignore_errors=True)


def uninstall(cluster: Cluster) -> None:
    helm, kubectl = str(cluster.program("helm")), str(cluster.kubectl)
    succeed(
        [kubectl, "delete", "resourceslices", "--field-selector", f"spec.driver={DRIVER}"],
        cluster.kubeconfig,
    )
    release = [helm, "uninstall", RELEASE, "--namespace", SPACE]
    succeed([*release, "--ignore-not-found"], cluster.kubeconfig)
    of_release = ["--selector", f"app.kubernetes.io/instance={RELEASE}"]
    succeed([kubectl, "delete", "customresourcedefinitions", *of_release], cluster.kubeconfig)
    gone = ["delete", "namespace", SPACE, "--ignore-not-found", "--timeout=60s"]
    succeed([kubectl, *gone], cluster.kubeconfig)


@pytest.mark.point(103)
def test_the_pods_own_token_writes_slices_of_its_own_node(installed: Installed) -> None:
    """What the policies refuse is in test_policies_on_cluster.py."""
    client = ApiClient(load_kubeconfig(installed.token), user_agent="chart-test")
    own_slice = slice_of(installed.cluster.node_name, "own", driver=DRIVER)
    path = f"{SLICES}/{own_slice['metadata']['name']}"
    stored = client.create(SLICES, own_slice)
    stored["spec"]["pool"]["generation"] = 2
    client.update(path, stored)
    client.delete(path)
    client.close()


@pytest.mark.point(102)
@pytest.mark.parametrize(
    ("allowed", "action"),
    [
        pytest.param("yes", "get resourceclaims", id="claims may be read"),
        pytest.param("yes", "watch resourceslices", id="slices may be watched"),
        pytest.param("yes", "update resourceslices", id="and written"),
        pytest.param("no", "get resourceslices", id="but are listed, not read"),
        pytest.param("no", "patch resourceslices", id="and written as a whole"),
        pytest.param("yes", "get nodes", id="the node may be read"),
        pytest.param("yes", "watch nodes", id="the node's labels may be watched"),
        pytest.param("yes", "patch nodes", id="and one of them written"),
        pytest.param("no", "update nodes", id="but not the node as a whole"),
        pytest.param("yes", "patch nodes --subresource=status", id="and conditions of its status"),
        pytest.param("no", "delete nodes", id="nor may one be removed"),
        pytest.param("yes", "create events", id="events may be told"),
        pytest.param("no", "list events", id="but not read"),
        pytest.param("no", "update resourceclaims", id="claims may not be written"),
        pytest.param("no", "update resourceclaims/status", id="nor their status"),
        pytest.param("yes", "get pods", id="a pod that a claim names may be read"),
        pytest.param("yes", "list pods", id="and those of the node are listed"),
        pytest.param("no", "watch pods", id="but not watched"),
        pytest.param("no", "delete pods", id="nor may one be removed there"),
        pytest.param("no", "get secrets", id="nor secrets"),
        pytest.param("no", "deletecollection resourceslices", id="slices go one by one"),
    ],
)
def test_rights_end_where_the_work_does(installed: Installed, allowed: str, action: str) -> None:
    answer = installed.kubectl("auth", "can-i", *action.split(), f"--as={ACCOUNT}")
    assert answer.stdout.strip() == allowed


@pytest.mark.parametrize("action", ["get pods", "get resourceclaims", "list resourceslices"])
def test_the_agent_may_do_nothing(installed: Installed, action: str) -> None:
    account = f"system:serviceaccount:{SPACE}:{AGENT}"
    answer = installed.kubectl("auth", "can-i", *action.split(), f"--as={account}")
    assert answer.stdout.strip() == "no"


def test_plugin_and_agent_meet_in_a_directory_that_the_agent_alone_writes(
    installed: Installed,
) -> None:
    file = MPS_DIR / "chart-test"
    for name, command, allowed in (
        (PLUGIN, "touch", False),
        (AGENT, "touch", True),
        (PLUGIN, "cat", True),
    ):
        answer = installed.inside(name, command, str(file))
        assert (answer.returncode == 0) is allowed, answer.stderr
    file.unlink()


def test_what_the_agent_mounts_is_there_for_containers(installed: Installed) -> None:
    memory = MPS_DIR / "shm"
    memory.mkdir()
    mount = installed.inside(AGENT, "/bin/busybox", "mount", "-t", "tmpfs", "tmpfs", str(memory))
    assert mount.returncode == 0, mount.stderr
    assert memory.is_mount()
    assert installed.inside(AGENT, "/bin/busybox", "umount", str(memory)).returncode == 0
    assert not memory.is_mount()
    memory.rmdir()


def test_the_agents_pod_has_no_token(installed: Installed) -> None:
    answer = installed.inside(AGENT, "ls", "/var/run/secrets/kubernetes.io/serviceaccount")
    assert answer.returncode != 0
    assert "No such file" in answer.stderr


@pytest.mark.parametrize(
    ("name", "resource"),
    [
        (DRIVER, "chart.test/gpu"),
        (f"shared.{DRIVER}", "chart.test/gpu.shared"),
        (f"mig-1g-10gb-me.{DRIVER}", "chart.test/mig-1g.10gb.me"),
    ],
)
def test_a_class_with_an_old_name_is_stored_as_it_is_written(
    installed: Installed, name: str, resource: str
) -> None:
    answer = installed.kubectl("get", "deviceclass", name, "--output=json")
    spec = json.loads(answer.stdout)["spec"]
    gates = installed.cluster.feature_gates
    has_field = installed.cluster.version >= "1.36" or gates.get("DRAExtendedResource", False)
    assert spec.get("extendedResourceName") == (resource if has_field else None)
    assert DRIVER in spec["selectors"][0]["cel"]["expression"]


def admin_claim(kind: str, version: str) -> dict[str, Any]:
    """Requests with and without adminAccess, in the shape of one version of the API."""
    tolerates = [{"key": "mine", "operator": "Exists"}]
    fields: dict[str, dict[str, Any]] = {
        "plain": {},
        "all": {"adminAccess": True, "allocationMode": "All"},
        "tolerant": {"adminAccess": True, "tolerations": tolerates},
        "other": {"adminAccess": True, "deviceClassName": "another.test"},
    }
    requests = []
    for name, more in fields.items():
        requested = {"deviceClassName": DRIVER, **more}
        requests.append(
            {"name": name, **(requested if version == "v1beta1" else {"exactly": requested})}
        )
    spec: dict[str, Any] = {"devices": {"requests": requests}}
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": kind,
        "metadata": {"name": "chart-test-admin", "namespace": SPACE},
        "spec": {"spec": spec} if kind == "ResourceClaimTemplate" else spec,
    }


@pytest.mark.parametrize("kind", ["ResourceClaim", "ResourceClaimTemplate"])
@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_a_claim_with_admin_access_asks_for_monitors_instead(
    installed: Installed, kind: str, version: str
) -> None:
    if installed.cluster.version < "1.36":
        pytest.skip("needs Kubernetes 1.36: mutating admission policies")
    label = ["label", "namespace", SPACE, "resource.kubernetes.io/admin-access=true"]
    installed.kubectl(*label, "--overwrite")
    written = admin_claim(kind, version)

    def stored() -> dict[str, Any]:
        command = ["create", "--dry-run=server", "--output=json", "-f-"]
        answer = installed.kubectl(*command, stdin=written)
        assert answer.returncode == 0, answer.stderr
        spec = json.loads(answer.stdout)["spec"]
        requests = spec.get("spec", spec)["devices"]["requests"]
        return {each["name"]: each.get("exactly", each) for each in requests}

    def rewritten() -> bool:
        return stored()["all"]["deviceClassName"] == f"monitor.{DRIVER}"

    wait_for("the admission policy to take effect", rewritten, timeout_seconds=30)
    rewrites = stored()
    taint = {"key": "gpu.nvidia.com/monitor", "operator": "Exists", "effect": "NoSchedule"}
    own_toleration = {"key": "mine", "operator": "Exists"}
    assert {name: each["deviceClassName"] for name, each in rewrites.items()} == {
        "plain": DRIVER,
        "all": f"monitor.{DRIVER}",
        "tolerant": f"monitor.{DRIVER}",
        "other": "another.test",
    }
    assert {name: each.get("tolerations") for name, each in rewrites.items()} == {
        "plain": None,
        "all": [taint],
        "tolerant": [own_toleration, taint],
        "other": None,
    }


def test_a_wrong_configuration_is_refused_when_it_is_applied(installed: Installed) -> None:
    refused = claim_with({"apiVersion": CONFIG_VERSION, "kind": "GpuConfig", "colour": 1})
    let_through = claim_with({"apiVersion": CONFIG_VERSION, "kind": "GpuConfig"})

    def apply(document: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        return installed.kubectl("apply", "--dry-run=server", "-f-", stdin=document)

    wait_for(
        "the policy to take effect", lambda: apply(refused).returncode != 0, timeout_seconds=30
    )
    assert (
        "spec.devices.config[0].opaque.parameters.colour: unknown field; known are apiVersion, "
        "kind and sharing"
    ) in apply(refused).stderr
    assert apply(let_through).returncode == 0


def claim_with(parameters: dict[str, Any]) -> dict[str, Any]:
    """A claim with a configuration for this driver."""
    request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER}}
    config = {"opaque": {"driver": DRIVER, "parameters": parameters}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "chart-test-configured", "namespace": SPACE},
        "spec": {"devices": {"requests": [request], "config": [config]}},
    }


def test_directories_can_be_written_where_the_plugin_has_to_and_not_elsewhere(
    installed: Installed,
) -> None:
    kubelet, cdi = installed.cluster.kubelet_dir, installed.cluster.cdi_dir
    for directory in (kubelet / "plugins" / DRIVER, kubelet / "plugins_registry", cdi):
        file = directory / ".chart-test"
        assert installed.inside(PLUGIN, "touch", str(file)).returncode == 0
        file.unlink()
    for elsewhere in ("/host/etc", "/etc"):
        answer = installed.inside(PLUGIN, "touch", f"{elsewhere}/.chart-test")
        assert "Read-only file system" in answer.stderr


def test_a_namespace_that_admits_no_privileged_pods_is_refused(cluster: Cluster) -> None:
    space = "chart-test-restricted"
    kubectl, helm = str(cluster.kubectl), str(cluster.program("helm"))
    succeed([kubectl, "create", "namespace", space], cluster.kubeconfig)
    try:
        label = "pod-security.kubernetes.io/enforce=baseline"
        succeed([kubectl, "label", "namespace", space, label], cluster.kubeconfig)
        install = [helm, "install", RELEASE, str(CHART), "--namespace", space]
        install += ["--set", "driverName=restricted.example.com"]  # the usual one may be there
        answer = run(install, cluster.kubeconfig)
        assert answer.returncode != 0
        assert f"kubectl label namespace {space} pod-security" in answer.stderr
    finally:
        succeed([kubectl, "delete", "namespace", space, "--timeout=60s"], cluster.kubeconfig)
