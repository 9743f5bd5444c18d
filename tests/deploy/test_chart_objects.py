"""What the chart installs by default, read from the golden file: rights, policy, class, settings.

That the chart renders to that file, `test_chart_rendered.py` checks with the real helm.
"""

import argparse
from pathlib import Path
from typing import Any

import pytest

from api import names
from api.decode import decode
from api.v1beta1 import GpuConfig, TimeSlicing
from dra_driver.cli.cluster_checks import NEEDED, Right
from dra_driver.settings import PluginSettings
from tests.deploy.chart import GOLDEN, objects

CHART = objects(GOLDEN.read_text())
POD = CHART["DaemonSet"]["spec"]["template"]["spec"]
PLUGIN = POD["containers"][0]


def mounts() -> dict[str, dict[str, Any]]:
    return {mount["name"]: mount for mount in PLUGIN["volumeMounts"]}


def host_paths() -> dict[str, str]:
    return {v["name"]: v["hostPath"]["path"] for v in POD["volumes"] if "hostPath" in v}


def environment(node: str, pod_uid: str) -> dict[str, str]:
    """The environment of the plugin as the kubelet would make it."""
    fields = {"spec.nodeName": node, "metadata.uid": pod_uid}
    return {
        entry["name"]: entry["value"]
        if "value" in entry
        else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in PLUGIN["env"]
    }


def settings() -> PluginSettings:
    flags = argparse.Namespace()
    return PluginSettings.read(flags, environment("gpu-node-1", "0b5f"))


@pytest.mark.point(102)
def test_the_plugin_has_the_rights_it_needs_and_no_other() -> None:
    assert CHART["ClusterRole"]["rules"] == [
        {
            "apiGroups": ["resource.k8s.io"],
            "resources": ["resourceclaims"],
            "verbs": ["get", "list"],
        },
        {
            "apiGroups": ["resource.k8s.io"],
            "resources": ["resourceslices"],
            "verbs": ["get", "list", "watch", "create", "update", "patch", "delete"],
        },
        {
            "apiGroups": ["resource.k8s.io"],
            "resources": ["deviceclasses"],
            "verbs": ["get", "list"],
        },
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
    ]


def test_the_role_allows_what_the_doctor_asks_about() -> None:
    allowed = {
        Right(group, resource, verb)
        for rule in CHART["ClusterRole"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert set(NEEDED) <= allowed


def test_rights_token_and_policy_are_those_of_the_account_that_the_pods_run_as() -> None:
    account = CHART["ServiceAccount"]["metadata"]
    assert POD["serviceAccountName"] == account["name"]
    assert CHART["DaemonSet"]["metadata"]["namespace"] == account["namespace"]
    assert CHART["ClusterRoleBinding"]["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    assert (
        CHART["ClusterRoleBinding"]["roleRef"]["name"] == CHART["ClusterRole"]["metadata"]["name"]
    )
    [condition] = CHART["ValidatingAdmissionPolicy"]["spec"]["matchConditions"]
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    assert condition["expression"] == f"request.userInfo.username == '{user}'"
    binding = CHART["ValidatingAdmissionPolicyBinding"]["spec"]
    assert binding["policyName"] == CHART["ValidatingAdmissionPolicy"]["metadata"]["name"]


def test_the_only_token_is_bound_to_the_pod_and_ends_within_an_hour() -> None:
    assert CHART["ServiceAccount"]["automountServiceAccountToken"] is False
    assert POD["automountServiceAccountToken"] is False
    [token] = [volume["projected"]["sources"] for volume in POD["volumes"] if "projected" in volume]
    assert token[0] == {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}
    assert not any("secret" in volume for volume in POD["volumes"])


def type_is(value: str) -> str:
    return (
        f"device.driver == '{names.DRIVER}' && "
        f"device.attributes['{names.DRIVER}'].{names.TYPE} == '{value}'"
    )


def expression(name: str) -> str:
    [selector] = CHART[name]["spec"]["selectors"]
    return str(selector["cel"]["expression"])


@pytest.mark.parametrize(
    ("name", "selected", "resource"),
    [
        pytest.param(names.DRIVER, names.TYPE_GPU, "nvidia.com/gpu", id="GPUs"),
        pytest.param(
            f"shared.{names.DRIVER}", names.TYPE_GPU_SHARED, "nvidia.com/gpu.shared", id="replicas"
        ),
    ],
)
def test_a_class_with_an_old_name_selects_one_type(name: str, selected: str, resource: str) -> None:
    assert expression(name) == type_is(selected)
    assert CHART[name]["spec"]["extendedResourceName"] == resource


def test_the_time_sliced_class_brings_a_configuration_that_the_driver_reads() -> None:
    spec = CHART[f"time-sliced.{names.DRIVER}"]["spec"]
    types = f"['{names.TYPE_GPU}', '{names.TYPE_GPU_SHARED}']"
    assert expression(f"time-sliced.{names.DRIVER}").endswith(f".{names.TYPE} in {types}")
    [config] = spec["config"]
    assert config["opaque"]["driver"] == names.DRIVER
    decoded = decode(config["opaque"]["parameters"])
    assert isinstance(decoded, GpuConfig)
    assert decoded.sharing == TimeSlicing(strategy="TimeSlicing")


def test_the_monitor_class_selects_monitors_and_gpus_that_have_none() -> None:
    selected = expression(f"monitor.{names.DRIVER}")
    assert f".{names.TYPE} == '{names.TYPE_GPU_MONITOR}' ||" in selected
    assert selected.endswith(f"!('{names.SHARES}' in device.capacity['{names.DRIVER}']))")
    assert "extendedResourceName" not in CHART[f"monitor.{names.DRIVER}"]["spec"]


def test_claims_with_admin_access_are_led_to_the_monitors_and_tolerate_their_taint() -> None:
    policy = CHART["MutatingAdmissionPolicy"]
    [mutation] = policy["spec"]["mutations"]
    patch = mutation["jsonPatch"]["expression"]
    assert f"value: 'monitor.{names.DRIVER}'" in patch
    assert f"'key': '{names.MONITOR_TAINT}'" in patch
    assert (
        CHART["MutatingAdmissionPolicyBinding"]["spec"]["policyName"] == policy["metadata"]["name"]
    )


def test_every_environment_variable_is_a_setting_of_the_plugin() -> None:
    known = {field.upper() for field in PluginSettings.model_fields}
    assert {entry["name"] for entry in PLUGIN["env"]} <= known
    assert PLUGIN["args"] == ["kubelet-plugin"]
    assert settings().node_name == "gpu-node-1"
    assert settings().pod_uid == "0b5f"
    assert settings().driver_name == names.DRIVER


def test_directories_that_others_know_by_path_have_the_same_path_inside() -> None:
    for name in ("plugin", "registry", "cdi", "dev"):
        assert mounts()[name]["mountPath"] == host_paths()[name]
        assert not mounts()[name].get("readOnly")


def test_the_plugin_can_write_everywhere_it_keeps_something() -> None:
    writable = [Path(mounts()[name]["mountPath"]) for name in ("plugin", "registry", "cdi")]
    for wanted in (settings().plugin_dir, settings().state, settings().cdi_dir):
        assert any(wanted.is_relative_to(mounted) for mounted in writable), wanted
    assert settings().kubelet_dir / "plugins_registry" in writable
    assert mounts()["tmp"]["mountPath"] == "/tmp"
    assert PLUGIN["securityContext"]["readOnlyRootFilesystem"] is True


def test_profiles_are_read_from_a_directory_that_follows_their_configmap() -> None:
    """A directory, since a single file of a ConfigMap never changes in a running container."""
    [volume] = [volume for volume in POD["volumes"] if "configMap" in volume]
    assert volume["configMap"] == {"name": CHART["ConfigMap"]["metadata"]["name"]}
    mount = mounts()[volume["name"]]
    assert mount["mountPath"] == environment("n", "u")["PROFILES"]
    assert "subPath" not in mount
    assert CHART["ConfigMap"]["data"] == {}
    assert "immutable" not in CHART["ConfigMap"]


def test_the_memory_guard_sees_the_hosts_processes_cgroups_and_pods() -> None:
    assert POD["hostPID"] is True
    assert host_paths()["cgroup"] == mounts()["cgroup"]["mountPath"] == "/sys/fs/cgroup"
    assert not mounts()["cgroup"].get("readOnly")
    assert Path(host_paths()["pod-resources"]) == settings().kubelet_dir / "pod-resources"
    assert mounts()["pod-resources"]["mountPath"] == host_paths()["pod-resources"]
    assert mounts()["pod-resources"]["readOnly"] is True


def test_the_host_is_only_read_and_later_mounts_on_it_are_seen() -> None:
    host = mounts()["host"]
    assert host_paths()["host"] == "/"
    assert Path(host["mountPath"]) == settings().host_root
    assert host["readOnly"] is True
    assert host["mountPropagation"] == "HostToContainer"


def test_an_update_starts_the_new_pod_before_it_stops_the_old_one() -> None:
    strategy = CHART["DaemonSet"]["spec"]["updateStrategy"]
    assert strategy == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }


def test_the_plugin_outlives_other_pods_on_its_node() -> None:
    assert POD["priorityClassName"] == "system-node-critical"
    assert POD["tolerations"] == [{"operator": "Exists"}]


def test_the_probes_ask_the_address_that_the_plugin_serves() -> None:
    [port] = PLUGIN["ports"]
    assert settings().http_address == f":{port['containerPort']}"
    for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert PLUGIN[probe]["httpGet"] == {"path": path, "port": port["name"]}
        assert PLUGIN[probe]["timeoutSeconds"] > 1
