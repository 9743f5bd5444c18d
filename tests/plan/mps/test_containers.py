"""Which claims one container cannot have together, decided by the records of their claims."""

import pytest

from dra_driver.k8s.claims import ShareId
from dra_driver.model.gpus import DeviceName, GpuUuid, MigInstance, PartitionKey, placeholder_uuid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName
from dra_driver.model.profiles import MpsTenants
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.plan.mps.containers import (
    mps_tenants_of,
    separate_server_problems,
    served_requests,
)
from tests.builders import gpu_uuid, holding, ref
from tests.fakes.pods import container, pod_spec


def claim_record(name, *requests, namespace="default"):
    """A claim of (request, minor number, how)."""
    claim = ref(name, namespace=namespace)
    holdings = tuple(
        holding(
            claim,
            f"gpu-{minor}",
            share=ShareId(f"share-{number}"),
            admin=how == "admin access",
            request=request,
        )
        for number, (request, minor, how) in enumerate(requests)
    )
    served = tuple(gpu_uuid(minor) for _, minor, how in requests if how == "mps")
    served_namespace = MpsNamespace(MpsNamespaceName(f"c_{name}"), claim.uid, served)
    return ClaimRecord(claim, holdings, (ServeMpsNamespace(served_namespace),) if served else ())


def mps(name, minor=0, **fields):
    return claim_record(name, ("gpu", minor, "mps"), **fields)


def turns(name, minor=1, **fields):
    return claim_record(name, ("gpu", minor, "turns"), **fields)


def problems(record, others, *uses):
    return separate_server_problems(record, others, [pod_spec("p", container("c", *uses))])


def test_a_container_that_two_servers_claim_is_named():
    others = [mps("b"), mps("c"), mps("d", namespace="else")]
    pods = (
        pod_spec(
            "p",
            container("both", ("a", ""), ("c", "gpu"), ("b", "")),
            container("one", ("a", "")),
        ),
        pod_spec(
            "q", container("others", ("b", ""), ("c", "")), container("far", ("a", ""), ("d", ""))
        ),
    )

    assert separate_server_problems(mps("a"), others, pods) == [
        "pod default/p, container 'both' uses claim b, c too: it is under MPS as well, and a "
        "program reaches one MPS server; write both as requests of one claim, or use them in "
        "different containers"
    ]
    assert separate_server_problems(mps("a"), [mps("a")], pods) == []


def test_a_gpu_without_mps_is_not_seen_beside_one_with_it_whichever_comes_first():
    uses = ("a", ""), ("b", "gpu")

    assert problems(mps("a"), [turns("b")], *uses) == [
        "pod default/p, container 'c' uses claim b too, which is not under MPS: a program under "
        "MPS sees no other GPU; write both as requests of one claim with the same strategy, or use "
        "them in different containers"
    ]
    assert problems(turns("b"), [mps("a")], *uses) == [
        "pod default/p, container 'c' uses claim a too, which is under MPS: a program under MPS "
        "sees no other GPU; write both as requests of one claim with the same strategy, or use "
        "them in different containers"
    ]


def test_a_container_with_all_kinds_of_claims_is_told_of_all():
    two, problem = problems(mps("a"), [mps("b"), turns("c")], ("a", ""), ("b", ""), ("c", ""))

    assert "uses claim b too: it is under MPS as well" in two
    assert "uses claim c too, which is not under MPS" in problem


@pytest.mark.parametrize(
    ("record", "other"),
    [
        pytest.param(turns("a"), turns("b"), id="neither is under MPS"),
        pytest.param(
            mps("a"), claim_record("b", ("gpu", 1, "admin access")), id="the other has admin access"
        ),
        pytest.param(
            claim_record("a", ("gpu", 1, "admin access")), mps("b"), id="it has admin access"
        ),
        pytest.param(mps("a"), turns("b", namespace="else"), id="another claim of this name"),
    ],
)
def test_these_go_together(record, other):
    assert problems(record, [other], ("a", ""), ("b", "")) == []
    assert problems(record, [other], ("a", "")) == []


def test_of_a_claim_only_the_requests_count_that_the_container_uses():
    both = claim_record("a", ("gpu", 0, "mps"), ("rest", 1, "turns"), ("look", 2, "admin access"))

    assert problems(both, [turns("b")], ("a", "rest"), ("b", "")) == []
    assert problems(both, [turns("b")], ("a", "look"), ("b", "")) == []
    assert problems(turns("b"), [both], ("a", "rest"), ("b", "")) == []
    assert len(problems(both, [mps("b")], ("a", "rest"), ("b", ""))) == 1
    assert len(problems(both, [turns("b")], ("a", "gpu"), ("b", ""))) == 1


def test_admin_access_is_no_gpu_to_compute_on():
    assert turns("a").computes
    assert not claim_record("a", ("gpu", 0, "admin access")).computes


def test_the_strictest_rule_of_what_is_held_is_the_claims():
    rules = (MpsTenants.NON_ROOT, MpsTenants.USER_NAMESPACES, MpsTenants.ANY)
    holdings = tuple(holding(device=f"gpu-{n}", tenants=rule) for n, rule in enumerate(rules))

    assert mps_tenants_of(ClaimRecord(ref(), holdings)) is MpsTenants.USER_NAMESPACES
    assert mps_tenants_of(ClaimRecord(ref(), ())) is MpsTenants.ANY


def on_partitions(name, *parts, created_for_claims=True):
    """A claim of (request, where its partition of gpu-0 begins, how)."""
    claim, holdings, under = ref(name), [], []
    for request, start, how in parts:
        key = PartitionKey(19, start, 1, 1)
        instance = (
            MigInstance(key, 7 + start, 0, GpuUuid(f"MIG-{start}")) if created_for_claims else None
        )
        device = DeviceName(f"gpu-0-mig-1g5gb-19-{start}")
        gpu = GpuUuid("GPU-0")
        holdings.append(
            Holding(claim, device, gpu=gpu, request=request, partition=key, instance=instance)
        )
        if how == "mps":
            under.append(instance.uuid if instance else placeholder_uuid(gpu, key))
    steps = tuple(
        ServeMpsNamespace(MpsNamespace(MpsNamespaceName(f"c_{name}_{number}"), claim.uid, (gpu,)))
        for number, gpu in enumerate(under)
    )
    return ClaimRecord(claim, tuple(holdings), steps)


@pytest.mark.parametrize("created", [True, False], ids=["created", "not created yet"])
def test_of_the_partitions_of_one_gpu_those_under_mps_are_told_from_the_others(created):
    both = on_partitions("a", ("one", 0, "mps"), ("two", 1, "turns"), created_for_claims=created)

    assert served_requests(both) == {"one"}
    assert problems(both, [turns("b")], ("a", "two"), ("b", "")) == []
    (problem,) = problems(both, [turns("b")], ("a", "one"), ("b", ""))
    assert "uses claim b too, which is not under MPS" in problem
