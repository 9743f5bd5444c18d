"""MPS: claims with limits of their own on one GPU, and what becomes of them when something ends."""

import json
import re
import signal
import time
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from dra_driver.sim.node_spec import node_file
from tests.e2e.driver import LIMITING
from tests.e2e.kube import wait
from tests.e2e.manifests import (
    claim,
    container,
    fraction,
    on,
    pod,
    pod_of,
    request,
    sharing,
    template,
)
from tests.e2e.mps import alive, attached, mps_variables
from tests.e2e.processes import main_process

GIB = 1 << 30
SHOW = "env | grep ^CUDA_MPS_ | sort; " + (
    "trap 'exit 0' TERM; while :; do sleep 1 & wait; done"  # as manifests.SLEEP
)

pytestmark = pytest.mark.usefixtures("containers", "sliceable")


@pytest.fixture
def sliceable(driver):
    if not driver.usual["gpu-0"].get("allowMultipleAllocations"):
        pytest.skip("this API server keeps no consumable capacity (KEP-5075)")


@pytest.fixture
def newest(driver, kube):
    """Plugin and agent on a node with two GPUs and a driver with protocol 3 of MPS."""
    driver.stop()
    driver.agent.stop()
    node = driver.node_file.read_text()
    driver.replace_node(node_file(LIMITING).read_text())
    driver.agent.start()
    driver.start()
    wait("its two GPUs", lambda: len(kube.devices()) == 2)
    yield driver
    kube.clean_up()
    wait("ledger records to go", lambda: not driver.claims(), 70)
    wait(f"servers to go: {driver.agent.remains()}", lambda: not driver.agent.remains(), 20)
    driver.stop()
    driver.agent.ensure()
    driver.agent.stop()
    driver.replace_node(node)
    driver.agent.start()
    driver.start()


def part(memory, cores, where, name="gpu"):
    requested = fraction(memory, name, where)
    requested["exactly"]["capacity"]["requests"]["cores"] = cores
    return requested


def uses(driver, gpu, **processes):
    """Tells the simulation what processes use of a GPU."""
    node = yaml.safe_load(driver.node_file.read_text())
    node["gpus"][gpu]["processes"] = [
        {"pid": int(pid.removeprefix("p")), "memory_bytes": size} for pid, size in processes.items()
    ]
    driver.change(node)


def metric(driver, begins):
    lines = driver.ask("/metrics")[1].splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(begins)]


def shown(driver):
    """What `dra-driver claims` says: the clients of each claim under MPS, by its percentage."""
    node = f"--sim={driver.node_file}"
    output = json.loads(driver.command("claims", "-o", "json", node).stdout)
    devices = [device for claim in output["claims"] for device in claim["devices"]]
    return {d["mps"]["percent"]: d["mps"]["clients"] for d in devices if d["mps"]}


def running(kube, *names):
    for name in names:
        kube.wait_pod(name, "Running")


def test_three_claims_under_mps_and_one_that_takes_turns_share_a_gpu_each_within_its_limits(
    kube, newest
):
    """Two thirds and one third as two users, the rest, and a notebook; the server holds limits."""
    driver, on_gpu = newest, on(kube.uuid("gpu-0"))
    shares = {"large": ("40Gi", "70"), "small": ("16Gi", "20"), "rest": ("8Gi", "10")}
    for user, (name, (memory, cores)) in enumerate(shares.items(), 1000):
        kube.apply(template(name, part(memory, cores, on_gpu)))
        document = pod(name, SHOW, template=name)
        document["spec"]["securityContext"] = {"runAsUser": user}
        kube.apply(document)
    kube.apply(template("notebook", fraction("4Gi", cel=on_gpu)))
    kube.apply(pod("notebook", SHOW, template="notebook"))
    running(kube, *shares, "notebook")

    variables = {name: mps_variables(kube, name) for name in shares}
    assert {t["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for t in variables.values()} == {
        "70",
        "20",
        "10",
    }
    assert variables["small"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={16 * 1024}M"
    assert len({t["CUDA_MPS_PIPE_DIRECTORY"] for t in variables.values()}) == 3
    assert "CUDA_MPS" not in kube.logs("notebook")
    mains = {name: main_process(kube, name) for name in shares}
    limits = {name: attached(driver, pid) for name, pid in mains.items()}
    assert {n: (limit["percent"], limit["memory_bytes"] >> 30) for n, limit in limits.items()} == {
        "large": (70, 40),
        "small": (20, 16),
        "rest": (10, 8),
    }
    assert driver.agent.client("attach", mains["rest"], "--memory", "9Gi").returncode != 0

    assert shown(driver) == {70: [mains["large"]], 20: [mains["small"]], 10: [mains["rest"]]}
    wait("metrics of clients", lambda: sum(metric(driver, "dra_driver_mps_claim_clients")) == 3, 15)

    kube.delete("Pod", "small")
    kube.wait_gone("Pod", "small")
    assert alive(driver, mains["large"], mains["rest"])


def test_clients_outlive_plugin_and_agent_and_are_told_when_a_server_was_restarted(kube, newest):
    driver, on_gpu = newest, on(kube.uuid("gpu-0"))
    kube.apply(template("half", part("20Gi", "50", on_gpu)))
    kube.apply(pod("one", SHOW, template="half"))
    running(kube, "one")
    first = main_process(kube, "one")
    attached(driver, first)

    driver.kill()
    driver.agent.kill()
    driver.agent.start()
    driver.start()
    assert alive(driver, first), "an upgrade of both loses no client"
    kube.apply(pod("two", SHOW, template="half"))
    running(kube, "two")
    two = main_process(kube, "two")
    attached(driver, two)

    assert driver.agent.client("wedge-server", first).returncode == 0
    wait("a restart", lambda: driver.agent.server(kube.uuid("gpu-0")).restarts == 1, 40)
    for name in ("one", "two"):
        pod_knows = lambda n=name: "MPSServerRestarted" in str(kube.events(n))  # noqa: E731
        wait(f"{name} to be told", pod_knows, 20)
    assert not alive(driver, first)
    uses(driver, 0, **{f"p{first}": GIB})
    wait("silent fallback to be told", lambda: "MPSNotUsed" in str(kube.events("one")), 30)
    assert sum(metric(driver, "dra_driver_mps_bypassing_processes")) == 1
    assert "MPSNotUsed" not in str(kube.events("two"))
    assert attached(driver, first)["percent"] == 50, "the same pipe directory leads to it again"


def test_a_claim_waits_for_the_agent_and_nothing_is_left_of_what_was_cut_short(kube, newest):
    driver, on_gpu = newest, on(kube.uuid("gpu-0"))
    kube.apply(template("half", part("20Gi", "50", on_gpu)))
    driver.agent.stop()
    kube.apply(pod("waits", SHOW, template="half"))
    pod_knows = lambda: "mps-agent" in str(kube.events("waits"))  # noqa: E731
    wait("what is missing to be said", pod_knows, 40)
    assert not driver.specs()
    driver.agent.start()
    kube.wait_pods(["waits"], "Running")

    kube.apply(template("other", part("20Gi", "50", on(kube.uuid("gpu-1")))))
    before = len(driver.claims())
    kube.apply(pod("interrupted", SHOW, template="other"))
    wait("the record of a claim that is begun", lambda: len(driver.claims()) > before, 20, 0.005)
    driver.kill()
    time.sleep(0.5)
    driver.start()
    kube.wait_pods(["interrupted"], "Running")
    killed = main_process(kube, "interrupted")
    attached(driver, killed)

    kube.delete("Pod", "interrupted")
    kube.wait_gone("Pod", "interrupted")
    wait("its server to go", lambda: driver.agent.server(kube.uuid("gpu-1")) is None, 20)


def test_a_container_with_two_gpus_has_one_server_and_what_cannot_be_served_is_refused(
    kube, newest
):
    driver = newest
    both = [part("8Gi", "30", on(kube.uuid(f"gpu-{n}")), f"g{n}") for n in range(2)]
    kube.apply(claim("both", *both))
    kube.apply(pod("both", SHOW, claim="both"))
    running(kube, "both")
    (server,) = driver.agent.status().servers
    assert set(server.gpus) == {kube.uuid("gpu-0"), kube.uuid("gpu-1")}
    assert attached(driver, main_process(kube, "both"))["percent"] == 30

    kube.apply(template("one", part("8Gi", "20", on(kube.uuid("gpu-0")))))
    sources = [{"name": name, "resourceClaimTemplateName": "one"} for name in ("a", "b")]
    uses_both = container(SHOW, "greedy", ({"name": "a"}, {"name": "b"}))
    kube.apply(pod_of("twice", [uses_both], sources))
    wait("the reason", lambda: "one MPS server" in str(kube.events("twice")), 30)


def test_an_older_driver_limits_by_the_environment_and_clients_are_drained(kube, driver):
    on_gpu = on(kube.uuid("gpu-2"))
    limits = {"defaultActiveThreadPercentage": 40, "defaultPinnedDeviceMemoryLimit": "10Gi"}
    by_mps = sharing("MPS", mpsConfig=limits)
    kube.apply(claim("whole", request(cel=on_gpu), config=[by_mps]))
    stubborn = "trap '' TERM; env | grep ^CUDA_MPS_ | sort; while :; do sleep 1; done"
    first = pod("first", stubborn, claim="whole")
    first["spec"]["terminationGracePeriodSeconds"] = 6
    kube.apply(first)
    kube.apply(pod("second", SHOW, claim="whole"))
    running(kube, "first", "second")

    assert mps_variables(kube, "first")["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=10240M"
    mains = [main_process(kube, name) for name in ("first", "second")]
    assert [attached(driver, pid)["percent"] for pid in mains] == [40, 40]
    assert driver.smi("--query-gpu=compute_mode", "--format=csv,noheader").count("Exclusive") == 1

    wait("both to be clients", lambda: alive(driver, *mains), 5)

    begun = time.monotonic()
    kube.delete("Pod", "first")
    wait("the client to be drained", lambda: not alive(driver, mains[0]), 20)
    assert time.monotonic() - begun > 1, "it had time of its own"
    assert alive(driver, mains[1])
    drained = lambda: sum(metric(driver, "dra_driver_mps_drained_clients_total")) >= 1  # noqa: E731
    wait("it to be counted", drained, 10)
    kube.wait_gone("Pod", "first")


ROOT_KEPT_OUT = """
apiVersion: resource.nvidia.com/v1beta1
kind: NodeProfile
spec: {gpus: [{mpsTenants: NonRoot}]}
"""
SERVERS = """
apiVersion: resource.nvidia.com/v1beta1
kind: NodeProfile
spec: {gpus: [{mpsServer: WHOSE}]}
"""
TEAMS = ("team-a", "team-b")
TIME = r"[0-9-]{10}T[0-9:.]{12}Z"  # of a line of the log


def test_a_sidecar_that_is_root_keeps_its_pod_out_where_the_profile_wants_no_root(
    kube, driver, profile
):
    profile("no-root", ROOT_KEPT_OUT)
    kube.apply(template("no-root", part("10Gi", "20", on(kube.uuid("gpu-3")))))
    source = [{"name": "gpu", "resourceClaimTemplateName": "no-root"}]
    harmless = {"runAsUser": 1000, "allowPrivilegeEscalation": False}
    for name, user in (("no-root-barred", 0), ("no-root-let-in", 1000)):
        main, sidecar = container(SHOW, uses=({"name": "gpu"},)), container(name="sidecar")
        main["securityContext"] = harmless
        sidecar["securityContext"] = {**harmless, "runAsUser": user}
        kube.apply(pod_of(name, [main, sidecar], source))

    running(kube, "no-root-let-in")

    reason = "container 'sidecar' can run as root"
    wait("the reason", lambda: reason in str(kube.events("no-root-barred")), 120)
    assert kube.phase("no-root-barred") == "Pending"


def starts(kube, name, where, *namespaces):
    """A pod with a fifth of a GPU in each; its main processes."""
    for namespace in namespaces:
        kube.apply(template(name, part("8Gi", "20", where)), namespace)
        kube.apply(pod(name, SHOW, template=name), namespace)
    for namespace in namespaces:
        kube.wait_pod(name, "Running", namespace=namespace, seconds=120)
    return [main_process(kube, name, namespace=namespace) for namespace in namespaces]


def places(kube, name, namespace):
    """The pipe directory that a container was told."""
    return mps_variables(kube, name, namespace=namespace)["CUDA_MPS_PIPE_DIRECTORY"]


def servers_over(driver, gpu):
    """By the namespace that each is for, the number of claims that it serves."""
    servers = [server for server in driver.agent.status().servers if server.gpus == (gpu,)]
    assert len({server.name for server in servers}) == len(servers)
    return {server.tenant: len(server.namespaces) for server in servers}


def inside(pid, path):
    """A path of the container in which that process of the host is."""
    return Path(f"/proc/{pid}/root{path}")


def test_with_an_older_driver_each_namespace_has_a_server_of_its_own_on_the_gpu(kube, driver):
    gpu = kube.uuid("gpu-4")
    first, third = starts(kube, "apart", on(gpu), *TEAMS)
    (second,) = starts(kube, "apart-too", on(gpu), TEAMS[0])

    wait("their servers", lambda: servers_over(driver, gpu) == {"team-a": 2, "team-b": 1}, 120)
    pipes_of_a, others = (places(kube, "apart", team) for team in TEAMS)
    assert pipes_of_a == places(kube, "apart-too", TEAMS[0]) != others
    assert not inside(first, others).exists()
    assert not inside(third, pipes_of_a).exists()
    inside(first, "/dev/shm/of-team-a").touch()
    assert inside(second, "/dev/shm/of-team-a").exists()
    assert not inside(third, "/dev/shm/of-team-a").exists()

    for pid in (first, second, third):
        attached(driver, pid)
    wait("all to be clients", lambda: alive(driver, first, second, third), 120)
    assert driver.agent.client("wedge-server", first).returncode == 0

    def again():
        return {server.tenant: server.restarts for server in driver.agent.status().servers}

    wait("a restart", lambda: again() == {"team-a": 1, "team-b": 0}, 120)
    assert alive(driver, third), "what one namespace does to its server is no other's business"


def test_who_has_a_server_keeps_it_whatever_the_profile_says_and_whoever_is_killed_meanwhile(
    kube, driver, profile
):
    profile("servers", SERVERS.replace("WHOSE", "PerNamespace"))
    gpu = kube.uuid("gpu-5")
    clients = starts(kube, "held", on(gpu), *TEAMS)
    before = [places(kube, "held", team) for team in TEAMS]
    for pid in clients:
        attached(driver, pid)

    driver.kill()
    driver.agent.kill()
    profiles_followed = driver.log.count("profile in force")
    (driver.profiles / "servers.yaml").write_text(SERVERS.replace("WHOSE", "Shared"))
    driver.agent.start()
    driver.start()
    wait("the other profile", lambda: driver.log.count("profile in force") > profiles_followed, 120)
    wait("both to be clients", lambda: alive(driver, *clients), 120)

    starts(kube, "joined", on(gpu), *TEAMS)
    assert servers_over(driver, gpu) == {"team-a": 1, "team-b": 1, "": 2}
    together = {places(kube, "joined", team) for team in TEAMS}
    assert len(together) == 1
    assert not together & set(before)
    assert alive(driver, *clients)

    for team in TEAMS:
        kube.delete("Pod", "held", team)
        kube.wait_gone("Pod", "held", team, 120)
    wait("their servers to end", lambda: servers_over(driver, gpu) == {"": 2}, 120)


def test_clients_of_a_pod_that_ended_while_no_plugin_ran_are_drained_before_the_kubelets_kill(
    kube, driver
):
    """And not at once: they have their grace period, whenever the plugin comes to see it."""
    kube.apply(template("drained", part("10Gi", "20", on(kube.uuid("gpu-6")))))
    stubborn = pod("drained", "trap '' TERM; while :; do sleep 1; done", template="drained")
    stubborn["spec"]["terminationGracePeriodSeconds"] = 45
    kube.apply(stubborn)
    running(kube, "drained")
    pid = main_process(kube, "drained")
    attached(driver, pid)
    driver.kill()

    kube.delete("Pod", "drained")
    written = kube.get("Pod", "drained")["metadata"]["deletionTimestamp"]
    ends_at = datetime.fromisoformat(written).timestamp()
    driver.start()

    def drained():
        lines = (line for line in driver.log.splitlines() if "ended the MPS clients" in line)
        return [re.findall(TIME, line)[0] for line in lines if "drained" in line]

    at = datetime.fromisoformat(wait("the client to be drained", drained, 120)[0]).timestamp()
    assert ends_at - 15 < at < ends_at
    kube.wait_gone("Pod", "drained", seconds=120)


def test_an_agent_ends_at_once_and_leaves_its_daemons(driver, kube):
    kube.apply(template("half", part("20Gi", "50", on(kube.uuid("gpu-3")))))
    kube.apply(pod("half", SHOW, template="half"))
    running(kube, "half")
    before = driver.agent.daemons()
    assert before

    begun = time.monotonic()
    assert driver.agent.stop(signal.SIGTERM) == 0
    assert time.monotonic() - begun < 5
    assert driver.agent.daemons() == before
