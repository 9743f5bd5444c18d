"""Pods that come to a claim later, and which container of a pod uses which claim."""

from collections.abc import Callable
from typing import Any

from dra_driver.base.errors import NodeError, Unreachable
from dra_driver.k8s.claims import Claim, Pod
from dra_driver.k8s.pods import Container
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimMemoryLimit
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.plugin.memory.pod_limits import PodLimits
from tests import builders
from tests.builders import fraction, holding, pod, ref

GPU = GpuUuid("GPU-0")
LIMIT = ClaimMemoryLimit(1, GuardRules(GuardPolicy.KILL))


def record(name, *pods, limit=LIMIT, **fields):
    return builders.record(name, holding(name, gpu=GPU, limit=limit), pods=pods, **fields)


class World:
    """The API server, who acts, the limits of this node, and the loops that are woken."""

    def __init__(self, *records):
        self.records = records
        self.away = False
        self.refused = False  # a strict limit that cannot be set
        self.can_tell = True
        self.on_new_pod: Any = None  # of pods that come
        self.on_owners_unknown: Callable[[], None] = lambda: None
        self.in_memory: tuple[Pod, ...] = (pod("later"),)
        self.reserved: tuple[Pod, ...] = self.in_memory
        self.asked = []
        self.asked_live = []
        self.noted = []
        self.settled = []
        self.joinable = None
        self.containers: tuple[Container, ...] = ()
        self.woken = []
        me: Any = self
        self.limits = PodLimits(lambda: self.records, me, me, me)
        self.limits.wake(lambda: self.woken.append("look"), lambda: self.woken.append("settle"))

    def read_cached(self, claim):
        self.asked.append(claim.name)
        if self.away:
            raise Unreachable("no answer")
        return Claim(claim, (fraction(),), pods=self.in_memory)

    def read(self, claim):
        self.asked_live.append(claim.name)
        return Claim(claim, (fraction(),), pods=self.reserved)

    def note_pods(self, claim):
        if self.refused:
            raise NodeError("its driver does not limit the pod's memory")
        self.noted.append(claim)
        return True

    def settle(self, read, joinable):
        self.settled.append(read(self.containers))
        self.joinable = joinable

    def report_new_pods(self, on_new_pod):
        self.on_new_pod = on_new_pod
        return on_new_pod is not None and self.can_tell

    def look(self):
        self.limits.update_pods()
        self.limits.settle()

    def settles(self):
        """Settle, and who is woken by that."""
        self.woken.clear()
        self.limits.settle()
        return self.woken


def test_as_long_as_the_same_pods_use_a_claim_nobody_asks_for_more_than_is_in_memory():
    world = World(record("shared", "first"))
    world.in_memory = (pod("first"),)

    world.limits.update_pods()

    assert world.asked == ["shared"]
    assert world.asked_live == []


def test_a_pod_that_is_not_in_the_memory_of_the_api_server_yet_keeps_its_limit():
    world = World(record("shared", "first", "second"))
    world.in_memory = (pod("first"),)
    world.reserved = (pod("first"), pod("second"))

    world.limits.update_pods()

    assert world.asked_live == ["shared"]
    assert [claim.pods for claim in world.noted] == [(pod("first"), pod("second"))]


def limited(settled):
    return [(share.pod, share.memory_bytes) for share in settled]


def test_a_claim_that_pods_can_join_is_read_again_and_then_it_is_settled():
    world = World(record("shared", "first"))

    world.limits.update_pods()
    assert [claim.pods for claim in world.noted] == [(pod("later"),)]
    assert world.woken == ["settle"]

    world.limits.settle()
    assert [limited(settled) for settled in world.settled] == [[("uid-first", 1)]]


def test_nobody_is_asked_about_claims_that_nobody_can_join_or_that_have_no_limit():
    world = World(
        record("from-a-template", "pod", pod_claim_name="gpu"),
        record("whole", "pod", limit=None),
        record("begun", "pod", completed=False),
    )

    world.look()

    assert world.asked == []
    assert world.on_new_pod is None, "nor is anybody woken when pods come"
    assert world.limits.update_pods() is None


def by_mps(name, *pods, **fields):
    """Under MPS, and nobody limits its memory."""
    namespace = MpsNamespace(MpsNamespaceName(f"c_{name}"), ref(name).uid, (GPU,))
    return record(name, *pods, limit=None, steps=(ServeMpsNamespace(namespace),), **fields)


def test_pods_that_join_a_claim_under_mps_are_noticed_though_nobody_limits_its_memory():
    world = World(by_mps("shared", "first"))

    world.look()

    assert [claim.pods for claim in world.noted] == [(pod("later"),)]
    assert world.on_new_pod is not None


def test_pods_that_name_a_claim_from_a_template_are_noticed_where_it_is_under_mps():
    world = World(by_mps("p-gpu-x7k2", "p", pod_claim_name="gpu"))

    world.look()

    assert [claim.pods for claim in world.noted] == [(pod("later"),)]
    assert world.on_new_pod is None, "it is not meant for others, and nobody is woken for it"
    assert world.limits.update_pods() is None


def test_of_many_claims_from_templates_some_are_read_at_once_and_all_in_turn():
    names = [f"claim-{number:02}" for number in range(20)]
    claims = [by_mps(name, "p", pod_claim_name="gpu") for name in names]
    world = World(*claims, by_mps("shared", "q"))

    world.limits.update_pods()
    assert world.asked == ["shared", *names[:8]]
    world.limits.update_pods()
    world.records = world.records[1:]  # what comes and goes does not put the others out of turn
    world.limits.update_pods()

    assert sorted(world.asked) == sorted([*names, *names[1:5], *["shared"] * 3])


def test_an_api_server_that_is_away_does_not_keep_limits_from_being_looked_after(caplog):
    world = World(record("shared", "first"))
    world.away = True
    caplog.set_level("INFO")

    world.look()

    assert world.noted == []
    assert world.settled
    messages = [(entry.levelname, entry.message) for entry in caplog.records]
    assert messages == [("INFO", "which pods use a claim is not known now")]


def test_a_limit_that_fails_for_a_later_pod_is_a_warning_of_its_own(caplog):
    world = World(record("shared", "first"), record("other", "second"))
    world.refused = True

    world.look()

    assert world.asked == ["shared", "other"]
    assert [entry.levelname for entry in caplog.records] == ["WARNING", "WARNING"]
    assert "limits do not hold for the pods that use a claim now: its driver" in caplog.text


def test_a_pod_that_comes_wakes_who_looks_for_pods():
    world = World(record("shared", "first"))
    world.limits.settle()
    world.woken.clear()

    world.on_new_pod()

    assert world.woken == ["look"]


def test_who_came_before_pods_were_told_of_is_looked_for_once():
    world = World(record("shared", "first"))

    assert world.settles() == ["look"]
    assert world.settles() == []

    world.records = (*world.records, record("another", "second"))
    assert world.settles() == ["look"]
    world.records = world.records[:1]
    assert world.settles() == []


def test_where_nobody_tells_of_pods_they_are_looked_for_more_often():
    world = World(record("shared", "first"))
    world.can_tell = False
    world.look()
    assert world.limits.update_pods() == 5.0
    assert world.settles() == []

    world.can_tell = True
    assert world.settles() == ["look"]
    assert world.limits.update_pods() is None


def test_as_long_as_the_records_are_the_same_nothing_is_computed_anew():
    world = World(record("shared", "first"))
    world.limits.settle()
    world.records = tuple(list(world.records))  # as the ledger has it: another tuple of the same
    world.limits.settle()
    world.records = (record("shared", "first", "second"),)
    world.limits.settle()

    before, again, after = world.settled
    assert again is before
    assert limited(after) == [("uid-first", 1), ("uid-second", 1)]


def test_the_limits_of_the_node_wake_who_settles():
    world = World()
    world.on_owners_unknown()
    assert world.woken == ["settle"]


def container_with(name, *claims, namespace="default"):
    """A container of a pod that was given something of these claims."""
    return Container(f"of {name}", "main", namespace, pod(name), frozenset(r.uid for r in claims))


def test_a_pod_whose_container_was_given_a_claim_is_limited_whoever_it_is_reserved_for():
    world = World(record("p-gpu-x7k2", "p", pod_claim_name="gpu"), record("of-a-pod-group"))
    world.containers = (
        container_with("second", ref("p-gpu-x7k2")),
        container_with("member", ref("of-a-pod-group")),
    )

    world.look()

    assert world.joinable
    assert limited(world.settled[-1]) == [("uid-member", 1), ("uid-p", 1), ("uid-second", 1)]
    assert world.asked == ["of-a-pod-group"], "nobody is asked about a claim from a template"


def test_claims_are_joinable_for_the_limits_only_where_one_limits():
    world = World(record("whole", "p", limit=None))

    world.look()

    assert world.joinable is False


def test_a_container_of_another_namespace_joins_nothing():
    world = World(record("a", "p"))
    world.containers = (container_with("stranger", ref("a"), namespace="other"),)

    world.look()

    assert limited(world.settled[-1]) == [("uid-p", 1)]
