"""What containers were given is read once, and never forgotten while they may be there."""

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import ClaimUid, Pod, PodUid
from dra_driver.k8s.pods import Container
from dra_driver.node.cgroups.containers import NoContainer, PodContainerCache

A, B = PodUid("pod-a"), PodUid("pod-b")
CLAIM = ClaimUid("claim")


def container(id_, *claims):
    return Container(id_, "main", "default", Pod("p", PodUid("")), frozenset(claims))


class World:
    """The bundles on a machine: what there is of each container; an error is raised."""

    def __init__(self, **containers):
        self.existing = containers
        self.calls = []
        self.containers = PodContainerCache(self.find)

    def find(self, id_):
        self.calls.append(id_)
        container = self.existing.get(id_, NoContainer.GONE)
        if isinstance(container, NodeError):
            raise container
        return container

    def learn(self, **ids_by_pod):
        return self.containers.learn(lambda: {PodUid(pod): ids for pod, ids in ids_by_pod.items()})

    def known(self):
        return {container.id: container.pod.uid for container in self.containers.known}


def test_a_container_is_of_the_pod_in_whose_cgroup_it_is():
    world = World(one=container("one", CLAIM), side=container("side"), sandbox=NoContainer.SANDBOX)

    assert world.learn(a=["one", "side", "sandbox"])

    assert world.known() == {"one": "a"}
    assert world.containers.claims_of("one") == {CLAIM}
    assert world.containers.claims_of("side") == world.containers.claims_of("nobody") == frozenset()


def test_it_is_the_same_object_until_something_changes():
    world = World(one=container("one", CLAIM))
    world.learn(a=["one"])
    before = world.containers.known

    world.learn(a=["one"], b=["side"])
    assert world.containers.known is before
    assert world.calls.count("one") == 1

    world.learn(a=[])
    assert world.containers.known == ()


def test_one_that_appears_while_the_others_are_listed_is_not_forgotten():
    world = World(one=container("one", CLAIM), late=container("late", CLAIM))

    def look():
        world.containers.learn_new(B, ["late"])
        return {A: ["one"]}

    assert world.containers.learn(look)
    assert world.known() == {"one": A, "late": B}


def test_what_was_known_stays_where_nothing_can_be_listed():
    world = World(one=container("one", CLAIM))
    world.learn(a=["one"])

    def look():
        raise NodeError("too many open files")

    with pytest.raises(NodeError, match="too many"):
        world.containers.learn(look)
    assert world.known() == {"one": "a"}


def test_one_that_cannot_be_read_hides_its_pod_and_is_read_again(caplog):
    world = World(one=NodeError("half written"))

    assert not world.learn(a=["one"])
    assert not world.learn(a=["one"])
    assert world.containers.hidden == {"a"}
    assert caplog.text.count("who uses GPU memory is not known: half written") == 1

    world.existing["one"] = container("one", CLAIM)
    assert world.learn(a=["one"])
    assert (world.known(), world.containers.hidden) == ({"one": "a"}, frozenset())


def test_where_the_runtime_is_elsewhere_pods_are_hidden_and_nothing_is_expected():
    world = World(one=NoContainer.NOWHERE, two=NoContainer.GONE)

    assert world.learn(a=["one"], b=["two"]), "another try would find no more"
    assert world.containers.hidden == {"a"}
    assert world.containers.learn_new(B, ["one"])
    assert world.containers.hidden == {"a", B}
