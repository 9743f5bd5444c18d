"""The controller as the chart installs it: its rights, its pods, and where there is none."""

import argparse
import json
from typing import Any

import pytest

from api import names
from dra_driver.settings import ControllerSettings
from tests.deploy.chart import (
    CONTROLLER,
    GOLDEN,
    objects,
    pod_spec,
    render,
)

CHART = objects(GOLDEN.read_text())
POD = pod_spec(CHART, CONTROLLER)
CONTAINER = POD["containers"][0]
OF_CONTROLLER = {name: each for name, each in CHART.items() if name.startswith(f"{CONTROLLER} ")}


def settings() -> ControllerSettings:
    """As the kubelet would hand them to the container."""
    fields = {"metadata.name": "dra-driver-gpu-controller-a"}
    environment = {
        entry["name"]: entry["value"]
        if "value" in entry
        else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in CONTAINER["env"]
    }
    assert environment.keys() <= {field.upper() for field in ControllerSettings.model_fields}
    return ControllerSettings.read(argparse.Namespace(), environment)


def rights(name: str) -> dict[tuple[str, ...], list[str]]:
    return {
        (*rule["apiGroups"], *rule["resources"], *rule.get("resourceNames", ())): rule["verbs"]
        for rule in CHART[name]["rules"]
    }


def test_the_controller_has_the_rights_it_needs_and_no_other() -> None:
    lease = settings().lease_name
    assert rights("controller ClusterRole") == {
        (names.CONFIG_GROUP, "nodeprofiles"): ["list", "watch"],
        (names.CONFIG_GROUP, "nodeprofiles/status"): ["patch"],
        ("", "nodes"): ["list", "watch", "patch"],
    }
    assert rights("controller Role") == {
        ("apps", "controllerrevisions"): ["list", "watch", "create", "update", "delete"],
        ("coordination.k8s.io", "leases"): ["create"],
        ("coordination.k8s.io", "leases", lease): ["get", "update"],
    }
    assert rights("controller-events Role") == {("", "events"): ["create", "patch"]}
    assert CHART["controller Role"]["metadata"]["namespace"] == settings().revision_namespace
    assert CHART["controller-events Role"]["metadata"]["namespace"] == "default"


def test_its_rights_and_its_policy_are_those_of_the_account_that_its_pods_run_as() -> None:
    account = CHART["controller ServiceAccount"]["metadata"]
    assert POD["serviceAccountName"] == account["name"]
    subject = {
        "kind": "ServiceAccount",
        "name": account["name"],
        "namespace": account["namespace"],
    }
    for binding in (
        "controller ClusterRoleBinding",
        "controller RoleBinding",
        "controller-events RoleBinding",
    ):
        assert CHART[binding]["subjects"] == [subject]
        role = CHART[binding.removesuffix("Binding")]["metadata"]["name"]
        assert CHART[binding]["roleRef"]["name"] == role
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    for name in (
        "controller ValidatingAdmissionPolicy",
        "revisions ValidatingAdmissionPolicy",
        "controller-events ValidatingAdmissionPolicy",
    ):
        policy = CHART[name]
        [condition] = policy["spec"]["matchConditions"]
        assert condition["expression"] == f"request.userInfo.username == '{user}'"
        binding = CHART[f"{name}Binding"]["spec"]
        assert binding == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}


def test_the_controller_may_change_one_annotation_of_nodes() -> None:
    policy = CHART["controller ValidatingAdmissionPolicy"]["spec"]
    assert policy["failurePolicy"] == "Fail"
    [rule] = policy["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["nodes"], ["UPDATE"])
    [others] = [v["expression"] for v in policy["variables"] if v["name"] == "otherAnnotations"]
    assert others.endswith(f".filter(k, k != '{names.PROFILE_REVISION_ANNOTATION}')")


def test_the_controller_sees_nothing_of_its_node_and_is_not_root() -> None:
    assert {kind for volume in POD["volumes"] for kind in volume} == {"name", "projected"}
    assert not POD.keys() & {"hostPID", "hostNetwork", "hostIPC"}
    assert CONTAINER["securityContext"] == {
        "runAsUser": 65534,
        "runAsNonRoot": True,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_the_replicas_agree_on_one_lease_and_have_names_of_their_own() -> None:
    assert settings().lease_name == CHART["controller Deployment"]["metadata"]["name"]
    assert settings().identity == "dra-driver-gpu-controller-a"
    assert CHART["controller Deployment"]["spec"]["replicas"] == 2
    assert CONTAINER["args"] == ["controller"]


def test_the_replicas_prefer_different_nodes_and_need_no_gpu() -> None:
    affinity = POD["affinity"]["podAntiAffinity"]
    [preferred] = affinity.pop("preferredDuringSchedulingIgnoredDuringExecution")
    assert not affinity, "on the only node of a cluster both have to run"
    selector = CHART["controller Deployment"]["spec"]["selector"]
    assert preferred["podAffinityTerm"]["labelSelector"] == selector
    assert POD["nodeSelector"] == {"kubernetes.io/os": "linux"}


def test_the_probes_ask_the_address_that_is_served() -> None:
    [port] = CONTAINER["ports"]
    assert settings().http_address == f":{port['containerPort']}"
    for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        asked = CONTAINER[probe]["httpGet"]
        assert asked == {"path": path, "port": port["containerPort"]}
        assert CONTAINER[probe]["timeoutSeconds"] > 1


@pytest.mark.cluster
@pytest.mark.timeout(1800)  # helm is built on first use
class TestWithHelm:
    def test_two_replicas_on_the_network_of_one_node_do_not_keep_each_other_away(self) -> None:
        """A port of a container is one of the node there, which the scheduler gives away once."""
        pod = pod_spec(render("--set", "hostNetwork=true"), CONTROLLER)
        [container] = pod["containers"]
        assert pod["hostNetwork"] is True
        assert "ports" not in container
        address = {"host": "127.0.0.1", "port": 8082}
        assert container["livenessProbe"]["httpGet"] == {"path": "/livez", **address}
        assert {"name": "HTTP_ADDRESS", "value": "127.0.0.1:8082"} in container["env"]

    def test_without_a_controller_there_is_nothing_of_it(self) -> None:
        rendered = render("--set", "controller.enabled=false")
        assert not [
            name for name in rendered if name in OF_CONTROLLER or name == "controller-events Role"
        ]
        assert not any("controller" in each["metadata"]["name"] for each in rendered.values())

    def test_values_of_the_controller_are_those_of_its_pods(self) -> None:
        values = {
            "replicas": 3,
            "priorityClassName": "system-cluster-critical",
            "nodeSelector": {"pool": "small"},
            "affinity": {"nodeAffinity": {}},
            "tolerations": [],
            "resources": {"limits": {"memory": "1Gi"}},
        }
        options = [f"--set-json=controller.{name}={_json(value)}" for name, value in values.items()]
        rendered = render(*options)
        pod = pod_spec(rendered, CONTROLLER)
        assert rendered["controller Deployment"]["spec"]["replicas"] == 3
        assert pod["priorityClassName"] == "system-cluster-critical"
        assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "small"}
        assert pod["affinity"] == {"nodeAffinity": {}}
        assert "tolerations" not in pod
        resources = pod["containers"][0]["resources"]
        assert resources["limits"] == {"memory": "1Gi"}

    def test_on_openshift_it_has_constraints_that_allow_no_privilege(self) -> None:
        rendered = render("--api-versions", "security.openshift.io/v1")
        constraints = rendered["controller SecurityContextConstraints"]
        account = pod_spec(rendered, CONTROLLER)["serviceAccountName"]
        assert constraints["users"] == [f"system:serviceaccount:gpus:{account}"]
        assert constraints["users"][0] not in rendered["SecurityContextConstraints"]["users"]
        allowed = {name for name, value in constraints.items() if value is True}
        assert allowed == {"readOnlyRootFilesystem"}
        assert constraints["runAsUser"] == {"type": "MustRunAsNonRoot"}
        options = ("--api-versions", "security.openshift.io/v1", "--set", "hostNetwork=true")
        constraints = render(*options)["controller SecurityContextConstraints"]
        assert constraints["allowHostNetwork"] is constraints["allowHostPorts"] is True

    def test_a_proxy_is_given_to_the_controller_too(self) -> None:
        variable = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
        pod = pod_spec(render(f"--set-json=env={_json([variable])}"), CONTROLLER)
        assert variable in pod["containers"][0]["env"]


def _json(value: Any) -> str:
    return json.dumps(value)
