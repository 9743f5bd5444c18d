"""The chart in the hands of the real helm."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from api import names
from tests.conftest import Golden
from tests.deploy.chart import (
    CHART,
    CONFIGS_POLICY,
    EVENTS_POLICY,
    MPS_AGENT,
    NODE_POLICY,
    RENDER_GOLDEN,
    STATUS_POLICY,
    UNINSTALL,
    helm,
    host_paths,
    pod_spec,
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


WITH_POLICIES = ("1.30.14", "1.31.14-eks-1")


@pytest.mark.parametrize("kubernetes", ["1.26.13", "1.28.15", *WITH_POLICIES])
def test_before_dra_all_but_its_objects_are_there_and_policies_where_the_cluster_has_them(
    kubernetes: str,
) -> None:
    newest, rendered = render(), render("--kube-version", kubernetes)
    missing = {name: each for name, each in newest.items() if name not in rendered}
    kinds = {each["kind"] for each in missing.values()}
    policies = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    assert rendered.keys() <= newest.keys()
    assert kinds - policies == {
        *("DeviceClass", "MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"),
    }
    kept = {name for name, each in rendered.items() if each["kind"] in policies}
    assert ({NODE_POLICY, STATUS_POLICY, EVENTS_POLICY} <= kept) is (kubernetes in WITH_POLICIES)
    assert not {CONFIGS_POLICY, "ValidatingAdmissionPolicy"} & kept
    for name, each in rendered.items():
        if name not in ("DaemonSet", "CustomResourceDefinition"):
            assert each == newest[name]


@pytest.mark.parametrize("kubernetes", ["1.26.13", "1.29.15", "1.30.14"])
def test_nodeprofiles_have_rules_where_the_api_server_knows_their_functions(
    kubernetes: str,
) -> None:
    kind = "CustomResourceDefinition"
    newest, crd = render()[kind], render("--kube-version", kubernetes)[kind]
    assert crd == (newest if kubernetes == "1.30.14" else without_rules(newest))
    assert without_rules(newest) != newest


def without_rules(part: Any) -> Any:
    match part:
        case dict():
            rules = "x-kubernetes-validations"
            return {key: without_rules(value) for key, value in part.items() if key != rules}
        case list():
            return [without_rules(each) for each in part]
    return part


def test_the_plugin_is_told_what_pods_ask_for_by_name() -> None:
    options = "extendedResourceName=a.b/gpu,sharedExtendedResourceName=,kubeletCdi=true"
    told = variables(pod_spec(render("--set-string", options)))
    assert told["EXTENDED_RESOURCE_NAME"] == "a.b/gpu"
    assert told["SHARED_EXTENDED_RESOURCE_NAME"] == ""
    assert told["MIG_EXTENDED_RESOURCE_PREFIX"] == "nvidia.com/mig-"
    assert told["KUBELET_CDI"] == "true"


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


def test_without_the_controller_the_plugin_looks_at_no_nodeprofile() -> None:
    rendered = render("--set", "controller.enabled=false")
    rights = [
        resource for rule in rendered["ClusterRole"]["rules"] for resource in rule["resources"]
    ]
    assert "REVISION_NAMESPACE" not in variables(pod_spec(rendered))
    assert "nodeprofiles" not in rights
    assert not {"Role", "RoleBinding"} & set(rendered)


def test_without_the_status_of_devices_the_plugin_may_not_write_into_claims() -> None:
    rendered = render("--set", "deviceStatus=false")
    rights = [
        resource for rule in rendered["ClusterRole"]["rules"] for resource in rule["resources"]
    ]
    assert variables(pod_spec(rendered))["DEVICE_STATUS"] == "false"
    assert not {"resourceclaims/status", "resourceclaims/driver"} & set(rights)
    assert "claim-status ValidatingAdmissionPolicy" not in rendered


def test_values_that_mean_the_same_in_nvidias_chart_are_taken() -> None:
    options = "image.tag=v1,nameOverride=,serviceAccount.name=gpus,serviceAccount.annotations.a=b"
    rendered = render("--set", options)
    assert rendered["ServiceAccount"]["metadata"]["annotations"] == {"a": "b"}


def test_the_account_of_the_plugin_is_followed_everywhere() -> None:
    rendered = render("--set", "serviceAccount.create=false,serviceAccount.name=gpus")
    assert "ServiceAccount" not in rendered
    assert pod_spec(rendered)["serviceAccountName"] == "gpus"
    [subject] = rendered["ClusterRoleBinding"]["subjects"]
    assert (subject["name"], subject["namespace"]) == ("gpus", "gpus")
    for policy in ("ValidatingAdmissionPolicy", NODE_POLICY, EVENTS_POLICY):
        [condition] = rendered[policy]["spec"]["matchConditions"]
        assert condition["expression"].endswith("== 'system:serviceaccount:gpus:gpus'")
    assert pod_spec(rendered, MPS_AGENT)["serviceAccountName"] == "dra-driver-gpu-mps-agent"


@pytest.mark.parametrize(
    ("value", "name", "label"),
    [
        pytest.param("nameOverride=gpus", "dra-driver-gpu-gpus", "gpus", id="of the chart"),
        pytest.param("fullnameOverride=gpus", "gpus", "dra-driver-gpu", id="as a whole"),
    ],
)
def test_objects_can_have_other_names(value: str, name: str, label: str) -> None:
    rendered = render("--set", value)
    for component in ("kubelet-plugin", MPS_AGENT):
        key = "DaemonSet" if component == "kubelet-plugin" else f"{MPS_AGENT} DaemonSet"
        assert rendered[key]["metadata"]["name"] == f"{name}-{component}"
        selector = rendered[key]["spec"]["selector"]["matchLabels"]
        assert selector["app.kubernetes.io/name"] == label
        assert selector.items() <= rendered[key]["spec"]["template"]["metadata"]["labels"].items()
    named = {each["metadata"]["name"] for each in rendered.values() if "spec" not in each}
    assert all(each.startswith(f"{name}-") for each in named)


def test_beside_another_driver_its_classes_are_left_to_it_and_no_claim_is_rewritten() -> None:
    rendered = render("--set", "besideOtherDriver=true")
    missing = set(render()) - set(rendered)
    policies = {"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"}
    assert missing == {names.DRIVER, "mig.nvidia.com"} | policies


def test_on_openshift_the_accounts_may_use_constraints_of_their_own() -> None:
    assert "SecurityContextConstraints" not in render()
    rendered = render("--api-versions", "security.openshift.io/v1")
    constraints = rendered["SecurityContextConstraints"]
    accounts = [pod_spec(rendered, part)["serviceAccountName"] for part in ("", MPS_AGENT)]
    accounts.append(rendered["uninstall Job"]["spec"]["template"]["spec"]["serviceAccountName"])
    assert constraints["users"] == [f"system:serviceaccount:gpus:{name}" for name in accounts]
    for component in ("", MPS_AGENT):
        pod = pod_spec(rendered, component)
        kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
        assert kinds <= set(constraints["volumes"])
        assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert constraints["allowHostNetwork"] is constraints["allowHostPorts"] is False
    options = ("--api-versions", "security.openshift.io/v1", "--set", "hostNetwork=true")
    constraints = render(*options)["SecurityContextConstraints"]
    assert constraints["allowHostNetwork"] is constraints["allowHostPorts"] is True


@pytest.mark.parametrize("component", ["", MPS_AGENT], ids=["plugins", "agents"])
@pytest.mark.parametrize("more", ["", "hostNetwork=true,log.level=debug"], ids=["", "host"])
def test_a_simulated_node_has_the_pods_of_a_real_one_with_one_more_variable(
    component: str, more: str
) -> None:
    kind = f"{component} DaemonSet".lstrip()
    simulated = render("--set", f"sim=h100x2-615,{more}".rstrip(","))[kind]
    environment = simulated["spec"]["template"]["spec"]["containers"][0]["env"]
    environment.remove({"name": "SIM", "value": "h100x2-615"})
    assert simulated == render(*(("--set", more) if more else ()))[kind]


def test_without_mps_there_is_no_agent_and_no_class_of_it() -> None:
    rendered = render("--set", "mps.enabled=false")
    assert not any(key.startswith(MPS_AGENT) for key in rendered)
    classes = {name for name, each in rendered.items() if each["kind"] == "DeviceClass"}
    assert {name for name in classes if not name.startswith("mig-")} == set(CLASSES) - {
        f"mps.{names.DRIVER}"
    }
    pod = pod_spec(rendered)
    assert variables(pod)["MPS_SOCKET"] == ""
    assert "dra-driver-gpu/mps" not in str([pod["volumes"], pod["containers"][0]["volumeMounts"]])


@pytest.mark.parametrize(
    ("enabled", "message"),
    [
        pytest.param("true", "before mps.enabled=false", id="on"),
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
    assert "get events --field-selector reason=FailedCreate" in text
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
        "priorityClassName=mine,driverRoot=/run/nvidia/driver,affinity.nodeAffinity.required=any,"
        "podSecurityContext.supplementalGroups={44}",
    )
    for component, memory in (("", "1Gi"), (MPS_AGENT, "2Gi")):
        template = rendered[f"{component} DaemonSet".lstrip()]["spec"]["template"]
        pod, container = template["spec"], template["spec"]["containers"][0]
        assert template["metadata"]["annotations"] == {"scrape": "yes"}
        assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "gpu"}
        assert pod["imagePullSecrets"] == [{"name": "one"}]
        assert pod["tolerations"] == [{"key": "a", "operator": "Exists"}]
        assert pod["priorityClassName"] == "mine"
        assert pod["affinity"] == {"nodeAffinity": {"required": "any"}}
        assert pod["securityContext"] == {"supplementalGroups": [44]}
        assert container["image"] == "example/driver:v9"
        assert container["resources"]["limits"] == {"memory": memory}
        assert variables(pod)["DRIVER_ROOT"] == "/run/nvidia/driver"
    assert pod_spec(rendered)["containers"][0]["env"][-1] == {
        "name": "HTTPS_PROXY",
        "value": "http://127.0.0.1:3128",
    }


@pytest.mark.parametrize(
    ("component", "port", "probes", "update"),
    [
        pytest.param(
            "", 9400, ("livenessProbe", "readinessProbe"), {"maxSurge": "10%", "maxUnavailable": 0}
        ),
        pytest.param(MPS_AGENT, 8081, ("livenessProbe",), {"maxSurge": 0, "maxUnavailable": "10%"}),
    ],
    ids=["plugins", "agents"],
)
def test_pods_on_the_host_network_serve_on_loopback_and_are_updated_as_elsewhere(
    component: str, port: int, probes: tuple[str, ...], update: dict[str, Any]
) -> None:
    rendered = render("--set", "hostNetwork=true,httpPort=9400,updateAtOnce=10%")
    spec = rendered[f"{component} DaemonSet".lstrip()]["spec"]
    assert spec["updateStrategy"]["rollingUpdate"] == update
    pod = pod_spec(rendered, component)
    assert pod["hostNetwork"] is True
    assert variables(pod)["HTTP_ADDRESS"] == f"127.0.0.1:{port}"
    for probe in probes:
        assert pod["containers"][0][probe]["httpGet"]["host"] == "127.0.0.1"


def test_two_plugins_of_an_update_on_the_host_network_are_on_the_node_at_once() -> None:
    """A port that is declared would be the host's, and the scheduler keep the new pod waiting."""
    [plugin] = pod_spec(render("--set", "hostNetwork=true,httpPort=9400"))["containers"]
    assert "ports" not in plugin
    for probe in ("livenessProbe", "readinessProbe"):
        assert plugin[probe]["httpGet"]["port"] == 9400


def test_on_the_host_network_the_startup_probe_asks_the_process_of_its_own_pod() -> None:
    [plugin] = pod_spec(render("--set", "hostNetwork=true"))["containers"]
    assert plugin["startupProbe"]["exec"] == {"command": ["dra-driver", "startup-probe"]}
    assert plugin["startupProbe"]["timeoutSeconds"] >= 5  # a Python has to start


def test_the_check_before_an_uninstall_may_list_who_has_gpus_and_nothing_else() -> None:
    rendered = render("--set", "hostNetwork=true,driverName=gpu.example.com")
    account = rendered[f"{UNINSTALL} ServiceAccount"]["metadata"]
    assert rendered[f"{UNINSTALL} ClusterRole"]["rules"] == [
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list"]},
    ]
    [subject] = rendered[f"{UNINSTALL} ClusterRoleBinding"]["subjects"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])

    job = rendered[f"{UNINSTALL} Job"]["spec"]
    assert (job["backoffLimit"], job["activeDeadlineSeconds"]) == (0, 120)
    pod = job["template"]["spec"]
    [check] = pod["containers"]
    assert (pod["serviceAccountName"], pod["hostNetwork"]) == (account["name"], True)
    assert check["args"] == ["uninstall-check"]
    labels = rendered["DaemonSet"]["spec"]["selector"]["matchLabels"]
    assert variables(pod) == {
        "DRIVER_NAME": "gpu.example.com",
        "PLUGIN_SELECTOR": ",".join(f"{name}={value}" for name, value in sorted(labels.items())),
    }
    assert check["securityContext"]["runAsNonRoot"] is True
    assert check["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_check_before_an_uninstall_rather_runs_where_a_plugin_has_brought_the_image() -> None:
    rendered = render("--set", "nameOverride=gpus")
    pod = rendered[f"{UNINSTALL} Job"]["spec"]["template"]["spec"]
    affinity = pod["affinity"]["podAffinity"]
    [preferred] = affinity.pop("preferredDuringSchedulingIgnoredDuringExecution")
    assert not affinity, "without a plugin any node has to do"
    assert preferred["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    selector = preferred["podAffinityTerm"]["labelSelector"]
    assert selector == rendered["DaemonSet"]["spec"]["selector"]


def test_the_check_before_an_uninstall_is_admitted_as_the_other_pods_are() -> None:
    """A sidecar of a service mesh, for example, would keep it from ending."""
    options = "podAnnotations.mesh=out,podSecurityContext.supplementalGroups={44}"
    pod = render("--set", options)[f"{UNINSTALL} Job"]["spec"]["template"]
    assert pod["metadata"]["annotations"] == {"mesh": "out"}
    assert pod["spec"]["securityContext"] == {"supplementalGroups": [44]}


def test_what_an_uninstall_makes_is_no_part_of_the_release_and_only_a_failed_job_stays() -> None:
    rendered = render()
    policies = {
        name: each["metadata"]["annotations"]["helm.sh/hook-delete-policy"].split(",")
        for name, each in rendered.items()
        if name.startswith(f"{UNINSTALL} ")
        and each["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    }
    failed = {name: "hook-failed" in policy for name, policy in policies.items()}
    kinds = ("ClusterRole", "ClusterRoleBinding", "ServiceAccount")
    assert failed == {f"{UNINSTALL} Job": False} | {f"{UNINSTALL} {kind}": True for kind in kinds}
    assert all(
        {"before-hook-creation", "hook-succeeded"} <= set(each) for each in policies.values()
    )
    assert rendered[f"{UNINSTALL} Job"]["spec"]["ttlSecondsAfterFinished"] == 3600


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
        "device-plugins": "/var/lib/kubelet/device-plugins",  # which the kubelet does not move
    }
    assert expected.items() <= inside.items()
    assert expected.items() <= host_paths(pod).items()


NAMES_OF_EVERY_DRIVER = (
    names.MONITOR_TAINT,
    names.CLEAR_FAULTS_ANNOTATION,
    names.DEVICE_PLUGIN_ANNOTATION,
    names.RELEASED_ANNOTATION,
    names.RELEASE_ANNOTATION,
)


def test_another_driver_name_is_followed_everywhere() -> None:
    rendered = render("--set", "driverName=gpu.example.com")
    classes = {name: rendered[name] for name in rendered if name.endswith("example.com")}
    assert len(classes) == len(CLASSES) + PROFILES
    policies = ("ValidatingAdmissionPolicy", NODE_POLICY, CONFIGS_POLICY)
    documents = [*classes.values(), *map(rendered.get, policies), rendered["DaemonSet"]]
    for each in (*documents, rendered["MutatingAdmissionPolicy"]["spec"]):
        text = str(each)
        for name in NAMES_OF_EVERY_DRIVER:
            text = text.replace(name, "")
        assert "gpu.nvidia.com" not in text


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
