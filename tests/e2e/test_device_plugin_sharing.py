"""GPUs that several pods share by the device-plugin API, as published configurations say."""

import pytest

from tests.e2e.device_plugin import (
    CONFIG_LABEL,
    GPU,
    SHARED,
    by_default,
    described,
    pod,
    restarts,
    running,
    serving,
    shown,
    wait_allocatable,
)
from tests.e2e.driver import LIMITING
from tests.e2e.health import SimulatedGpus, health
from tests.e2e.kube import wait
from tests.e2e.manifests import GLIBC
from tests.e2e.mps import attached, mps_variables
from tests.e2e.processes import main_process

SLICES = """
version: v1
flags:
  migStrategy: none
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
      - name: nvidia.com/gpu
        replicas: {replicas}
"""
TEN_REPLICAS = """
version: v1
sharing:
  {strategy}:
    resources:
      - name: nvidia.com/gpu
        replicas: 10
"""
SHOW_MPS = (
    "nvidia-smi -L; env | grep ^CUDA_MPS_; trap 'exit 0' TERM; while :; do sleep 1 & wait; done"
)
FELL_OFF = {"xid": 79}

pytestmark = [pytest.mark.device_plugin, pytest.mark.usefixtures("containers")]


@pytest.fixture(scope="module", autouse=True)
def node(session_driver):
    """Gives its eight GPUs out by the device-plugin API."""
    with by_default(session_driver):
        yield


@pytest.mark.core
@pytest.mark.point(157)
def test_a_label_divides_the_gpus_and_another_one_divides_them_anew_and_no_pod_is_disturbed(
    kube, driver, profile
):
    profile("slice-4", SLICES.format(replicas=4), CONFIG_LABEL)
    wait_allocatable(driver, {SHARED: 32})
    names = [f"slice-{n}" for n in range(4)]
    for name in names:
        kube.apply(pod(name, 1, SHARED))
    running(kube, *names)
    (gpu,) = {shown(kube, name) for name in names}
    kube.apply(pod("greedy", 2, SHARED))
    kube.wait_pod("greedy", "Failed")
    assert "are not twice as much" in kube.get("Pod", "greedy")["status"]["message"]

    profile("slice-10", SLICES.format(replicas=10), CONFIG_LABEL)
    wait_allocatable(driver, {SHARED: 4 + 7 * 10})
    kube.apply(pod("late", 1, SHARED))
    running(kube, "late")
    assert shown(kube, "late") != gpu
    assert [restarts(kube, name) for name in names] == [0] * 4

    kube.clean_up()
    wait_allocatable(driver, {SHARED: 80}, 70)


def test_of_pods_that_come_while_the_label_changes_each_gets_a_share_or_is_told_why_not(
    kube, driver, profile
):
    """The kubelet may have chosen a device just before it is offered no longer."""
    names = []
    for step, replicas in enumerate((4, 10, 4, 10)):
        profile(f"slice-{replicas}", SLICES.format(replicas=replicas), CONFIG_LABEL)
        for number in range(6):
            names.append(f"comes-{step}-{number}")
            kube.apply(pod(names[-1], 1, SHARED, "nvidia-smi -L"))

    phases = {name: kube.wait_pod(name, "Succeeded", "Failed") for name in names}

    refused = [name for name in names if phases[name] == "Failed"]
    for name in refused:
        assert "Allocate failed" in kube.get("Pod", name)["status"]["message"]
    assert len(refused) < len(names) / 4, phases
    assert {len(shown(kube, name)) for name in names if name not in refused} == {1}
    wait_allocatable(driver, {SHARED: 80}, 70)


@pytest.mark.point(131)
def test_of_more_replicas_than_the_kubelet_takes_those_of_some_gpus_are_given_out(
    kube, driver, profile
):
    profile("too-many", SLICES.format(replicas=9000), CONFIG_LABEL)
    wait("as many as it takes", lambda: driver.allocatable() == {SHARED: 6 * 9000}, 30)
    assert "than the 4 MiB that the kubelet takes; lower replicas to 7" in driver.log

    kube.apply(pod("one", 1, SHARED))
    running(kube, "one")
    assert len(shown(kube, "one")) == 1


@pytest.mark.timeout(600)
def test_a_hundred_pods_created_at_once_on_eighty_replicas_all_run(kube, driver, profile):
    profile("ten", TEN_REPLICAS.format(strategy="timeSlicing"), CONFIG_LABEL)
    wait_allocatable(driver, {GPU: 80})
    names = [f"burst-{n:03}" for n in range(100)]
    for name in names:
        kube.apply(pod(name, command="nvidia-smi -L"))

    def ended():
        unfinished = kube.all("Pod", fieldSelector="status.phase!=Succeeded")
        statuses = {p["metadata"]["name"]: p["status"] for p in unfinished}
        failed = {name: each for name, each in statuses.items() if each.get("phase") == "Failed"}
        assert failed == {}  # they never run
        return not unfinished

    wait("all pods to have run", ended, 400, 0.5)
    assert {p["metadata"]["name"] for p in kube.all("Pod")} == set(names)
    assert len(shown(kube, "burst-099")) == 1


@pytest.mark.core
def test_ten_pods_share_a_gpu_under_mps_each_within_its_limits(kube, driver, profile):
    profile("mps", TEN_REPLICAS.format(strategy="mps"), CONFIG_LABEL)
    wait_allocatable(driver, {GPU: 80})
    names = [f"client-{n}" for n in range(10)]
    for name in names:
        kube.apply(pod(name, command=SHOW_MPS))
    running(kube, *names)

    (gpu,) = {uuid for name in names for uuid in shown(kube, name)}
    variables = [mps_variables(kube, name) for name in names]
    assert {each["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for each in variables} == {"10"}
    assert {each["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] for each in variables} == {"0=8155M"}
    for name in names[:2]:
        limits = attached(driver, main_process(kube, name))
        assert (limits["percent"], limits["memory_bytes"] >> 20) == (10, 8155)
    assert driver.agent.server(gpu) is not None


@pytest.mark.core
def test_a_pod_is_held_to_its_replicas_before_its_first_instruction(kube, driver, profile):
    """By NVIDIA's driver, which limits the memory of cgroups."""
    with serving(driver, LIMITING):
        profile("strict", described([{"replicas": 5, "memoryLimit": "Strict"}]))
        wait_allocatable(driver, {GPU: 2 * 5})  # no number that the node had before
        limited = pod("limited", 1, command="echo $EPOCHREALTIME; nvidia-smi -L; sleep 600")
        limited["spec"]["containers"][0] |= {"image": GLIBC}
        kube.apply(limited)
        running(kube, "limited")

        directory = f"besteffort/pod{kube.get('Pod', 'limited')['metadata']['uid']}"
        assert driver.limits()[directory] == 81559 // 5 << 20
        first_instruction = float(wait("its log", lambda: kube.logs("limited").split())[0])
        (file,) = driver.host.glob(f"sys/fs/cgroup/**/{directory}/dmem.max")
        assert file.stat().st_mtime < first_instruction


@pytest.mark.point(152)
def test_a_gpu_that_gets_sick_is_given_to_nobody_until_it_is_well_and_its_pod_runs_on(kube, driver):
    gpus = SimulatedGpus(driver)
    kube.apply(pod("works", 8))
    running(kube, "works")
    try:
        gpus.report(3, FELL_OFF)
        wait_allocatable(driver, {GPU: 7})
        assert kube.phase("works") == "Running"
        refused = health(driver, "release", "gpu-3")
        assert (refused.returncode, "default/works" in refused.stderr) == (1, True), refused
        kube.delete("Pod", "works")
        kube.apply(pod("healthy", 7))
        running(kube, "healthy")

        assert "device-plugin API" in health(driver, "list").stderr
        cleared = health(driver, "clear", "all")
        assert cleared.returncode == 0, cleared
        wait_allocatable(driver, {GPU: 8})
    finally:
        gpus.heal()
    kube.apply(pod("last"))
    running(kube, "last")
    assert not shown(kube, "last") & shown(kube, "healthy")
