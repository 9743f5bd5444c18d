"""MIG: partitions that come with their claims and go with them, beside those of others."""

import random
import re

import pytest
import yaml

from tests.deploy.examples import uuids
from tests.e2e.kills import killed_at_work, records_go
from tests.e2e.kube import wait
from tests.e2e.manifests import CLASS, claim, fraction, on, pod, request, sharing, template
from tests.e2e.mig import change_gpu, modes, partitions, serving
from tests.e2e.partitions import (
    LIST,
    SHOW,
    existing_partitions,
    gone,
    held_partitions,
    part,
    partition,
    printed,
    refused,
    runs,
    settled,
)

IS_GPU = f"device.attributes['{CLASS}'].type == 'gpu'"


@pytest.fixture(scope="module", autouse=True)
def h100s(session_driver):
    """Two H100s that offer partitions, for all tests here that have no other node served."""
    with serving(session_driver, "h100x2-mig"):
        yield


@pytest.fixture(autouse=True)
def unchanged(driver):
    """After each test the boards are again as they were."""
    node = yaml.safe_load(driver.node_file.read_text())
    yield
    driver.change(node)


@pytest.fixture
def offered(kube, simulated):
    """Has another node be served, which offers partitions: ``offered("a100-40x1")``."""

    def offer(node, many=1):
        simulated(node)
        wait("partitions", lambda: len(partitions(kube)) >= many, 60)

    return offer


def test_seven_smallest_partitions_fill_an_a100_and_the_eighth_pod_waits(kube, driver, offered):
    """The board is switched to MIG mode at the start, as nothing uses it."""
    offered("a100-40x1")
    assert "gpu-0" not in kube.published(), "an A100 in MIG mode is nothing but its partitions"
    kube.apply(template("small", partition("1g.5gb")))
    names = [f"small-{n}" for n in range(7)]
    runs(kube, *names, template="small")
    uuids_by_pod = [uuids(printed(kube, name, "MIG 1g.5gb"), "partition") for name in names]
    assert {len(each) for each in uuids_by_pod} == {1}, "each sees its own"
    assert len(frozenset.union(*uuids_by_pod)) == 7
    assert len(existing_partitions(driver)) == 7

    kube.apply(pod("eighth", SHOW, template="small"))
    refused(kube, "eighth")
    kube.delete("Pod", names[3])
    kube.wait_pod("eighth", "Running")
    assert existing_partitions(driver) == held_partitions(driver)

    gone(kube, "eighth", *(name for name in names if name != names[3]))
    wait("every partition to go", lambda: not driver.instances(), 30)


def test_a_whole_gpu_waits_for_partitions_and_partitions_for_it(kube, driver):
    gpu = kube.uuid("gpu-0")
    kube.apply(template("whole", request(cel=f"{IS_GPU} && {on(gpu)}")))
    kube.apply(template("half", partition("3g.40gb", parent=gpu)))
    kube.apply(template("quarter", fraction("20Gi", cel=f"{IS_GPU} && {on(gpu)}")))
    runs(kube, "half-a", "half-b", template="half")
    assert modes(driver)[gpu]
    for name in ("whole", "quarter"):
        kube.apply(pod(name, SHOW, template=name))
        refused(kube, name)

    gone(kube, "half-a")
    assert {kube.phase(name) for name in ("whole", "quarter")} == {"Pending"}
    kube.delete("Pod", "quarter")
    gone(kube, "half-b")
    kube.wait_pod("whole", "Running")
    assert not modes(driver)[gpu], "MIG mode went with the last partition"
    assert not uuids(printed(kube, "whole", "GPU 0:"), "partition")

    kube.apply(pod("half-c", SHOW, template="half"))
    refused(kube, "half-c")
    gone(kube, "whole")
    kube.wait_pod("half-c", "Running")
    assert len(uuids(printed(kube, "half-c", "MIG 3g.40gb"), "partition")) == 1


def test_two_pods_share_a_partition_by_mps_and_a_third_takes_turns(kube, driver):
    gpu = kube.uuid("gpu-1")
    kube.apply(template("large", part("3g.40gb", "20Gi", "60", parent=gpu)))
    kube.apply(template("small", part("3g.40gb", "8Gi", "40", parent=gpu)))
    kube.apply(template("notebook", part("3g.40gb", "4Gi", parent=gpu)))
    for name in ("large", "small", "notebook"):
        runs(kube, name, template=name)
    logs = {name: printed(kube, name, "UUID") for name in ("large", "small", "notebook")}
    assert len(frozenset.union(*(uuids(text, "partition") for text in logs.values()))) == 1
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60" in logs["large"]
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M" in logs["small"]
    assert "CUDA_MPS" not in logs["notebook"]
    (server,) = driver.agent.status().servers
    assert server.gpus == tuple(uuids(logs["large"], "partition"))
    assert len(existing_partitions(driver)) == 1

    gone(kube, "large", "small")
    wait("the server to go", lambda: not driver.agent.status().servers, 20)
    assert len(existing_partitions(driver)) == 1, "the notebook is still in it"
    gone(kube, "notebook")
    wait("the partition to go", lambda: not driver.instances(), 30)


def test_a_claim_is_configured_as_with_nvidias_driver(kube, driver):
    """``mig.nvidia.com``, CEL on the profile, and a MigDeviceConfig."""
    limits = {"defaultActiveThreadPercentage": 30, "defaultPinnedDeviceMemoryLimit": "4Gi"}
    by_mps = sharing("MPS", mpsConfig=limits)
    by_mps["opaque"]["parameters"]["kind"] = "MigDeviceConfig"
    cel = f"device.attributes['{CLASS}'].profile == '2g.20gb'"
    requested = request(cel=cel, deviceClassName="mig.nvidia.com")
    kube.apply(claim("theirs", requested, config=[by_mps]))
    runs(kube, "theirs", claim="theirs")
    log = printed(kube, "theirs", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M")
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30" in log
    assert "MIG 2g.20gb" in log


def test_the_first_alternative_is_taken_where_a_partition_can_be_created(kube, driver):
    alternatives = {
        "name": "gpu",
        "firstAvailable": [
            {"name": "partition", "deviceClassName": f"mig-3g-40gb.{CLASS}"},
            {
                "name": "half",
                "deviceClassName": f"mps.{CLASS}",
                "capacity": {"requests": {"memory": "39Gi", "cores": "50"}},
            },
        ],
    }
    kube.apply(template("either", alternatives))
    kube.apply(template("whole", request()))
    runs(kube, "whole", template="whole")
    runs(kube, "first", "second", template="either")
    for name in ("first", "second"):
        assert len(uuids(printed(kube, name, "MIG 3g.40gb"), "partition")) == 1
    kube.apply(pod("third", SHOW, template="either"))
    refused(kube, "third")
    gone(kube, "whole")
    kube.wait_pod("third", "Running")


def test_a_monitor_looks_on_beside_partitions(kube, driver):
    gpu = kube.uuid("gpu-0")
    kube.apply(template("small", partition("1g.10gb", parent=gpu)))
    runs(kube, "one", "two", template="small")
    tolerates = {"key": f"{CLASS}/monitor", "operator": "Exists", "effect": "NoSchedule"}
    every = request(
        deviceClassName=f"monitor.{CLASS}",
        allocationMode="All",
        adminAccess=True,
        tolerations=[tolerates],
    )
    kube.apply(template("watch", every), "monitoring")
    kube.apply(pod("watch", LIST, template="watch"), "monitoring")
    kube.wait_pod("watch", "Succeeded", namespace="monitoring")

    log = kube.logs("watch", namespace="monitoring")
    assert len(uuids(log)) == 2
    assert len(re.findall(r"^nvidia-cap\d+$", log, re.MULTILINE)) == 1, "the one to monitor with"
    assert existing_partitions(driver) == held_partitions(driver), (
        "a monitor takes nothing and creates nothing"
    )


def test_sixteen_gpus_of_a_node_offer_their_partitions(kube, driver, offered):
    offered("a100x16", many=16 * 14)
    for each in kube.slices():
        assert len(each["spec"].get("devices") or ()) <= 64
        assert len(each["spec"].get("sharedCounters") or ()) <= 8
    last = next(d for n, d in kube.published().items() if n.startswith("gpu-15-mig-"))
    parent = last["attributes"]["parentUUID"]["string"]
    kube.apply(template("last", partition("7g.40gb", parent=parent)))
    runs(kube, "last", template="last")
    assert existing_partitions(driver) == [(15, 0, 0)]


def test_partitions_are_created_around_those_of_somebody_else(kube, driver):
    gpu = kube.uuid("gpu-0")
    change_gpu(driver, mig=True, instances=[{"profile": "1g.10gb", "start": 0}])
    theirs = "gpu-0-mig-1g10gb-19-0"
    at_its_place = re.compile(r"gpu-0-mig-\w+-\d+-0")
    is_alone = lambda: [n for n in kube.devices() if at_its_place.fullmatch(n)] == [theirs]  # noqa: E731
    wait("theirs, and nothing else at its place", is_alone, 20)
    uuid = kube.uuid(theirs)
    assert "gpu-0" not in kube.published(), "a GPU with an instance of others is not whole"

    kube.apply(template("small", partition("1g.10gb", parent=gpu)))
    kube.apply(template("half", partition("3g.40gb", parent=gpu)))
    runs(kube, "half", template="half")
    names = [f"small-{n}" for n in range(4)]
    runs(kube, *names, template="small")
    uuids_by_pod = [uuids(printed(kube, name, "MIG 1g.10gb"), "partition") for name in names]
    assert frozenset({uuid}) in uuids_by_pod, "it is given out as those of claims are"
    kube.apply(pod("late", SHOW, template="small"))
    refused(kube, "late")

    gone(kube, "late", "half", *names)
    wait("ours to go", lambda: not driver.claims(), 30)
    assert existing_partitions(driver) == [(0, 19, 0)]
    assert kube.uuid(theirs) == uuid
    assert modes(driver)[gpu]


def test_an_instance_that_appears_is_in_the_way_until_it_vanishes(kube, driver):
    everything = partitions(kube)
    change_gpu(driver, mig=True, instances=[{"profile": "7g.80gb", "start": 0}])
    whole = ["gpu-0-mig-7g80gb-0-0"]
    wait("theirs alone on that GPU", lambda: partitions(kube, "gpu-0") == whole, 30)
    assert "gpu-0" not in kube.published()

    change_gpu(driver, mig=None, instances=None)
    wait("everything to be back", lambda: partitions(kube) == everything, 30)
    assert "gpu-0" in kube.published()


@pytest.mark.point(7, 14, 24, 61)
@pytest.mark.point(84)
def test_killed_at_random_moments_while_partitions_come_and_go_nothing_is_left(kube, driver):
    """Beside the kills at each call to NVML: servers, whole GPUs and partitions at a time."""
    moments = random.Random(7)
    kinds = {
        "small": partition("1g.10gb"),
        "large": partition("3g.40gb"),
        "shared": part("2g.20gb", "8Gi", "40"),
        "whole": request(),
    }
    for kind, requested in kinds.items():
        kube.apply(template(kind, requested))
    names = []
    for number in range(3):
        come = [f"{kind}-{number}" for kind in kinds]
        for kind, name in zip(kinds, come, strict=True):
            document = pod(name, LIST, template=kind)
            # The simulated nvidia-smi is another file after each change of a partition: a container
            # that mounts it in that moment does not start, and is tried again.
            document["spec"]["restartPolicy"] = "OnFailure"
            kube.apply(document)
        names += come
        killed_at_work(driver, kube, moments, names)
    kube.wait_pods(names, "Succeeded", 200)
    stay = {"small-s": "small", "large-s": "large", "shared-s": "shared", "shared-t": "shared"}
    for name, kind in stay.items():
        kube.apply(pod(name, template=kind))
    kube.wait_pods(stay, "Running")
    settled(driver)

    for pair in (("small-s", "shared-s"), ("large-s", "shared-t")):
        for name in pair:
            kube.delete("Pod", name)
        killed_at_work(driver, kube, moments, pair)
    gone(kube, *names)
    records_go(driver, kube, stay)
    wait("every partition to go", lambda: not driver.instances(), 30)
    assert (driver.specs(), driver.metadata()) == ([], [])
    assert not any(modes(driver).values())
