"""Fractions of a GPU: who gets which part, what holds there, and what the containers see of it."""

import json

import pytest

from tests.e2e.kube import wait
from tests.e2e.manifests import (
    ANY_INTERVAL,
    CLASS,
    claim,
    container,
    fraction,
    interval,
    on,
    pod,
    pod_of,
    request,
    sharing,
    template,
)

SMI = "nvidia-smi -L"
LOOK = f"{SMI}; env | grep ^GPU_DEVICE_ | sort"
WAITS = "cannot allocate"
METADATA = "/var/run/kubernetes.io/dra-device-attributes"


@pytest.fixture(autouse=True)
def sliceable(driver):
    """These tests are about GPUs that many claims can have; test_profiles has the others."""
    if not driver.usual["gpu-0"].get("allowMultipleAllocations"):
        pytest.skip("this API server keeps no consumable capacity (KEP-5075)")


def wait_refused(kube, name, text=WAITS, namespace="default"):
    """The event of a pod that says *text*."""

    def matching_event():
        return next((e for e in kube.events(name, namespace) if text in e), "")

    try:
        return wait(f"{text!r} to be said of {name}", matching_event, 30)
    except AssertionError as e:
        raise AssertionError(f"{e}: {kube.explain(name, namespace)}") from e


def consumed(kube, pod_name):
    """What the claim of a pod takes of its device."""
    status = kube.get("Pod", pod_name)["status"]["resourceClaimStatuses"][0]
    allocation = kube.get("ResourceClaim", status["resourceClaimName"])["status"]["allocation"]
    return allocation["devices"]["results"][0]["consumedCapacity"]


def finished(kube, name):
    """What a pod printed that ran to its end."""
    kube.wait_pod(name, "Succeeded")
    return kube.logs(name)


def test_ten_fractions_from_three_namespaces_fill_a_gpu_and_whole_claims_keep_away(kube, driver):
    on_gpu = on(kube.uuid("gpu-0"))
    places = ["default", "team-a", "team-b"]
    for place in places:
        kube.apply(template("tenth", fraction("8155Mi", cel=on_gpu)), place)
    kube.apply(template("nothing", fraction("0", cel=on_gpu)))
    kube.apply(template("whole", request(cel=on_gpu)))
    ten = [(f"tenth-{n}", places[n % 3]) for n in range(10)]
    for name, place in ten:
        kube.apply(pod(name, template="tenth"), place)
    for name, place in ten:
        kube.wait_pod(name, "Running", namespace=place)
    assert len(driver.claims()) == 10

    for name, source in (("eleventh", "tenth"), ("whole", "whole")):
        kube.apply(pod(name, template=source))
        wait_refused(kube, name)

    kube.delete("Pod", *ten[0])
    kube.wait_pod("eleventh", "Running")
    kube.apply(pod("nothing", template="nothing"))
    wait_refused(kube, "nothing")
    kube.delete("Pod", *ten[1])
    kube.wait_pod("nothing", "Running")
    assert consumed(kube, "nothing")["memory"] == "1Gi", "a claim for nothing takes the least"
    assert kube.phase("whole") == "Pending"

    for name, place in [*ten[2:], ("eleventh", "default"), ("nothing", "default")]:
        kube.delete("Pod", name, place)
    kube.wait_pod("whole", "Running")
    kube.apply(pod("late", template="nothing"))
    wait_refused(kube, "late")
    kube.delete("Pod", "whole")
    kube.wait_pod("late", "Running")


@pytest.mark.point(82)
def test_claims_for_fractions_in_all_their_shapes(kube, driver):
    kube.apply(template("some", fraction("30Gi", cel=on(kube.uuid("gpu-3")))))
    kube.apply(pod("busy", template="some"))
    kube.wait_pod("busy", "Running")
    kube.apply(template("all", request(allocationMode="All")))
    kube.apply(pod("all", SMI, template="all"))
    assert len(finished(kube, "all").splitlines()) == 7, "all that have room, at once"

    both = [fraction("39Gi", "left"), fraction("39Gi", "right")]
    for name, constraint in (("matched", "matchAttribute"), ("distinct", "distinctAttribute")):
        kube.apply(claim(name, *both, constraints=[{constraint: f"{CLASS}/uuid"}]))
        kube.apply(pod(name, LOOK, claim=name))
    kube.apply(claim("listed", listed(kube.uuid("gpu-3"))))
    kube.apply(pod("listed", LOOK, claim="listed"))

    matched = finished(kube, "matched").splitlines()
    assert len(matched) == 6, "one GPU, and its shares, each under its own name"
    assert [line.partition("_MEMORY")[2] for line in matched[2:5]] == [
        *("=39Gi", "_MATCHED_LEFT=39Gi", "_MATCHED_RIGHT=39Gi"),
    ]
    distinct = finished(kube, "distinct").splitlines()
    assert [line.split(":")[0] for line in distinct if "UUID:" in line] == ["GPU 0", "GPU 1"]
    assert len([line for line in distinct if line.endswith("_MEMORY=39Gi")]) == 2
    assert "GPU_DEVICE_3_MEMORY=39Gi" in finished(kube, "listed"), "not whole: half of it"


def listed(uuid):
    """The whole of a GPU, else half of it."""
    selectors = [{"cel": {"expression": on(uuid)}}]
    whole = {"name": "whole", "deviceClassName": CLASS, "selectors": selectors}
    half = {**whole, "name": "half", "capacity": {"requests": {"memory": "39Gi"}}}
    return {"name": "gpu", "firstAvailable": [whole, half]}


@pytest.mark.point(91, 92)
@pytest.mark.usefixtures("containers")
def test_a_container_reads_what_it_was_given_in_the_files_of_its_claims(kube, driver):
    """One file for each request, at a path that whoever writes a pod knows: of a claim from a
    template by what the pod calls it, of another by its name."""
    kube.apply(template("part", fraction("20Gi", cel=on(kube.uuid("gpu-0")))))
    kube.apply(claim("own", request("one", cel=on(kube.uuid("gpu-1")))))
    name = f"{CLASS}-metadata.json"
    paths = [f"resourceclaimtemplates/mine/gpu/{name}", f"resourceclaims/own/one/{name}"]
    look = "; ".join(f"head -n1 {METADATA}/{path}" for path in paths)
    look += f"; (echo no >> {METADATA}/{paths[0]}) 2>/dev/null || echo unwritable; {LOOK}"
    uses = ({"name": "mine"}, {"name": "own"})
    sources = [
        {"name": "mine", "resourceClaimTemplateName": "part"},
        {"name": "own", "resourceClaimName": "own"},
    ]
    kube.apply(pod_of("reads", [container(look, uses=uses)], sources))

    *files, third = finished(kube, "reads").split("\n", 2)

    (part, whole), lines = map(json.loads, files), third.splitlines()
    assert part["podClaimName"] == "mine"
    assert whole["metadata"]["name"] == "own"
    (device,) = part["requests"][0]["devices"]
    assert device["name"] == "gpu-0"
    assert device["attributes"]["memory"] == {"string": "20Gi"}
    assert device["attributes"]["uuid"] == {"string": kube.uuid("gpu-0")}
    (device,) = whole["requests"][0]["devices"]
    assert device["name"] == "gpu-1"
    assert "memory" not in device["attributes"], "a whole GPU is no share"
    assert "unwritable" in lines
    assert "GPU_DEVICE_0_MEMORY=20Gi" in lines
    assert f"GPU_DEVICE_1_UUID={kube.uuid('gpu-1')}" in lines
    wait("the files to go with the pod", lambda: not driver.metadata(), 20)


def test_an_interval_is_set_with_the_claim_and_what_was_found_comes_back(kube, driver, profile):
    profile("any-interval", ANY_INTERVAL)
    driver.smi("compute-policy", "-i", "0", "--set-timeslice=1")
    try:
        first, second = on(kube.uuid("gpu-0")), on(kube.uuid("gpu-1"))
        kube.apply(template("long", fraction("20Gi", cel=first), config=[interval("Long")]))
        calm = fraction("20Gi", cel=first)
        calm["exactly"]["deviceClassName"] = f"time-sliced.{CLASS}"
        kube.apply(template("calm", calm))
        kube.apply(template("whole", request(cel=second), config=[interval("Medium")]))
        for name in ("long", "calm", "whole"):
            kube.apply(pod(name, template=name))
        for name in ("long", "calm", "whole"):
            kube.wait_pod(name, "Running")
        assert driver.intervals() == {"Long": 1, "Medium": 1, "Default": 6}

        kube.delete("Pod", "long")
        kube.delete("Pod", "whole")

        wait("intervals", lambda: driver.intervals() == {"Short": 1, "Default": 7}, 20)
        assert kube.phase("calm") == "Running"
    finally:
        driver.smi("compute-policy", "-i", "0", "--set-timeslice=0")


@pytest.mark.point(46)
def test_what_is_not_offered_is_said_in_the_pods_events(kube, driver):
    """Each in one message, with the path of the field and what to do."""
    cores = fraction("10Gi")
    cores["exactly"]["capacity"]["requests"]["cores"] = "50"
    monitor = request(
        deviceClassName=f"monitor.{CLASS}",
        tolerations=[{"key": f"{CLASS}/monitor", "operator": "Exists", "effect": "NoSchedule"}],
    )
    part = fraction("10Gi")
    each = "defaultPerDevicePinnedMemoryLimit"
    path = "status.allocation.devices.config[0].opaque.parameters.sharing"
    refused = {
        "cores": (template("cores", cores, config=[sharing()]), "capacity.requests.cores: 50 %"),
        "mps": (
            template("mps", part, config=[sharing("MPS", mpsConfig={each: {"7": "10Gi"}})]),
            f"{path}.mpsConfig.{each}[7]: is no GPU of the claim",
        ),
        "turns": (
            template("turns", part, config=[interval("Long")]),
            f"{path}.timeSlicingConfig: gpu-",
        ),
        "monitor": (template("monitor", monitor), "write adminAccess: true"),
    }
    for name, (document, _) in refused.items():
        kube.apply(document)
        kube.apply(pod(name, SMI, template=name))

    for name, (_, why) in refused.items():
        event = wait_refused(kube, name, why)
        assert event.startswith("FailedPrepareDynamicResources")
        assert kube.phase(name) == "Pending"


def test_two_intervals_on_one_gpu_are_refused(kube, driver, profile):
    profile("any-interval", ANY_INTERVAL)
    both = (fraction("10Gi", "a"), fraction("10Gi", "b"))
    same = [{"matchAttribute": f"{CLASS}/uuid"}]
    configs = [interval("Long", "a"), interval("Short", "b")]
    kube.apply(template("both", *both, constraints=same, config=configs))
    kube.apply(pod("both", SMI, template="both"))

    wait_refused(kube, "both", "sharing.timeSlicingConfig.interval: Short on gpu-")


def test_the_doctor_names_claims_that_can_never_be_served(cluster, kube, driver):
    """With the plugin's own account, as in its pod."""
    large, unknown = fraction("100Gi"), request(capacity={"requests": {"vram": "1Gi"}})
    percent = request(capacity={"requests": {"memory": "10Gi", "cores": "101"}})
    for name, requested in (("large", large), ("unknown", unknown), ("percent", percent)):
        kube.apply(claim(name, requested))
    kube.apply(claim("patient", fraction("10Gi")))

    answer = driver.command(
        "doctor",
        f"--sim={driver.node_file}",
        f"--cdi-dir={cluster.cdi_dir}",
        f"--node-name={cluster.node_name}",
        f"--kubeconfig={driver.kubeconfig}",
    )

    findings = {line for line in answer.stdout.splitlines() if "can never be served" in line}
    for name, why in (("large", "100Gi"), ("unknown", "vram"), ("percent", "cores")):
        assert any(f"default/{name} " in line and why in line for line in findings), answer.stdout
    assert not any("patient" in line for line in findings)
