"""Where no container's bundle is to be found, the kubelet's list says which pods use a claim."""

from dataclasses import replace
from typing import Any

from dra_driver.base.errors import NodeError
from dra_driver.k8s.pods import ClaimName, KubeletPod
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimMemoryLimit
from dra_driver.plugin.memory.pod_limits import KubeletPods
from tests import builders
from tests.builders import holding, pod
from tests.fakes.pods import FakePods, pod_spec

LIMIT = ClaimMemoryLimit(1, GuardRules(GuardPolicy.KILL))


def record(name, *pods, limit=LIMIT, **fields):
    return builders.record(name, holding(name, limit=limit), pods=pods, **fields)


def listed(name, *claims, namespace="default"):
    names = frozenset(ClaimName("default", claim) for claim in claims)
    return KubeletPod(namespace, name, {"main": names, "side": frozenset()})


class World:
    def __init__(self, *records):
        self.ledger = records
        self.hidden = True
        self.fails = False
        self.asked = 0
        self.list: tuple[KubeletPod, ...] = ()
        self.api = FakePods([pod_spec("p"), pod_spec("q"), pod_spec("r")])
        self.pods_listed = self.list_pods()

    def list_pods(self):
        me: Any = self
        api: Any = self.api
        return KubeletPods(lambda: self.ledger, me, api, lambda: self.hidden)

    def pods(self):
        self.asked += 1
        if self.fails:
            raise NodeError("the kubelet does not answer")
        return self.list

    def look(self):
        self.pods_listed.update()
        return self.pods_listed.records()


def test_a_listed_pod_uses_the_claims_that_the_kubelet_names():
    world = World(record("a", "p"), record("b"))
    world.list = (listed("p", "a"), listed("q", "a", "b"), listed("other"))

    assert world.look() == (record("a", "p", "q"), record("b", "q"))
    assert world.api.read_names == ["q"], "of those that are recorded the UID is known"
    assert world.look() is world.look(), "the same object where nothing changed"
    assert world.api.read_names == ["q"]


def test_nobody_is_asked_where_containers_tell_or_nothing_is_limited():
    world = World(record("a", "p"))
    world.hidden = False
    assert world.look() is world.ledger
    world.hidden, world.ledger = True, (record("a", "p", limit=None), record("b", completed=False))
    assert world.look() is world.ledger
    assert world.asked == 0


def test_what_was_known_stays_where_the_kubelet_does_not_answer():
    world = World(record("a"))
    world.list = (listed("q", "a"),)
    world.look()
    world.fails = True

    assert world.look() == (record("a", "q"),)


def test_a_pod_that_goes_uses_nothing_any_more_and_one_of_its_name_is_another():
    world = World(record("a"))
    world.list = (listed("q", "a"),)
    world.look()
    world.list = ()
    assert world.look() == (record("a"),)

    world.api.pods["default", "q"] = replace(pod_spec("q"), uid=pod("new").uid)
    world.list = (listed("q", "a"),)
    assert [user.uid for user in world.look()[0].pods] == ["uid-new"]


def test_a_pod_that_cannot_be_read_is_read_at_the_next_look():
    world = World(record("a"))
    world.list = (listed("gone", "a"), listed("q", "a"))
    assert world.look() == (record("a", "q"),)
    world.api.pods["default", "gone"] = pod_spec("gone")
    assert world.look() == (record("a", "gone", "q"),)


def test_one_look_reads_some_pods_and_the_next_the_others():
    world = World(record("a"))
    names = [f"p{number:02}" for number in range(12)]
    world.api = FakePods([pod_spec(name) for name in names])
    world.pods_listed = world.list_pods()
    world.list = tuple(listed(name, "a") for name in names)

    world.look()
    assert len(world.api.read_names) == 8
    assert world.look() == (record("a", *names),)
    assert sorted(world.api.read_names) == names
