"""What the chart refuses, and what it says then, in the hands of the real helm."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART, helm, pod_spec, refusal, render, variables

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]  # helm is built on first use

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
    "an MPS directory behind its parent": (["mps.dir=/run/../etc"], "/mps/dir"),
    "a network with more bits than IPv4 has": (
        ["networkPolicy.to[0]=10.0.0.0/99"],
        "/networkPolicy/to/0",
    ),
    "one resource name for two classes": (
        ["sharedExtendedResourceName=nvidia.com/gpu"],
        "are both nvidia.com/gpu",
    ),
    "no profile of MIG": (["mig.profiles={10gb}"], "/mig/profiles/0"),
    "a profile of MIG twice": (["mig.profiles={1g.10gb,1g.10gb}"], "/mig/profiles"),
    "a resource of no domain": (["mig.extendedResourcePrefix=mig-"], "/mig/extendedResourcePrefix"),
    "a misspelt value of MPS": (["mps.enable=false"], "'enable' not allowed"),
    "one port for two": (["hostNetwork=true", "mps.httpPort=8080"], "are both 8080"),
    "one port for two others": (
        ["hostNetwork=true", "controller.httpPort=8081"],
        "controller.httpPort and mps.httpPort are both 8081",
    ),
    "no replica": (["controller.replicas=0"], "/controller/replicas"),
    "a misspelt value of the controller": (["controller.replica=2"], "'replica' not allowed"),
    "a variable that the chart sets": (
        ["env[0].name=CDI_DIR", "env[0].value=/etc/cdi"],
        "may not set CDI_DIR",
    ),
    "an account that nobody named": (["serviceAccount.create=false"], "which account"),
    "nodes chosen by two values": (
        ["onlyLabelledNodes=true", "affinity.nodeAffinity.a=b"],
        "affinity and onlyLabelledNodes exclude each other",
    ),
    "a name too long for objects": ([f"fullnameOverride={'n' * 49}"], "/fullnameOverride"),
    "the image of NVIDIA's DRA driver": (
        ["image.repository=registry.k8s.io/dra-driver-nvidia/dra-driver-nvidia-gpu"],
        "the image of NVIDIA's DRA driver",
    ),
    "a path too long for a socket": ([f"kubeletDir=/var/lib/{'k' * 64}"], "No socket fits"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED_VALUES.values(), ids=REFUSED_VALUES)
def test_what_cannot_work_is_refused(arguments: list[str], message: str) -> None:
    assert message in refusal("--set", ",".join(arguments))


# Every value of the chart of NVIDIA's DRA driver (0.4 and main); of a group that is one thing here,
# the group.
NVIDIA_VALUES = (
    *("nvidiaDriverRoot", "nvidiaCDIHookPath", "altProcDevices", "namespaceOverride"),
    *("selectorLabelsOverride", "gpuResourcesEnabledOverride", "consumableShares"),
    *("resourceApiVersion", "imagePullSecrets", "featureGates", "logVerbosity", "webhook"),
    *("controller.leaderElection", "controller.metrics", "controller.podAnnotations"),
    *("controller.podSecurityContext", "controller.containers", "controller.networkPolicy"),
    *("resources.gpus", "resources.computeDomains", "maskNvidiaDriverParams"),
    *("nvidiaCtkPath", "deviceClasses", "kubeletPlugin.metrics.enabled"),
    "kubeletPlugin.metrics.gpuHttpEndpoint",
    *("kubeletPlugin.metrics.computeDomainHttpEndpoint", "kubeletPlugin.metrics.metricsPath"),
    *("kubeletPlugin.priorityClassName", "kubeletPlugin.updateStrategy"),
    *("kubeletPlugin.podAnnotations", "kubeletPlugin.podSecurityContext"),
    *("kubeletPlugin.nodeSelector", "kubeletPlugin.tolerations", "kubeletPlugin.affinity"),
    "kubeletPlugin.kubeletRegistrarDirectoryPath",
    "kubeletPlugin.kubeletPluginsDirectoryPath",
    *("kubeletPlugin.containers.init", "kubeletPlugin.containers.computeDomains"),
    *("kubeletPlugin.containers.gpus.env", "kubeletPlugin.containers.gpus.resources"),
    "kubeletPlugin.containers.gpus.securityContext",
    *("kubeletPlugin.containers.gpus.healthcheckPort", "kubeletPlugin.networkPolicy"),
)
NVIDIA_VALUES_THAT_ARE_OURS = (
    *("image.repository", "image.tag", "image.pullPolicy", "nameOverride", "fullnameOverride"),
    *("allowDefaultNamespace", "serviceAccount.create", "serviceAccount.name"),
    *("serviceAccount.annotations", "controller.priorityClassName", "controller.nodeSelector"),
    *("controller.tolerations", "controller.affinity"),
)


def test_the_table_has_every_value_of_nvidias_chart() -> None:
    table = yaml.safe_load((CHART / "nvidia-values.yaml").read_text())
    same = {value["value"] for value in table if value.get("same")}
    assert same == set(NVIDIA_VALUES_THAT_ARE_OURS)
    assert {value["value"] for value in table} - same == {*NVIDIA_VALUES, "kubeletPlugin"}


def test_a_values_file_of_nvidias_chart_is_refused_with_the_counterpart_of_every_value() -> None:
    message = refusal(*(f"--set={name}=1" for name in NVIDIA_VALUES))
    for name in NVIDIA_VALUES:
        assert f"    {name}\n        " in message
    assert "nvidiaDriverRoot\n        driverRoot." in message
    assert "docs/reference/nvidia-chart-values.md" in message


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("kubeletPlugin.newer=1", id="one below a group that the table has not"),
        pytest.param("altProcDevices=", id="an empty one"),
        pytest.param("gpuResourcesEnabledOverride=false", id="one that is off"),
    ],
)
def test_one_value_of_nvidias_chart_is_enough(value: str) -> None:
    assert "chart of NVIDIA's DRA driver" in refusal("--set", value)


_CRD_V1 = {"groupVersion": "apiextensions.k8s.io/v1", "version": "v1"}
KUBERNETES_133: dict[str, Any] = {  # without Dynamic Resource Allocation
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.4"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [
            {"name": "apiextensions.k8s.io", "versions": [_CRD_V1], "preferredVersion": _CRD_V1}
        ],
    },
    "/apis/apiextensions.k8s.io/v1": {
        "kind": "APIResourceList",
        "groupVersion": "apiextensions.k8s.io/v1",
        "resources": [
            {
                "name": "customresourcedefinitions",
                "kind": "CustomResourceDefinition",
                "namespaced": False,
            }
        ],
    },
}
_V1 = {"groupVersion": "resource.k8s.io/v1", "version": "v1"}
KUBERNETES_136 = {
    **KUBERNETES_133,
    "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.3"},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [{"name": "namespaces", "kind": "Namespace", "namespaced": False}],
    },
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [
            *KUBERNETES_133["/apis"]["groups"],
            {"name": "resource.k8s.io", "versions": [_V1], "preferredVersion": _V1},
        ],
    },
    "/apis/resource.k8s.io/v1": {
        "kind": "APIResourceList",
        "groupVersion": "resource.k8s.io/v1",
        "resources": [{"name": "deviceclasses", "kind": "DeviceClass", "namespaced": False}],
    },
}
CLASS_PATH = "/apis/resource.k8s.io/v1/deviceclasses/gpu.nvidia.com"


def device_class(**annotations: str) -> dict[str, Any]:
    metadata = {"name": "gpu.nvidia.com", "annotations": annotations}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": metadata}


def class_of_release(name: str, namespace: str) -> dict[str, Any]:
    """As Helm marks what it installed."""
    return device_class(
        **{"meta.helm.sh/release-name": name, "meta.helm.sh/release-namespace": namespace}
    )


@pytest.fixture
def refusal_on(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """What `helm install` says on a cluster that answers so, by path, and where it refuses
    nothing."""
    with contextlib.ExitStack() as stack:

        def install(answers: Mapping[str, Any], *arguments: str) -> str:
            port = stack.enter_context(serving(answers))
            config = tmp_path / "kubeconfig"
            cluster = {"name": "it", "cluster": {"server": f"http://127.0.0.1:{port}"}}
            context = {"name": "it", "context": {"cluster": "it", "user": "it"}}
            config.write_text(
                json.dumps(
                    {
                        "current-context": "it",
                        "contexts": [context],
                        "clusters": [cluster],
                        "users": [{"name": "it", "user": {}}],
                    }
                )
            )
            answer = helm(
                *("install", "dra-driver-gpu", str(CHART), "--namespace", "gpus"),
                *("--dry-run=server", *arguments),
                kubeconfig=str(config),
            )
            assert answer.returncode != 0, "not all that a cluster serves is served here"
            return answer.stderr

        yield install


@contextlib.contextmanager
def serving(answers: Mapping[str, Any]) -> Iterator[int]:
    """An API server that has these documents, by path; the port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            body = json.dumps(answer).encode()
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the test says what matters."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_a_cluster_without_dra_is_asked_for_no_class_and_not_refused_for_that(
    refusal_on: Callable[..., str],
) -> None:
    """All templates are rendered; then the cluster of the test does not serve something else."""
    message = refusal_on(KUBERNETES_133)
    assert "resource.k8s.io" not in message
    assert "failed to download openapi" in message


@pytest.mark.parametrize(
    ("installed", "owner", "removal"),
    [
        pytest.param(
            class_of_release("nvidia-dra-driver-gpu", "nvidia"),
            "the release nvidia-dra-driver-gpu in the namespace nvidia",
            "helm uninstall nvidia-dra-driver-gpu --namespace nvidia",
            id="NVIDIA's DRA driver",
        ),
        pytest.param(
            class_of_release("dra-driver-gpu", "others"),
            "the release dra-driver-gpu in the namespace others",
            "helm uninstall dra-driver-gpu --namespace others",
            id="this chart in another namespace",
        ),
        pytest.param(
            device_class(),
            "somebody who did not use Helm",
            "kubectl delete deviceclass gpu.nvidia.com",
            id="no release",
        ),
    ],
)
def test_a_second_driver_of_one_name_is_refused_with_the_name_of_the_first(
    refusal_on: Callable[..., str], installed: dict[str, Any], owner: str, removal: str
) -> None:
    cluster = KUBERNETES_136 | {CLASS_PATH: installed}
    message = refusal_on(cluster)
    assert (
        f"a driver of the name gpu.nvidia.com already: its DeviceClass was installed by {owner}"
        in (message)
    )
    assert removal in message
    assert "besideOtherDriver=true" in message
    for let_through in ("driverName=gpu.example.com", "besideOtherDriver=true"):
        assert "already" not in refusal_on(cluster, "--set", let_through)


def test_an_upgrade_finds_the_class_of_its_own_release(refusal_on: Callable[..., str]) -> None:
    own = class_of_release("dra-driver-gpu", "gpus")
    assert "already" not in refusal_on(KUBERNETES_136 | {CLASS_PATH: own})


@pytest.mark.parametrize("level", ["restricted", "baseline"])
def test_a_namespace_without_privileged_pods_is_refused_with_what_to_label(
    refusal_on: Callable[..., str], level: str
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": level}
    metadata = {"name": "gpus", "labels": labels}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    message = refusal_on(KUBERNETES_136 | {"/api/v1/namespaces/gpus": namespace})
    assert f"admits no privileged pods (Pod Security {level})" in message
    label = "kubectl label namespace gpus pod-security.kubernetes.io/enforce=privileged --overwrite"
    assert label in message


def test_a_cluster_that_is_too_old_is_refused() -> None:
    assert ">=1.26.0-0" in refusal("--kube-version", "1.25.16")


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
