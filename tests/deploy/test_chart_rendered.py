"""The chart in the hands of the real helm."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from api import names
from tests.conftest import Golden
from tests.deploy.chart import (
    CHART,
    CONFIGS_POLICY,
    MPS_AGENT,
    NODE_POLICY,
    RENDER_GOLDEN,
    helm,
    host_paths,
    pod_spec,
    refusal,
    render,
    values,
    variables,
)

CLASSES = (
    names.DRIVER,
    *(f"{which}.{names.DRIVER}" for which in ("time-sliced", "mps", "shared", "monitor", "mig")),
    "mig.nvidia.com",
)
PROFILES = len(values()["mig"]["profiles"])  # of MIG, each of which has a class besides
OLD_NAMES = "extendedResourceName=,sharedExtendedResourceName=,mig.extendedResourcePrefix="
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]  # helm is built on first use


def test_the_defaults_render_to_the_golden_file(golden: Golden) -> None:
    answer = helm(*RENDER_GOLDEN)
    assert answer.returncode == 0, answer.stderr
    golden("chart/default.yaml", answer.stdout)


def test_helm_finds_nothing_to_complain_about() -> None:
    answer = helm("lint", "--strict", str(CHART), "--namespace", "gpus")
    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize(
    ("kubernetes", "version"),
    [
        pytest.param("1.36.3", "v1", id="v1 on 1.36"),
        pytest.param("1.34.0-rc.1", "v1", id="v1 on the first version that has it"),
        pytest.param("1.33.4-gke.100", "v1beta2", id="v1beta2 on a vendor's 1.33"),
        pytest.param("1.32.0", "v1beta1", id="v1beta1 on 1.32"),
    ],
)
def test_the_classes_are_of_the_newest_version_that_the_cluster_has(
    kubernetes: str, version: str
) -> None:
    rendered = render("--kube-version", kubernetes)
    classes = {name: rendered[name] for name in CLASSES}
    assert {each["apiVersion"] for each in classes.values()} == {f"resource.k8s.io/{version}"}
    named = {name for name, each in classes.items() if "extendedResourceName" in each["spec"]}
    assert named == ({"gpu.nvidia.com", "shared.gpu.nvidia.com"} if version == "v1" else set())
    of_a_profile = rendered["mig-7g-80gb.gpu.nvidia.com"]
    assert of_a_profile["apiVersion"] == f"resource.k8s.io/{version}"
    assert ("extendedResourceName" in of_a_profile["spec"]) is (version == "v1")


@pytest.mark.parametrize(
    ("arguments", "rewritten"),
    [
        pytest.param(["--kube-version", "1.36.3"], True, id="by default"),
        pytest.param(["--kube-version", "1.35.4"], False, id="not where policies are off"),
        pytest.param(["--set", "rewriteAdminAccess=false"], False, id="not where it is unwanted"),
    ],
)
def test_claims_with_admin_access_are_rewritten(arguments: list[str], rewritten: bool) -> None:
    kinds = {"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"}
    assert render(*arguments).keys() & kinds == (kinds if rewritten else set())


class Discovery(BaseHTTPRequestHandler):
    """What a cluster of 1.33 without Dynamic Resource Allocation says about itself."""

    ANSWERS: ClassVar = {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.4"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    }

    def do_GET(self) -> None:
        answer = self.ANSWERS.get(self.path.partition("?")[0])
        body = json.dumps(answer).encode()
        self.send_response(200 if answer else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test says what matters."""


@pytest.fixture
def cluster_without_the_api(tmp_path: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Discovery) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        config = {
            "current-context": "it",
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "clusters": [
                {"name": "it", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
            ],
            "users": [{"name": "it", "user": {}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(config))
        yield str(path)
        server.shutdown()
        thread.join()


def test_a_cluster_that_does_not_serve_this_api_is_refused_with_what_to_turn_on(
    cluster_without_the_api: str,
) -> None:
    answer = helm(
        *("install", "dra-driver-gpu", str(CHART), "--namespace", "gpus", "--dry-run=server"),
        kubeconfig=cluster_without_the_api,
    )
    assert answer.returncode != 0
    assert "Kubernetes v1.33.4) does not serve resource.k8s.io" in answer.stderr
    assert "--feature-gates=DynamicResourceAllocation=true" in answer.stderr


def test_a_cluster_that_is_too_old_is_refused() -> None:
    assert ">=1.32.0-0" in refusal("--kube-version", "1.31.14")


def test_the_extended_resources_can_be_left_to_a_device_plugin() -> None:
    rendered = render("--set", OLD_NAMES)
    assert not any("extendedResourceName" in each.get("spec", {}) for each in rendered.values())


@pytest.mark.parametrize(
    ("profile", "name", "resource"),
    [
        pytest.param("1g.10gb", "mig-1g-10gb", "nvidia.com/mig-1g.10gb", id="a plain one"),
        pytest.param("1g.10gb+me", "mig-1g-10gb-me", "nvidia.com/mig-1g.10gb.me", id="with media"),
        pytest.param(
            "1g.24gb+me.all", "mig-1g-24gb-me-all", "nvidia.com/mig-1g.24gb.me.all", id="with all"
        ),
        pytest.param(
            "1g.24gb-me", "mig-1g-24gb-no-me", "nvidia.com/mig-1g.24gb-me", id="without any"
        ),
    ],
)
def test_a_profile_of_mig_has_the_class_and_the_resource(
    profile: str, name: str, resource: str
) -> None:
    rendered = render("--set", f"mig.profiles={{{profile}}}")
    spec = rendered[f"{name}.{names.DRIVER}"]["spec"]
    assert spec["extendedResourceName"] == resource
    [selector] = spec["selectors"]
    assert selector["cel"]["expression"].endswith(f".profile == '{profile}'")


def test_partitions_have_the_class_of_nvidias_driver_only_where_the_driver_has_its_name() -> None:
    classes = render("--set", "driverName=gpu.example.com")
    assert {"mig.gpu.example.com", "mig.example.com"} <= classes.keys()
    classes = render("--set", "driverName=other.example.com")
    assert "mig.other.example.com" in classes
    assert "mig.nvidia.com" not in classes


def profiles(values: Path, *arguments: str) -> dict[str, Any]:
    """The profiles as the plugin finds them: the text of each file, by name."""
    documents: dict[str, Any] = render("--values", str(values), *arguments)["ConfigMap"]["data"]
    return documents


def test_profiles_arrive_as_they_are_written(tmp_path: Path) -> None:
    written = {
        "default": {
            "apiVersion": names.CONFIG_VERSION,
            "kind": "NodeProfile",
            "spec": {"gpus": [{"fractions": "Never"}]},
        },
        "by-four": "  version: v1\n  sharing:\n    timeSlicing:\n      resources: []  # none\n",
    }
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"profiles": written}))
    texts = profiles(values)
    assert yaml.safe_load(texts.pop("default")) == written["default"]
    assert texts == {"by-four": written["by-four"]}


def test_layouts_of_mig_parted_arrive_beside_the_profiles(tmp_path: Path) -> None:
    """As a file of it, with ``--set-file``, or as values."""
    layouts = {
        "version": "v1",
        "mig-configs": {
            "small": [{"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb": 7}}]
        },
    }
    file, values = tmp_path / "layouts.yaml", tmp_path / "values.yaml"
    file.write_text(f"# from elsewhere\n{yaml.safe_dump(layouts)}")
    values.write_text(yaml.safe_dump({"profiles": {"other": layouts}}))
    texts = profiles(values, "--set-file", f"profiles.layouts={file}")
    assert texts["layouts"] == file.read_text()
    assert yaml.safe_load(texts["other"]) == layouts


def test_other_profiles_restart_nothing(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"profiles": {"default": {"kind": "NodeProfile"}}}))
    assert render("--values", str(values))["DaemonSet"] == render()["DaemonSet"]


def test_profiles_can_come_from_a_configmap_that_is_there() -> None:
    rendered = render("--set", "existingProfilesConfigMap=gpu-profiles,profile=any")
    assert "ConfigMap" not in rendered
    pod = pod_spec(rendered)
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "profiles"]
    assert volume["configMap"] == {"name": "gpu-profiles"}
    assert variables(pod)["PROFILE"] == "any"


REFUSED_VALUES = {
    "a misspelt group": (["lgo.level=debug"], "'lgo' not allowed"),
    "a misspelt value in a group": (["log.lvel=debug"], "'lvel' not allowed"),
    "a misspelt resource": (["resources.request.cpu=1"], "'request' not allowed"),
    "a misspelt toleration": (["tolerations[0].ky=a"], "'ky' not allowed"),
    "a log level that does not exist": (["log.level=verbose"], "/log/level"),
    "a port that is no number": (["httpPort=http"], "/httpPort"),
    "a driver name that is no DNS name": (["driverName=Gpu_1"], "/driverName"),
    "a relative driver root": (["driverRoot=opt/nvidia"], "/driverRoot"),
    "an update of no node at a time": (["updateAtOnce=0"], "/updateAtOnce"),
    "a profile no label can name": (["profiles.-a=b"], "invalid propertyName '-a'"),
    "a profile that has no name": (["profile=not/one"], "/profile"),
    "profiles of two origins": (
        ["profiles.a=b", "existingProfilesConfigMap=c"],
        "exclude each other",
    ),
    "a value taken away": (["log.level=null"], "level"),
    "simulated GPUs on labelled nodes only": (
        ["sim=h100x8", "onlyLabelledNodes=true"],
        "exclude each other",
    ),
    "an MPS directory too long for a socket": ([f"mps.dir=/{'m' * 33}"], "can have 33"),
    "a relative MPS directory": (["mps.dir=run/mps"], "/mps/dir"),
    "no profile of MIG": (["mig.profiles={10gb}"], "/mig/profiles/0"),
    "a profile of MIG twice": (["mig.profiles={1g.10gb,1g.10gb}"], "/mig/profiles"),
    "a resource of no domain": (["mig.extendedResourcePrefix=mig-"], "/mig/extendedResourcePrefix"),
    "a misspelt value of MPS": (["mps.enable=false"], "'enable' not allowed"),
    "one port for two": (["hostNetwork=true", "mps.httpPort=8080"], "are both 8080"),
    "a variable that the chart sets": (
        ["env[0].name=CDI_DIR", "env[0].value=/etc/cdi"],
        "may not set CDI_DIR",
    ),
    "a path too long for a socket": ([f"kubeletDir=/var/lib/{'k' * 64}"], "No socket fits"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED_VALUES.values(), ids=REFUSED_VALUES)
def test_what_cannot_work_is_refused(arguments: list[str], message: str) -> None:
    assert message in refusal("--set", ",".join(arguments))


def test_the_default_namespace_is_refused_unless_allowed() -> None:
    message = refusal(namespace="default")
    assert "--namespace dra-driver-gpu --create-namespace" in message
    assert "allowDefaultNamespace=true" in message
    render("--set", "allowDefaultNamespace=true", namespace="default")


def test_no_variable_of_the_chart_can_be_set_twice() -> None:
    """The list in the guard and the list in the DaemonSet are the same, with every option on."""
    everything = (
        "sim=h100x8,driverRoot=/run/nvidia/driver,nvidiaCdiHook=/usr/bin/nvidia-cdi-hook,"
        "profile=one,runtimeDir=/var/lib/containerd-state"
    )
    for name in variables(pod_spec(render("--set", everything))):
        assert f"may not set {name}" in refusal("--set", f"env[0].name={name},env[0].value=x")


def test_simulated_gpus_need_no_privilege_of_the_plugin_and_the_same_of_the_agent() -> None:
    rendered = render("--set", "sim=h100x2-615")
    plugin, agent = pod_spec(rendered), pod_spec(rendered, MPS_AGENT)
    assert variables(plugin)["SIM"] == variables(agent)["SIM"] == "h100x2-615"
    assert "mountPropagation" not in str(plugin)
    assert "hostPID" not in plugin
    assert "/sys/fs/cgroup" not in str(plugin)
    security = plugin["containers"][0]["securityContext"]
    assert security["privileged"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert agent["hostPID"] is True
    mounts = agent["containers"][0]["volumeMounts"]
    assert [mount["mountPath"] for mount in mounts if "mountPropagation" in mount] == [
        "/run/dra-driver-gpu/mps"
    ]


def test_without_mps_there_is_no_agent_no_class_of_it_and_no_pod_is_read() -> None:
    rendered = render("--set", "mps.enabled=false")
    assert not any(key.startswith(MPS_AGENT) for key in rendered)
    classes = {name for name, each in rendered.items() if each["kind"] == "DeviceClass"}
    assert {name for name in classes if not name.startswith("mig-")} == set(CLASSES) - {
        f"mps.{names.DRIVER}"
    }
    assert not any("pods" in rule["resources"] for rule in rendered["ClusterRole"]["rules"])
    pod = pod_spec(rendered)
    assert variables(pod)["MPS_SOCKET"] == ""
    assert "dra-driver-gpu/mps" not in str([pod["volumes"], pod["containers"][0]["volumeMounts"]])


@pytest.mark.parametrize(
    ("enabled", "message"),
    [
        pytest.param("true", "before `helm uninstall` and before mps.enabled=false", id="on"),
        pytest.param("false", "MPS is off.", id="off"),
    ],
)
def test_what_is_installed_says_that_servers_outlive_it(enabled: str, message: str) -> None:
    notes = helm(
        *("install", "dra-driver-gpu", str(CHART), "--namespace", "gpus", "--dry-run=client"),
        *("--set", f"mps.enabled={enabled}"),
    )
    assert notes.returncode == 0, notes.stderr
    _, _, text = notes.stdout.partition("NOTES:")
    assert message in text
    assert "run on until their nodes restart" in text


def test_another_mps_directory_is_followed_everywhere() -> None:
    rendered = render("--set", "mps.dir=/data/mps")
    for component in ("", MPS_AGENT):
        pod = pod_spec(rendered, component)
        assert "/run/dra-driver-gpu" not in str(pod)
        assert host_paths(pod)["mps"] == "/data/mps"
    assert variables(pod_spec(rendered))["MPS_SOCKET"] == "/data/mps/agent.sock"


def test_what_kubernetes_defines_is_passed_on_as_it_is_to_plugins_and_agents() -> None:
    rendered = render(
        "--set",
        "nodeSelector.pool=gpu,podAnnotations.scrape=yes,image.pullSecrets={one},image.tag=v9,"
        "image.repository=example/driver,env[0].name=HTTPS_PROXY,"
        "env[0].value=http://127.0.0.1:3128,resources.limits.memory=1Gi,"
        "mps.resources.limits.memory=2Gi,tolerations[0].key=a,tolerations[0].operator=Exists,"
        "priorityClassName=mine,driverRoot=/run/nvidia/driver,onlyLabelledNodes=true",
    )
    for component, memory in (("", "1Gi"), (MPS_AGENT, "2Gi")):
        template = rendered[f"{component} DaemonSet".lstrip()]["spec"]["template"]
        pod, container = template["spec"], template["spec"]["containers"][0]
        assert template["metadata"]["annotations"] == {"scrape": "yes"}
        assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "gpu"}
        assert pod["imagePullSecrets"] == [{"name": "one"}]
        assert pod["tolerations"] == [{"key": "a", "operator": "Exists"}]
        assert pod["priorityClassName"] == "mine"
        assert pod["affinity"] == pod_spec(rendered)["affinity"]
        assert container["image"] == "example/driver:v9"
        assert container["resources"]["limits"] == {"memory": memory}
        assert variables(pod)["DRIVER_ROOT"] == "/run/nvidia/driver"
    assert pod_spec(rendered)["containers"][0]["env"][-1] == {
        "name": "HTTPS_PROXY",
        "value": "http://127.0.0.1:3128",
    }


@pytest.mark.parametrize(
    ("component", "port", "probes"),
    [
        pytest.param("", 9400, ("startupProbe", "livenessProbe", "readinessProbe"), id="plugins"),
        pytest.param(MPS_AGENT, 8081, ("livenessProbe",), id="agents"),
    ],
)
def test_pods_on_the_host_network_take_turns_and_serve_on_loopback(
    component: str, port: int, probes: tuple[str, ...]
) -> None:
    rendered = render("--set", "hostNetwork=true,httpPort=9400,updateAtOnce=10%")
    spec = rendered[f"{component} DaemonSet".lstrip()]["spec"]
    assert spec["updateStrategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": "10%"}
    pod = pod_spec(rendered, component)
    assert pod["hostNetwork"] is True
    assert variables(pod)["HTTP_ADDRESS"] == f"127.0.0.1:{port}"
    for probe in probes:
        assert pod["containers"][0][probe]["httpGet"]["host"] == "127.0.0.1"


def test_a_kubelet_that_knows_one_plugin_per_driver_gets_one_at_a_time() -> None:
    spec = render("--kube-version", "1.32.0")["DaemonSet"]["spec"]
    assert spec["updateStrategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_other_directories_are_the_same_inside_and_out() -> None:
    options = "kubeletDir=/data/kubelet,cdiDir=/etc/cdi,driverName=gpu.example.com"
    pod = pod_spec(render("--set", options))
    inside = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    expected = {
        "plugin": "/data/kubelet/plugins/gpu.example.com",
        "registry": "/data/kubelet/plugins_registry",
        "pod-resources": "/data/kubelet/pod-resources",
        "cdi": "/etc/cdi",
    }
    assert expected.items() <= inside.items()
    assert expected.items() <= host_paths(pod).items()


def test_another_driver_name_is_followed_everywhere() -> None:
    rendered = render("--set", "driverName=gpu.example.com")
    classes = {name: rendered[name] for name in rendered if name.endswith("example.com")}
    assert len(classes) == len(CLASSES) + PROFILES
    policies = ("ValidatingAdmissionPolicy", NODE_POLICY, CONFIGS_POLICY)
    for each in (*classes.values(), *map(rendered.get, policies), rendered["DaemonSet"]):
        assert "gpu.nvidia.com" not in str(each)
    policy = str(rendered["MutatingAdmissionPolicy"]["spec"]).replace(names.MONITOR_TAINT, "")
    assert "gpu.nvidia.com" not in policy


def test_labelled_nodes_are_chosen_by_any_of_the_usual_labels() -> None:
    pod = pod_spec(render("--set", "onlyLabelledNodes=true"))
    node = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = [term["matchExpressions"][0]["key"] for term in node["nodeSelectorTerms"]]
    assert keys == [
        "feature.node.kubernetes.io/pci-10de.present",
        "feature.node.kubernetes.io/pci-0300_10de.present",
        "feature.node.kubernetes.io/pci-0302_10de.present",
        "nvidia.com/gpu.present",
    ]
    assert "affinity" not in pod_spec(render())


def test_names_stay_valid_for_the_longest_release_name() -> None:
    answer = helm("template", "r" * 53, str(CHART), "--namespace", "gpus")
    for component in ("kubelet-plugin", MPS_AGENT):
        name = f"{'r' * 48}-{component}"
        assert f"name: {name}\n" in answer.stdout
        assert len(name) <= 63
