"""What hack/demo shows: the whole road of one GPU, on one screen, from values alone."""

from pathlib import Path
from typing import Any

import pytest

from hack.demonstration.errors import DemoError
from hack.demonstration.manifests import documents, with_local_image, with_memory
from hack.demonstration.page import (
    Findings,
    Partitions,
    Servers,
    Style,
    ended,
    left_running,
    limits,
    page,
    partitions_page,
    servers_page,
    sharing,
)
from hack.demonstration.progress import style
from hack.demonstration.stage import alone

UID = "cfe8cf07-3c21-490b-a61d-dbab914fb204"
GPU = "GPU-fc71e4ef-1f50-516d-843d-47ce7eaf2cf4"
COLOURS = Style("<b>", "<d>", "<n>")


def device(name: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "productName": {"string": "NVIDIA H100 80GB HBM3"},
        "uuid": {"string": GPU},
        "driverVersion": {"version": "580.95.5"},
        "nvlinkPeers": {"int": 7},
    }
    return {"name": name, "attributes": attributes, "capacity": {"memory": {"value": "81559Mi"}}}


def mount(path: str) -> dict[str, Any]:
    return {"hostPath": f"/sim{path}", "containerPath": path}


def findings(**parts: Any) -> Findings:
    result = {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "node-1", "device": "gpu-0"}
    values: dict[str, Any] = {
        "version": "1.36.3",
        "sim": "h100x8",
        "why": None,
        "log": f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {GPU})",
        "claim": {
            "metadata": {"namespace": "one-gpu", "name": "one-gpu-gpu-x", "uid": UID},
            "status": {"allocation": {"devices": {"results": [result]}}},
        },
        "resource_slice": {
            "metadata": {"name": "00000-gpu.nvidia.com-node-1-y"},
            "spec": {"devices": [device(f"gpu-{n}") for n in range(8)]},
        },
        "claim_spec": (
            f"/cdi/k8s.gpu.nvidia.com-claim_{UID}.json",
            {
                "kind": "k8s.gpu.nvidia.com/claim",
                "devices": [
                    {
                        "name": f"{UID}-gpu-0",
                        "containerEdits": {
                            "env": [f"GPU_DEVICE_0_UUID={GPU}", "MORE=1"],
                            "deviceNodes": [{"path": "/dev/nvidia0"}],
                        },
                    }
                ],
                "containerEdits": {"deviceNodes": [{"path": "/dev/nvidiactl"}]},
            },
        ),
        "driver_spec": (
            "/cdi/k8s.gpu.nvidia.com-driver_files.json",
            {
                "kind": "k8s.gpu.nvidia.com/driver",
                "devices": [{"name": "files", "containerEdits": {"env": ["VERSION=1"]}}],
                "containerEdits": {
                    "mounts": [
                        mount("/usr/bin/nvidia-smi"),
                        mount("/usr/lib/libcuda.so.1"),
                        mount("/usr/lib/libnvoptix.so.1"),
                    ],
                },
            },
        ),
        "quarters": {"a/one": "GPU 0: H100\nMEMORY=19Gi", "b-c/one": "GPU 0: H100\nMEMORY=19Gi"},
        "claims_table": "gpu-0  [####]  all 79.6 GiB held\n  # one-gpu/one-gpu-gpu-x",
    }
    return Findings(**(values | parts))


def test_the_page_leads_from_the_pod_back_to_the_node() -> None:
    assert (
        page(findings(), Style())
        == f"""\
One pod with one GPU, three that share one, on Kubernetes 1.36.3; GPUs are simulated

What the pod printed  kubectl logs -n one-gpu one-gpu
  GPU 0: NVIDIA H100 80GB HBM3 (UUID: {GPU})

The GPU it was given  kubectl get resourceclaims -n one-gpu
  claim one-gpu/one-gpu-gpu-x
  request 'gpu' <- device gpu-0 of pool node-1, driver gpu.nvidia.com

The ResourceSlice it came from  kubectl get resourceslices -o yaml
  00000-gpu.nvidia.com-node-1-y: gpu-0, one of its 8 devices
    productName            NVIDIA H100 80GB HBM3
    uuid                   {GPU}
    driverVersion          580.95.5
    memory                 81559Mi
    and 1 more

The CDI spec of the claim  /cdi/k8s.gpu.nvidia.com-claim_{UID}.json
  device       k8s.gpu.nvidia.com/claim={UID}-gpu-0
  env          GPU_DEVICE_0_UUID={GPU} and 1 more
  deviceNodes  /dev/nvidia0 /dev/nvidiactl

The CDI spec of the driver  /cdi/k8s.gpu.nvidia.com-driver_files.json
  device       k8s.gpu.nvidia.com/driver=files
  env          VERSION=1
  mounts       /usr/bin/nvidia-smi /usr/lib/libcuda.so.1 and 1 more

Pods of three namespaces on one GPU  kubectl logs -n NAMESPACE POD
  a/one    GPU 0: H100  MEMORY=19Gi
  b-c/one  GPU 0: H100  MEMORY=19Gi

Who holds what, and what is free  dra-driver claims
  gpu-0  [####]  all 79.6 GiB held
    # one-gpu/one-gpu-gpu-x"""
    )


def servers(why: str | None = None) -> Servers:
    logs = {"two/large": "GPU 0: H100\nPERCENT=70", "two/small": "GPU 0: H100\nPERCENT=30"}
    return Servers("1.36.3", why, logs, "gpu-0  [####]\n  # two/large-gpu-x")


def test_the_page_of_two_servers_shows_what_each_of_them_sees() -> None:
    assert (
        servers_page(servers(), Style())
        == """\
Two servers with 30 and 70 percent of one GPU, under MPS, on Kubernetes 1.36.3; GPUs are simulated

What pod large sees  kubectl logs -n two large
  GPU 0: H100
  PERCENT=70

What pod small sees  kubectl logs -n two small
  GPU 0: H100
  PERCENT=30

Who holds what, and what is free  dra-driver claims
  gpu-0  [####]
    # two/large-gpu-x"""
    )
    assert "without a container: not root" in servers_page(servers("not root"), Style())


def test_partitions_are_shown_while_pods_have_them_and_after() -> None:
    logs = {"a/one": "GPU 0: H100\n  MIG 1g.10gb", "b/two": "GPU 0: H100\n  MIG 2g.20gb"}
    pods = Partitions("1.36.3", None, logs, "gpu-0  [A|BB|.]", "gpu-0  [.|.|.|.]")
    assert (
        partitions_page(pods, Style())
        == """\
Two pods with MIG partitions that nobody created before, on Kubernetes 1.36.3; GPUs are simulated

What pod one sees  kubectl logs -n a one
  GPU 0: H100
    MIG 1g.10gb

What pod two sees  kubectl logs -n b two
  GPU 0: H100
    MIG 2g.20gb

How the GPUs are divided now  dra-driver devices --profile mig
  gpu-0  [A|BB|.]

And once the pods are gone  dra-driver devices --profile mig
  gpu-0  [.|.|.|.]"""
    )


def test_where_nothing_is_shared_nothing_is_said_of_it() -> None:
    shown = page(findings(quarters={}), Style())
    assert shown.startswith("One pod with one GPU on Kubernetes")
    assert "three" not in shown
    assert "it takes two GPUs" in sharing({})
    assert sharing({"a/b": "GPU 0", "c/d": "GPU 0"}) == "running: a/b, c/d"


def test_everything_fits_on_a_screen_of_sixty_lines() -> None:
    attributes = {f"attribute{n}": {"int": n} for n in range(40)} | device("gpu-0")["attributes"]
    slice_of_one = {
        "metadata": {"name": "s"},
        "spec": {"devices": [{"name": "gpu-0", "attributes": attributes}]},
    }
    bars = "\n".join(f"line {n}" for n in range(8 + 4))  # eight GPUs, four claims
    logs = {f"{name}/pod": "GPU 0\nMEMORY=1Gi" for name in ("a", "b", "c")}
    full = findings(resource_slice=slice_of_one, why="not root", quarters=logs, claims_table=bars)
    shown = page(full, Style())
    more = left_running("/root/admin.kubeconfig", "/root/bin", "one-gpu/one-gpu", "doctor")
    assert len(f"{shown}\n\n{more}".splitlines()) <= 60
    assert len(f"{shown}\n\n{ended()}".splitlines()) <= 60


def test_a_pod_without_a_container_is_said_to_be_one() -> None:
    shown = page(findings(why="not root: containers need root"), Style())
    assert "without a container: not root: containers need root" in shown
    assert "nothing isolates it" in limits("not root")
    outside = left_running("k", "p", "", "dra-driver doctor --sim=h100x8")
    assert "kubectl exec" not in outside
    assert "  dra-driver doctor --sim=h100x8\n" in outside
    inside = left_running("k", "p", "space/name", "dra-driver doctor")
    assert "kubectl exec -n space name -- nvidia-smi" in inside
    assert "the image dra.test/glibc:1" in inside


def test_headings_are_bold_and_sources_faint_where_the_terminal_is_told_so() -> None:
    lines = page(findings(), COLOURS).splitlines()
    assert "<b>What the pod printed<n>  <d>kubectl logs -n one-gpu one-gpu<n>" in lines


@pytest.mark.parametrize(
    ("is_terminal", "environment", "coloured"),
    [
        pytest.param(True, {}, True, id="a terminal"),
        pytest.param(False, {}, False, id="a file"),
        pytest.param(True, {"NO_COLOR": ""}, False, id="a person who wants none"),
        pytest.param(True, {"TERM": "dumb"}, False, id="a terminal that has none"),
    ],
)
def test_colours_are_for_terminals(
    is_terminal: bool, environment: dict[str, str], coloured: bool
) -> None:
    assert (style(is_terminal, environment) != Style()) is coloured


def test_the_example_runs_from_a_local_image_and_stays_after_its_own_command() -> None:
    container = {"name": "main", "image": "ubuntu:24.04", "command": ["nvidia-smi", "-L"]}
    changed = with_local_image({"kind": "Pod", "spec": {"containers": [container]}})
    (only,) = changed["spec"]["containers"]
    assert only["command"][:2] == ["sh", "-c"]
    assert only["command"][2].startswith("nvidia-smi -L || exit; ")
    assert only["image"].startswith("dra.test/")


def test_an_example_that_stays_by_itself_keeps_its_command() -> None:
    pods = [each for each in documents("quarter-gpu") if each["kind"] == "Pod"]
    before = [pod["spec"]["containers"][0]["command"] for pod in pods]
    after = [with_local_image(pod)["spec"]["containers"][0]["command"] for pod in pods]
    assert after == before


@pytest.mark.parametrize(
    ("quarter", "asked"),
    [
        pytest.param(20389, "19Gi", id="a large GPU: as it is written"),
        pytest.param(3840, "3840Mi", id="a small one: a quarter of it"),
    ],
)
def test_a_quarter_is_one_of_the_smallest_gpu_too(quarter: int, asked: str) -> None:
    objects = [with_memory(each, quarter) for each in documents("quarter-gpu")]
    templates = [each for each in objects if each["kind"] == "ResourceClaimTemplate"]
    requests = [each["spec"]["spec"]["devices"]["requests"][0] for each in templates]
    amounts = [request["exactly"]["capacity"]["requests"] for request in requests]
    assert amounts == [{"memory": asked}] * 3


def test_two_demonstrations_at_once_are_one_too_many(tmp_path: Path) -> None:
    with (
        alone(tmp_path),
        alone(tmp_path / "of another cluster"),
        pytest.raises(DemoError, match="another hack/demo is at work"),
        alone(tmp_path),
    ):
        pass
    with alone(tmp_path):
        pass
