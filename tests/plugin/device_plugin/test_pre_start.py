"""PreStartContainer: the pod is known, what holds for it holds, and nobody else has its devices."""

import threading
import time
from dataclasses import replace

import pytest

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import ClaimError, ClaimInUse, NodeError
from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.kubeletplugin.device_plugin.resources import (
    AllocatedContainer,
    ContainerResponse,
    HostDevice,
    ResourceName,
)
from dra_driver.model.gpus import Inventory
from dra_driver.model.profiles import MpsTenants, SharingStrategy
from dra_driver.model.records import DeviceAllocation
from dra_driver.plan.memory.pod_limits import pod_memory_shares
from tests.builders import claim, gpu, gpu_uuid
from tests.fakes.allocations import (
    GPU,
    OFF,
    AllocationWorld,
    listed,
    node_pod,
    profile_of,
    replica,
    whole,
)
from tests.fakes.node import FILES

FIRST_REPLICA_BYTES = 81559 // 4 * 1024 * 1024


@pytest.fixture
def world(tmp_path):
    return AllocationWorld(tmp_path, replicas=4)


@pytest.fixture
def impatient(world):
    world.others_seconds = 0.3
    world.start()
    return world


def limits(world):
    """Of pods, once the loop that looks after limits has looked."""
    world.node.settle(pod_memory_shares(world.ledger.records()))
    return {pod: size for (pod, _), size in world.node.limits.items()}


def test_a_container_that_another_device_plugin_gave_its_gpu_starts_again_as_it_was(world):
    """That plugin has gone, and the kubelet asks us before it starts the container again."""
    answer = ContainerResponse(env=(("NVIDIA_VISIBLE_DEVICES", whole(1)),))
    world.node_pods[PodUid("uid-theirs")] = node_pod("theirs")
    world.containers.append(
        AllocatedContainer(PodUid("uid-theirs"), "main", GPU, (whole(1),), answer)
    )

    world.allocations.pre_start(GPU, [whole(1)])

    assert (world.ledger.records(), limits(world)) == ((), {})


def test_the_pod_is_recorded_and_limited_before_its_container_starts(world):
    world.admit("train", replica(0))
    assert world.pods_of(replica(0)) == []

    world.allocations.pre_start(GPU, [replica(0)])

    assert world.node.limits == {("uid-train", gpu_uuid(0)): FIRST_REPLICA_BYTES}
    record = world.recorded(replica(0))
    assert (record.claim.namespace, record.pods) == ("ml", (Pod("train", PodUid("uid-train")),))
    assert {holding.claim for holding in record.holdings} == {record.claim}
    assert world.observed[-1] == ("pre-start", "ok")


@pytest.mark.point(145)
def test_it_can_be_repeated(world):
    world.admit("train", replica(0))
    world.run("train", replica(0))
    before = world.recorded(replica(0))

    world.users.alive.clear()  # the container ended, and is created again
    world.run("train", replica(0))

    assert world.recorded(replica(0)) == before


def test_two_containers_of_one_pod_have_the_sum(world):
    world.admit("train", replica(0))
    world.admit("train", replica(1), container="other")

    world.run("train", replica(0))
    world.run("train", replica(1))

    assert limits(world) == {"uid-train": 2 * FIRST_REPLICA_BYTES}


def test_a_static_pod_is_known_by_the_uid_that_its_cgroup_has(world):
    world.admit("static", replica(0))
    mirror = node_pod("static")
    spec = replace(mirror.spec, uid=PodUid("of-the-mirror"))
    world.node_pods = {mirror.pod.uid: replace(mirror, spec=spec)}

    world.run("static", replica(0))

    assert limits(world) == {"uid-static": FIRST_REPLICA_BYTES}


def test_an_init_container_and_what_its_pods_app_container_has_besides(world):
    world.admit("train", replica(0), container="init")
    world.admit("train", replica(0), replica(1))

    world.run("train", replica(0))
    world.users.alive.clear()  # the init container has ended
    world.run("train", replica(0), replica(1))

    assert [record.allocation.ids for record in world.ledger.records()] == [
        (replica(0), replica(1))
    ]
    assert limits(world) == {"uid-train": 2 * FIRST_REPLICA_BYTES}


def test_an_init_container_that_runs_again_has_its_device_again(world):
    first = world.admit("train", replica(0), container="init")
    world.admit("train", replica(0), replica(1))
    world.run("train", replica(0))
    world.users.alive.clear()
    world.run("train", replica(0), replica(1))
    world.users.alive.clear()  # the sandbox of the pod died

    world.run("train", replica(0))

    assert set(first.cdi_names) <= world.cdi_names
    assert limits(world) == {"uid-train": FIRST_REPLICA_BYTES}


def test_a_container_waits_until_the_last_user_of_its_device_has_ended(world):
    world.admit("first", replica(0))
    world.run("first", replica(0))
    first = Pod("first", PodUid("uid-first"))
    world.end("first")
    world.users.alive[world.uid(replica(0))] = {first}  # it was force-deleted
    world.admit("second", replica(0))
    timer = threading.Timer(0.3, world.users.alive.clear)
    timer.start()

    world.allocations.pre_start(GPU, [replica(0)])

    assert timer.finished.is_set()
    assert world.pods_of(replica(0)) == ["second"]
    assert limits(world) == {"uid-second": FIRST_REPLICA_BYTES}


@pytest.mark.parametrize(
    ("asked", "words"), [([0, 1], "them"), ([1, 2], replica(1))], ids=["all", "a part"]
)
def test_the_devices_that_another_pod_goes_on_to_use_are_named_once(impatient, asked, words):
    world = impatient
    world.admit("first", replica(0), replica(1))
    world.run("first", replica(0), replica(1))
    world.containers.clear()
    devices = [replica(place) for place in asked]
    world.admit("second", *devices)

    with pytest.raises(ClaimInUse, match=f"pod first still uses {words}; this container"):
        world.allocations.pre_start(GPU, devices)


def test_a_container_whose_device_another_pod_goes_on_to_use_is_refused_and_told_why(impatient):
    world = impatient
    world.admit("first", replica(0), replica(1))
    world.run("first", replica(0), replica(1))
    world.containers.clear()  # the kubelet lost its checkpoint
    world.admit("second", replica(1))

    with pytest.raises(ClaimInUse, match=r"pod first still uses it; this cont"):
        world.allocations.pre_start(GPU, [replica(1)])

    assert world.pods_of(replica(1)) == []
    assert world.told() == [("second", world.events[0].message)]
    assert world.events[0].message == (
        f"{GPU} {replica(1)}: pod first still uses it; this container waits for its end"
    )
    assert world.pods_of(replica(0), replica(1)) == ["first"]


@pytest.mark.parametrize("takes_names", [True, False])
@pytest.mark.parametrize("api_down", [True, False])
def test_after_a_reboot_the_old_answer_works_again(world, takes_names, api_down):
    world.takes_names, world.api_down = takes_names, api_down
    answer = world.admit("train", replica(0))
    world.run("train", replica(0))

    world.reboot()
    world.allocations.pre_start(GPU, [replica(0)])

    assert world.allocate(replica(0)) == answer
    assert set(answer.cdi_names) <= world.cdi_names
    assert limits(world) == {"uid-train": FIRST_REPLICA_BYTES}


class TestAnAnswerByFilesAfterAReboot:
    @pytest.fixture
    def world(self, tmp_path):
        world = AllocationWorld(tmp_path, gpus=2)
        world.takes_names = False
        world.admit("train", whole(1))
        return world

    def refusal(self, world):
        with pytest.raises(NodeError, match="asks once for each pod; delete the pod") as refused:
            world.allocations.pre_start(GPU, [whole(1)])
        assert [name for name, _ in world.told()] == ["train"]
        return str(refused.value)

    def test_is_refused_where_another_gpu_has_the_number_now(self, world):
        world.node.now = Inventory((gpu(0, uuid=gpu_uuid(1)), gpu(1, uuid=gpu_uuid(0))))
        world.reboot()

        assert "/dev/nvidia1 is not the device file any more" in self.refusal(world)

    def test_is_refused_where_the_driver_is_another_one(self, world):
        library = replace(FILES.libraries[0], host_path="/usr/lib64/libcuda.so.590.1")
        world.reboot()
        world.node.files = replace(FILES, version="590.1", libraries=(library,))

        assert "/usr/lib64/libcuda.so.580.95.05 is gone" in self.refusal(world)

    def test_is_good_as_long_as_what_it_names_is_there(self, world):
        kept = world.directory / "host/usr/lib64/libcuda.so.580.95.05"
        kept.parent.mkdir(parents=True)
        kept.touch()
        world.reboot()
        world.node.files = replace(FILES, libraries=())
        world.takes_names = True  # the kubelet was updated, too

        world.allocations.pre_start(GPU, [whole(1)])


def test_a_container_that_starts_again_on_a_node_that_cannot_be_looked_at_is_not_kept_from_it(
    world,
):
    world.admit("train", replica(0))
    world.run("train", replica(0))
    world.users.alive.clear()
    world.node.now = Inventory()
    world.node.refresh()

    world.run("train", replica(0))


def test_what_was_taken_by_a_claim_meanwhile_is_refused(tmp_path):
    world = AllocationWorld(tmp_path)
    world.admit("train", whole(0))
    world.preparer.take_back_if(world.recorded(whole(0)).claim, lambda: True)
    world.preparer.prepare(world.api.put(claim("gpu-0")))

    with pytest.raises(ClaimError, match="gpu-0 is held by claim default/claim"):
        world.allocations.pre_start(GPU, [whole(0)])


def test_a_node_that_gives_out_by_dra_prepares_nothing_any_more(world):
    world.admit("train", replica(0))
    world.preparer.take_back_if(world.recorded(replica(0)).claim, lambda: True)
    world.choice.set(OFF)

    with pytest.raises(NodeError, match=r"gives its GPUs out by DRA: .*; delete the pod"):
        world.allocations.pre_start(GPU, [replica(0)])

    assert world.nothing_left


def test_without_the_api_server_the_kubelet_says_enough_to_limit_a_pod(tmp_path):
    world = AllocationWorld(tmp_path, replicas=4, strict=True)
    world.api_down = True
    world.admit("train", replica(0))

    world.allocations.pre_start(GPU, [replica(0)])

    assert limits(world) == {"uid-train": FIRST_REPLICA_BYTES}
    assert world.pods_of(replica(0)) == ["uid-train"]
    world.api_down = False
    world.now += 60
    world.reconciler.look()
    assert world.pods_of(replica(0)) == ["train"]
    assert world.recorded(replica(0)).claim.namespace == "ml"


def test_a_limit_that_has_to_hold_and_cannot_be_set_keeps_the_container_from_starting(tmp_path):
    world = AllocationWorld(tmp_path, replicas=4, strict=True)
    world.node.offers_limits = False
    world.admit("train", replica(0))

    with pytest.raises(NodeError, match="older than 615"):
        world.allocations.pre_start(GPU, [replica(0)])

    assert world.told() == [
        ("train", "nvidia.com/gpu: the driver offers no limits: it is older than 615")
    ]


class TestWithoutACheckpoint:
    """The kubelet's list of pods is asked instead, and the API server for their UIDs."""

    @pytest.fixture
    def world(self, world):
        world.checkpoint_error = NodeError("the kubelet's checkpoint says in no known way")
        world.listed = []
        return world

    def test_the_list_tells_and_a_pod_of_the_same_name_that_has_ended_is_not_meant(self, world):
        world.admit("train", replica(0))
        ended = node_pod("before", ended=True)
        world.node_pods[ended.pod.uid] = replace(ended, pod=Pod("train", ended.pod.uid))
        world.listed = [listed("train", replica(0)), listed("other", replica(1))]

        world.allocations.pre_start(GPU, [replica(0)])

        assert limits(world) == {"uid-train": FIRST_REPLICA_BYTES}

    @pytest.mark.parametrize("silent", [True, False])
    def test_a_pod_that_nobody_tells_starts_and_is_limited_when_it_is_found(self, world, silent):
        world.admit("train", replica(0))
        world.listed = None if silent else []

        world.allocations.pre_start(GPU, [replica(0)])

        assert limits(world) == {}
        assert [name for name, _ in world.told()] == ["node-1"]
        assert "its memory is limited once the pod is found" in world.events[0].message
        world.checkpoint_error = None
        world.reconciler.look()
        assert limits(world) == {"uid-train": FIRST_REPLICA_BYTES}

    def test_without_the_api_server_the_list_is_no_help(self, world):
        world.admit("train", replica(0))
        world.listed, world.api_down = [listed("train", replica(0))], True

        world.allocations.pre_start(GPU, [replica(0)])

        assert "which pods the kubelet's list means cannot be asked" in world.events[0].message


@pytest.mark.parametrize(
    "rules",
    [
        {"strict": True},
        {"tenants": MpsTenants.NON_ROOT, "default_strategy": SharingStrategy.MPS},
    ],
    ids=["memoryLimit: Strict", "mpsTenants"],
)
def test_where_something_has_to_hold_for_the_pod_one_that_is_not_known_does_not_start(
    tmp_path, rules
):
    world = AllocationWorld(tmp_path, replicas=4, **rules)
    world.checkpoint_error = NodeError("the kubelet's checkpoint says in no known way")
    world.admit("train", replica(0))

    with pytest.raises(NodeError, match=r"which pod it is is not known: .*list of pods: no answer"):
        world.allocations.pre_start(GPU, [replica(0)])


@pytest.mark.parametrize(
    ("tenants", "fields", "why"),
    [
        (MpsTenants.NON_ROOT, {"root": True}, "can run as root or become it"),
        (MpsTenants.NON_ROOT, {"root": False}, ""),
        (MpsTenants.USER_NAMESPACES, {"root": False}, "set spec.hostUsers: false"),
        (MpsTenants.USER_NAMESPACES, {"host_users": False}, ""),
    ],
)
def test_a_pod_that_the_profile_keeps_out_of_mps_does_not_start(tmp_path, tenants, fields, why):
    world = AllocationWorld(
        tmp_path, replicas=4, default_strategy=SharingStrategy.MPS, tenants=tenants
    )
    world.admit("train", replica(0), **fields)

    if not why:
        world.allocations.pre_start(GPU, [replica(0)])
        assert world.pods_of(replica(0)) == ["train"]
        return
    with pytest.raises(ClaimError, match=f"pod ml/train, container 'main'.*{why}"):
        world.allocations.pre_start(GPU, [replica(0)])
    assert [name for name, _ in world.told()] == ["train"]


def test_a_container_with_another_resource_beside_one_under_mps_does_not_start(tmp_path):
    world = AllocationWorld(tmp_path, replicas=4, default_strategy=SharingStrategy.MPS)
    shared, other = replica(0), replica(1, 1)
    world.admit("train", shared)
    world.containers.append(
        replace(world.containers[0], resource=ResourceName("nvidia.com/gpu.shared"), ids=(other,))
    )
    world.allocations.pre_start(GPU, [shared])
    world.profile = profile_of(replicas=4, default_strategy=SharingStrategy.MPS, rename=True)
    world.allocations.prepare_again(
        DeviceAllocation(ResourceName("nvidia.com/gpu.shared"), (other,)), Deadline(5)
    )

    with pytest.raises(ClaimError, match=r"container has nvidia.com/gpu.shared besides, and one"):
        world.allocations.pre_start(GPU, [shared])


def test_what_another_device_plugin_answered_is_not_ours_to_judge(tmp_path):
    world = AllocationWorld(tmp_path)
    world.admit("train", whole(0))
    theirs = ContainerResponse(devices=(HostDevice("/dev/nvidia7", "/dev/nvidia7"),))
    world.containers = [replace(world.containers[0], answer=theirs)]

    world.allocations.pre_start(GPU, [whole(0)])


def test_whose_pod_it_is_has_to_be_asked_where_the_profile_keeps_pods_out_of_mps(tmp_path):
    world = AllocationWorld(
        tmp_path,
        replicas=4,
        default_strategy=SharingStrategy.MPS,
        tenants=MpsTenants.NON_ROOT,
    )
    world.api_down = True
    world.admit("train", replica(0), root=False)

    with pytest.raises(ClaimError, match="the API server does not tell what pod uid-train is"):
        world.allocations.pre_start(GPU, [replica(0)])


def test_mps_serves_the_container_again_where_the_agent_has_forgotten_it(tmp_path):
    world = AllocationWorld(tmp_path, replicas=4, default_strategy=SharingStrategy.MPS)
    world.admit("train", replica(0))
    world.node.namespaces.clear()

    world.allocations.pre_start(GPU, [replica(0)])

    assert list(world.node.namespaces) == [world.recorded(replica(0)).namespaces[0].name]


def test_a_hundred_containers_that_start_at_once_ask_the_api_server_a_few_times(tmp_path):
    world = AllocationWorld(tmp_path, replicas=50)
    for place in range(50):
        for minor in range(2):
            world.admit(f"pod-{place}-{minor}", replica(place, minor))
    threads = [
        threading.Thread(target=world.run, args=(f"pod-{place}-{minor}", replica(place, minor)))
        for place in range(50)
        for minor in range(2)
    ]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert time.monotonic() - begun < 30
    assert world.asked == 1
    assert len(limits(world)) == 100
    assert {record.gpus for record in world.ledger.records()} == {
        frozenset({gpu_uuid(0)}),
        frozenset({gpu_uuid(1)}),
    }
