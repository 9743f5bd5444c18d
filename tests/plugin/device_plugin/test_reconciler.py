"""What the kubelet tells nobody: which pods have ended, and what of its answers has to be there."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.kubeletplugin.device_plugin.resources import (
    AllocatedContainer,
    ContainerResponse,
    DeviceId,
    ResourceName,
)
from dra_driver.model.offer import DEVICE_PLUGIN_FEATURES
from dra_driver.model.profiles import AllocationApi, SharingStrategy
from dra_driver.model.records import DeviceAllocation
from dra_driver.plugin.publish.offers import OfferBuilder
from tests.fakes.allocations import (
    DRAINING,
    GPU,
    OFF,
    ON,
    AllocationWorld,
    node_pod,
    profile_of,
    replica,
    whole,
)
from tests.fakes.users import FakeUsers


@pytest.fixture
def world(tmp_path):
    return AllocationWorld(tmp_path, replicas=4, default_strategy=SharingStrategy.MPS)


def look(world, seconds=0.0):
    world.now += seconds
    return world.reconciler.look()


def allocated(*ids):
    return DeviceAllocation(GPU, ids)


def everything_is_gone(world):
    return world.nothing_left and not world.node.namespaces


@pytest.mark.point(144)
def test_what_a_pod_had_that_has_ended_is_taken_back_at_once(world):
    world.admit("train", replica(0))
    world.run("train", replica(0))
    containers = world.containers
    world.end("train", deleted=False)
    world.containers = containers  # until the kubelet writes its checkpoint again

    look(world)

    assert everything_is_gone(world)
    assert world.reconciler.mended == 1


@pytest.mark.parametrize("lingers", [True, False])
def test_what_a_pod_had_that_is_gone_is_taken_back_after_15_seconds(world, lingers):
    """The API server may tell from a cache that does not know the pod yet."""
    world.admit("train", replica(0))
    world.run("train", replica(0))
    containers = world.containers
    world.end("train")
    world.containers = containers if lingers else world.containers

    assert look(world) == 15
    assert look(world, 14) == 1
    assert world.pods_of(replica(0)) == ["train"]
    look(world, 1)

    assert everything_is_gone(world)
    look(world, 60)
    assert everything_is_gone(world), "and it is not prepared again for a pod that is gone"


def test_what_no_pod_is_seen_with_is_taken_back_after_a_minute(world):
    world.allocate(replica(0))

    assert look(world) == 60
    assert look(world, 59) == 1
    assert world.recorded(replica(0)).completed
    look(world, 1)

    assert everything_is_gone(world)


def test_what_a_pod_had_that_is_gone_may_be_given_to_one_that_is_not_known_yet(world):
    world.admit("train", replica(0))
    world.run("train", replica(0))
    world.end("train")
    look(world)
    world.admit("next", replica(0))
    world.node_pods.pop(PodUid("uid-next"))

    look(world, 14)
    look(world, 59)
    assert world.recorded(replica(0)).completed
    look(world, 1)

    assert everything_is_gone(world)


def test_what_a_pod_has_that_waits_for_its_volumes_is_kept(world):
    world.admit("train", replica(0))

    for _ in range(10):
        look(world, 60)

    assert world.recorded(replica(0)).completed


def test_what_is_seen_again_begins_anew_to_be_missing(world):
    world.admit("train", replica(0))
    containers, world.containers = world.containers, []
    look(world)
    world.containers = containers
    look(world, 50)
    world.containers = []
    look(world, 50)

    look(world, 59)

    assert world.recorded(replica(0)).completed


@pytest.mark.parametrize("lingers", [True, False])
def test_a_new_pod_with_the_same_devices_begins_anew_to_be_missing(world, lingers):
    """The API server may not have heard of it yet, or it is a static one without a mirror."""
    world.admit("train", replica(0))
    before = world.containers
    world.end("train")
    world.containers = before
    look(world)
    world.containers = []
    world.admit("next", replica(0))
    world.containers = [*(before if lingers else ()), *world.containers]
    world.node_pods.pop(PodUid("uid-next"))

    look(world, 60)
    assert world.recorded(replica(0)).completed
    look(world, 59)
    assert world.recorded(replica(0)).completed
    look(world, 1)

    assert everything_is_gone(world)


def test_what_a_process_still_uses_is_kept_until_that_ends(world):
    world.admit("train", replica(0))
    world.run("train", replica(0))
    world.end("train")
    users = world.users.alive[world.uid(replica(0))] = {Pod("train", PodUid("uid-train"))}

    look(world)
    look(world, 60)
    assert world.recorded(replica(0)).completed
    users.clear()
    look(world, 60)

    assert everything_is_gone(world)


@pytest.mark.parametrize("who", ["the API server", "the kubelet"])
def test_while_somebody_does_not_answer_everything_is_kept(world, who):
    world.admit("train", replica(0))
    world.run("train", replica(0))
    containers = world.containers
    world.end("train")
    if who == "the API server":
        world.api_down, world.containers = True, containers
        look(world)
        look(world, 600)
    else:
        world.checkpoint_error = NodeError("it cannot be read")
        for _ in range(2):
            with pytest.raises(NodeError, match="no answer"):
                look(world, 600)

    assert world.recorded(replica(0)).completed


@pytest.mark.parametrize("lost", ["a reboot", "the record", "a damaged record"])
def test_what_pods_have_is_prepared_again_before_they_need_it(world, lost):
    answer = world.admit("train", replica(0))
    world.run("train", replica(0))
    if lost == "a reboot":
        world.reboot()
    else:
        (path,) = (world.directory / "claims/boot-1").glob("*.json")
        path.unlink() if lost == "the record" else path.write_text("{")
        world.start()

    look(world)

    assert world.pods_of(replica(0)) == ["train"]
    assert set(answer.cdi_names) <= world.cdi_names
    assert not world.ledger.set_aside()
    look(world, 60)
    assert world.reconciler.mended == 1


def test_what_cannot_be_prepared_again_keeps_no_other_from_it(world):
    world.admit("train", replica(0))
    world.admit("other", replica(1))
    world.containers.insert(
        0,
        AllocatedContainer(PodUid("uid-train"), "lost", GPU, (DeviceId("GPU-gone"),)),
    )
    world.reboot()

    look(world)

    assert {record.allocation.ids for record in world.ledger.records()} == {
        (replica(0),),
        (replica(1),),
    }


def test_devices_of_others_are_none_of_ours(world):
    nic = ResourceName("nic.example.com/vf")
    world.containers.append(
        AllocatedContainer(PodUid("uid-train"), "main", nic, (DeviceId("vf-0"),))
    )

    look(world)

    assert world.nothing_left
    assert world.reconciler.held == frozenset()


def test_a_node_that_gives_out_by_dra_asks_nobody_once_nothing_is_recorded(world):
    world.admit("train", replica(0))
    world.choice.set(OFF)
    world.end("train", deleted=False)
    assert look(world) == 60
    look(world, 60)
    asked = world.asked

    assert look(world) == math.inf
    assert world.asked == asked
    assert everything_is_gone(world)


@pytest.mark.parametrize("pods", [("train",), ()])
def test_a_node_that_goes_to_the_other_api_looks_often(world, pods):
    for pod in pods:
        world.admit(pod, replica(0))
    assert look(world) is None
    world.choice.set(DRAINING)

    assert look(world) == 5.0


@pytest.mark.parametrize(("wanted", "seconds"), [(AllocationApi.DRA, 30.0), (ON.wanted, None)])
def test_a_node_that_waits_for_pods_of_another_device_plugin_looks_often(tmp_path, wanted, seconds):
    world = AllocationWorld(tmp_path)
    world.choice.set(replace(ON, wanted=wanted))
    give_by_another_plugin(world, "theirs", whole(1))
    told = []
    world.reconciler.others_gone = lambda: told.append("they have ended")

    assert look(world) == seconds
    assert told == []
    world.end("theirs", deleted=False)
    assert look(world) is None
    assert told == ["they have ended"]


def test_a_node_that_offers_nothing_beside_another_device_plugin_looks_seldom(tmp_path):
    world = AllocationWorld(tmp_path)
    world.choice.set(replace(ON, offering=False, other_plugin="nvidia-gpu.sock is there"))
    give_by_another_plugin(world, "theirs", whole(1))

    assert look(world) is None


def test_a_node_without_pods_asks_the_api_server_nothing(tmp_path):
    world = AllocationWorld(tmp_path)

    look(world)

    assert world.asked == 0


def test_after_a_reboot_a_pod_keeps_what_the_profile_offers_otherwise_by_now(world):
    answer = world.admit("train", replica(0))
    world.run("train", replica(0))
    world.profile = profile_of()
    world.node.agent = False
    world.reboot(agent=False)
    look(world)  # the MPS agent starts, too
    assert not world.recorded(replica(0)).completed

    world.node.agent = True
    world.run("train", replica(0))

    assert set(answer.cdi_names) <= world.cdi_names
    assert world.pods_of(replica(0)) == ["train"]
    world.end("train")
    look(world)
    look(world, 60)
    assert everything_is_gone(world)
    assert world.allocate(whole(0))


@pytest.mark.parametrize("boots", [1, 2])
def test_what_a_pod_had_that_did_not_come_back_after_a_reboot_is_forgotten(world, boots):
    world.admit("train", replica(0))
    world.run("train", replica(0))
    world.end("train")
    for _ in range(boots):
        world.reboot()
    assert world.recorded(replica(0)).pods

    look(world)
    look(world, 60)

    assert everything_is_gone(world)


@pytest.mark.parametrize("used", [True, False])
def test_a_damaged_record_that_no_pod_needs_is_forgotten_once_nothing_uses_it(world, used):
    world.admit("train", replica(0))
    world.run("train", replica(0))
    world.end("train")
    users = world.users.alive[world.uid(replica(0))]
    if used:
        users.add(Pod("train", PodUid("uid-train")))
    (path,) = (world.directory / "claims/boot-1").glob("*.json")
    path.write_text("{")
    world.start()

    look(world)
    assert bool(world.ledger.set_aside()) == used
    users.clear()
    look(world)

    assert not world.ledger.set_aside()
    assert world.nothing_left


def test_it_is_known_that_nobody_else_has_anything_only_where_that_was_seen(world):
    assert not world.reconciler.knows_all()
    world.admit("train", replica(0))
    look(world)
    assert world.reconciler.knows_all()

    world.node.agent = False
    world.admit("other", replica(1))
    look(world)
    assert not world.reconciler.knows_all(), "what the other pod has is not recorded"
    world.node.agent = True
    look(world)
    assert world.reconciler.knows_all()

    world.checkpoint_error = NodeError("it cannot be read")
    with pytest.raises(NodeError):
        look(world)
    assert not world.reconciler.knows_all()


def test_what_is_known_stays_known_while_a_look_takes_long_and_is_as_old_as_its_look(world):
    world.admit("train", replica(0))
    look(world, 1)
    known = []

    def ask_meanwhile():
        world.now += 10
        known.append((world.reconciler.knows_all(1), world.reconciler.knows_all(2)))

    world.before_pods = ask_meanwhile
    look(world, 1)

    assert known == [(True, False)]
    assert world.reconciler.knows_all(2)
    assert not world.reconciler.knows_all(3)


OTHER_PLUGIN = replace(DRAINING, other_plugin="another device plugin is here")
THEIRS = ContainerResponse(env=(("NVIDIA_VISIBLE_DEVICES", whole(1)),))  # what NVIDIA's answers


def give_by_another_plugin(world, name, id_, answer=THEIRS):
    world.node_pods[PodUid(f"uid-{name}")] = node_pod(name)
    world.containers.append(
        AllocatedContainer(PodUid(f"uid-{name}"), "main", GPU, (id_,), answer),
    )


@pytest.mark.parametrize("id_", [whole(1), DeviceId("GPU-gone")])
@pytest.mark.parametrize("choice", [OTHER_PLUGIN, ON], ids=["beside it", "after it"])
def test_what_another_device_plugin_gave_is_never_recorded_and_all_of_ours_is_known(
    tmp_path, choice, id_
):
    world = AllocationWorld(tmp_path)
    world.admit("ours", whole(0))
    world.choice.set(choice)
    give_by_another_plugin(world, "theirs", id_)

    for _ in range(3):
        look(world, 60)

    assert [record.allocation for record in world.ledger.records()] == [allocated(whole(0))]
    assert world.reconciler.knows_all()
    assert world.reconciler.others == ("pod ml/theirs",)
    assert allocated(id_) in world.reconciler.held, "it does not leave a list"
    world.end("theirs", deleted=False)
    look(world)
    assert world.reconciler.others == ()


@pytest.mark.parametrize("takes_names", [True, False])
def test_what_we_gave_counts_beside_another_device_plugin_and_is_recovered(tmp_path, takes_names):
    """By what the kubelet was answered, by CDI names or file by file."""
    world = AllocationWorld(tmp_path)
    world.takes_names = takes_names
    world.admit("kept", whole(0))
    world.admit("lost", whole(1))
    world.preparer.take_back_if(world.recorded(whole(1)).claim, lambda: True)
    world.choice.set(OTHER_PLUGIN)

    for _ in range(3):
        look(world, 60)

    assert (world.pods_of(whole(0)), world.pods_of(whole(1))) == (["kept"], ["lost"])
    assert world.reconciler.others == ()


def test_a_gpu_that_another_device_plugin_gave_out_next_is_no_longer_that_of_our_record(tmp_path):
    world = AllocationWorld(tmp_path)
    world.admit("train", whole(1))
    world.run("train", whole(1))
    world.choice.set(OTHER_PLUGIN)
    world.end("train")
    give_by_another_plugin(world, "theirs", whole(1))

    look(world)
    assert world.pods_of(whole(1)) == ["train"]
    look(world, 15)

    assert everything_is_gone(world)


def test_where_nobody_says_who_gave_it_what_is_not_recorded_is_ours(tmp_path):
    world = AllocationWorld(tmp_path)
    give_by_another_plugin(world, "train", whole(1), answer=None)

    look(world)

    assert world.pods_of(whole(1)) == ["train"]
    assert world.reconciler.knows_all()


def test_beside_another_plugin_who_has_what_is_known_once_the_kubelet_says_who_gave_it(tmp_path):
    world = AllocationWorld(tmp_path)
    world.choice.set(OTHER_PLUGIN)
    give_by_another_plugin(world, "train", whole(1), answer=None)

    look(world)
    assert world.nothing_left
    assert not world.reconciler.knows_all(), "it may be ours"
    assert world.reconciler.others == ("pod ml/train",)
    world.end("train", deleted=False)
    look(world)

    assert world.reconciler.knows_all()
    assert world.reconciler.others == ()


def test_a_damaged_record_is_kept_while_nobody_says_who_gave_its_devices(tmp_path):
    world = AllocationWorld(tmp_path)
    answer = world.admit("train", whole(1))
    world.run("train", whole(1))
    world.users.alive.clear()
    (path,) = (world.directory / "claims/boot-1").glob("*.json")
    path.write_text("{")
    world.start()
    world.choice.set(OTHER_PLUGIN)
    given, world.containers = world.containers, []
    give_by_another_plugin(world, "train", whole(1), answer=None)

    look(world)
    assert [aside.uid for aside in world.ledger.set_aside()] == [world.uid(whole(1))]
    assert not world.reconciler.knows_all()
    assert set(answer.cdi_names) <= world.cdi_names
    world.containers = given
    look(world)

    assert world.pods_of(whole(1)) == ["train"]
    assert world.reconciler.knows_all()


class UsersWhileTheKubeletGoesOn(FakeUsers):
    """Does *act* once, with what is taken back first."""

    def __init__(self, act):
        super().__init__()
        self._act = act

    def refuse_while_used(self, record):
        act, self._act = self._act, None
        if act:
            act(record.allocation.ids)


def test_what_another_pod_was_given_during_a_look_is_not_taken_back(tmp_path):
    """To take something back can take seconds, and the pods were asked for before."""
    world = AllocationWorld(tmp_path, gpus=2)
    given = []

    def give_the_other_one_to_another_pod(taken_back):
        (id_,) = {whole(0), whole(1)} - {*taken_back}
        world.end(owners[id_])
        world.admit("next", id_)
        world.run("next", id_)
        given.append(id_)

    owners = {whole(0): "first", whole(1): "second"}
    world.users = UsersWhileTheKubeletGoesOn(give_the_other_one_to_another_pod)
    world.start()
    for id_, pod in owners.items():
        world.admit(pod, id_)
        world.run(pod, id_)
        world.node_pods[PodUid(f"uid-{pod}")] = node_pod(pod, ended=True)
    world.users.alive.clear()

    look(world)

    assert world.pods_of(*given) == ["next"]
    assert [record.allocation.ids for record in world.ledger.records()] == [tuple(given)]


class OffersWhileTheKubeletGoesOn(OfferBuilder):
    """Does *act* before the next offer, once there is one."""

    act: Callable[[], None] | None = None

    def now(self):
        act, self.act = self.act, None
        if act:
            act()
        return super().now()


def world_and_its_offers(directory):
    world = AllocationWorld(directory, replicas=4)
    offers = OffersWhileTheKubeletGoesOn(
        world.node, lambda: world.profile, lambda: DEVICE_PLUGIN_FEATURES, world.ledger
    )
    world.start(ledger=world.ledger, offers=offers)
    return world, offers


def test_what_another_pod_was_given_while_something_was_prepared_again_is_still_its_own(tmp_path):
    world, offers = world_and_its_offers(tmp_path)
    world.admit("first", replica(0))
    world.run("first", replica(0))
    world.admit("lost", replica(1, minor=1))
    world.preparer.take_back_if(world.recorded(replica(1, minor=1)).claim, lambda: True)

    def give_to_another_pod():
        world.end("first")
        world.admit("next", replica(0))
        world.allocations.pre_start(GPU, [replica(0)])

    offers.act = give_to_another_pod
    look(world)

    assert world.pods_of(replica(1, minor=1)) == ["lost"]
    assert world.pods_of(replica(0)) == ["next"]


def test_what_is_prepared_again_keeps_no_device_from_being_listed(tmp_path):
    """It can take 20 s for each, and nothing is allocatable meanwhile."""
    world, offers = world_and_its_offers(tmp_path)
    world.admit("lost", replica(0))
    world.preparer.take_back_if(world.recorded(replica(0)).claim, lambda: True)
    ready = []
    world.reconciler.ready_changed = lambda: ready.append(world.reconciler.held)
    offers.act = lambda: ready.append("begins to prepare it again")

    look(world)

    assert ready == [frozenset({allocated(replica(0))}), "begins to prepare it again"]
