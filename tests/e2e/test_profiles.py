"""Profiles of the node, chosen by its label, live: what is held stays, what comes follows them."""

import pytest

from tests.e2e.kube import wait
from tests.e2e.manifests import fraction, old_way, on, pod, request, template

SMI = "nvidia-smi -L"
LOOK = f"{SMI}; env | grep ^GPU_DEVICE_ | sort"
STAYS = f"{LOOK}; trap 'exit 0' TERM; while :; do sleep 1 & wait; done"
WAITS = "cannot allocate"
DEVICE_PLUGIN_LABEL = "nvidia.com/device-plugin.config"
# A configuration of NVIDIA's device plugin, as its manual shows it.
TIME_SLICING = """
version: v1
sharing:
  timeSlicing:
    renameByDefault: {renamed}
    failRequestsGreaterThanOne: {one}
    resources:
      - name: nvidia.com/gpu
        replicas: 2
"""
BROKEN = """
apiVersion: resource.nvidia.com/v1beta1
kind: NodeProfile
spec: {gpus: [{replicas: none}]}
"""


def sliceable(kube):
    """The GPUs that many claims can have at once."""
    devices = kube.published().items()
    return {name for name, device in devices if device.get("allowMultipleAllocations")}


def wait_event(kube, name, text):
    wait(f"{text!r} to be said of {name}", lambda: text in str(kube.events(name)), 30)


def printed(kube, name, words):
    """The log of a pod that runs, once *words* are in it."""
    return wait(f"{words} from {name}", lambda: words in (t := kube.logs(name)) and t, 15)


@pytest.mark.core
def test_a_gpu_that_is_given_out_whole_goes_from_one_claim_to_the_next(kube, driver, profile):
    """Also to a claim that asks for a part of it."""
    profile("exclusive")
    wait("exclusive GPUs", lambda: "gpu-0" in kube.published() and not sliceable(kube))
    on_gpu = on(kube.uuid("gpu-0"))
    kube.apply(template("part", fraction("20Gi", cel=on_gpu)))
    kube.apply(template("whole", request(cel=on_gpu)))
    run(kube, part="part")
    assert "MEMORY" not in printed(kube, "part", "GPU_DEVICE_0_UUID")
    kube.apply(pod("next", template="whole"))
    wait_event(kube, "next", WAITS)

    kube.delete("Pod", "part")

    kube.wait_pod("next", "Running")


@pytest.mark.core
def test_as_many_pods_as_a_gpu_has_replicas_run_on_it_and_the_next_one_waits(kube, driver, profile):
    """With a configuration file of NVIDIA's device plugin, and the label of its config manager."""
    text = TIME_SLICING.format(renamed="false", one="false")
    profile("old.yaml", text, DEVICE_PLUGIN_LABEL)
    wait("replicas", lambda: kube.published() != driver.usual)
    uuid = kube.published()[next(iter(kube.published()))]["attributes"]["uuid"]["string"]
    kube.apply(template("replica", request(cel=on(uuid))))
    run(kube, a="replica", b="replica")
    for name in ("a", "b"):
        assert uuid in printed(kube, name, "UUID")
    assert len(driver.claims()) == 2
    kube.apply(pod("c", template="replica"))
    wait_event(kube, "c", WAITS)

    kube.delete("Pod", "a")

    kube.wait_pod("c", "Running")


def test_old_manifests_get_replicas_as_the_device_plugins_file_says(kube, driver, profile):
    if "extendedResourceName" not in kube.get("DeviceClass", "gpu.nvidia.com", "")["spec"]:
        pytest.skip("this Kubernetes has no extended resources by DRA (KEP-5004)")

    def kind():
        return {d["attributes"]["type"]["string"] for d in kube.published().values()}

    text = TIME_SLICING.format(renamed="true", one="true")
    profile("renamed", text, DEVICE_PLUGIN_LABEL)
    wait("renamed GPUs", lambda: "gpu-shared" in kind())
    kube.apply(old_way("one", LOOK, **{"nvidia.com/gpu.shared": "1"}))
    kube.apply(old_way("more", SMI, **{"nvidia.com/gpu.shared": "2"}))
    kube.wait_pod("one", "Succeeded")
    lines = kube.logs("one").splitlines()
    assert lines[0].startswith("GPU 0: NVIDIA H100")
    wait_event(kube, "more", "more than one share was asked for")
    kube.clean_up()

    text = TIME_SLICING.format(renamed="false", one="false")
    profile("named", text, DEVICE_PLUGIN_LABEL)
    wait("GPUs under their name", lambda: "gpu-shared" not in kind(), 20)
    kube.apply(old_way("one", SMI, **{"nvidia.com/gpu": "1"}))
    kube.apply(old_way("two", SMI, **{"nvidia.com/gpu": "2"}))
    for name, count in (("one", 1), ("two", 2)):
        kube.wait_pod(name, "Succeeded")
        assert len(kube.logs(name).splitlines()) == count


def test_a_profile_that_changes_under_load_disturbs_no_claim(kube, driver, profile):
    if not sliceable(kube):
        pytest.skip("this API server keeps no consumable capacity (KEP-5075)")
    for name in ("gpu-0", "gpu-1", "gpu-2"):
        part = fraction("20Gi", cel=on(kube.uuid(name)))
        kube.apply(template(name, part))
    kube.apply(template("whole", request(cel=on(kube.uuid("gpu-1")))))
    run(kube, held="gpu-0", whole="whole")

    profile("exclusive")
    wait("GPUs that nobody holds to be exclusive", lambda: sliceable(kube) == {"gpu-0", "gpu-1"})
    run(kube, beside="gpu-0", new="gpu-2")
    assert "GPU_DEVICE_0_MEMORY=20Gi" in printed(kube, "beside", "GPU_DEVICE_0_UUID")
    assert "MEMORY" not in printed(kube, "new", "GPU_DEVICE_2_UUID")
    assert seen_by_a_monitor(kube) == 8

    kube.delete("Pod", "held")
    kube.wait_gone("Pod", "held")
    assert "gpu-0" in sliceable(kube)
    kube.delete("Pod", "beside")
    wait("the last one to leave", lambda: sliceable(kube) == {"gpu-1"}, 20)

    profile("broken", BROKEN, message="spec.gpus[0].replicas")
    assert "profile 'exclusive' stays in force" in driver.log
    assert sliceable(kube) == {"gpu-1"}

    profile("default")
    wait("GPUs that nobody holds", lambda: len(sliceable(kube)) == 7, 20)
    assert "gpu-2" not in sliceable(kube)
    assert {kube.phase(name) for name in ("whole", "new")} == {"Running"}


def run(kube, **templates):
    """Start pods, by name the template of each, until all of them run."""
    for name, template_name in templates.items():
        kube.apply(pod(name, STAYS, template=template_name))
    for name in templates:
        kube.wait_pod(name, "Running")


def seen_by_a_monitor(kube):
    """How many GPUs a monitor sees that asks for all of the class that holds for whole ones."""
    kube.apply(template("watch", request(allocationMode="All", adminAccess=True)), "monitoring")
    kube.apply(pod("watch", SMI, template="watch"), "monitoring")
    kube.wait_pod("watch", "Succeeded", namespace="monitoring")
    return len(kube.logs("watch", namespace="monitoring").splitlines())
