"""Pods of a real Kubernetes on a real GPU, by the chart and its image, as administrators have them.

No claim here changes a setting of a GPU: a part of one under MPS leaves its compute mode alone.
"""

import json
import os
import statistics
import time
from functools import partial
from pathlib import Path

import pytest

from hack.benchmark.usage import cpu_seconds, rss_mib
from hack.container_image.build import build
from hack.testbed.assets import DEFAULT_VERSION
from hack.testbed.cluster import Cluster
from tests.e2e.device_plugin import PROFILE as BY_DEVICE_PLUGIN
from tests.e2e.kube import Kube, wait
from tests.e2e.manifests import container, fraction, pod_of, request, template
from tests.e2e.release import IMAGE, PLUGIN, Release
from tests.gpu.cuda_image import CUDA_IMAGE, write_cuda_image
from tests.gpu.programs import pids, read_words
from tests.gpu.rootfs import PROGRAM

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

GIB = 1 << 30
COMPUTE = f"python3 {PROGRAM}"
CLIENT = "python3 -m tests.gpu.mps_client libcuda.so.1"
OUT_OF_MEMORY = "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"
IDLE_SECONDS = 30.0
STARTS = 11  # of pods with a claim, and without; the first of each warms caches
CHANGE_SECONDS = 180.0  # from one API to the other
GUARD = """
apiVersion: resource.nvidia.com/v1beta1
kind: NodeProfile
spec: {gpus: [{memoryGuard: {policy: Kill, grace: 2s}}]}
"""


@pytest.fixture(scope="module")
def cluster(driver, tmp_path_factory):
    """Kubernetes on this machine, with the driver's image and one with CUDA programs."""
    cluster = Cluster(DEFAULT_VERSION)
    if cluster.why:
        pytest.skip(f"no node of Kubernetes here: {cluster.why}")
    cluster.up(progress=print)
    directory = tmp_path_factory.mktemp("images")
    # hack/image makes an archive on a machine that reaches Debian and PyPI; it can be carried here.
    carried = os.environ.get("DRIVER_IMAGE")
    archive = Path(carried) if carried else build(IMAGE, directory, print).archive
    write_cuda_image(directory / "cuda.tar", directory / "rootfs", driver.files())
    for image in (archive, directory / "cuda.tar"):
        cluster.import_images(image)
    yield cluster
    cluster.down()


@pytest.fixture(scope="module")
def kube(cluster):
    return Kube(cluster.kubeconfig, cluster.kubectl)


@pytest.fixture(scope="module")
def installed(cluster, kube, document, tmp_path_factory):
    """The release, once all GPUs of this machine are published."""
    release = Release(cluster, kube, tmp_path_factory.mktemp("helm"), Path("unused"))
    # Not in the hurry of other tests: the plugin looks as often as it does for everybody.
    place = [each for each in release.usual()["env"] if each["name"].startswith("KUBERNETES_")]
    profiles = {"guarded": GUARD, "by-device-plugin": BY_DEVICE_PLUGIN}
    release.upgrade(sim="", profiles=profiles, env=place)
    release.start()
    published = wait("its GPUs", kube.published, 60)
    uuids = {attribute_of(device, "uuid") for device in published.values()}
    assert uuids == {gpu.uuid for gpu in document.gpus}
    yield release
    kube.clean_up()
    wait("MPS servers to go", lambda: not list(release.mps_dir.glob("s" + "[0-9a-f]" * 12)), 60)
    release.stop()
    release.uninstall()


@pytest.fixture
def kubernetes(installed, kube):
    """The cluster's API, and after the test no pod and no claim of it."""
    yield kube
    kube.clean_up()


def attribute_of(device, name):
    return device["attributes"][name]["string"]


def cuda_pod(name, command, template_name=""):
    """A pod of one container in the network of the node, so that it needs none of its own."""
    claims = [{"name": "gpu", "resourceClaimTemplateName": template_name}] if template_name else []
    uses = ({"name": "gpu"},) if claims else ()
    program = container(uses=uses, image=CUDA_IMAGE)
    program["command"] = ["bash", "-c", command]
    return pod_of(name, [program], claims, hostNetwork=True)


def output_of(kube, pod):
    """What a pod printed that ran to its end, by line."""
    kube.apply(pod)
    name = pod["metadata"]["name"]
    phase = kube.wait_pod(name, "Succeeded", "Failed", seconds=120)
    text = kube.logs(name)
    assert phase == "Succeeded", f"{text}\n{kube.explain(name)}"
    return text.splitlines()


def answers_of(kube, name):
    """What a CUDA program of a running pod has said so far."""
    return [json.loads(line) for line in kube.logs(name).splitlines() if line.startswith("{")]


def has_answered(kube, name, questions):
    kube.wait_pod(name, "Running")
    return len(answers_of(kube, name)) == 1 + len(questions)


def asking(*questions):
    """A command that has the CUDA program answer these, and goes on using the GPU. The program is
    the first of its container, which the kernel spares a SIGTERM that it does not ask for."""
    lines = "; ".join(f"echo {question}" for question in questions)
    return f"exec {CLIENT} < <({lines}; sleep 200)"


def test_the_plugin_costs_next_to_nothing_while_nothing_happens(kubernetes, report):
    (pid,) = [pid for pid in pids() if "kubelet-plugin" in read_words(pid, "cmdline")]
    time.sleep(IDLE_SECONDS)  # it has just started
    before = cpu_seconds(pid)
    time.sleep(IDLE_SECONDS)
    percent = 100 * (cpu_seconds(pid) - before) / IDLE_SECONDS

    report([f"{percent:.2f} % of a core, {rss_mib(pid)['all']:.0f} MiB resident"])
    assert percent < 0.8


def start_seconds(kube, template_name):
    """From a pod's creation to its first instruction."""
    created = time.time()
    (began,) = output_of(kube, cuda_pod("starts", "echo $EPOCHREALTIME", template_name))
    kube.delete("Pod", "starts")
    kube.wait_gone("Pod", "starts")
    wait("its claim to go", lambda: not kube.all("ResourceClaim"))
    return float(began) - created


def test_a_claim_does_not_hold_up_the_start_of_a_pod(kubernetes, report):
    kubernetes.apply(template("gpu", request()))
    seconds = {"": [], "gpu": []}
    for _ in range(STARTS):
        for template_name, starts in seconds.items():
            starts.append(start_seconds(kubernetes, template_name))

    without, with_claim = (1000 * statistics.median(starts[1:]) for starts in seconds.values())
    report([f"start of a pod, p50 of {STARTS - 1}: {without:.0f} ms, with a GPU {with_claim:.0f}"])
    assert with_claim < without + 1000


def test_a_pod_with_a_claim_computes_on_its_gpu(kubernetes, document):
    kubernetes.apply(template("gpu", request()))

    *listed, answer = output_of(
        kubernetes, cuda_pod("computes", f"nvidia-smi -L; {COMPUTE}", "gpu")
    )

    assert [gpu.uuid for gpu in document.gpus if gpu.uuid in listed[0]]
    assert len(listed) == 1
    assert json.loads(answer)["right"]
    assert json.loads(answer)["gpus"] == 1


def test_a_pod_without_a_claim_has_no_gpu(kubernetes):
    lines = output_of(kubernetes, cuda_pod("bare", f"ls /dev; {COMPUTE} 2>&1 || true"))

    assert not [line for line in lines if line.startswith("nvidia")]
    assert "libcuda.so.1" in lines[-1], "its library comes with a claim"


def test_a_pod_that_asks_for_a_gpu_by_number_computes(kubernetes):
    pod = cuda_pod("by-number", COMPUTE)
    pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}

    (answer,) = output_of(kubernetes, pod)

    assert json.loads(answer)["right"]


def test_two_pods_share_a_gpu_under_mps_each_within_its_memory_and_multiprocessors(
    kubernetes, document, report
):
    shares = {"quarter": ("4Gi", "25"), "half": ("2Gi", "50")}
    questions = (f"allocate {3 * GIB}", "compute")
    for name, (memory, cores) in shares.items():
        part = fraction(memory)
        part["exactly"]["capacity"]["requests"]["cores"] = cores
        kubernetes.apply(template(name, part))
        kubernetes.apply(cuda_pod(name, asking(*questions), name))
    for name in shares:
        answered = partial(has_answered, kubernetes, name, questions)
        wait(f"{name} to answer {questions}", answered, 90)
    seen = {name: answers_of(kubernetes, name) for name in shares}

    report([f"{name}: {answers}" for name, answers in seen.items()])
    multiprocessors = {name: answers[0]["multiprocessors"] for name, answers in seen.items()}
    assert multiprocessors["half"] == pytest.approx(2 * multiprocessors["quarter"], abs=4)
    assert [answer["error"] for answer in seen["quarter"][1:]] == ["", ""]
    assert [answer["error"] for answer in seen["half"][1:]] == [OUT_OF_MEMORY, ""]


def test_the_guard_ends_a_program_that_takes_more_than_its_part(
    kubernetes, installed, cluster, report
):
    cluster_node = cluster.node_name
    kubernetes.label_node(cluster_node, **{"gpu.nvidia.com/profile": "guarded"})
    try:
        kubernetes.apply(template("part", fraction("2Gi")))
        kubernetes.apply(cuda_pod("modest", asking(f"allocate {GIB // 2}"), "part"))
        kubernetes.apply(cuda_pod("greedy", asking(f"allocate {3 * GIB}"), "part"))
        kubernetes.wait_pod("greedy", "Failed", seconds=90)
        events = kubernetes.events("greedy")

        report(events)
        assert any(event.startswith("GPUMemoryProcessEnded") for event in events)
        assert kubernetes.phase("modest") == "Running"
        assert not any("GPUMemory" in event for event in kubernetes.events("modest"))
    finally:
        kubernetes.label_node(cluster_node, **{"gpu.nvidia.com/profile": None})


def test_a_pod_computes_on_the_gpu_that_it_got_by_the_device_plugin_api(
    kubernetes, cluster, document
):
    def allocatable():
        node = kubernetes.api.get(f"/api/v1/nodes/{cluster.node_name}")
        return node["status"]["allocatable"].get("nvidia.com/gpu")

    with_label = partial(kubernetes.label_node, cluster.node_name)
    with_label(**{"gpu.nvidia.com/profile": "by-device-plugin"})
    try:
        wait("its GPUs", lambda: allocatable() == str(len(document.gpus)), CHANGE_SECONDS)
        pod = cuda_pod("by-device-plugin", COMPUTE)
        pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
        (answer,) = output_of(kubernetes, pod)
        assert json.loads(answer)["right"]
        assert json.loads(answer)["gpus"] == 1
        kubernetes.clean_up()
    finally:
        with_label(**{"gpu.nvidia.com/profile": None})
        wait("its slices", kubernetes.published, CHANGE_SECONDS)


@pytest.mark.parametrize("command", ["doctor", "devices", "claims"])
def test_the_commands_answer_in_the_plugins_container(installed, kubernetes, report, command):
    answer = installed.inside(PLUGIN, "dra-driver", command)

    report(answer.stdout.splitlines() + answer.stderr.splitlines())
    assert answer.returncode == 0, answer.stderr
