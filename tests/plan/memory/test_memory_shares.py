"""Who may use how much of which GPU, and whose a process is."""

from dataclasses import replace

import pytest

from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.k8s.pods import Container
from dra_driver.model.gpus import DeviceName, GpuUuid, MigInstance, PartitionKey
from dra_driver.model.processes import ContainerProcess
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimMemoryLimit, ClaimRecord, Holding
from dra_driver.plan.memory.usage import (
    ContainerClaims,
    MemoryShare,
    container_claims,
    instance_names,
    memory_shares,
    mildest_guard,
    pod_claims,
    possible_owners,
)
from tests.builders import ref

GPU, OTHER = GpuUuid("GPU-0"), GpuUuid("GPU-1")
KILL = GuardRules(GuardPolicy.KILL, 10.0)
A, B, C, M = ref("a"), ref("b"), ref("c"), ref("m")
WEB = Pod("web", PodUid("pod-web"))
IN_WEB = ContainerProcess(100, 1, WEB.uid, "c1")
IN_OTHER = ContainerProcess(100, 1, PodUid("pod-other"), "c1")


def holding(claim, gpu=GPU, memory=10, guard=KILL, **fields):
    limit = ClaimMemoryLimit(memory, guard) if memory is not None else None
    return Holding(claim, DeviceName("gpu-0"), gpu=gpu, limit=limit, **fields)


def record(claim, *holdings, pods=(WEB,)):
    return ClaimRecord(claim, holdings or (holding(claim),), pods=pods)


def share(claim, memory=10, **fields):
    return MemoryShare(claim, frozenset({WEB.uid}), memory, KILL, **fields)


def container_with(*claims):
    """A container of the pod "web"."""
    return Container("c1", "main", "default", WEB, frozenset(claim.uid for claim in claims))


def known(*claims):
    return container_claims(container_with(*claims), None)


def holder(*claims):
    return pod_claims([record(claim) for claim in claims])[WEB.uid]


def test_a_limited_claim_has_a_share_of_its_gpu():
    assert memory_shares([record(A)]) == {GPU: (share(A),)}


@pytest.mark.parametrize("guard", [None, GuardRules(GuardPolicy.OFF)])
def test_a_gpu_whose_claims_nobody_limits_or_guards_needs_no_look(guard):
    fields = {"memory": None} if guard is None else {"guard": guard}
    records = [record(claim, holding(claim, **fields)) for claim in (A, B)]

    assert memory_shares(records) == {}


def partition(claim, start, uuid="", **fields):
    """A part of a partition, which is *uuid* once it was created."""
    key = PartitionKey(19, start, 1, 1)
    instance = MigInstance(key, start + 7, 0, GpuUuid(uuid)) if uuid else None
    limit = ClaimMemoryLimit(10, KILL)
    name = DeviceName(f"gpu-0-mig-1g5gb-19-{start}")
    return Holding(claim, name, gpu=GPU, limit=limit, partition=key, instance=instance, **fields)


def test_a_mig_instance_has_memory_of_its_own_apart_from_its_gpu_and_from_others():
    records = [
        record(A, partition(A, 0, "MIG-0"), partition(A, 1, "MIG-1")),
        record(B, partition(B, 1, "MIG-1")),
        record(M, holding(M, memory=None, admin=True)),
    ]

    assert memory_shares(records) == {"MIG-0": (share(A),), "MIG-1": (share(A), share(B))}


def test_a_partition_that_is_not_created_yet_is_not_looked_at():
    assert memory_shares([record(A, partition(A, 0))]) == {}


def test_an_instance_is_known_by_its_partition_and_a_gpu_by_its_uuid():
    records = [record(A, partition(A, 0, "MIG-0")), record(B), record(C, partition(C, 1))]

    assert instance_names(records) == {"MIG-0": "gpu-0-mig-1g5gb-19-0 (MIG-0)"}


def test_the_neighbours_of_a_guarded_claim_are_known_too():
    monitor = record(M, holding(M, memory=None, admin=True))
    shares = memory_shares([monitor, record(C, holding(C, memory=None)), record(A)])

    assert shares[GPU] == (
        share(A),
        MemoryShare(C, frozenset({WEB.uid}), None),
        MemoryShare(M, frozenset({WEB.uid}), None, admin=True),
    )


def test_fractions_of_one_gpu_in_one_claim_are_one_share():
    mild = GuardRules(GuardPolicy.WARN, 30.0)
    shares = memory_shares(
        [record(A, holding(A), holding(A, memory=5, guard=mild), holding(A, OTHER))]
    )

    assert shares[GPU] == (MemoryShare(A, frozenset({WEB.uid}), 15, mild),)
    assert shares[OTHER] == (share(A),)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param({"memory": None}, id="all of the GPU"),
        pytest.param({"memory": None, "admin": True}, id="admin access"),
    ],
)
def test_a_claim_that_holds_its_gpu_in_another_way_too_has_no_limit(second):
    shares = memory_shares([record(A, holding(A), holding(A, **second)), record(B)])

    assert shares[GPU] == (MemoryShare(A, frozenset({WEB.uid}), None), share(B))


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        ([("Kill", 10), ("Kill", 5)], ("Kill", 10)),
        ([("Kill", 10), ("Warn", 5)], ("Warn", 10)),
        ([("Off", 0), ("Kill", 10), ("Warn", 5)], ("Off", 10)),
    ],
)
def test_the_mildest_of_several_guards_holds_for_all(policies, expected):
    guards = [GuardRules(GuardPolicy(policy), seconds) for policy, seconds in policies]

    assert mildest_guard(guards) == GuardRules(GuardPolicy(expected[0]), expected[1])


def test_a_pod_holds_all_claims_that_name_it():
    db = Pod("db", PodUid("pod-db"))
    pods = pod_claims([record(A), record(B, pods=(WEB, db))])

    assert pods[WEB.uid].claims == (A, B)
    assert (pods[db.uid].name, pods[db.uid].namespace) == ("db", "default")


def test_a_container_uses_the_claims_that_it_was_given():
    used = container_claims(container_with(A), holder(A, B))

    assert used == ContainerClaims(known=frozenset({A.uid}), namespace="default")


def test_of_a_container_that_cannot_be_read_every_claim_of_its_pod_is_possible():
    assert container_claims(None, holder(A, B)) == ContainerClaims(
        possible=frozenset({A.uid, B.uid})
    )
    assert container_claims(None, None) == ContainerClaims(), "nor has its pod any that is recorded"


MONITOR = share(M, None, admin=True)


@pytest.mark.parametrize(
    ("shares", "process", "claims", "owners"),
    [
        pytest.param([share(A), share(B)], IN_WEB, known(A), {A}, id="which its container uses"),
        pytest.param([share(A)], IN_OTHER, known(A), {A}, id="of a pod that joined unseen"),
        pytest.param([share(A)], IN_WEB, known(), set(), id="of a container that was given none"),
        pytest.param([share(A)], IN_WEB, ContainerClaims(), set(), id="of one that uses none"),
        pytest.param(
            [share(A), share(B)],
            IN_WEB,
            container_claims(None, holder(A, B)),
            {A, B},
            id="any of its pod's, where its container cannot be read",
        ),
        pytest.param(
            [share(A)], IN_OTHER, container_claims(None, holder(A)), set(), id="of another pod"
        ),
        pytest.param(
            [share(A)], IN_OTHER, replace(known(A), namespace="other"), set(), id="elsewhere"
        ),
        pytest.param([share(A), MONITOR], IN_WEB, known(M), set(), id="of a monitor"),
        pytest.param(
            [share(A), MONITOR],
            IN_WEB,
            ContainerClaims(possible=frozenset({A.uid, M.uid})),
            set(),
            id="perhaps of a monitor",
        ),
        pytest.param([share(A), MONITOR], IN_WEB, known(A, M), {A}, id="surely of a share"),
        pytest.param(
            [share(A), MONITOR],
            IN_WEB,
            replace(known(A), possible=frozenset({M.uid})),
            {A},
            id="surely of a share, and perhaps of a monitor",
        ),
    ],
)
def test_of_which_claims_a_process_may_be(shares, process, claims, owners):
    assert possible_owners(shares, process, claims) == {claim.uid for claim in owners}
