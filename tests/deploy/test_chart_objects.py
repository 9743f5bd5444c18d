"""What the chart installs by default, read from the golden file: rights, policy, class, settings.

That the chart renders to that file, `test_chart_rendered.py` checks with the real helm.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from api import names
from api.claim_configs import GpuConfig, Mps, TimeSlicing, decode_config
from dra_driver.cli.doctor.cluster_checks import NEEDED_PERMISSIONS, ApiPermission
from dra_driver.cli.doctor.scheduling.selectors import evaluate, variables_of
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import GpuSelector, MigRules, Profile, ProfileEntry, Rules
from dra_driver.plan.mig.dynamic import after_switch
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.slice_documents import published_devices
from dra_driver.plan.profiles.rules import decode_profile
from dra_driver.settings import AgentSettings, PluginSettings
from dra_driver.sim.mig.geometry import geometry_documents
from tests.deploy.chart import (
    EVENTS_POLICY,
    GOLDEN,
    MPS_AGENT,
    NODE_POLICY,
    STATUS_POLICY,
    host_paths,
    objects,
    pod_spec,
    values,
    variables,
)
from tests.fakes.simulated import Node, h100

CHART = objects(GOLDEN.read_text())
OF_PROFILES = {name: each for name, each in CHART.items() if name.startswith("mig-")}
POD = pod_spec(CHART)
PLUGIN = POD["containers"][0]
AGENT_POD = pod_spec(CHART, MPS_AGENT)
AGENT = AGENT_POD["containers"][0]
MIG_STATE_LABEL = "nvidia.com/mig.config.state"  # as NVIDIA's MIG manager writes it


def mounts() -> dict[str, dict[str, Any]]:
    return {mount["name"]: mount for mount in PLUGIN["volumeMounts"]}


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


def agent_settings() -> AgentSettings:
    return AgentSettings.read(argparse.Namespace(), variables(AGENT_POD))


@pytest.mark.point(102)
def test_the_plugin_has_the_rights_it_needs_and_no_other() -> None:
    rules = CHART["ClusterRole"]["rules"]
    assert {(*rule["apiGroups"], *rule["resources"]): rule["verbs"] for rule in rules} == {
        ("resource.k8s.io", "resourceclaims"): ["get", "list"],
        ("resource.k8s.io", "resourceclaims/status"): ["patch"],
        ("resource.k8s.io", "resourceclaims/driver"): ["associated-node:patch"],
        ("resource.k8s.io", "resourceslices"): [*("list", "watch", "create", "update", "delete")],
        ("resource.k8s.io", "deviceclasses"): ["get", "list"],
        ("", "nodes"): ["get", "list", "watch", "patch"],
        ("", "nodes/status"): ["patch"],
        ("resource.nvidia.com", "nodeprofiles"): ["get", "list"],
        ("", "events"): ["create", "patch"],
        ("", "pods"): ["get", "list"],
    }
    [revisions] = CHART["Role"]["rules"]
    assert revisions == {
        "apiGroups": ["apps"],
        "resources": ["controllerrevisions"],
        "verbs": ["get"],
    }
    assert settings().revision_namespace == CHART["Role"]["metadata"]["namespace"]


def test_the_role_allows_what_the_doctor_asks_about() -> None:
    allowed = {
        ApiPermission(group, resource, verb)
        for rule in CHART["ClusterRole"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert set(NEEDED_PERMISSIONS) <= allowed


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
    assert CHART["RoleBinding"]["subjects"] == CHART["ClusterRoleBinding"]["subjects"]
    assert CHART["RoleBinding"]["roleRef"]["name"] == CHART["Role"]["metadata"]["name"]
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    for policy in ("ValidatingAdmissionPolicy", NODE_POLICY, STATUS_POLICY, EVENTS_POLICY):
        [condition] = CHART[policy]["spec"]["matchConditions"]
        assert condition["expression"] == f"request.userInfo.username == '{user}'"
        binding = CHART[f"{policy}Binding"]["spec"]
        assert binding["policyName"] == CHART[policy]["metadata"]["name"]
        assert binding["validationActions"] == ["Deny"]


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


def takes(name: str, kind: str, **attributes: Any) -> bool:
    """Whether a class selects a device of this type with these attributes besides."""
    device = {
        "attributes": {
            names.TYPE: {"string": kind},
            **{
                each: {"bool": value} if isinstance(value, bool) else {"string": value}
                for each, value in attributes.items()
            },
        }
    }
    result = evaluate(expression(name), variables_of(device, names.DRIVER))
    assert isinstance(result, bool)
    return result


def published_kinds(product: str, directory: Path) -> set[str]:
    """The values of the attribute `profile` where every partition of such a GPU is offered."""
    inventory = Node(directory, {"gpus": [h100("1b", product=product)]}).gpus().scan()
    everything = Rules(mig=MigRules(dynamic=True, profiles=("*",)))
    profile = Profile("p", (ProfileEntry(GpuSelector(), everything, "spec.gpus[0]"),))
    ready = after_switch(inventory, profile, ApiFeatures(), {})
    devices = published_devices(build_offer(ready, profile, ApiFeatures(), {}))
    attributes = (device["attributes"].get(names.PROFILE) for device in devices)
    return {each["string"] for each in attributes if each}


@pytest.mark.parametrize(
    ("name", "resource"),
    [
        pytest.param(names.DRIVER, "nvidia.com/gpu", id="GPUs"),
        pytest.param(f"shared.{names.DRIVER}", "nvidia.com/gpu.shared", id="replicas"),
        pytest.param(f"mig-1g-5gb.{names.DRIVER}", "nvidia.com/mig-1g.5gb", id="partitions"),
        pytest.param(
            f"mig-1g-5gb-me.{names.DRIVER}",
            "nvidia.com/mig-1g.5gb.me",
            id="partitions with media engines",
        ),
    ],
)
def test_a_class_has_the_name_that_device_plugins_serve(name: str, resource: str) -> None:
    assert CHART[name]["spec"]["extendedResourceName"] == resource


def test_no_two_classes_have_one_old_name() -> None:
    specs = [each["spec"] for each in CHART.values() if each["kind"] == "DeviceClass"]
    resource_names = [
        spec["extendedResourceName"] for spec in specs if "extendedResourceName" in spec
    ]
    assert len(resource_names) == len(set(resource_names)) == len(values()["mig"]["profiles"]) + 2


def test_the_shared_class_selects_one_type() -> None:
    assert expression(f"shared.{names.DRIVER}") == type_is(names.TYPE_GPU_SHARED)


SERVED_MIG = {names.MPS: True, names.TIME_SLICING: True, names.AS_GPU: True}
GPUS, BY_MPS, SMALL = names.DRIVER, f"mps.{names.DRIVER}", f"mig-1g-10gb.{names.DRIVER}"
TIMED = f"time-sliced.{names.DRIVER}"


@pytest.mark.parametrize(
    ("name", "kind", "attributes", "taken"),
    [
        (GPUS, names.TYPE_GPU, {}, True),
        (GPUS, names.TYPE_GPU_SHARED, {}, False),
        (GPUS, names.TYPE_GPU_MONITOR, {}, False),
        (GPUS, names.TYPE_MIG, {}, False),
        (GPUS, names.TYPE_MIG, {names.AS_GPU: True}, True),
        (GPUS, names.TYPE_MIG, {names.AS_GPU: False}, False),
        (SMALL, names.TYPE_MIG, {names.PROFILE: "1g.10gb"}, True),
        (SMALL, names.TYPE_MIG, {names.PROFILE: "1g.10gb+me"}, False),
        (SMALL, names.TYPE_MIG, {names.PROFILE: "2g.10gb"}, False),
        (SMALL, names.TYPE_GPU, {}, False),
        (BY_MPS, names.TYPE_GPU, {names.MPS: True}, True),
        (BY_MPS, names.TYPE_GPU_SHARED, {names.MPS: True}, True),
        (BY_MPS, names.TYPE_GPU, {names.MPS: False}, False),
        (BY_MPS, names.TYPE_GPU, {}, False),  # of an older plugin
        (BY_MPS, names.TYPE_GPU_MONITOR, {names.MPS: True}, False),
        (TIMED, names.TYPE_GPU, {}, True),
        (TIMED, names.TYPE_GPU_SHARED, {}, True),
        (TIMED, names.TYPE_GPU_MONITOR, {}, False),
        # A class that brings a way of sharing GPUs takes no partition.
        (BY_MPS, names.TYPE_MIG, SERVED_MIG, False),
        (TIMED, names.TYPE_MIG, SERVED_MIG, False),
        (f"shared.{names.DRIVER}", names.TYPE_MIG, SERVED_MIG, False),
        (f"monitor.{names.DRIVER}", names.TYPE_MIG, SERVED_MIG, False),
    ],
)
def test_a_class_takes_devices_of_its_kind_and_no_others(
    name: str, kind: str, attributes: dict[str, Any], taken: bool
) -> None:
    assert takes(name, kind, **attributes) is taken


@pytest.mark.parametrize("name", [f"mig.{names.DRIVER}", "mig.nvidia.com"])
def test_partitions_of_every_kind_have_a_class_and_one_that_nvidias_driver_names(name: str) -> None:
    assert expression(name) == type_is(names.TYPE_MIG)
    assert "extendedResourceName" not in CHART[name]["spec"]


def test_every_profile_has_a_class_that_selects_it_and_no_other() -> None:
    for profile in values()["mig"]["profiles"]:
        taken = [name for name in OF_PROFILES if takes(name, names.TYPE_MIG, profile=profile)]
        word = profile.replace("-me", "-no-me").replace(".", "-").replace("+", "-")
        assert taken == [f"mig-{word}.{names.DRIVER}"]


def test_names_of_classes_and_resources_are_legal_and_each_is_there_once() -> None:
    for name, each in OF_PROFILES.items():
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name.partition(".")[0])
        _, _, resource = each["spec"]["extendedResourceName"].partition("/")
        assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", resource)
    assert len(OF_PROFILES) == len(values()["mig"]["profiles"])


@pytest.mark.parametrize("board", sorted(geometry_documents()))
def test_whatever_is_published_of_a_board_has_a_class(board: str, tmp_path: Path) -> None:
    kinds = published_kinds(geometry_documents()[board]["products"][0], tmp_path)

    assert kinds == set(geometry_documents()[board]["profiles"])
    assert kinds <= set(values()["mig"]["profiles"])


@pytest.mark.parametrize("profile", values()["mig"]["profiles"])
def test_a_file_of_the_device_plugin_knows_the_resource_of_each_class(profile: str) -> None:
    [name] = [name for name in OF_PROFILES if takes(name, names.TYPE_MIG, profile=profile)]
    resource = {"name": OF_PROFILES[name]["spec"]["extendedResourceName"], "replicas": 2}

    [entry] = decode_profile({"sharing": {"timeSlicing": {"resources": [resource]}}}, "p").entries

    assert entry.rules.mig.replicas == ((profile, 2),)


def test_the_plugin_may_change_one_label_of_one_node() -> None:
    policy = CHART[NODE_POLICY]["spec"]
    assert policy["failurePolicy"] == "Fail"
    [rule] = policy["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["nodes"], ["UPDATE"])
    checked = [each["expression"] for each in policy["validations"]]
    assert "object.metadata.name == variables.tokenNode" in checked
    assert "variables.otherLabels.size() == 0" in checked
    [others] = [v["expression"] for v in policy["variables"] if v["name"] == "otherLabels"]
    assert others.endswith(f".filter(k, k != '{MIG_STATE_LABEL}')")


@pytest.mark.parametrize(
    ("name", "condition", "sharing"),
    [
        (
            "time-sliced",
            f".{names.TYPE} in ['{names.TYPE_GPU}', '{names.TYPE_GPU_SHARED}']",
            TimeSlicing(strategy="TimeSlicing"),
        ),
        (
            "mps",
            f"'{names.MPS}' in device.attributes['{names.DRIVER}'] && "
            f"device.attributes['{names.DRIVER}'].{names.MPS}",
            Mps(strategy="MPS"),
        ),
    ],
)
def test_a_class_for_sharing_brings_a_configuration_that_the_driver_reads(
    name: str, condition: str, sharing: TimeSlicing | Mps
) -> None:
    assert condition in expression(f"{name}.{names.DRIVER}")
    [config] = CHART[f"{name}.{names.DRIVER}"]["spec"]["config"]
    assert config["opaque"]["driver"] == names.DRIVER
    decoded = decode_config(config["opaque"]["parameters"])
    assert isinstance(decoded, GpuConfig)
    assert decoded.sharing == sharing


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
        assert mounts()[name]["mountPath"] == host_paths(POD)[name]
        assert not mounts()[name].get("readOnly")


def test_the_plugin_can_write_everywhere_it_keeps_something() -> None:
    writable = [Path(mounts()[name]["mountPath"]) for name in ("plugin", "registry", "cdi")]
    for directory in (settings().plugin_dir, settings().state, settings().cdi_dir):
        assert any(directory.is_relative_to(mounted) for mounted in writable), directory
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
    assert host_paths(POD)["cgroup"] == mounts()["cgroup"]["mountPath"] == "/sys/fs/cgroup"
    assert not mounts()["cgroup"].get("readOnly")
    assert Path(host_paths(POD)["pod-resources"]) == settings().kubelet_dir / "pod-resources"
    assert mounts()["pod-resources"]["mountPath"] == host_paths(POD)["pod-resources"]
    assert mounts()["pod-resources"]["readOnly"] is True


def test_the_host_is_only_read_and_later_mounts_on_it_are_seen() -> None:
    host = mounts()["host"]
    assert host_paths(POD)["host"] == "/"
    assert Path(host["mountPath"]) == settings().host_root
    assert host["readOnly"] is True
    assert host["mountPropagation"] == "HostToContainer"


@pytest.mark.parametrize(
    ("component", "surge", "unavailable"),
    [
        pytest.param("", 1, 0, id="a new plugin starts before the old one stops"),
        pytest.param(MPS_AGENT, 0, 1, id="no two agents look after the servers of a node"),
    ],
)
def test_an_update_goes_from_node_to_node(component: str, surge: int, unavailable: int) -> None:
    strategy = CHART[f"{component} DaemonSet".lstrip()]["spec"]["updateStrategy"]
    assert strategy == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
    }


def test_the_plugin_outlives_other_pods_on_its_node() -> None:
    assert POD["priorityClassName"] == "system-node-critical"
    assert POD["tolerations"] == [{"operator": "Exists"}]


def test_the_probes_ask_the_address_that_is_served() -> None:
    live = {"livenessProbe": "/livez", "readinessProbe": "/readyz"}
    ports = []
    for container, address, probes in (
        (PLUGIN, settings().http_address, {"startupProbe": "/livez", **live}),
        (AGENT, agent_settings().http_address, live),
    ):
        [port] = container["ports"]
        ports.append(port["containerPort"])
        assert address == f":{port['containerPort']}"
        for probe, path in probes.items():
            asked = container[probe]["httpGet"]
            assert asked["path"] == path
            assert asked["port"] in (port["name"], port["containerPort"])
            assert container[probe]["timeoutSeconds"] > 1
    assert len(set(ports)) == 2


def test_a_plugin_that_starts_slowly_is_not_killed_for_it() -> None:
    probe = PLUGIN["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 120


def test_the_plugin_finds_the_socket_of_the_agent_where_the_agent_puts_it() -> None:
    directory = agent_settings().mps_dir
    assert Path(settings().mps_socket) == directory / "agent.sock"
    assert mounts()["mps"]["mountPath"] == host_paths(POD)["mps"] == str(directory)
    assert host_paths(AGENT_POD)["mps"] == str(directory)


def test_the_agent_has_no_right_and_no_token() -> None:
    account = CHART[f"{MPS_AGENT} ServiceAccount"]
    assert account["automountServiceAccountToken"] is False
    assert AGENT_POD["serviceAccountName"] == account["metadata"]["name"]
    assert AGENT_POD["automountServiceAccountToken"] is False
    assert {volume["name"] for volume in AGENT_POD["volumes"]} == host_paths(AGENT_POD).keys()
    subjects = CHART["ClusterRoleBinding"]["subjects"]
    assert account["metadata"]["name"] not in [each["name"] for each in subjects]
    assert not any(kind.startswith(f"{MPS_AGENT} Role") for kind in CHART)


def test_every_environment_variable_is_a_setting_of_the_agent() -> None:
    known = {field.upper() for field in AgentSettings.model_fields}
    assert {entry["name"] for entry in AGENT["env"]} <= known
    assert AGENT["args"] == ["mps-agent"]
    assert agent_settings().host_root == settings().host_root


def test_the_agent_sees_the_hosts_processes_and_what_it_mounts_is_there_for_containers() -> None:
    assert AGENT_POD["hostPID"] is True
    assert AGENT["securityContext"]["privileged"] is True
    directory = str(agent_settings().mps_dir)
    by_path = {mount["mountPath"]: mount for mount in AGENT["volumeMounts"]}
    assert by_path[directory]["mountPropagation"] == "Bidirectional"
    assert by_path["/host"]["readOnly"] is True
    within = by_path[f"/host{directory}"]
    assert within["name"] == "mps"
    assert not within.get("readOnly")
    assert within["mountPropagation"] == by_path["/host"]["mountPropagation"] == "HostToContainer"
    assert by_path["/sys/fs/cgroup"] == {"name": "cgroup", "mountPath": "/sys/fs/cgroup"}


def test_agents_are_where_plugins_are_and_as_hard_to_evict() -> None:
    for field in ("nodeSelector", "tolerations", "priorityClassName"):
        assert AGENT_POD[field] == POD[field]
    assert AGENT["image"] == PLUGIN["image"]
    labels = CHART[f"{MPS_AGENT} DaemonSet"]["spec"]["selector"]["matchLabels"]
    assert labels != CHART["DaemonSet"]["spec"]["selector"]["matchLabels"]
