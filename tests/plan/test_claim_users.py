"""Whose processes keep a claim from being given back, and whose do not."""

from dra_driver.k8s.claims import ClaimRef, Pod
from dra_driver.k8s.pods import Container
from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.processes import CgroupProcesses
from dra_driver.model.records import ClaimRecord, DeviceAllocation, is_allocation
from dra_driver.plan.device_plugin.allocations import allocation_uid
from dra_driver.plan.prepare.claim_users import (
    cgroups_given_claim,
    outside_gpu_processes,
    records_with_pods,
)
from tests.builders import gpu, holding, pod, record, ref

A, B = ref("a"), ref("b")
ZERO, ONE = gpu(0).uuid, gpu(1).uuid
WEB, DB = pod("web"), pod("db")


def processes(*pids: int, claims: tuple[ClaimRef, ...] | None = (), of: Pod = WEB):
    given = None if claims is None else frozenset(claim.uid for claim in claims)
    return CgroupProcesses(of, given, pids)


def test_the_containers_that_were_given_the_claim_count_and_those_that_may_have_been():
    mine = processes(1, claims=(A,))
    both = processes(2, claims=(A, B), of=DB)
    unknown = processes(3, claims=None)
    others = (processes(4, claims=(B,)), processes(5))

    assert cgroups_given_claim(A.uid, (mine, both, unknown, *others)) == (mine, both, unknown)


def test_elsewhere_in_its_pods_nobody_may_compute_on_its_gpus():
    sidecar, outside = processes(4, 5), processes(6, of=DB)

    assert outside_gpu_processes(record(A, "gpu-0", "gpu-1"), (), (sidecar, outside)) == {
        ZERO: {4: WEB, 5: WEB, 6: DB},
        ONE: {4: WEB, 5: WEB, 6: DB},
    }


def test_who_was_given_another_claim_on_the_gpu_may_compute_there():
    neighbour = processes(4, claims=(B,))

    assert outside_gpu_processes(record(A, "gpu-0", "gpu-1"), (record(B),), (neighbour,)) == {
        ONE: {4: WEB}
    }


def test_a_claim_that_only_looks_on_brings_nobody_to_compute():
    monitor = processes(4, claims=(B,))

    assert outside_gpu_processes(record(A), (record(B, holding(B, admin=True)),), (monitor,)) == {
        ZERO: {4: WEB}
    }
    assert outside_gpu_processes(record(A, holding(A, admin=True)), (), (monitor,)) == {}


def test_who_counts_already_because_it_lives_is_not_looked_for():
    there = (processes(1, claims=(A,)), processes(3, claims=None))

    assert outside_gpu_processes(record(A), (), there) == {}


def test_of_a_claim_that_holds_no_gpu_no_gpu_is_asked():
    assert outside_gpu_processes(ClaimRecord(A, ()), (), (processes(4),)) == {}


def test_an_allocation_is_of_the_namespace_of_the_pod_whose_container_was_given_it():
    given = DeviceAllocation(ResourceName("nvidia.com/gpu"), (DeviceId("GPU-0"),))
    unknown = record(ref("dp", namespace=""), allocation=given)
    container = Container("c1", "main", "ml", WEB, frozenset({unknown.claim.uid}))

    (known,) = records_with_pods([unknown], [container])

    assert (known.claim.namespace, known.pods) == ("ml", (WEB,))
    assert [is_allocation(each.claim.uid) for each in (unknown, record(A))] == [False, False]
    assert is_allocation(allocation_uid(given))
