"""Memory of a fraction: what the guard does about a claim that takes more, and what the driver
itself refuses it."""

import pytest
import yaml

from tests.e2e.kube import wait
from tests.e2e.manifests import claim, container, fraction, on, pod, pod_of, template
from tests.e2e.pod_groups import add_pod, prepare, reserve_for_group
from tests.e2e.processes import container_ids, is_alive, process

GIB = 1 << 30
QUICK = """
apiVersion: resource.nvidia.com/v1beta1
kind: NodeProfile
spec: {gpus: [{memoryGuard: {policy: Kill, grace: 1s}}]}
"""
STRICT = """
apiVersion: resource.nvidia.com/v1beta1
kind: NodeProfile
spec: {gpus: [{memoryLimit: Strict}]}
"""
MAIN = "sleep {} & trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done"

pytestmark = pytest.mark.usefixtures("containers")


@pytest.fixture
def uses(driver):
    """Tells the simulation what processes use of gpu-0: ``uses({pid: bytes})``."""
    text = driver.node_file.read_text()

    def use(processes):
        node = yaml.safe_load(text)
        node["gpus"][0]["processes"] = [
            {"pid": pid, "memory_bytes": size} for pid, size in processes.items()
        ]
        driver.change(node)

    yield use
    driver.replace_node(text)


def metric(driver, name):
    lines = driver.ask("/metrics")[1].splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)


@pytest.mark.point(83)
def test_the_guard_ends_the_largest_process_of_a_claim_above_its_share_and_no_other(
    kube, driver, profile, uses
):
    """Two containers of a pod with a claim of their own each, and another pod, on one GPU."""
    profile("quick", QUICK)
    kube.apply(template("ten", fraction("10Gi", cel=on(kube.uuid("gpu-0")))))
    containers = [
        container(MAIN.format(3601), "greedy", ({"name": "first"},)),
        container(MAIN.format(3602), "modest", ({"name": "second"},)),
    ]
    sources = [{"name": name, "resourceClaimTemplateName": "ten"} for name in ("first", "second")]
    kube.apply(pod_of("pair", containers, sources))
    kube.apply(pod("other", MAIN.format(3603), template="ten"))
    for name in ("pair", "other"):
        kube.wait_pod(name, "Running")
    ids = container_ids(kube, "pair")
    outlier = process(ids["greedy"], "sleep 3601")
    spared = {
        process(ids["greedy"], "sh -c"): 2 * GIB,
        process(ids["modest"], "sleep 3602"): 9 * GIB,
        process(container_ids(kube, "other")["main"], "sleep 3603"): 10 * GIB,
    }
    ended = metric(driver, "dra_driver_memory_guard_kills_total")

    uses({outlier: 15 * GIB, **spared})

    wait("the outlier to be ended", lambda: not is_alive(outlier), 15)
    wait("an event", lambda: "GPUMemoryProcessEnded" in str(kube.events("pair")), 10)
    assert all(map(is_alive, spared))
    assert not any("GPUMemory" in event for event in kube.events("other"))
    assert metric(driver, "dra_driver_memory_guard_kills_total") == ended + 1
    states = kube.get("Pod", "pair")["status"]["containerStatuses"]
    assert [status["restartCount"] for status in states if "running" in status["state"]] == [0, 0]


@pytest.mark.point(83)
def test_the_driver_limits_pods_and_containers_to_what_their_claims_hold(kube, limiting, profile):
    """Strictly: that it can is what a strict profile insists on."""
    driver, on_gpu = limiting, on(kube.uuid("gpu-0"))
    profile("strict", STRICT)
    kube.apply(template("two", fraction("10Gi", "a", on_gpu), fraction("5Gi", "b", on_gpu)))
    kube.apply(claim("shared", fraction("20Gi", cel=on_gpu)))
    containers = [
        container(name="own", uses=({"name": "two"},)),
        container(name="common", uses=({"name": "shared"},)),
    ]
    sources = [
        {"name": "two", "resourceClaimTemplateName": "two"},
        {"name": "shared", "resourceClaimName": "shared"},
    ]
    kube.apply(pod_of("first", containers, sources))
    kube.wait_pod("first", "Running")
    first, ids = limited(kube, "first"), container_ids(kube, "first")
    assert driver.limits()[first] == 35 * GIB, "before any of its processes runs"

    def own():
        limits = driver.limits()
        return [limits.get(f"{first}/{ids[name]}", 0) // GIB for name in ("own", "common")]

    wait("limits of the containers' own", lambda: own() == [15, 20], 15)
    kube.apply(pod("later", claim="shared"))
    kube.wait_pod("later", "Running")
    later = limited(kube, "later")
    wait("the limit of a later pod", lambda: driver.limits().get(later) == 20 * GIB, 15)
    assert driver.limits()[first] == 35 * GIB

    kube.delete("Pod", "first")
    kube.delete("Pod", "later")
    wait("every limit to go", lambda: not driver.limits(), 30)


def joined(kube, how, cel):
    """A claim of 10 GiB with its first pod, as users can make one that looks like a template's; its
    name."""
    if how == "annotated":
        made = claim("joined-annotated", fraction("10Gi", cel=cel))
        made["metadata"]["annotations"] = {"resource.kubernetes.io/pod-claim-name": "gpu"}
        kube.apply(made)
        kube.apply(pod("owner-annotated", MAIN.format(3604), claim="joined-annotated"))
        kube.wait_pod("owner-annotated", "Running")
        return "joined-annotated"
    kube.apply(template("joined", fraction("10Gi", cel=cel)))
    kube.apply(pod("owner", MAIN.format(3604), template="joined"))
    kube.wait_pod("owner", "Running")
    (status,) = kube.get("Pod", "owner")["status"]["resourceClaimStatuses"]
    return status["resourceClaimName"]


def second_pod(kube, how, name):
    """Another pod that names the claim, and uses it in an init container that does not end."""
    uses = ({"name": "mine"},)
    setup = container(MAIN.format(3605), "setup", uses)
    sources = [{"name": "mine", "resourceClaimName": name}]
    second = f"second-{how}"
    kube.apply(pod_of(second, [container(uses=uses)], sources, initContainers=[setup]))
    return second, wait("its init container", lambda: container_ids(kube, second).get("setup"), 60)


@pytest.mark.parametrize("how", ["template", "annotated"])
def test_the_driver_limits_a_second_pod_that_names_a_claim_of_one_pod(kube, limiting, how):
    """Nobody tells us of it, and the claim is not read again: its containers show that they were
    given the claim."""
    name = joined(kube, how, on(kube.uuid("gpu-0")))

    second, setup = second_pod(kube, how, name)

    directory = limited(kube, second)

    def limits():
        limits = limiting.limits()
        return [limits.get(cgroup, 0) // GIB for cgroup in (directory, f"{directory}/{setup}")]

    wait("limits of the pod and its init container", lambda: limits() == [10, 10], 60)


@pytest.mark.parametrize("how", ["template", "annotated"])
def test_the_guard_counts_a_second_pod_that_names_a_claim_of_one_pod(
    kube, driver, profile, uses, how
):
    profile("quick", QUICK)
    name = joined(kube, how, on(kube.uuid("gpu-0")))
    owner = "owner" if how == "template" else "owner-annotated"
    second, setup = second_pod(kube, how, name)
    outlier = process(setup, "sleep 3605")
    spared = process(container_ids(kube, owner)["main"], "sleep 3604")

    uses({outlier: 9 * GIB, spared: 5 * GIB})

    wait("the outlier to be ended", lambda: not is_alive(outlier), 60)
    wait("an event", lambda: "GPUMemoryProcessEnded" in str(kube.events(second)), 60)
    assert is_alive(spared)


def test_the_driver_limits_the_members_of_a_pod_group(kube, limiting):
    """Its claim is prepared for no pod; one that looks like a template's is not read again."""
    made = claim("grouped", fraction("10Gi"))
    made["metadata"]["annotations"] = {"resource.kubernetes.io/pod-claim-name": "gpu"}
    kube.apply(made)
    uid = reserve_for_group(kube, "grouped", limiting.cluster.node_name, "10Gi")
    assert prepare(limiting, "grouped", uid) == ""
    member = pod("member", claim="grouped")
    member["spec"]["schedulingGates"] = [{"name": "dra.test/reserved"}]
    kube.apply(member)
    add_pod(kube, "grouped", "member")

    path = f"{kube.path('Pod', 'default')}/member"
    kube.api.patch(path, {"spec": {"schedulingGates": None}})

    kube.wait_pod("member", "Running")
    directory = limited(kube, "member")
    wait("its limit", lambda: limiting.limits().get(directory) == 10 * GIB, 60)


def test_a_strict_claim_of_a_pod_group_is_refused(kube, limiting, profile):
    profile("strict", STRICT)
    kube.apply(claim("strict-grouped", fraction("10Gi")))
    uid = reserve_for_group(kube, "strict-grouped", limiting.cluster.node_name, "10Gi")

    refused = prepare(limiting, "strict-grouped", uid)

    assert "a PodGroup does not tell its pods" in refused
    assert limiting.claims() == []


def limited(kube, name):
    """Where the cgroup of a pod is, below kubepods."""
    return f"besteffort/pod{kube.get('Pod', name)['metadata']['uid']}"


def test_a_strict_profile_refuses_a_fraction_where_the_driver_limits_nothing(kube, driver, profile):
    profile("strict", STRICT)
    kube.apply(template("part", fraction("10Gi")))
    kube.apply(pod("part", template="part"))

    def matching_event():
        return [e for e in kube.events("part") if "does not limit the pod's memory" in e]

    why = wait("a reason", matching_event, 30)[0]
    assert why.startswith("FailedPrepareDynamicResources")
    assert "driver 580.95.5 is too old" in why
    assert kube.phase("part") == "Pending"
