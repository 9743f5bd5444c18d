"""The kubelet and the API server of every version, without any driver."""

import re

import pytest

from tests.e2e.kube import wait
from tests.e2e.manifests import pod

pytestmark = [
    pytest.mark.core,
    pytest.mark.device_plugin,
    pytest.mark.usefixtures("containers"),
]


def test_the_node_is_of_the_version_that_was_asked_for(cluster, kube):
    node = kube.get("Node", cluster.node_name)

    assert node["status"]["nodeInfo"]["kubeletVersion"] == f"v{cluster.version}"
    assert re.match(r"containerd://2\.", node["status"]["nodeInfo"]["containerRuntimeVersion"])


def test_a_pod_runs_and_kubectl_reads_its_log_and_runs_commands_in_it(cluster, kube):
    name = "seen-by-kubectl"
    kube.apply(pod(name, "echo begun; sleep 600"))
    try:
        kube.wait_pod(name, "Running")

        wait("its log", lambda: kube.logs(name) == "begun\n")
        assert kube.kubectl("exec", name, "--", "echo", "also here") == "also here\n"
        uid = kube.get("Pod", name)["metadata"]["uid"]
        log = cluster.layout.pod_logs / f"default_{name}_{uid}" / "main" / "0.log"
        assert log.read_text().endswith(" begun\n")
    finally:
        kube.delete("Pod", name)
        kube.wait_gone("Pod", name)


def test_device_plugins_find_the_kubelet_in_a_directory_that_goes_with_the_cluster(cluster):
    assert (cluster.device_plugins_dir / "kubelet.sock").is_socket()
    assert cluster.device_plugins_dir.samefile(cluster.layout.device_plugins)
    assert cluster.pod_resources_socket.is_socket()
