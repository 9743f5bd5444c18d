"""GPUs get sick and well again: who is told, what gets no new pods, and what is never disturbed.

Each test makes other GPUs sick, and sees that the rest of the node does not change.
"""

import re
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from tests.e2e.health import (
    PAUSE,
    SimulatedGpus,
    clear,
    following,
    health,
    instance_of,
    metric,
    others_unchanged,
    pod_health,
    tainted_devices,
    taints,
    wait_health,
    wait_ready,
    wait_tainted,
    wait_untainted,
)
from tests.e2e.kube import wait
from tests.e2e.manifests import (
    CLASS,
    SLEEP,
    container,
    fraction,
    on,
    pod,
    pod_of,
    request,
    template,
)
from tests.e2e.mig import boards
from tests.e2e.partitions import SHOW, partition, printed, refused
from tests.e2e.processes import main_process

# Of GPU 7 partitions are created for claims; pods leave GPU 5 when it has a fatal Xid.
PROFILE = """
apiVersion: resource.nvidia.com/v1beta1
kind: NodeProfile
spec:
  gpus:
    - select: {index: [7]}
      mig: {mode: Dynamic}
      health: {recovery: 1s}
    - select: {index: [5]}
      health: {recovery: 1s, effects: {xid: NoExecute}}
    - health: {recovery: 1s}
"""
FELL_OFF, FAULTY_MEMORY, PAGE_FAULT = {"xid": 79}, {"xid": 48}, {"xid": 31}
XID_TAINT = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}


@pytest.fixture(scope="module", autouse=True)
def short_recovery(session_driver):
    """A GPU that is well for a second is well, for all tests here."""
    with following(session_driver, PROFILE, "gpu-7-mig" if keeps_taints(session_driver) else "gpu"):
        yield


def keeps_taints(driver):
    """Whether the API server does: those of 1.34 and 1.35 have neither them nor parts of GPUs by
    default."""
    return "allowMultipleAllocations" in driver.usual["gpu-0"]


@pytest.fixture
def well_again(driver):
    """The GPUs of the node, all well again after the test."""
    simulated = SimulatedGpus(driver)
    yield simulated
    simulated.heal()


@pytest.fixture
def taints_kept(session_driver):
    """For a test that looks at taints, and at pods that the kubelet runs: else it skips."""
    if session_driver.cluster.mode != "full":
        pytest.skip(f"needs the kubelet itself: {session_driver.cluster.why}")
    if not keeps_taints(session_driver):
        pytest.skip("this API server keeps neither consumable capacity nor taints by default")


@pytest.fixture
def gpus(taints_kept, well_again):
    return well_again


def starts(kube, name, gpu, **fields):
    """A pod with a part of that GPU; running, and healthy."""
    kube.apply(template(name, fraction("10Gi", cel=on(kube.uuid(gpu)), **fields)))
    kube.apply(pod(name, SHOW, template=name))
    kube.wait_pod(name, "Running")
    wait_health(kube, name, "Healthy")


MPS_PODS = ("mps-a", "mps-b", "mps-c")


def starts_under_mps(kube):
    """Three pods that share GPU 2 under MPS; running, and healthy."""
    part = fraction("8Gi", cel=on(kube.uuid("gpu-2")))
    part["exactly"]["capacity"]["requests"]["cores"] = "20"
    kube.apply(template("mps", part))
    for name in MPS_PODS:
        kube.apply(pod(name, SHOW, template="mps"))
    for name in MPS_PODS:
        kube.wait_pod(name, "Running")
        wait_health(kube, name, "Healthy")


def starts_on_partitions(kube):
    """The pods "sick" and "well" on partitions of GPU 7, healthy, and which partition each has."""
    kube.apply(template("smallest", partition("1g.10gb", parent=kube.uuid("gpu-7"))))
    devices = {}
    for name in ("sick", "well"):
        kube.apply(pod(name, template="smallest"))
        kube.wait_pod(name, "Running")
        wait_health(kube, name, "Healthy")
        devices[name] = device_of(kube, name)
    return devices


def told(kube, name, reason, gpu, text=""):
    """Until an event of that object says so."""
    said = re.compile(rf"{reason}: {gpu} \(GPU-[\w-]+\): .*{text}")
    try:
        wait(f"{said.pattern} of {name}", lambda: any(map(said.match, kube.events(name))), 20)
    except AssertionError as e:
        raise AssertionError(f"{e}: {kube.events(name)}") from e


def restarted(driver):
    """The plugin is killed, and another one runs."""
    driver.kill()
    driver.start()


def since(kube, *devices):
    """Each taint of *devices*, with its time."""
    return {
        (device, problem): taint["timeAdded"]
        for device in devices
        for problem, taint in taints(kube, device).items()
    }


@pytest.mark.point(77, 89)
def test_a_gpu_with_a_fatal_xid_gets_no_new_pod_until_it_is_cleared_and_all_are_told(
    kube, driver, gpus
):
    starts(kube, "works", "gpu-0")

    with others_unchanged(kube, "gpu-0"):
        gpus.report(0, FELL_OFF)
        taint = wait_tainted(kube, "gpu-0", "xid")
        assert {name: taint[name] for name in XID_TAINT} == XID_TAINT
        assert tainted_devices(kube) == {"gpu-0": {"xid:NoSchedule"}}, "and no monitor of it"

        wait_health(kube, "works", "Unhealthy", "Xid 79: the GPU has fallen off the bus")
        everybody_told(kube, driver, "works")
        late = fraction("10Gi", cel=on(kube.uuid("gpu-0")))
        kube.apply(template("late", late))
        kube.apply(pod("late", template="late"))
        refused(kube, "late")
        assert kube.phase("works") == "Running"

        cleared = health(driver, "clear", "gpu-0")
        assert cleared.returncode == 0, cleared
        wait_untainted(kube, "gpu-0")
        wait_health(kube, "works", "Healthy")
        told(kube, "works", "GPURecovered", "gpu-0")
        kube.wait_pod("late", "Running")
    assert sum(metric(driver, "dra_driver_gpu_fault")) == 0


def everybody_told(kube, driver, name):
    """Who has or looks after GPU 0, which fell off the bus: pod, claim, node, metrics, doctor."""
    node = driver.cluster.node_name
    (claim,) = kube.get("Pod", name)["status"]["resourceClaimStatuses"]
    for each in (name, claim["resourceClaimName"], node):
        told(kube, each, "GPUUnhealthy", "gpu-0", "Xid 79")
    assert metric(driver, "dra_driver_gpu_fault") == [1]
    place = (f"--kubeconfig={kube.config}", f"--node-name={node}")
    doctor = driver.command("doctor", f"--sim={driver.node_file}", *place)
    assert re.search(r"GPU health: gpu-0: Xid 79: .*\n +-> reboot", doctor.stdout), doctor


@pytest.mark.core
@pytest.mark.point(77)
def test_where_taints_are_not_kept_a_sick_gpu_is_withdrawn_and_a_waiting_pod_gets_another(
    kube, driver, well_again
):
    if keeps_taints(driver):
        pytest.skip("this API server keeps taints")
    either = f"{on(kube.uuid('gpu-0'))} || {on(kube.uuid('gpu-1'))}"
    for name, cel in (("first", on(kube.uuid("gpu-0"))), ("either", either)):
        kube.apply(template(name, request(cel=cel)))
    kube.apply(pod("works", template="first"))
    kube.wait_pod("works", "Running")
    wait_ready(kube, "works", "Prepared")

    with others_unchanged(kube, "gpu-0"):
        well_again.report(0, FELL_OFF)
        wait("gpu-0 to be withdrawn", lambda: "gpu-0" not in kube.published(), 20)
        told(kube, "works", "GPUUnhealthy", "gpu-0", "Xid 79")
        wait_ready(kube, "works", "Unhealthy")
        assert kube.phase("works") == "Running"
        kube.delete("Pod", "works")
        kube.wait_gone("Pod", "works")
        for name in ("first", "either"):
            kube.apply(pod(f"late-{name}", template=name))
        kube.wait_pod("late-either", "Running")
        refused(kube, "late-first")
        assert device_of(kube, "late-either") == "gpu-1"

        restarted(driver)
        assert "gpu-0" not in kube.published()
        clear(driver, "gpu-0")
        kube.wait_pod("late-first", "Running")
        assert device_of(kube, "late-first") == "gpu-0"


def test_where_taints_are_not_kept_a_gpu_is_reset_and_published_again(kube, driver, well_again):
    if keeps_taints(driver):
        pytest.skip("this API server keeps taints")
    reset = str(driver.host / "usr/bin/nvidia-smi"), "--gpu-reset", "-i", "4"

    with others_unchanged(kube, "gpu-4"):
        well_again.set(4, remap="failed")
        wait("gpu-4 to be withdrawn", lambda: "gpu-4" not in kube.published(), 20)
        done = health(driver, "release", "gpu-4", "--", *reset)
        assert done.returncode == 0, done
        wait("gpu-4 to be back", lambda: "gpu-4" in kube.published(), 20)


def device_of(kube, pod):
    """What the only claim of a pod was given."""
    (status,) = kube.get("Pod", pod)["status"]["resourceClaimStatuses"]
    claim = kube.get("ResourceClaim", status["resourceClaimName"])
    return claim["status"]["allocation"]["devices"]["results"][0]["device"]


def test_an_xid_of_a_program_is_told_to_its_pod_alone_and_changes_nothing(kube, driver, gpus):
    starts(kube, "guilty", "gpu-1")
    starts(kube, "innocent", "gpu-1")
    before = driver.kube.slices()

    gpus.report(1, {**PAGE_FAULT, "pid": main_process(kube, "guilty")})

    told(kube, "guilty", "GPUHealthEvent", "gpu-1", "Xid 31")
    assert "GPUHealthEvent" not in str(kube.events("innocent"))
    assert xids(driver, "gpu-1") == {"31": 1}
    assert driver.kube.slices() == before
    assert {health for health, _ in pod_health(kube, "guilty")} == {"Healthy"}


def test_a_problem_of_a_mig_instance_is_one_of_its_partition_alone(kube, driver, gpus):
    devices = starts_on_partitions(kube)

    with others_unchanged(kube, "gpu-7"):
        gi = instance_of(driver, boards(driver), devices["sick"])
        gpus.report(7, {**FAULTY_MEMORY, "gi": gi, "ci": 0})
        wait_tainted(kube, devices["sick"], "xid")
        wait_health(kube, "sick", "Unhealthy", "Xid 48")
        sick = tainted_devices(kube)
        assert devices["well"] not in sick
        assert "gpu-7" in sick, "the GPU as a whole has that instance, too"
        assert not [name for name in sick if name in smallest_partitions(kube, devices["sick"])]
        assert {health for health, _ in pod_health(kube, "well")} == {"Healthy"}

        restarted(driver)
        wait_health(kube, "sick", "Unhealthy", "Xid 48")
        assert tainted_devices(kube) == sick
        clear(driver, "gpu-7")
        wait_untainted(kube, devices["sick"])
        wait_health(kube, "sick", "Healthy")


def smallest_partitions(kube, but):
    """The partitions of one slice at another place than *but*."""
    words = but.rpartition("-")[0]
    return [name for name in kube.published() if name.startswith(words) and name != but]


def test_three_claims_under_mps_are_told_each_and_go_on(kube, driver, gpus):
    starts_under_mps(kube)
    server = driver.agent.server(kube.uuid("gpu-2"))

    with others_unchanged(kube, "gpu-2"):
        gpus.report(2, FELL_OFF)
        wait_tainted(kube, "gpu-2", "xid")
        for name in MPS_PODS:
            wait_health(kube, name, "Unhealthy", "Xid 79")
            told(kube, name, "GPUUnhealthy", "gpu-2")
        assert {kube.phase(name) for name in MPS_PODS} == {"Running"}
        assert driver.agent.server(kube.uuid("gpu-2")) == server

        clear(driver, "gpu-2")
        for name in MPS_PODS:
            wait_health(kube, name, "Healthy")


@pytest.mark.point(77)
def test_a_gpu_that_hangs_is_lost_and_the_others_are_served(kube, driver, gpus):
    with others_unchanged(kube, "gpu-0"):
        gpus.set(0, hangs=True)
        wait_tainted(kube, "gpu-0", "gpu-lost", 30)
        starts(kube, "healthy", "gpu-1")
        late, gone = "no answer within 5 s", ": it may hang; look for Xid"
        assert driver.log.index(late) < driver.log.index(gone), "once may be chance"


def test_a_lost_gpu_stays_published_with_a_taint_its_pods_can_end_and_it_comes_back(
    kube, driver, gpus
):
    starts(kube, "holds", "gpu-3")

    with others_unchanged(kube, "gpu-3"):
        gpus.set(3, fails="GPU_IS_LOST")
        taint = wait_tainted(kube, "gpu-3", "gpu-lost")
        assert taint["effect"] == "NoSchedule"
        wait_health(kube, "holds", "Unhealthy", "does not answer")
        restarted(driver)
        assert wait_tainted(kube, "gpu-3", "gpu-lost") == taint
        kube.delete("Pod", "holds")
        kube.wait_gone("Pod", "holds")
        wait("its claim to be given back", lambda: not driver.claims(), 30)

        gpus.set(3, fails=None)
        wait_untainted(kube, "gpu-3")
    starts(kube, "again", "gpu-3")


def test_a_gpu_is_reset_when_the_driver_let_go_of_it_and_is_well_then(kube, driver, gpus):
    starts(kube, "elsewhere", "gpu-6")

    gpus.set(4, remap="failed")
    wait_tainted(kube, "gpu-4", "row-remap-failed")
    reset = [str(driver.host / "usr/bin/nvidia-smi"), "--gpu-reset", "-i", "4"]
    in_use = subprocess.run(reset, capture_output=True, text=True, check=False, timeout=20)
    assert in_use.returncode != 0
    assert "In use by another client" in in_use.stdout + in_use.stderr

    process = driver.processes[""]
    done = health(driver, "release", "gpu-4", "--", *reset)
    assert done.returncode == 0, done
    wait_untainted(kube, "gpu-4")
    assert driver.processes[""] is process
    assert process.poll() is None
    starts(kube, "after", "gpu-4")
    assert {each for each, _ in pod_health(kube, "elsewhere")} == {"Healthy"}


def test_while_gpus_are_released_pods_end_and_others_start_also_after_restarts(
    cluster, kube, driver, gpus
):
    starts(kube, "ends", "gpu-6")
    begun = health(driver, "release", "gpu-4")
    assert begun.returncode == 0, begun
    taint = wait_tainted(kube, "gpu-4", "released")
    assert tainted_devices(kube) == {"gpu-4": {"released:NoSchedule"}}

    cluster.restart("kubelet")
    restarted(driver)
    assert wait_tainted(kube, "gpu-4", "released") == taint
    kube.delete("Pod", "ends")
    kube.wait_gone("Pod", "ends")
    kube.apply(template("other", request(cel=on(kube.uuid("gpu-6")))))
    kube.apply(pod("other", template="other"))
    kube.wait_pod("other", "Running")
    assert re.search(r"gpu-4 .*let go of", health(driver, "list").stdout)

    ended = health(driver, "release", "--end")
    assert ended.returncode == 0, ended
    wait_untainted(kube, "gpu-4")


VERSIONS = {"595.58.03": "595.58.3", "580.95.05": "580.95.5"}  # and as devices have them


@pytest.mark.usefixtures("containers")
def test_the_gpu_operator_replaces_nvidias_driver_while_it_has_paused_ours(
    kube, driver, well_again
):
    node = driver.cluster.node_name
    kube.apply(template("waits", request(cel=on(kube.uuid("gpu-6")))))

    for version, published in VERSIONS.items():
        kube.label_node(node, **{PAUSE: "paused-for-driver-upgrade"})
        wait("all GPUs to be released", lambda: not offered(kube), 20)
        wait("NVML to be closed", lambda: released(kube, node) == f"all {PAUSE}", 20)
        kube.apply(pod("waits", f"grep libcuda /proc/self/mountinfo; {SLEEP}", template="waits"))
        refused(kube, "waits")

        well_again.set_driver(driver_version=version)
        kube.label_node(node, **{PAUSE: "true"})

        wait("all GPUs to be back", lambda: offered(kube) >= ALL, 20)
        devices = kube.published().values()
        versions = {device["attributes"]["driverVersion"]["version"] for device in devices}
        assert versions == {published}
        kube.wait_pod("waits", "Running")
        wait_ready(kube, "waits", "Prepared")
        printed(kube, "waits", f"libcuda.so.{version} ")
        wait("the answer to go", lambda: released(kube, node) is None, 20)
        kube.delete("Pod", "waits")
        kube.wait_gone("Pod", "waits")


ALL = {f"gpu-{n}" for n in range(8)}


def offered(kube):
    """The devices that a claim can be given."""
    return set(kube.devices()) - tainted_devices(kube).keys()


def released(kube, node):
    """What the plugin answers on the Node: what it let go of, and what it waits for."""
    return kube.get("Node", node)["metadata"]["annotations"].get("gpu.nvidia.com/released")


@pytest.fixture
def reboot(driver, tmp_path):
    """Has the node start again: the plugin that runs then has another boot ID."""
    boot_id = tmp_path / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    bind = f"mount --bind {boot_id} /proc/sys/kernel/random/boot_id"

    def start_again():
        driver.stop()
        driver.inside = ("unshare", "--mount", "sh", "-c", f'{bind} && exec "$0" "$@"')
        driver.start()

    yield start_again
    driver.inside = ()
    restarted(driver)


def test_a_reboot_ends_what_was_wrong(kube, driver, gpus, reboot):
    gpus.report(0, FELL_OFF)
    gpus.set(4, recovery_action="NODE_REBOOT")
    wait_tainted(kube, "gpu-0", "xid")
    wait_tainted(kube, "gpu-4", "recovery-action")

    with others_unchanged(kube, "gpu-0", "gpu-4"):
        reboot()

        wait_untainted(kube, "gpu-0")
        wait_untainted(kube, "gpu-4")


def test_a_thousand_events_in_a_second_are_one_change_and_hold_nothing_up(kube, driver, gpus):
    changes = [each["metadata"]["resourceVersion"] for each in kube.slices()]
    events = len(kube.events(driver.cluster.node_name))
    begun, used = time.monotonic(), processor_seconds(driver)

    with others_unchanged(kube, "gpu-6"):
        gpus.report(
            6,
            *({**PAGE_FAULT, "times": 500}, {**FELL_OFF, "times": 500}),
            *({"ecc": "correctable", "times": 1000}, {**PAGE_FAULT, "times": 500}),
        )
        wait_tainted(kube, "gpu-6", "xid", 10)
        starts(kube, "meanwhile", "gpu-1")
        all_of_them = {"31": 1000, "79": 500}
        wait("all to be counted", lambda: xids(driver, "gpu-6") == all_of_them, 20)
    cost = processor_seconds(driver) - used
    assert cost < 2 + 0.1 * (time.monotonic() - begun), f"{cost} s"
    now = [each["metadata"]["resourceVersion"] for each in kube.slices()]
    assert sum(before != after for before, after in zip(changes, now, strict=True)) == 1
    assert len(kube.events(driver.cluster.node_name)) - events < 10


def xids(driver, gpu):
    """How many of each number the plugin counted of that GPU."""
    uuid = driver.kube.uuid(gpu)
    return {
        number: metric(driver, f'dra_driver_gpu_xid_total{{gpu="{uuid}",xid="{number}"}}')[0]
        for number in re.findall(f'xid_total{{gpu="{uuid}",xid="(\\d+)"', driver.ask("/metrics")[1])
    }


def processor_seconds(driver):
    fields = Path(f"/proc/{driver.processes[''].pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_pods_leave_a_gpu_with_no_execute_for_a_healthy_one(kube, driver, gpus):
    sick_first = {
        "name": "gpu",
        "firstAvailable": [
            {**request("sick", on(kube.uuid("gpu-5")))["exactly"], "name": "sick"},
            {"name": "any", "deviceClassName": CLASS},
        ],
    }
    kube.apply(template("flees", sick_first))
    source = [{"name": "gpu", "resourceClaimTemplateName": "flees"}]
    flees = pod_of("flees", [container(SHOW, uses=({"name": "gpu"},))], source)
    kube.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": "flees"},
            "spec": {
                "selector": {"matchLabels": {"app": "flees"}},
                "template": {
                    "metadata": {"labels": {"app": "flees"}},
                    "spec": {**flees["spec"], "restartPolicy": "Always"},
                },
            },
        }
    )
    kube.wait_pod("flees-0", "Running")
    first = kube.get("Pod", "flees-0")["metadata"]["uid"]
    wait("what it was given", lambda: kube.uuid("gpu-5") in kube.logs("flees-0"))

    with others_unchanged(kube, "gpu-5"):
        gpus.report(5, FELL_OFF)
        assert wait_tainted(kube, "gpu-5", "xid")["effect"] == "NoExecute"
        wait("its replacement", lambda: uid_of(kube, "flees-0") not in ("", first), 60)
        kube.wait_pod("flees-0", "Running")
        wait_health(kube, "flees-0", "Healthy")
    given = wait("what it was given", lambda: kube.logs("flees-0"))
    assert "GPU-" in given and kube.uuid("gpu-5") not in given


def uid_of(kube, name):
    found = kube.find("Pod", name)
    return found["metadata"]["uid"] if found else ""


@pytest.mark.point(73, 77, 89)
def test_what_is_wrong_outlives_plugin_kubelet_and_slices_since_the_same_moment(
    cluster, kube, driver, gpus
):
    partitions = starts_on_many_gpus(kube)
    server = driver.agent.server(kube.uuid("gpu-2"))
    every = [*(f"gpu-{n}" for n in range(8)), *partitions.values()]
    sick = everything_happens(kube, driver, gpus, partitions["sick"])
    before, effects = since(kube, *every), tainted_devices(kube)
    assert set(before) == set(sick.items()), "heat is no taint, and a partition is not another"
    assert effects["gpu-5"] == {"xid:NoExecute"}

    def unchanged():
        wait("slices", lambda: "gpu-7" in kube.published(), 20)
        assert since(kube, *every) == before
        assert tainted_devices(kube) == effects

    with others_unchanged(kube, *sick):
        restarted(driver)
        unchanged()
        cluster.restart("kubelet")
        for each in kube.slices():
            kube.delete("ResourceSlice", each["metadata"]["name"])
        unchanged()
        driver.kill()
        cluster.restart("kubelet")
        wait("the kubelet to wipe the slices", lambda: not kube.slices(), 60, 0.5)
        driver.start()
        unchanged()
    all_are_told_again(kube)
    assert driver.agent.server(kube.uuid("gpu-2")) == server


def starts_on_many_gpus(kube):
    """Pods of all kinds, and which partition "sick" and "well" have."""
    starts_under_mps(kube)
    starts(kube, "stays", "gpu-0")
    starts(kube, "endures", "gpu-5", tolerations=[{"operator": "Exists", "effect": "NoExecute"}])
    return starts_on_partitions(kube)


def all_are_told_again(kube):
    for name in ("stays", "endures", *MPS_PODS):
        wait_health(kube, name, "Unhealthy", "Xid 79")
    wait_health(kube, "sick", "Unhealthy", "Xid 48")
    wait_health(kube, "well", "Healthy")


def everything_happens(kube, driver, gpus, partition):
    """Every GPU has a problem, GPU 7 one of that partition; until they are told. The devices with
    a taint, and why."""
    for gpu in (0, 2, 5):
        gpus.report(gpu, FELL_OFF)
    gi = instance_of(driver, boards(driver), partition)
    gpus.report(7, {**FAULTY_MEMORY, "gi": gi, "ci": 0})
    gpus.set(1, clocks=["thermal"])
    gpus.set(3, fails="GPU_IS_LOST")
    gpus.set(4, recovery_action="GPU_RESET")
    gpus.set(6, remap="failed")
    sick = dict.fromkeys(("gpu-0", "gpu-2", "gpu-5", "gpu-7", partition), "xid")
    sick |= {"gpu-3": "gpu-lost", "gpu-4": "recovery-action", "gpu-6": "row-remap-failed"}
    for device, problem in sick.items():
        wait_tainted(kube, device, problem)
    wait("heat to be told", lambda: len(metric(driver, "dra_driver_gpu_fault")) == 8, 20)
    return sick
