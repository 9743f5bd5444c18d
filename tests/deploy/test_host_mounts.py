"""The directories of a node that the pods have are those that the documents list, with a reason."""

import re
from typing import Any

import pytest

from tests.deploy.chart import GOLDEN, MPS_AGENT, REPOSITORY, objects, pod_spec, render

CHART = objects(GOLDEN.read_text())
INSTALL = REPOSITORY / "docs/install.md"
COMPONENTS = {"plugin": "", "MPS agent": MPS_AGENT}

Mount = tuple[str, str, str, str]  # directory of the node, seen as, written, created


def mounted(pod: dict[str, Any]) -> list[Mount]:
    """What the containers of a pod have of the node."""
    volumes = {v["name"]: v["hostPath"] for v in pod["volumes"] if "hostPath" in v}
    return sorted(
        (
            volumes[mount["name"]]["path"],
            mount["mountPath"],
            "no" if mount.get("readOnly") else "yes",
            "yes" if volumes[mount["name"]]["type"] == "DirectoryOrCreate" else "no",
        )
        for container in (*pod["containers"], *pod.get("initContainers", ()))
        for mount in container["volumeMounts"]
        if mount["name"] in volumes
    )


def documented(component: str, table: int = 0) -> list[Mount]:
    """What a table says, of which each row has a reason. The second one is for less of the node."""
    text = INSTALL.read_text().split("### Less of the node")[table]
    rows = re.findall(r"^\| `(/[^`]*)` \| ([^|`]+) \| (.+) \|$", text, re.MULTILINE)
    mounts = []
    for directory, of, rest in rows:
        inside, written, created, reason = rest.split(" | ")
        assert of in COMPONENTS
        assert len(reason) > 10
        if of == component:
            mounts.append((directory, inside.strip("`"), written, created))
    return sorted(mounts)


@pytest.mark.parametrize("component", COMPONENTS)
def test_pods_have_the_directories_of_the_node_that_are_documented_and_no_others(
    component: str,
) -> None:
    pod = pod_spec(CHART, COMPONENTS[component])

    assert mounted(pod) == documented(component)


@pytest.mark.parametrize("component", COMPONENTS)
def test_nothing_is_made_on_the_node_but_our_own_directories_and_that_of_cdi(
    component: str,
) -> None:
    pod = pod_spec(CHART, COMPONENTS[component])
    kinds = {v["hostPath"]["type"] for v in pod["volumes"] if "hostPath" in v}
    created = {directory for directory, _, _, created in mounted(pod) if created == "yes"}

    assert kinds <= {"Directory", "DirectoryOrCreate"}  # each is looked at before it is mounted
    assert created <= {
        "/var/lib/kubelet/plugins/gpu.nvidia.com",
        "/var/run/cdi",
        "/run/dra-driver-gpu/mps",
    }


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("others", "besides"),
    [
        pytest.param("", [], id="by default"),
        pytest.param(",driverRoot=/", [], id="with a driver on the host"),
        pytest.param(",driverRoot=/run/nvidia/driver", [], id="with a driver container"),
        pytest.param(
            ",driverRoot=/home/kubernetes/bin/nvidia/,runtimeDir=/var/snap/microk8s/run",
            ["/home/kubernetes/bin/nvidia", "/var/snap/microk8s/run"],
            id="with directories elsewhere",
        ),
        pytest.param(
            ",driverRoot=/opt/nvidia,nvidiaCdiHook=/opt/nvidia/bin/nvidia-cdi-hook",
            ["/opt/nvidia"],
            id="with one directory below the other",
        ),
    ],
)
def test_less_of_the_node_is_what_is_documented(others: str, besides: list[str]) -> None:
    rendered = render("--set", f"mountHostRoot=false{others}")
    own = [mount for mount in documented("plugin") if mount[1] != "/host"]
    less = [*documented("plugin", 1), *((path, f"/host{path}", "no", "no") for path in besides)]

    assert mounted(pod_spec(rendered)) == sorted([*own, *less])
    assert mounted(pod_spec(rendered, MPS_AGENT)) == documented("MPS agent")
    later = {  # where a driver can be mounted, and where containers are
        mount["mountPath"]
        for mount in pod_spec(rendered)["containers"][0]["volumeMounts"]
        if mount.get("mountPropagation") == "HostToContainer"
    }
    assert later == {"/host/run", *(f"/host{path}" for path in besides)}
