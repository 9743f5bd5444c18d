"""MIG breaks while pods with partitions come and go: by NVML, by somebody else."""

import re

import pytest
import yaml

from tests.e2e.kube import wait
from tests.e2e.manifests import CLASS, SLEEP, claim, on, pod, request, template
from tests.e2e.mig import PARTITION, boards, change_gpu, described, modes, part, partitions, serving

SMALL = 19  # the id of 1g.10gb
MODE = "nvmlDeviceSetMigMode"
CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"
FILL = "nvmlGpuInstanceCreateComputeInstance"
REMOVE = "nvmlGpuInstanceDestroy"


@pytest.fixture(scope="module", autouse=True)
def h100s(session_driver):
    """Two H100s that offer partitions beside the GPUs, for all tests here."""
    with serving(session_driver, "h100x2-mig"):
        yield


@pytest.fixture(autouse=True)
def first(h100s, driver, kube):
    """The UUID of the first GPU, which is what things happen to. After each test no GPU has
    instances or is in MIG mode."""
    node = yaml.safe_load(driver.node_file.read_text())
    yield kube.uuid("gpu-0")
    change_gpu(driver, fails=None)
    kube.clean_up()
    wait("claims to be given back", lambda: not driver.claims(), 30)
    driver.change(node)
    wait(f"partitions to go: {driver.instances()}", lambda: not driver.instances(), 30)
    wait("MIG mode to be off", lambda: not any(modes(driver).values()), 10)


def gone(kube, name):
    kube.delete("Pod", name)
    kube.wait_gone("Pod", name)


def refused(kube, name, *words):
    """The event of a pod that says all of *words*."""

    def matching_event():
        kube.nudge(name)
        return next((e for e in kube.events(name) if all(word in e for word in words)), "")

    try:
        return wait(f"{words} to be said of {name}", matching_event, 40, 0.5)
    except AssertionError as e:
        raise AssertionError(f"{e}: {kube.explain(name)}") from e


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (CREATE, "UNKNOWN", ["creating"]),
        (FILL, "UNKNOWN", ["compute instance"]),
        (FILL, "INSUFFICIENT_RESOURCES", ["compute instance"]),
        (MODE, "IN_USE", ["MIG mode cannot be turned on", "in use"]),
    ],
)
def test_an_error_in_the_middle_is_said_of_the_pod_and_nothing_is_left_of_it(
    kube, driver, first, function, error, words
):
    """The other GPU is served meanwhile; and this one is when the fault is gone."""
    change_gpu(driver, fails={function: error})
    kube.apply(template("small", part("1g.10gb", of=first)))
    kube.apply(template("other", part("1g.10gb", of=kube.uuid("gpu-1"))))
    kube.apply(pod("waits", template="small"))

    refused(kube, "waits", "FailedPrepareDynamicResources", first, *words)
    kube.apply(pod("other", template="other"))
    kube.wait_pod("other", "Running")

    # All at once: the kubelet goes on trying, and each try turns the mode on and off again.
    undone = lambda: (  # noqa: E731
        first not in driver.instances()
        and not modes(driver)[first]
        and len(driver.claims()) == len(driver.specs()) == 1
    )
    wait("half a partition, its mode, record and spec to go", undone, 15, 0.05)

    change_gpu(driver, fails=None)
    kube.wait_pods(["waits"], "Running")
    assert len(driver.instances()[first]) == 1


def test_a_pod_that_cannot_end_since_its_partition_is_in_use_is_told(kube, driver, first):
    """The kubelet itself says nothing of it to anybody."""
    kube.apply(claim("held", part("1g.10gb", of=first)))
    kube.apply(pod("held", claim="held"))
    kube.wait_pods(["held"], "Running")
    change_gpu(driver, fails={REMOVE: "IN_USE"})

    kube.delete("Pod", "held")

    refusal = lambda: next((e for e in kube.events("held") if "ClaimNotGivenBack" in e), "")  # noqa: E731
    words = wait("why it stays", refusal, 40, 0.5)
    assert all(word in words for word in ("default/held", "removing", "in use"))
    assert kube.phase("held") != "gone"
    change_gpu(driver, fails=None)
    kube.wait_gone("Pod", "held", seconds=90)


@pytest.fixture
def scheduled(kube, driver, first):
    """A pod whose partition of the first GPU is chosen, and not created: no plugin runs. Answers
    with where that is."""

    def schedule(profile="2g.20gb"):
        kube.apply(claim("chosen", part(profile, of=first)))
        driver.stop()
        kube.apply(pod("chosen", claim="chosen"))
        allocated = lambda: kube.get("ResourceClaim", "chosen").get("status", {}).get("allocation")  # noqa: E731
        (result,) = wait("an allocation", allocated)["devices"]["results"]
        return int(result["device"].split("-")[-1])

    return schedule


def test_a_partition_that_somebody_else_created_meanwhile_is_used_and_left(
    kube, driver, first, scheduled
):
    start = scheduled()
    theirs = [{"profile": "2g.20gb", "start": start}]
    change_gpu(driver, mig=True, instances=theirs)
    driver.start()

    kube.wait_pods(["chosen"], "Running")
    assert kube.phase("chosen") == "Running"
    before = driver.instances()
    gone(kube, "chosen")
    wait("its record to go", lambda: not driver.claims())
    assert driver.instances() == before
    assert modes(driver)[first]


def test_a_place_that_somebody_else_took_meanwhile_is_said_by_name(kube, driver, first, scheduled):
    start = scheduled()
    change_gpu(driver, mig=True, instances=[{"profile": "1g.10gb", "start": start}])
    driver.start()

    name = f"mig-1g10gb-{SMALL}-{start}"
    refused(kube, "chosen", "FailedPrepareDynamicResources", name, "was not created for a claim")
    ((profile, _, _),) = driver.instances()[first]
    assert profile == SMALL
    assert driver.specs() == []

    change_gpu(driver, instances=[])
    kube.wait_pods(["chosen"], "Running")


THEIRS = {"profile": "1g.10gb", "start": 2}
NAME = f"gpu-0-mig-1g10gb-{SMALL}-2"


@pytest.fixture
def theirs(kube, driver, first):
    """The UUID of an instance that somebody created on the first GPU, once it is published."""
    change_gpu(driver, mig=True, instances=[THEIRS])
    wait("it to be there", lambda: "uuid" in kube.published()[NAME]["attributes"])
    assert "gpu-0" not in kube.published()
    return kube.uuid(NAME)


def exactly(uuid):
    """A request for an instance. What is not created yet has no UUID, and nothing to ask for."""
    named = f"'uuid' in device.attributes['{CLASS}'] && {on(uuid)}"
    return request(cel=named, deviceClassName=PARTITION)


def test_what_others_created_survives_claims_kills_restarts_and_other_profiles(
    kube, driver, first, theirs
):
    before = driver.instances()
    kube.apply(template("theirs", exactly(theirs)))
    kube.apply(template("ours", part("3g.40gb", of=first)))
    for name in ("theirs", "ours"):
        kube.apply(pod(name, f"nvidia-smi -L; {SLEEP}", template=name))
        kube.wait_pod(name, "Running")
    wait("what it sees", lambda: theirs in kube.logs("theirs"), 15)

    driver.kill()
    driver.start(profile="default")
    assert kube.uuid(NAME) == theirs
    for name in ("theirs", "ours"):
        assert kube.phase(name) == "Running"
        gone(kube, name)
    wait("ours to go", lambda: driver.instances() == before, 30)
    wait("theirs alone", lambda: partitions(kube, "gpu-0") == [NAME], 20)
    driver.stop()
    driver.start()
    wait("places beside it", lambda: len(partitions(kube, "gpu-0")) > 1, 20)
    assert (kube.uuid(NAME), driver.instances()) == (theirs, before)


def test_a_partition_that_vanishes_under_a_pod_is_said_and_created_anew_for_the_next_one(
    kube, driver, first
):
    """By a reset, as nvidia-smi does it."""
    kube.apply(claim("small", part("1g.10gb", of=first)))
    kube.apply(pod("has", claim="small"))
    kube.wait_pod("has", "Running")
    before = driver.instances()

    change_gpu(driver, mig=True)
    wait("that to be seen", lambda: boards(driver)[first]["specified"])
    change_gpu(driver, mig=None)
    wait("everything to be gone", lambda: not driver.instances())
    (device,) = driver.claims()[0]["devices"]
    findings = driver.command("doctor", f"--sim={driver.node_file}").stdout
    assert f"claim default/small has {device['name']}, which is not there any more" in findings

    gone(kube, "has")
    kube.apply(pod("late", claim="small"))
    kube.wait_pod("late", "Running")
    assert driver.instances() == before


def test_what_somebody_makes_in_the_place_of_one_that_vanished_is_his(kube, driver, first):
    """It is called the same: the driver makes a UUID of GPU and place."""
    kube.apply(template("small", part("1g.10gb", of=first)))
    kube.apply(pod("has", template="small"))
    kube.wait_pod("has", "Running")
    before = driver.instances()
    ((device,),) = [claim["devices"] for claim in driver.claims()]

    change_gpu(driver, mig=True)
    wait("that to be seen", lambda: boards(driver)[first]["specified"])
    change_gpu(driver, mig=None)
    wait("everything to be gone", lambda: not driver.instances())
    pod_knows = lambda: any("is not there any more" in event for event in kube.events("has"))  # noqa: E731
    wait("the pod to be told", pod_knows, 30)
    start = int(device["name"].split("-")[-1])
    change_gpu(driver, mig=True, instances=[{"profile": "1g.10gb", "start": start}])
    wait("his to be there", lambda: driver.instances() == before)

    gone(kube, "has")
    wait("its record to go", lambda: not driver.claims(), 15)
    his = lambda: kube.published().get(device["name"], {"attributes": {}})  # noqa: E731
    wait("his to be published", lambda: "uuid" in his()["attributes"], 20)
    assert driver.instances() == before


@pytest.mark.parametrize("reset", ["works", "impossible"])
def test_an_a100_that_somebody_uses_is_whole_until_it_is_free_and_can_be_reset(
    kube, driver, simulated, reset
):
    busy = [{"pid": 4242, "memory_bytes": 1 << 30}]
    simulated(described("a100-40x1", processes=busy, mig_reset=reset))
    assert partitions(kube) == []
    kube.apply(template("whole", request()))
    kube.apply(pod("whole", template="whole"))
    kube.wait_pod("whole", "Running")
    gone(kube, "whole")
    wait("who uses it", lambda: re.search(r"processes use it: .*\b4242\b", driver.log), 15)
    (gpu,) = modes(driver)

    change_gpu(driver, processes=[])
    if reset == "impossible":
        wait("the reason", lambda: "gpu-reset" in driver.log, 15)
        assert partitions(kube) == []
        change_gpu(driver, mig_reset="works")
        driver.stop()
        driver.start()
    wait("its partitions", lambda: partitions(kube), 15)
    assert "gpu-0" not in kube.published()
    assert modes(driver)[gpu]
