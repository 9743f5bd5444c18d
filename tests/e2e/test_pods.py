"""Pods that ask for whole GPUs, each way there is, and what their containers see."""

import re

import pytest

from tests.e2e.kube import wait
from tests.e2e.manifests import GLIBC, claim, container, fraction, pod, pod_of, request, template

SMI = "nvidia-smi -L"


def run(kube, document, **kwargs):
    """Run a pod to its end: what it printed."""
    kube.apply(document)
    name = document["metadata"]["name"]
    kube.wait_pod(name, "Succeeded", **kwargs)
    return kube.logs(name)


def wait_refused(kube, name):
    wait("the scheduler's refusal", lambda: "cannot allocate" in str(kube.events(name)))


@pytest.mark.core
def test_the_node_publishes_its_gpus(kube, driver):
    """As devices to be had in parts, with monitors behind them, where the API server keeps that;
    else as devices to be had whole."""
    gpus = [f"gpu-{minor}" for minor in range(8)]
    published = kube.published()
    several = [name for name in gpus if published[name].get("allowMultipleAllocations")]

    assert several in ([], gpus)
    assert several == gpus or driver.cluster.version.startswith(("1.34", "1.35"))
    monitors = [f"{name}-mon" for name in several] if "taints" in str(published) else []
    assert [*published] == [*gpus, *monitors]


@pytest.mark.core
@pytest.mark.point(99)
def test_a_claim_from_a_template_gives_one_gpu(kube, driver):
    kube.apply(template("one"))

    printed = run(kube, pod("one", SMI, template="one"))

    (gpu,) = printed.splitlines()
    assert re.fullmatch(r"GPU 0: NVIDIA H100 80GB HBM3 \(UUID: GPU-[0-9a-f-]{36}\)", gpu)


@pytest.mark.core
@pytest.mark.usefixtures("containers")
def test_the_container_sees_its_gpu_and_nothing_of_the_others(kube, driver):
    kube.apply(template("one"))
    look = "ls /dev | grep nvidia; env | grep GPU_DEVICE | sort; command -v nvidia-smi"

    printed = run(kube, pod("look", look, template="one")).splitlines()

    gpus = [line for line in printed if re.fullmatch(r"nvidia\d+", line)]
    assert len(gpus) == 1
    minor = gpus[0].removeprefix("nvidia")
    assert {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"} <= set(printed)
    assert f"GPU_DEVICE_{minor}_UUID={kube.uuid(f'gpu-{minor}')}" in printed
    variables = [line for line in printed if line.startswith("GPU_DEVICE_")]
    assert all(line.startswith(f"GPU_DEVICE_{minor}_") for line in variables)
    assert "/usr/bin/nvidia-smi" in printed


@pytest.mark.usefixtures("containers")
def test_the_loader_of_a_glibc_image_finds_the_driver_libraries_by_their_sonames(kube, driver):
    kube.apply(template("one"))
    load = "for lib in libcuda.so.1 libnvidia-ml.so.1 libnvidia-ptxjitcompiler.so.1; do "
    load += "LD_PRELOAD=$lib bash -c 'cat /proc/self/maps' 2>&1 | grep -m1 -o $lib; done"

    printed = run(kube, pod("loads", load, template="one", image=GLIBC)).splitlines()

    assert printed == ["libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"]


@pytest.mark.core
@pytest.mark.point(40)
def test_two_pods_share_one_claim(kube, driver):
    kube.apply(claim("shared"))

    printed = {run(kube, pod(name, SMI, claim="shared")) for name in ("first", "second")}

    assert len(printed) == 1


@pytest.mark.point(40)
def test_two_containers_of_a_pod_share_one_claim(kube, driver):
    kube.apply(template("one"))
    uses = ({"name": "gpu"},)
    both = [container(SMI, name, uses) for name in ("a", "b")]
    source = [{"name": "gpu", "resourceClaimTemplateName": "one"}]
    kube.apply(pod_of("both", both, source))
    kube.wait_pod("both", "Succeeded")

    assert kube.logs("both", "a") == kube.logs("both", "b") != ""


@pytest.mark.point(41)
def test_a_claim_is_used_by_one_pod_after_the_other(kube, driver):
    kube.apply(claim("kept"))
    printed = set()
    for name in ("first", "second", "third"):
        printed.add(run(kube, pod(name, SMI, claim="kept")))
        kube.delete("Pod", name)
        kube.wait_gone("Pod", name)

    assert all(text.startswith("GPU 0: NVIDIA H100") for text in printed)


@pytest.mark.core
def test_cel_selects_by_product_memory_and_driver_version(kube, driver):
    attributes, capacity = (
        "device.attributes['gpu.nvidia.com']",
        "device.capacity['gpu.nvidia.com']",
    )
    selectors = {
        "product": f"{attributes}.productName.contains('H100')",
        "memory": f"{capacity}.memory.isGreaterThan(quantity('79Gi'))",
        "driver": f"{attributes}.driverVersion.isGreaterThan(semver('580.0.0'))",
        "no-such-product": f"{attributes}.productName.contains('A100')",
        "too-much-memory": f"{capacity}.memory.isGreaterThan(quantity('80Gi'))",
        "too-new-a-driver": f"{attributes}.driverVersion.isGreaterThan(semver('600.0.0'))",
    }
    for name, cel in selectors.items():
        kube.apply(claim(name, request(cel=cel)))
        kube.apply(pod(name, SMI, claim=name))

    for name in [*selectors][:3]:
        kube.wait_pod(name, "Succeeded")
    for name in [*selectors][3:]:
        wait_refused(kube, name)
        assert kube.phase(name) == "Pending"


@pytest.mark.core
@pytest.mark.point(31)
def test_two_requests_go_to_the_containers_that_name_them(kube, driver):
    kube.apply(template("two", request("left"), request("right")))
    containers = [
        container(SMI, side, ({"name": "gpu", "request": side},)) for side in ("left", "right")
    ]
    kube.apply(pod_of("two", containers, [{"name": "gpu", "resourceClaimTemplateName": "two"}]))
    kube.wait_pod("two", "Succeeded")

    left_log, right = kube.logs("two", "left"), kube.logs("two", "right")

    assert left_log != right
    assert [len(text.splitlines()) for text in (left_log, right)] == [1, 1]


@pytest.mark.point(39)
def test_an_init_container_uses_the_claim_before_the_main_one(kube, driver):
    kube.apply(template("one"))
    uses = ({"name": "gpu"},)
    spec = {"initContainers": [container(SMI, "init", uses)]}
    source = [{"name": "gpu", "resourceClaimTemplateName": "one"}]
    kube.apply(pod_of("init", [container(SMI, "main", uses)], source, **spec))
    kube.wait_pod("init", "Succeeded")

    assert kube.logs("init", "init") == kube.logs("init", "main") != ""


@pytest.mark.point(38)
@pytest.mark.usefixtures("containers")
def test_a_claim_that_no_container_uses_is_prepared_and_harmless(kube, driver):
    kube.apply(template("one"))
    source = [{"name": "gpu", "resourceClaimTemplateName": "one"}]

    printed = run(kube, pod_of("unused", [container("ls /dev")], source))

    assert "nvidia0" not in printed


def test_all_eight_gpus_in_one_claim(kube, driver):
    kube.apply(template("all", request(allocationMode="ExactCount", count=8)))

    assert len(run(kube, pod("all", SMI, template="all")).splitlines()) == 8


@pytest.mark.core
@pytest.mark.point(85)
def test_the_old_way_to_ask_for_two_gpus_needs_no_claim(kube, driver):
    (old_way,) = [c for c in kube.all("DeviceClass") if c["metadata"]["name"] == "gpu.nvidia.com"]
    if "extendedResourceName" not in old_way["spec"]:
        pytest.skip("this Kubernetes has no extended resources by DRA (KEP-5004)")
    old = container(SMI)
    old["resources"] = {"limits": {"nvidia.com/gpu": "2"}}

    assert len(run(kube, pod_of("old", [old], [])).splitlines()) == 2


def test_a_prioritized_list_takes_the_first_that_fits(kube, driver):
    def choice(name, product):
        cel = f"device.attributes['gpu.nvidia.com'].productName.contains('{product}')"
        return {
            "name": name,
            "deviceClassName": "gpu.nvidia.com",
            "selectors": [{"cel": {"expression": cel}}],
        }

    listed = {"name": "gpu", "firstAvailable": [choice("best", "B200"), choice("good", "H100")]}
    kube.apply(template("listed", listed))
    uses = ({"name": "gpu", "request": "gpu"},)
    source = [{"name": "gpu", "resourceClaimTemplateName": "listed"}]

    printed = run(kube, pod_of("listed", [container(SMI, uses=uses)], source))

    assert len(printed.splitlines()) == 1


def test_two_gpus_of_one_pcie_switch_by_match_attribute(kube, driver):
    """With gpu-0 taken, the first two that are free hang below different switches."""
    published = [kube.published()[name]["attributes"] for name in kube.devices()]
    switch_of = {d["uuid"]["string"]: d["pcieSwitch"]["string"] for d in published}
    first, second, third = list(switch_of)[:3]
    assert switch_of[first] == switch_of[second] != switch_of[third]
    cel = f"device.attributes['gpu.nvidia.com'].uuid == '{first}'"
    kube.apply(claim("taken", request(cel=cel)))
    kube.apply(pod("taken", claim="taken"))
    kube.wait_pod("taken", "Running")

    constraint = {"matchAttribute": "gpu.nvidia.com/pcieSwitch", "requests": ["gpu"]}
    kube.apply(claim("pair", request(count=2), constraints=[constraint]))
    printed = run(kube, pod("pair", SMI, claim="pair"))

    uuids = re.findall(r"UUID: (GPU-[0-9a-f-]+)", printed)
    assert len(uuids) == 2
    assert len({switch_of[uuid] for uuid in uuids}) == 1


@pytest.mark.point(81)
def test_monitors_look_on_beside_gpus_that_are_in_use(kube, driver):
    """One also that was written for whole GPUs: the API server gives it the class of monitors."""
    kube.apply(template("one"))
    kube.apply(template("part", fraction("10Gi")))
    for name in ("one", "part"):
        kube.apply(pod(name, template=name))
    for name in ("one", "part"):
        kube.wait_pod(name, "Running")
    before = driver.specs()
    tolerated = {"key": "gpu.nvidia.com/monitor", "operator": "Exists", "effect": "NoSchedule"}
    old = request(allocationMode="All", adminAccess=True)
    new = request(allocationMode="All", adminAccess=True, tolerations=[tolerated])
    new["exactly"]["deviceClassName"] = "monitor.gpu.nvidia.com"
    for name, watching in (("old", old), ("new", new)):
        kube.apply(claim(name, watching), "monitoring")
        kube.apply(pod(name, SMI, claim=name), "monitoring")

    for name in ("old", "new"):
        kube.wait_pod(name, "Succeeded", namespace="monitoring")
        assert len(kube.logs(name, namespace="monitoring").splitlines()) == 8

        kube.delete("Pod", name, "monitoring")
        kube.delete("ResourceClaim", name, "monitoring")
    wait("the monitors' claims to be taken back", lambda: driver.specs() == before)
    assert {kube.phase(name) for name in ("one", "part")} == {"Running"}


def test_a_claim_that_cannot_be_satisfied_stays_pending_and_the_next_one_works(kube, driver):
    kube.apply(template("nine", request(count=9)))
    kube.apply(pod("nine", SMI, template="nine"))
    wait_refused(kube, "nine")
    kube.apply(template("one"))

    run(kube, pod("one", SMI, template="one"))

    assert kube.phase("nine") == "Pending"


@pytest.mark.core
@pytest.mark.point(108)
@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_a_manifest_of_an_older_api_version_gets_its_gpu(kube, driver, version):
    flat = {"name": "gpu", "deviceClassName": "gpu.nvidia.com"}
    nested = {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}
    old = claim("old", flat if version == "v1beta1" else nested)
    path = f"/apis/resource.k8s.io/{version}/namespaces/default/resourceclaims"
    kube.api.create(path, {**old, "apiVersion": f"resource.k8s.io/{version}"})

    assert run(kube, pod("old", SMI, claim="old")).startswith("GPU 0: NVIDIA H100")
