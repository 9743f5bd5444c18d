"""Who may use how much of which GPU, and whose a process is."""

from dataclasses import replace

import pytest

from dra_driver.kubeletplugin.claims import Pod, PodUid
from dra_driver.kubeletplugin.pods import Container
from dra_driver.model.devices import DeviceName, GpuUuid
from dra_driver.model.holdings import Holding, Limit, Record
from dra_driver.model.mig import Instance, PartitionKey
from dra_driver.model.processes import Process
from dra_driver.model.profiles import Guard, GuardPolicy
from dra_driver.plan.memory_shares import (
    Share,
    Uses,
    holders,
    known_as,
    mildest,
    owners,
    shares,
    uses,
)
from tests.fakes.values import ref

GPU, OTHER = GpuUuid("GPU-0"), GpuUuid("GPU-1")
KILL = Guard(GuardPolicy.KILL, 10.0)
A, B, C, M = ref("a"), ref("b"), ref("c"), ref("m")
WEB = Pod("web", PodUid("pod-web"))
IN_WEB = Process(100, 1, WEB.uid, "c1")
IN_OTHER = Process(100, 1, PodUid("pod-other"), "c1")


def holding(claim, gpu=GPU, memory=10, guard=KILL, **fields):
    limit = Limit(memory, guard) if memory is not None else None
    return Holding(claim, DeviceName("gpu-0"), gpu=gpu, limit=limit, **fields)


def record(claim, *holdings, pods=(WEB,)):
    return Record(claim, holdings or (holding(claim),), pods=pods)


def share(claim, memory=10, **fields):
    return Share(claim, frozenset({WEB.uid}), memory, KILL, **fields)


def given(*claims):
    """A container of the pod "web"."""
    return Container("c1", "main", "default", WEB, frozenset(claim.uid for claim in claims))


def known(*claims):
    return uses(given(*claims), None)


def holder(*claims):
    return holders([record(claim) for claim in claims])[WEB.uid]


def test_a_limited_claim_has_a_share_of_its_gpu():
    assert shares([record(A)]) == {GPU: (share(A),)}


def test_a_gpu_whose_claims_nobody_limits_needs_no_look():
    assert shares([record(A, holding(A, memory=None))]) == {}


def test_a_gpu_whose_guards_are_all_off_needs_no_look():
    off = Guard(GuardPolicy.OFF)
    assert shares([record(A, holding(A, guard=off)), record(B, holding(B, guard=off))]) == {}


def test_a_holding_of_a_release_that_did_not_write_the_gpu_is_not_guarded():
    assert shares([record(A, holding(A, gpu=None))]) == {}


def partition(claim, start, uuid="", **fields):
    """A part of a partition, which is *uuid* once it was cut."""
    key = PartitionKey(19, start, 1, 1)
    instance = Instance(key, start + 7, 0, GpuUuid(uuid)) if uuid else None
    limit = Limit(10, KILL)
    name = DeviceName(f"gpu-0-mig-1g5gb-19-{start}")
    return Holding(claim, name, gpu=GPU, limit=limit, partition=key, instance=instance, **fields)


def test_a_mig_instance_has_memory_of_its_own_apart_from_its_gpu_and_from_others():
    records = [
        record(A, partition(A, 0, "MIG-0"), partition(A, 1, "MIG-1")),
        record(B, partition(B, 1, "MIG-1")),
        record(M, holding(M, memory=None, admin=True)),
    ]

    assert shares(records) == {"MIG-0": (share(A),), "MIG-1": (share(A), share(B))}


def test_a_partition_that_is_not_cut_yet_is_not_looked_at():
    assert shares([record(A, partition(A, 0))]) == {}


def test_an_instance_is_known_by_its_partition_and_a_gpu_by_its_uuid():
    records = [record(A, partition(A, 0, "MIG-0")), record(B), record(C, partition(C, 1))]

    assert known_as(records) == {"MIG-0": "gpu-0-mig-1g5gb-19-0 (MIG-0)"}


def test_the_neighbours_of_a_guarded_claim_are_known_too():
    monitor = record(M, holding(M, memory=None, admin=True))
    found = shares([monitor, record(C, holding(C, memory=None)), record(A)])

    assert found[GPU] == (
        share(A),
        Share(C, frozenset({WEB.uid}), None),
        Share(M, frozenset({WEB.uid}), None, admin=True),
    )


def test_fractions_of_one_gpu_in_one_claim_are_one_share():
    mild = Guard(GuardPolicy.WARN, 30.0)
    found = shares([record(A, holding(A), holding(A, memory=5, guard=mild), holding(A, OTHER))])

    assert found[GPU] == (Share(A, frozenset({WEB.uid}), 15, mild),)
    assert found[OTHER] == (share(A),)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param({"memory": None}, id="all of the GPU"),
        pytest.param({"memory": None, "admin": True}, id="admin access"),
    ],
)
def test_a_claim_that_holds_its_gpu_in_another_way_too_has_no_limit(second):
    found = shares([record(A, holding(A), holding(A, **second)), record(B)])

    assert found[GPU] == (Share(A, frozenset({WEB.uid}), None), share(B))


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        ([("Kill", 10), ("Kill", 5)], ("Kill", 10)),
        ([("Kill", 10), ("Warn", 5)], ("Warn", 10)),
        ([("Off", 0), ("Kill", 10), ("Warn", 5)], ("Off", 10)),
    ],
)
def test_the_mildest_of_several_guards_holds_for_all(policies, expected):
    guards = [Guard(GuardPolicy(policy), seconds) for policy, seconds in policies]

    assert mildest(guards) == Guard(GuardPolicy(expected[0]), expected[1])


def test_a_pod_holds_all_claims_that_name_it():
    db = Pod("db", PodUid("pod-db"))
    found = holders([record(A), record(B, pods=(WEB, db))])

    assert found[WEB.uid].claims == (A, B)
    assert (found[db.uid].name, found[db.uid].namespace) == ("db", "default")


def test_a_container_uses_the_claims_that_it_was_given():
    its = uses(given(A), holder(A, B))

    assert its == Uses(known=frozenset({A.uid}), namespace="default")


def test_a_container_that_was_given_no_claim_uses_none():
    assert owners([share(A)], IN_WEB, uses(given(), holder(A))) == set()


def test_of_a_container_that_cannot_be_read_every_claim_of_its_pod_is_possible():
    assert uses(None, holder(A, B)) == Uses(possible=frozenset({A.uid, B.uid}))
    assert uses(None, None) == Uses(), "nor has its pod any that is recorded"


def test_a_process_is_of_the_claims_that_its_container_uses():
    assert owners([share(A), share(B)], IN_WEB, known(A)) == {A.uid}


def test_a_process_of_a_pod_that_joined_unseen_is_of_the_claim_that_its_container_was_given():
    assert owners([share(A)], IN_OTHER, known(A)) == {A.uid}


def test_a_process_of_another_pod_is_of_no_claim():
    assert owners([share(A)], IN_OTHER, uses(None, holder(A))) == set()


def test_a_container_of_another_namespace_uses_no_claim_of_this_one():
    elsewhere = replace(given(A), namespace="other")

    assert owners([share(A)], IN_OTHER, uses(elsewhere, None)) == set()


def test_a_process_of_a_container_that_uses_no_claim_is_of_none():
    assert owners([share(A)], IN_WEB, Uses()) == set()


def test_a_process_of_a_monitor_is_of_no_claim():
    monitor = share(M, None, admin=True)

    assert owners([share(A), monitor], IN_WEB, known(M)) == set()


def test_a_process_that_may_be_a_monitors_is_left_alone():
    monitor = share(M, None, admin=True)
    its = Uses(possible=frozenset({A.uid, M.uid}))

    assert owners([share(A), monitor], IN_WEB, its) == set()


def test_a_process_that_surely_uses_a_share_is_counted_though_it_may_look_on():
    monitor = share(M, None, admin=True)

    assert owners([share(A), monitor], IN_WEB, known(A, M)) == {A.uid}
    its = replace(known(A), possible=frozenset({M.uid}))
    assert owners([share(A), monitor], IN_WEB, its) == {A.uid}
