"""Things break while pods come and go: the plugin, the kubelet, the API server, the GPUs."""

import os
import random
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from dra_driver.k8s.claims import ClaimRef, ClaimUid
from hack.benchmark.calls import Calls
from hack.benchmark.errors import BenchError
from tests.e2e.conftest import restarts_api_server
from tests.e2e.driver import LIMITING
from tests.e2e.kills import killed_at_work, records_go
from tests.e2e.kube import wait
from tests.e2e.manifests import ANY_INTERVAL, claim, fraction, interval, on, pod, request, template
from tests.fakes.disk import small_disk
from tests.fakes.silent_proxy import SilentProxy

SMI = "nvidia-smi -L"


@pytest.fixture(autouse=True)
def one_gpu(kube, driver):
    """A template for one GPU, which every test here uses."""
    kube.apply(template("one"))


@pytest.fixture(autouse=True)
def everything_runs(cluster, driver):
    """Whatever a test stopped, also one that fails: before anybody has to clear up."""
    yield
    for name, pid in cluster.status().components.items():
        if pid is None:
            cluster.start(name)


@pytest.fixture
def node(driver):
    """The simulated node, as a document that can be changed while the plugin runs."""
    text = driver.node_file.read_text()
    yield driver.change
    driver.replace_node(text)
    wait("the GPUs to be back", lambda: len(driver.kube.devices()) == 8)


def hasten(cluster):
    """After an outage of the API server: these would come back to it only a minute later."""
    kubelet = ["kubelet"] if cluster.mode == "full" else []
    for name in ["controller-manager", "scheduler", *kubelet]:
        cluster.restart(name)


def test_a_deleted_pod_gives_its_gpu_back(kube, driver):
    kube.apply(pod("gone", template="one"))
    kube.wait_pod("gone", "Running")
    assert len(driver.specs()) == 1

    kube.delete("Pod", "gone")

    wait("its CDI file to go", lambda: not driver.specs())
    wait("its record to go", lambda: not driver.claims())


@pytest.mark.point(33)
def test_the_pod_after_a_force_deleted_one_starts_within_three_seconds(kube, driver):
    """The scheduler gives the GPU away while the old container still runs its grace period."""
    kube.apply(template("first", request(cel=on(kube.uuid("gpu-0")))))
    took = []
    for number in range(3):  # a machine can be busy once
        before, after = f"before-{number}", f"after-{number}"
        kube.apply(pod(before, template="first"))
        kube.wait_pod(before, "Running")
        kube.apply(pod(after, template="first"))
        kube.delete_now(before)
        begun = time.monotonic()
        kube.wait_pod(after, "Running")
        took.append(time.monotonic() - begun)
        if took[-1] < 3:
            break
        kube.delete_now(after)

    assert min(took) < 3, f"{took} s: {kube.events(after)}"


@pytest.mark.point(54)
def test_a_pod_with_the_name_of_a_force_deleted_one_gets_its_own_claim(kube, driver):
    kube.apply(claim("named"))
    kube.apply(pod("named", claim="named"))
    kube.wait_pod("named", "Running")
    kube.delete_now("named")
    kube.delete("ResourceClaim", "named")
    kube.wait_gone("ResourceClaim", "named")

    kube.apply(claim("named"))
    kube.apply(pod("named", claim="named"))

    kube.wait_pods(["named"], "Running")
    assert len(driver.claims()) == 1


@pytest.mark.point(7, 36, 37)
def test_a_pod_waits_for_the_plugin_and_starts_when_it_comes(kube, driver):
    driver.stop()
    kube.apply(pod("early", SMI, template="one"))
    wait("the kubelet to miss it", lambda: "FailedPrepareDynamic" in str(kube.events("early")))

    driver.start(ready=False)

    kube.wait_pods(["early"], "Succeeded")


@pytest.mark.point(15)
def test_a_plugin_that_does_not_answer_for_a_while_serves_when_it_does(kube, driver):
    driver.processes[""].send_signal(signal.SIGSTOP)
    kube.apply(pod("patient", SMI, template="one"))
    time.sleep(3)
    driver.processes[""].send_signal(signal.SIGCONT)

    kube.wait_pods(["patient"], "Succeeded")


@pytest.mark.point(56, 74)
def test_while_the_driver_stays_away_slices_go_and_pods_that_end_wait(kube, driver):
    kube.apply(pod("late", template="one"))
    kube.wait_pod("late", "Running")
    driver.stop()
    kube.delete("Pod", "late")

    wait("the kubelet to wipe the slices", lambda: not kube.slices(), 60, 1)
    assert kube.find("Pod", "late")
    driver.start()

    wait("slices", lambda: len(kube.devices()) == 8)
    kube.wait_gone("Pod", "late")
    wait("its record to go", lambda: not driver.claims())


@pytest.mark.point(7, 14, 24, 61)
def test_killed_at_random_moments_while_pods_come_and_go_everything_is_served(
    kube, limiting, profile
):
    """Pods with whole GPUs, and with fractions that have an interval and a memory limit."""
    driver, moments = limiting, random.Random(7)
    profile("any-interval", ANY_INTERVAL)
    kube.apply(template("part", fraction("10Gi"), config=[interval("Long")]))
    names = []
    for number in range(5):
        come = [f"{name}-{number}" for name in ("whole", "part", "other")]
        for name in come:
            kube.apply(pod(name, SMI, template="one" if name.startswith("whole") else "part"))
        names += come
        killed_at_work(driver, kube, moments, names, sim=LIMITING)
    kube.wait_pods(names, "Succeeded")
    stay = [f"stays-{n}" for n in range(6)]
    for name in stay:
        kube.apply(pod(name, template="part"))
    kube.wait_pods(stay, "Running")
    for some in (stay[:3], stay[3:]):
        for name in some:
            kube.delete("Pod", name)
        killed_at_work(driver, kube, moments, some, sim=LIMITING)
    records_go(driver, kube, stay)
    wait("every limit to go", lambda: not driver.limits(), 30)
    assert (driver.specs(), driver.metadata()) == ([], [])
    assert driver.intervals() == {"Default": 2}


@pytest.mark.point(6, 43, 73)
@pytest.mark.usefixtures("containers")
def test_a_restarted_kubelet_finds_the_plugin_its_claims_and_its_slices(cluster, kube, driver):
    kube.apply(claim("shared"))
    kube.apply(pod("before", claim="shared"))
    kube.wait_pod("before", "Running")
    generation = {s["metadata"]["uid"] for s in kube.slices()}

    cluster.restart("kubelet")

    wait("slices after the kubelet wiped them", lambda: len(kube.devices()) == 8, 20)
    assert {s["metadata"]["uid"] for s in kube.slices()} != generation
    kube.apply(pod("after", SMI, claim="shared"))
    kube.wait_pods(["after"], "Succeeded")
    assert kube.phase("before") == "Running"


@pytest.mark.point(42)
@pytest.mark.usefixtures("containers")
def test_a_kubelet_that_is_killed_while_pods_start_goes_on_with_them(cluster, kube, driver):
    for n in range(4):
        kube.apply(pod(f"start-{n}", SMI, template="one"))
    cluster.stop("kubelet", signal.SIGKILL)
    cluster.start("kubelet")

    kube.wait_pods([f"start-{n}" for n in range(4)], "Succeeded")


@pytest.mark.point(55)
@pytest.mark.usefixtures("containers")
def test_a_pod_deleted_while_the_kubelet_is_down_is_unprepared_after_its_start(
    cluster, kube, driver
):
    kube.apply(pod("orphan", template="one"))
    kube.wait_pod("orphan", "Running")
    cluster.stop("kubelet")
    kube.delete_now("orphan")

    cluster.start("kubelet")

    wait("its record to go", lambda: not driver.claims(), 120)
    assert driver.specs() == []


@restarts_api_server
@pytest.mark.point(50, 71)
def test_an_api_server_that_was_away_changes_nothing_for_running_pods(cluster, kube, driver):
    kube.apply(pod("steady", template="one"))
    kube.wait_pod("steady", "Running")
    before = driver.claims()

    cluster.stop("apiserver")
    time.sleep(15)
    driver.check_alive()
    cluster.start("apiserver")

    driver.wait_ready()
    assert driver.claims() == before
    assert kube.phase("steady") == "Running"
    assert len(kube.devices()) == 8
    hasten(cluster)
    kube.apply(pod("next", SMI, template="one"))
    kube.wait_pods(["next"], "Succeeded")


@restarts_api_server
def test_a_plugin_that_starts_without_an_api_server_serves_when_it_is_there(cluster, kube, driver):
    driver.stop()
    cluster.stop("apiserver")
    driver.start(ready=False)
    wait("it to live", lambda: driver.ask("/livez")[0] == 200, 30)
    assert driver.ask("/readyz")[0] == 503

    cluster.start("apiserver")

    driver.wait_ready()
    hasten(cluster)


@pytest.mark.point(68)
def test_deleted_slices_are_back_within_two_seconds(kube, driver):
    took = []
    for _ in range(3):  # a machine can be busy once
        for each in kube.slices():
            kube.delete("ResourceSlice", each["metadata"]["name"])
        begun = time.monotonic()
        wait("slices", lambda: len(kube.devices()) == 8, 10, 0.02)
        took.append(time.monotonic() - begun)
        if took[-1] < 2:
            break

    assert min(took) < 2


@pytest.mark.point(69)
def test_a_slice_that_somebody_edited_is_put_right(kube, driver):
    (ours,) = kube.slices()
    ours["spec"]["devices"][0]["attributes"]["productName"] = {"string": "a toaster"}
    kube.api.update(f"{kube.path('ResourceSlice')}/{ours['metadata']['name']}", ours)

    wait("the slice to be right", lambda: "toaster" not in str(kube.slices()), 10)


@pytest.mark.point(67)
def test_nothing_is_written_when_nothing_changed(kube, driver):
    before = [s["metadata"]["resourceVersion"] for s in kube.slices()]
    time.sleep(5)

    assert [s["metadata"]["resourceVersion"] for s in kube.slices()] == before


@pytest.mark.point(63, 74)
def test_slices_survive_a_short_restart_of_the_driver(kube, driver):
    uids = [s["metadata"]["uid"] for s in kube.slices()]
    assert kube.slices()[0]["metadata"]["ownerReferences"][0]["kind"] == "Node"

    assert driver.stop() < 5
    driver.start()

    assert [s["metadata"]["uid"] for s in kube.slices()] == uids


@pytest.mark.point(107)
def test_a_deleted_socket_is_served_again_and_the_kubelet_comes_back(kube, driver):
    for name in driver.sockets():
        (driver.cluster.kubelet_dir / name).unlink()

    wait("both sockets", lambda: len(driver.sockets()) == 2, 15)

    kube.apply(pod("again", SMI, template="one"))
    kube.wait_pods(["again"], "Succeeded")


def test_a_gpu_that_appears_or_disappears_is_published_or_not_without_a_restart(kube, driver, node):
    document = yaml.safe_load(driver.node_file.read_text())
    gpus = document["gpus"]

    node({**document, "gpus": gpus[:-1]})
    wait("seven GPUs", lambda: len(kube.devices()) == 7, 15)
    node({**document, "gpus": gpus})
    wait("eight GPUs", lambda: len(kube.devices()) == 8, 15)


def test_a_driver_that_broke_lets_pods_end_offers_nothing_and_says_why(kube, driver, node):
    document = yaml.safe_load(driver.node_file.read_text())

    kube.apply(template("turns", config=[interval("Long")]))
    kube.apply(pod("ends", template="turns"))
    kube.wait_pod("ends", "Running")
    smi = driver.host / "usr/bin/nvidia-smi"
    away = smi.rename(smi.with_suffix(".away"))
    try:
        kube.delete("Pod", "ends")
        wait("the pod to end", lambda: kube.find("Pod", "ends") is None, 30)
    finally:
        away.rename(smi)
    wait("its claim to be given back", lambda: not driver.claims(), 30)

    node({**document, "driver": "not-loaded"})
    wait("no GPU", lambda: kube.devices() == [], 15)

    assert len(kube.slices()) == 1
    wait("it to be said", lambda: "GPU is not offered" in driver.log)
    told = lambda: "all GPUs: not offered" in str(kube.events(driver.cluster.node_name))  # noqa: E731
    wait("an event of the Node", told, 15)
    assert "load the NVIDIA kernel driver" in driver.ask("/readyz")[1]


def test_an_unreadable_record_is_settled_and_the_pod_goes_on(kube, driver):
    kube.apply(pod("worker", template="one"))
    kube.wait_pod("worker", "Running")
    driver.stop()
    (record,) = driver.plugin_dir.glob("state/claims/*/*.json")
    record.write_bytes(b"{")

    driver.start()

    wait("the record to be settled", lambda: record.exists() and driver.claims(), 20)
    assert kube.phase("worker") == "Running"


def test_a_claim_that_the_kubelet_forgot_is_taken_back(kube, driver):
    """As if the kubelet's own state was lost: nobody will ever ask to unprepare it."""
    kube.apply(pod("worker", template="one"))
    kube.wait_pod("worker", "Running")
    driver.stop()
    (record,) = driver.plugin_dir.glob("state/claims/*/*.json")
    known = record.read_bytes()
    driver.start()
    kube.delete("Pod", "worker")
    kube.wait_gone("Pod", "worker")
    wait("its record to go", lambda: not driver.claims())
    driver.stop()
    record.write_bytes(known)

    driver.start()

    wait("the forgotten record to go", lambda: not driver.claims(), 20)


@pytest.fixture
def small_plugin_disk(cluster, driver):
    """The plugin's directory, on a small file system of its own. Its simulated host, which is not
    the plugin's, is on another one."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    driver.stop()
    with small_disk(driver.plugin_dir, "4m") as disk, small_disk(driver.host, "256m"):
        driver.start()
        yield disk
        driver.stop_all()
    driver.start()


def test_on_a_full_disk_pods_end_also_after_the_plugin_was_killed(kube, driver, small_plugin_disk):
    kube.apply(template("slow", config=[interval("Long")]))
    names = [f"fills-{number}" for number in range(3)]
    for name in names:
        kube.apply(pod(name, template="slow"))
    kube.wait_pods(names, "Running")
    assert driver.intervals() == {"Long": 3, "Default": 5}

    small_plugin_disk.fill()
    kube.delete("Pod", names[0])
    kube.wait_gone("Pod", names[0], seconds=120)
    driver.kill()
    driver.start()
    for name in names[1:]:
        kube.delete("Pod", name)

    for name in names[1:]:
        kube.wait_gone("Pod", name, seconds=120)
    wait("every record to go", lambda: not driver.claims(), 120)
    assert (driver.specs(), driver.metadata()) == ([], [])
    assert driver.intervals() == {"Default": 8}
    small_plugin_disk.fill()  # with what the pods that ended left free, too
    kube.apply(pod("no-room", SMI, template="slow"))
    wait(
        "the pod to be told", lambda: "No space left on device" in str(kube.events("no-room")), 120
    )

    small_plugin_disk.free()

    kube.wait_pods(["no-room"], "Succeeded", 120)


@pytest.fixture
def proxy(kube, driver):
    """What the plugin reaches the API server through."""
    config = yaml.safe_load(driver.kubeconfig.read_text())
    server = config["clusters"][0]["cluster"]
    address = urlsplit(server["server"])
    with SilentProxy(address.hostname, address.port) as proxy:
        server["server"] = f"https://127.0.0.1:{proxy.port}"
        server["tls-server-name"] = address.hostname
        proxied = driver.directory / "proxied.kubeconfig"
        proxied.write_text(yaml.safe_dump(config))
        driver.stop()
        driver.start(kubeconfig=str(proxied))
        yield proxy
        proxy.new_are_silent = False
        kube.clean_up()
        wait("ledger records to go", lambda: not driver.claims(), 120)
        driver.stop()
    driver.start()


def failures(kube, pod):
    return [event for event in kube.events(pod) if "FailedPrepareDynamic" in event]


def test_after_connections_died_in_silence_a_pod_starts_at_the_first_try(kube, driver, proxy):
    before = [f"before-silence-{number}" for number in range(4)]
    for name in before:
        kube.apply(pod(name, template="one"))
    kube.wait_pods(before, "Running")

    proxy.silence()
    kube.apply(pod("after-silence", template="one"))

    kube.wait_pod("after-silence", "Running", seconds=120)
    assert not failures(kube, "after-silence")
    assert proxy.swallowed


def test_a_pod_waits_while_the_api_server_keeps_silence_and_starts_once_it_speaks(
    kube, driver, proxy
):
    proxy.new_are_silent = True
    proxy.silence()
    kube.apply(pod("in-silence", template="one"))
    wait("the kubelet to be told", lambda: "in time" in str(failures(kube, "in-silence")), 120)
    assert kube.phase("in-silence") == "Pending"

    proxy.new_are_silent = False

    kube.wait_pods(["in-silence"], "Running", seconds=120)


def test_a_pod_ends_while_the_prepares_of_110_others_wait_for_a_silent_api_server(
    kube, driver, proxy
):
    kube.apply(pod("ends", template="one"))
    kube.wait_pod("ends", "Running")
    refs = [ClaimRef("default", f"waits-{n}", ClaimUid(str(uuid.uuid4()))) for n in range(110)]
    socket = driver.plugin_dir / "dra.sock"
    proxy.new_are_silent = True
    proxy.silence()

    with Calls(socket) as pods, Calls(socket) as others, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pods.prepare, *refs)
        tasks = Path(f"/proc/{driver.processes[''].pid}/task")
        wait("all prepares to wait", lambda: len(list(tasks.iterdir())) > len(refs), 20)

        assert others.empty() < 1
        kube.delete("Pod", "ends")
        kube.wait_gone("Pod", "ends", seconds=10)
        assert driver.claims() == []
        assert not waiting.done()

        proxy.new_are_silent = False
        with pytest.raises(BenchError):  # there are no such claims
            waiting.result(60)
