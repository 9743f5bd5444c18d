"""Upgrade, rollback, failed update and uninstall of the release, while pods run and start."""

import json
import os
import threading
import time
import urllib.request
from contextlib import contextmanager

import pytest

from dra_driver.node.mps.agent_client import MpsAgentClient
from tests.e2e.driver import NAMESPACE
from tests.e2e.kube import wait
from tests.e2e.manifests import fraction, on, pod, template
from tests.e2e.processes import container_ids, main_process
from tests.e2e.release import AGENT, HTTP_PORT, IMAGE, NAME, PLUGIN, REPOSITORY

pytestmark = [pytest.mark.usefixtures("containers"), pytest.mark.timeout(600)]

SECOND = "second"  # the tag of another image, of the same code
HOLDER, JOB = "holder", f"{NAME}-uninstall"


@pytest.fixture(scope="module", autouse=True)
def new_driver(installed, kube):
    """A driver whose MPS servers need no shared memory with their clients."""
    usual = installed.node_file.read_text()
    newer = installed.node_file.with_suffix(".new")
    newer.write_text(f'driver_version: "615.71.09"\ncuda_version: "13.4"\n{usual}')
    newer.replace(installed.node_file)
    wait("devices of the new driver", lambda: "615.71.9" in json.dumps(kube.published()), 20)
    installed.restart(PLUGIN)
    installed.restart(AGENT)


@pytest.fixture(scope="module")
def second(cluster, imported):
    cluster.tag_image(IMAGE, f"{REPOSITORY}:{SECOND}")
    return SECOND


@pytest.fixture
def holder(installed, kube):
    """A pod that holds a GPU; its container's id."""
    kube.apply(template("one"))
    kube.apply(pod(HOLDER, template="one"))
    kube.wait_pod(HOLDER, "Running")
    yield container_ids(kube, HOLDER)["main"]
    kube.clean_up()


@contextmanager
def always(act, pause=0.1):
    """*act* again and again beside the test, with a *pause* in seconds between; what it answers."""
    over, answers = threading.Event(), []

    def repeat():
        while not over.wait(pause):
            answers.append(act())

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join(200)
        assert not thread.is_alive()


def ready_pods(release):
    """How many pods of the plugin there are, and how many of them are ready."""
    pods = release.pods(PLUGIN)
    return len(pods), sum(is_ready(pod) for pod in pods)


def is_ready(pod):
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True"


def silent_seconds():
    """How long nobody has answered at the HTTP port, from now on."""
    begun = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{HTTP_PORT}/livez", timeout=5):
                return time.monotonic() - begun
        except OSError:
            time.sleep(0.02)


def runs_a_pod(kube):
    """A pod prepares a claim, runs and goes: what was wrong with it."""
    name = f"short-{time.monotonic_ns()}"
    kube.apply(pod(name, "nvidia-smi -L", template="one"))
    kube.wait_pod(name, "Succeeded")
    problems = [event for event in kube.events(name) if event.startswith("Failed")]
    kube.delete("Pod", name)
    kube.wait_gone("Pod", name)
    return problems


@pytest.fixture
def mps_client(installed, kube, session_driver):
    """A pod under MPS, whose process is a client of the server."""
    half = fraction("20Gi", cel=on(kube.uuid("gpu-7")))
    half["exactly"]["capacity"]["requests"]["cores"] = "50"
    kube.apply(template("half", half))
    kube.apply(pod("computes", template="half"))
    kube.wait_pod("computes", "Running")
    process = main_process(kube, "computes")
    attached = session_driver.agent.client("attach", process)
    assert attached.returncode == 0, attached.stderr
    return process


def clients(release):
    servers = MpsAgentClient(release.mps_dir / "agent.sock").status().servers
    return {client.pid for server in servers for client in server.clients}


def test_an_upgrade_and_a_rollback_are_noticed_by_nobody(
    installed, kube, holder, mps_client, second, record_property
):
    before = kube.slices()[0]["metadata"]["uid"]
    with (
        always(lambda: runs_a_pod(kube), 1) as problems,
        always(lambda: ready_pods(installed)) as pods,
        always(silent_seconds) as silences,
    ):
        wait("a pod to have run before", lambda: problems, 60)
        installed.upgrade(image={"tag": second})
        installed.wait_ready()
        images = {c["image"] for pod in installed.pods() for c in pod["spec"]["containers"]}
        assert images == {f"{REPOSITORY}:{second}"}
        assert mps_client in clients(installed)
        installed.helm("rollback", NAME)
        installed.wait_ready()
        at_the_end = len(problems)
        wait("a pod to have run after", lambda: len(problems) > at_the_end + 1, 60)

    assert not [problem for each in problems for problem in each]
    assert len(problems) > 5, "pods did not start all the time"
    assert (2, 2) in pods or (2, 1) in pods, "the plugins did not overlap"
    assert min(ready for _, ready in pods) >= 1, "for a moment no plugin was ready"
    assert max(silences) < 4, "the kubelet may miss three probes"
    assert mps_client in clients(installed)
    assert container_ids(kube, HOLDER)["main"] == holder
    assert kube.slices()[0]["metadata"]["uid"] == before
    record_property("pods that ran during an upgrade and a rollback", len(problems))
    record_property("longest silence of the HTTP port", round(max(silences), 2))


def test_a_restart_of_the_rollout_replaces_the_pod_when_the_next_one_is_ready(installed, kube):
    """The pods differ in an annotation alone, which no probe can tell."""
    [before] = installed.pods(PLUGIN)
    with always(lambda: ready_pods(installed)) as pods:
        kube.kubectl("rollout", "restart", "-n", NAMESPACE, f"daemonset/{NAME}-{PLUGIN}")
        installed.wait_ready(PLUGIN)

    [after] = installed.pods(PLUGIN)
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert min(ready for _, ready in pods) >= 1
    started = next(c for c in after["status"]["conditions"] if c["type"] == "Ready")
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0, started


def test_an_image_that_is_not_there_leaves_the_old_plugin_and_a_rollback_mends_it(
    installed, kube, holder
):
    [old] = [pod["metadata"]["name"] for pod in installed.pods(PLUGIN)]
    installed.upgrade(image={"tag": "missing"})

    def is_missing():
        return "ErrImageNeverPull" in json.dumps(installed.pods(PLUGIN))

    wait("the new pod to lack its image", is_missing)
    assert is_ready(kube.get("Pod", old, NAMESPACE))
    assert runs_a_pod(kube) == []

    installed.helm("rollback", NAME)
    installed.wait_ready()
    assert [pod["metadata"]["name"] for pod in installed.pods(PLUGIN)] == [old]
    assert runs_a_pod(kube) == []
    assert container_ids(kube, HOLDER)["main"] == holder


def test_an_uninstall_is_refused_while_claims_are_held(installed, kube, holder):
    [held] = kube.all("ResourceClaim")
    begun = time.monotonic()

    answer = installed.try_helm("uninstall", NAME)

    assert answer.returncode != 0
    assert time.monotonic() - begun < 60
    message = f"default/{held['metadata']['name']}  pods: {HOLDER}"
    assert message in answer.stdout + answer.stderr
    assert message in kube.kubectl("logs", "-n", NAMESPACE, f"job/{JOB}")
    assert not [a for a in kube.all("ServiceAccount", NAMESPACE) if a["metadata"]["name"] == JOB]
    assert runs_a_pod(kube) == [], "the plugin does not serve any longer"

    installed.keep()
    installed.wait_ready()
    installed.upgrade()


# With the release go its rights, before its last pod has gone.
@pytest.mark.refused(
    "pods",
    "nodes/status",
    "controllerrevisions.apps",
    "leases.coordination.k8s.io",
    "resourceclaims/status.resource.k8s.io",
)
def test_without_the_check_only_what_running_pods_need_stays_and_the_next_install_takes_it_up(
    installed, kube, holder, mps_client, session_driver
):
    session_driver.kubeconfig.unlink()  # its account goes
    installed.helm("uninstall", NAME, "--no-hooks")
    wait("the pods of the release to go", lambda: not installed.pods(), 90)

    names = {f"{claim['metadata']['uid']}" for claim in kube.all("ResourceClaim")}
    assert remains(installed) == {
        "CDI files": {f"claim_{uid}.json" for uid in names} | {"driver_files.json"},
        "records": names,
    }
    assert container_ids(kube, HOLDER)["main"] == holder
    assert os.path.exists(f"/proc/{mps_client}")

    installed.upgrade()
    installed.wait_ready()
    assert mps_client in clients(installed)
    for name in (HOLDER, "computes"):
        kube.delete("Pod", name)
        kube.wait_gone("Pod", name)
    wait("every claim to go", lambda: not kube.all("ResourceClaim"), 30)

    installed.helm("uninstall", NAME)
    wait("the pods of the release to go", lambda: not installed.pods(), 90)
    assert remains(installed) == {"CDI files": set(), "records": set()}
    assert not kube.find("Job", JOB, NAMESPACE)
    installed.upgrade()
    installed.wait_ready()


def remains(release):
    """What the driver leaves on the node, less empty directories and locks."""
    cluster = release.cluster
    home = cluster.kubelet_dir / "plugins/gpu.nvidia.com"
    records = {path.stem for path in (home / "state/claims").rglob("*.json")}
    files = {path.name.partition("gpu.nvidia.com-")[2] for path in cluster.cdi_dir.glob("k8s.*")}
    return {"CDI files": files, "records": records}
