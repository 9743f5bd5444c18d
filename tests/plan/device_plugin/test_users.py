"""Which pods have the devices that the kubelet gave out."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.k8s.node_labels import NodeStatus
from dra_driver.k8s.pods import NodePod
from dra_driver.kubeletplugin.device_plugin.resources import (
    AllocatedContainer,
    ContainerResponse,
    DeviceId,
    HostMount,
    ListedDevice,
    Resource,
    ResourceName,
)
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName
from dra_driver.model.profiles import GuardPolicy, GuardRules, MpsTenants
from dra_driver.model.records import ClaimMemoryLimit, ClaimRecord, DeviceAllocation
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.plan.device_plugin.allocations import allocation_uid
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.device_plugin.users import (
    AllocatedPod,
    Giver,
    PodsLeft,
    Use,
    as_recorded,
    by_giver,
    foreign_devices,
    have_gone,
    held_allocations,
    holding_pods,
    left_behind,
    listed_containers,
    names_files_of,
    needs_pod,
    not_taken,
    nothing_more,
    of_same_containers,
    overlapping,
    pod_problems,
    pods_left,
    pods_with,
    server_problems,
    unrecorded,
    untracked_containers,
    use_of,
    was_given_by_another_plugin,
    with_leftovers,
)
from tests.builders import holding, record
from tests.fakes.allocations import GPU, listed, node_pod

SHARED = ResourceName("nvidia.com/gpu.shared")
GPU_5GB = ResourceName("nvidia.com/mig-1g.5gb")

NAMES = ResourceNames()


def allocation(*ids: str, resource: str = GPU) -> DeviceAllocation:
    """Of ``"0"``: GPU-0."""
    return DeviceAllocation(
        ResourceName(resource), tuple(sorted(DeviceId(f"GPU-{id_}") for id_ in ids))
    )


def container(pod: str, *ids: str, name: str = "main", resource: str = GPU) -> AllocatedContainer:
    given = allocation(*ids, resource=resource)
    return AllocatedContainer(PodUid(f"uid-{pod}"), name, given.resource, given.ids)


def recorded(*ids: str, completed: bool = True, pods: Sequence[str] = ()) -> ClaimRecord:
    return record("dp", completed=completed, allocation=allocation(*ids), pods=pods)


def pods(*known: NodePod) -> dict[PodUid, NodePod]:
    return {each.pod.uid: each for each in known}


UID = allocation_uid(allocation("0"))
BY_NAMES = ContainerResponse(cdi_names=(f"k8s.gpu.nvidia.com/claim={UID}-0",))
BY_FILES = ContainerResponse(mounts=(HostMount(f"/metadata/{UID}/gpu.json", "/gpu.json", True),))
BY_NVIDIAS = ContainerResponse(env=(("NVIDIA_VISIBLE_DEVICES", "GPU-0"),))


def only(giver: Giver, given: AllocatedContainer) -> dict[Giver, list[AllocatedContainer]]:
    return {each: [given] if each is giver else [] for each in Giver}


@pytest.mark.parametrize(
    ("answer", "giver"),
    [
        (BY_NAMES, Giver.US),
        (BY_FILES, Giver.US),
        (BY_NVIDIAS, Giver.OTHER),
        (ContainerResponse(), Giver.OTHER),
    ],
    ids=["by names", "by files", "NVIDIA's", "NVIDIA's by annotations"],
)
@pytest.mark.parametrize("beside_other", [True, False])
@pytest.mark.parametrize("records", [(), (recorded("0"),)], ids=["not recorded", "recorded"])
def test_the_kubelets_answer_says_who_gave_a_device(answer, giver, beside_other, records):
    given = replace(container("a", "0"), answer=answer)

    assert by_giver([given], records, beside_other) == only(giver, given)
    having = pods_with(allocation("0"), [given], pods(node_pod("a")))
    assert was_given_by_another_plugin(having, allocation("0")) is (giver is Giver.OTHER)


@pytest.mark.parametrize(
    ("records", "beside_other", "giver"),
    [
        ((), True, Giver.UNKNOWN),
        ((), False, Giver.US),
        ((recorded("0"),), True, Giver.US),
        ((recorded("1"),), True, Giver.UNKNOWN),
    ],
)
def test_without_an_answer_what_is_recorded_is_ours_and_the_rest_where_nobody_else_is(
    records, beside_other, giver
):
    given = container("a", "0")

    assert by_giver([given], records, beside_other) == only(giver, given)
    having = pods_with(allocation("0"), [given], pods(node_pod("a")))
    assert not was_given_by_another_plugin(having, allocation("0"))


def test_by_dra_nobody_keeps_what_others_gave_and_by_a_device_plugin_what_no_gpu_is_known_of():
    ours = replace(container("ours", "0"), answer=BY_NAMES)
    theirs = replace(container("theirs", "1"), answer=BY_NVIDIAS)
    nic = replace(container("nic", "3", resource="example.com/vf"), answer=BY_NVIDIAS)
    unknown = container("unknown", "4")
    foreign = replace(theirs, pod=PodUid("uid-foreign"), ids=(DeviceId("nvidia0"),))
    given = [ours, theirs, nic, unknown, container("recorded", "5"), foreign]

    by_dra = untracked_containers(given, [recorded("5")], NAMES, by_dra=True)
    assert by_dra == (theirs, foreign, unknown)
    assert untracked_containers(given, [recorded("5")], NAMES, by_dra=False) == (foreign,)


def test_pods_with_gpus_live_have_ended_or_are_missing():
    given = [container("a", "0"), container("a", "1"), container("b", "2"), container("c", "3")]
    known = pods(node_pod("a", namespace="ml"), node_pod("b", ended=True))

    left = PodsLeft(("pod ml/a",), frozenset({PodUid("uid-b")}), frozenset({PodUid("uid-c")}))
    assert pods_left(given, known) == left
    assert pods_left((), known) == PodsLeft()


def test_a_gpu_is_another_plugins_only_where_the_kubelet_says_so_of_each_container_with_it():
    theirs = replace(container("gone", "0"), answer=BY_NVIDIAS)
    having = pods_with(allocation("0"), [theirs, container("a", "0")], pods(node_pod("a")))

    assert not was_given_by_another_plugin(having, allocation("0"))
    assert not was_given_by_another_plugin((), allocation("0"))


def test_pods_that_have_devices_are_named_as_far_as_they_are_known():
    containers = [container("b", "0"), container("a", "1"), container("a", "2", name="more")]

    assert holding_pods(containers, pods(node_pod("a"), node_pod("b")), NAMES) == (
        "pod ml/a",
        "pod ml/b",
    )
    assert holding_pods(containers, None, NAMES) == ("pod uid-a", "pod uid-b")


def test_a_pod_has_exactly_what_its_container_was_given():
    containers = [
        container("a", "0", "1"),
        container("b", "0"),
        container("c", "0", resource="nvidia.com/other"),
    ]

    (pod,) = pods_with(allocation("0"), containers, pods(node_pod("b")))

    assert pod == AllocatedPod(Pod("b", PodUid("uid-b")), ("main",), (), "ml", node_pod("b").spec)


def test_an_init_and_an_app_container_of_one_pod_are_one_pod():
    containers = [container("a", "0", name="init"), container("a", "0")]

    (pod,) = pods_with(allocation("0"), containers, {})

    assert pod == AllocatedPod(Pod("uid-a", PodUid("uid-a")), ("init", "main"))


def test_a_pod_that_has_ended_has_nothing():
    containers = [container("a", "0"), container("b", "0")]

    found = pods_with(allocation("0"), containers, pods(node_pod("a", ended=True)))

    assert [pod.pod.uid for pod in found] == ["uid-b"]


def test_a_name_that_is_known_by_our_record_stays_where_the_api_server_does_not_tell():
    known = recorded("0", pods=["train"])
    unnamed = AllocatedPod(Pod("uid-train", PodUid("uid-train")), ("main",))
    named = replace(unnamed, namespace="ml", spec=node_pod("train").spec)
    other = replace(unnamed, pod=Pod("uid-x", PodUid("uid-x")))

    assert as_recorded(unnamed, known).pod == Pod("train", PodUid("uid-train"))
    assert as_recorded(unnamed, known).namespace == "default"
    assert as_recorded(named, known) is named
    assert as_recorded(other, known) is other


def test_what_the_kubelet_lists_by_name_is_of_the_pod_that_has_not_ended():
    before = replace(node_pod("x", ended=True), pod=Pod("train", PodUid("before")))
    known = [before, node_pod("train")]

    found = list(
        listed_containers([listed("train", "GPU-1", "GPU-0"), listed("gone", "GPU-2")], known)
    )

    assert found == [container("train", "0", "1")]


def test_allocations_with_a_device_in_common_overlap_and_claims_do_not():
    one, both, other = recorded("0"), recorded("0", "1"), recorded("2")

    assert overlapping(allocation("0"), [one, both, other, record("claim")]) == (one, both)


@pytest.mark.parametrize(
    ("tenants", "strict", "needed"),
    [
        (MpsTenants.ANY, False, False),
        (MpsTenants.ANY, True, True),
        (MpsTenants.NON_ROOT, False, True),
    ],
)
def test_a_pod_has_to_be_known_where_something_has_to_hold_for_it(tenants, strict, needed):
    limit = ClaimMemoryLimit(1, GuardRules(GuardPolicy.WARN), strict)

    assert needs_pod(recorded("0")) is False
    assert needs_pod(record("dp", holding("dp", limit=limit, tenants=tenants))) is needed


def test_every_pod_may_have_what_is_not_kept_from_any():
    assert pod_problems(recorded("0"), AllocatedPod(Pod("a", PodUid("uid-a")), ("main",))) == ()


@pytest.mark.parametrize(
    ("containers", "known", "use"),
    [
        ([], {}, Use.MISSING),
        ([], None, Use.MISSING),
        ([container("a", "0")], None, Use.USED),
        ([container("a", "0")], pods(node_pod("a")), Use.USED),
        ([container("a", "0")], pods(node_pod("a", ended=True)), Use.ENDED),
        ([container("a", "0")], pods(node_pod("b")), Use.MISSING),
        ([container("a", "0", "1")], pods(node_pod("a")), Use.MISSING),
        (
            [container("a", "0"), container("b", "0")],
            pods(node_pod("a", ended=True)),
            Use.MISSING,
        ),
        (
            [container("a", "0"), container("b", "0")],
            pods(node_pod("a", ended=True), node_pod("b")),
            Use.USED,
        ),
    ],
)
def test_an_allocation_is_used_as_long_as_a_pod_has_it_that_has_not_ended(containers, known, use):
    assert use_of(allocation("0"), containers, known) is use


def test_what_living_pods_have_and_nothing_is_recorded_of_is_to_be_prepared_again():
    containers = [
        container("a", "0"),
        container("b", "1"),
        container("c", "2"),
        container("d", "3"),
        container("e", "4", resource="nic.example.com/vf"),
    ]
    records = [recorded("0"), recorded("1", completed=False), record("claim")]
    known = pods(node_pod("a"), node_pod("b"), node_pod("c", ended=True), node_pod("e"))

    assert unrecorded(containers, records, known, NAMES) == (allocation("1"),)
    assert unrecorded(containers, records, None, NAMES) == (
        allocation("1"),
        allocation("2"),
        allocation("3"),
    )


def test_a_device_of_ours_that_is_called_otherwise_is_of_another_device_plugin():
    registered = {
        GPU: (DeviceId("GPU-1::0"), DeviceId("vendor-0"), DeviceId("vendor-1")),
        ResourceName("nvidia.com/mig-1g.10gb"): (DeviceId("MIG-1"),),
        ResourceName("example.com/nic"): (DeviceId("nic-0"),),
    }
    assert foreign_devices(registered, NAMES) == {GPU: "vendor-0"}
    assert foreign_devices(registered, NAMES, [GPU]) == {GPU: "vendor-0"}
    assert foreign_devices(registered, NAMES, []) == {}


@pytest.mark.parametrize(
    ("sockets", "foreign", "rest"),
    [
        pytest.param(["nvidia-gpu.sock"], [], {SHARED}, id="a resource of NVIDIA's plugin"),
        pytest.param(["nvidia-gpu.sock", "nvidia-gpu.shared.sock"], [], set(), id="both"),
        pytest.param(["nvidia-mig-1g.5gb.sock"], [GPU_5GB], {GPU, SHARED}, id="one more"),
        pytest.param([], [], set(), id="no socket"),
        pytest.param(["nvidia-gpu.sock"], [SHARED], set(), id="somebody else lists another one"),
        pytest.param(["nvidia-gpu.sock", "nvidiaGPU-17.sock"], [], set(), id="one of a cloud"),
        pytest.param(["nvidia-gpu.sock", "nvidia-caps.sock"], [], set(), id="no resource of ours"),
    ],
)
def test_what_another_plugin_has_not_taken_follows_from_the_names_of_its_sockets(
    sockets, foreign, rest
):
    assert not_taken([GPU, SHARED], sockets, foreign, NAMES) == rest


@pytest.mark.parametrize(
    ("status", "remembered"),
    [
        pytest.param(None, None, id="the Node was not read yet"),
        pytest.param(NodeStatus(), frozenset(), id="the kubelet knows nothing of ours"),
        pytest.param(
            NodeStatus(capacity={GPU: "2", "example.com/nic": "1"}, allocatable={GPU: "0"}),
            {GPU},
            id="who listed it has ended",
        ),
        pytest.param(
            NodeStatus(capacity={GPU: "2"}, allocatable={GPU: "1"}), None, id="somebody lists it"
        ),
        pytest.param(
            NodeStatus(capacity={GPU: "0"}, allocatable={GPU: "0"}), frozenset(), id="long ago"
        ),
    ],
)
def test_what_the_kubelet_remembers_is_what_the_node_has_and_gives_to_nobody(status, remembered):
    assert left_behind(status, NAMES) == remembered


def test_what_a_pod_had_that_has_ended_is_held_no_more():
    containers = [container("a", "0"), container("b", "1"), container("gone", "2")]
    known = pods(node_pod("a"), node_pod("b", ended=True))

    assert held_allocations(containers, known, NAMES) == {allocation("0")}
    assert held_allocations(containers, None, NAMES) == {
        allocation("0"),
        allocation("1"),
        allocation("2"),
    }


def test_what_another_device_plugin_gave_as_our_resource_is_nothing_that_we_look_after():
    theirs = AllocatedContainer(PodUid("uid-b"), "main", ResourceName(GPU), (DeviceId("vgpu-1"),))
    containers = [container("a", "0"), theirs]

    assert held_allocations(containers, None, NAMES) == {allocation("0")}


def test_of_a_node_that_gives_nothing_more_out_only_what_is_held_stays_healthy():
    devices = tuple(
        ListedDevice(DeviceId(f"GPU-{id_}"), id_ != "sick") for id_ in ("0", "1", "sick")
    )

    (resource,) = nothing_more([Resource(GPU, devices)], [allocation("1"), allocation("sick")])

    assert [(device.id, device.healthy) for device in resource.devices] == [
        ("GPU-0", False),
        ("GPU-1", True),
        ("GPU-sick", False),
    ]


def test_an_answer_by_files_is_ours_where_it_shows_our_document():
    known = recorded("0")
    ours = ContainerResponse(mounts=(HostMount(f"/metadata/{known.claim.uid}_gpu.json", "/x"),))

    assert names_files_of(ours, known)
    assert not names_files_of(ContainerResponse(mounts=(HostMount("/lib", "/lib"),)), known)
    assert not names_files_of(ContainerResponse(cdi_names=("x/y=z",)), known)


def test_what_a_container_has_of_other_resources_is_of_that_container_alone():
    shared = "nvidia.com/gpu.shared"
    containers = [
        container("a", "0"),
        container("a", "1::0", resource=shared),
        container("a", "2::0", resource=shared, name="other"),
        container("b", "3::0", resource=shared),
    ]

    assert of_same_containers(allocation("0"), containers) == {allocation("1::0", resource=shared)}


def test_a_container_can_have_two_resources_unless_one_is_under_mps():
    plain, beside = recorded("0"), recorded("1")
    namespace = MpsNamespace(MpsNamespaceName("c_1"), plain.claim.uid, (GpuUuid("GPU-0"),))
    served = replace(plain, steps=(ServeMpsNamespace(namespace),))

    assert list(server_problems(plain, [beside])) == []
    for one, other in ((served, beside), (beside, served)):
        (problem,) = server_problems(one, [other])
        assert (
            "its container has nvidia.com/gpu besides, and one of the two is under MPS" in problem
        )


def test_a_pod_that_the_profile_keeps_out_of_mps_is_told_for_its_container():
    kept_out = record("dp", holding("dp", tenants=MpsTenants.NON_ROOT, request="gpu"))
    pod = AllocatedPod(Pod("a", PodUid("uid-a")), ("main",), (), "ml", node_pod("a").spec)
    harmless = replace(pod, spec=node_pod("a", root=False).spec)
    nobody = AllocatedPod(Pod("uid-a", PodUid("uid-a")), ("main",))
    elsewhere = replace(pod, containers=("other",))

    assert "pod ml/a, container 'main' can run as root" in pod_problems(kept_out, pod)[0]
    assert "the API server does not tell what pod uid-a is" in pod_problems(kept_out, nobody)[0]
    assert list(pod_problems(kept_out, harmless)) == []
    assert list(pod_problems(kept_out, elsewhere)) == []


def test_what_the_node_has_left_of_our_resources_is_listed_as_empty():
    listed_now = [Resource(GPU, (ListedDevice(DeviceId("0")),))]
    allocatable = {"nvidia.com/gpu": "1", "nvidia.com/mig-1g.5gb": "2", "cpu": "8"}

    assert with_leftovers(listed_now, allocatable, NAMES) == (
        *listed_now,
        Resource(ResourceName("nvidia.com/mig-1g.5gb"), ()),
    )
    assert with_leftovers(listed_now, {"nvidia.com/mig-1g.5gb": "0"}, NAMES) == (*listed_now,)


def test_a_record_takes_the_namespace_of_its_pod_and_is_known_by_its_resource():
    known = recorded("0")
    used = known.used_in("ml")

    assert used.claim.namespace == "ml"
    assert {each.claim for each in used.holdings} == {used.claim}
    assert used.used_in("ml") is used
    assert (used.known_as, record("train").known_as) == ("nvidia.com/gpu", "default/train")


@pytest.mark.parametrize(
    ("had", "named", "there", "expected"),
    [
        pytest.param(["a"], ["a"], [], True, id="the kubelet remembers a pod that is gone"),
        pytest.param(["a"], [], ["b"], True, id="the kubelet has it back"),
        pytest.param(["a"], [], ["a"], False, id="the kubelet has forgotten a pod that is there"),
        pytest.param(["a"], ["b"], [], False, id="another pod has it, which may be known soon"),
        pytest.param(["a", "b"], ["a"], [], True, id="both pods that had it are gone"),
        pytest.param(["a", "b"], ["a"], ["b"], False, id="one of the two is there"),
        pytest.param([], [], [], False, id="nobody was ever known to have it"),
        pytest.param(["a"], [], None, False, id="the API server does not tell"),
    ],
)
def test_what_pods_had_is_nobodys_once_they_are_known_to_be_gone(
    had: list[str], named: list[str], there: list[str] | None, expected: bool
) -> None:
    given = tuple(Pod(name, PodUid(f"uid-{name}")) for name in had)
    given_to = replace(recorded("0"), pods=given)
    known = None if there is None else pods(*map(node_pod, there))

    assert have_gone(given_to, {PodUid(f"uid-{name}") for name in named}, known) is expected
