"""Which claims a container cannot use together, when one is prepared and when a pod joins it."""

from dataclasses import replace

import pytest

from cdi.encoding import to_json
from cdi.spec import CdiDevice, ContainerEdits, Spec
from dra_driver.k8s.claims import Pod, PodUid, PreparedDevice, ShareId
from dra_driver.k8s.pods import PodSpec
from dra_driver.model.gpus import DeviceName, GpuUuid, MigInstance, PartitionKey
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName
from dra_driver.model.profiles import MpsTenants
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.plan.mps.containers import (
    JoinedPod,
    mps_tenants_of,
    pods_to_check,
    requested_devices,
    separate_server_problems,
    served_requests,
    tenant_violations,
    unusable_devices,
)
from tests.builders import holding, ref
from tests.fakes.pods import container, pod_spec

FIRST, LATER = Pod("first", PodUid("uid-first")), Pod("later", PodUid("uid-later"))


def record(name, *devices, pods=(FIRST, LATER), namespace="default", **fields):
    """A prepared claim of (request, GPU, where its environment leads; "": not under MPS)."""
    claim = ref(name, namespace=namespace)
    prepared, holdings, edits = [], [], []
    for number, (request, minor, leads, *admin) in enumerate(devices):
        device, share = f"gpu-{minor}", ShareId(f"share-{number}")
        id_ = f"k8s.gpu.nvidia.com/claim={name}-{number}"
        prepared.append(PreparedDevice((request,), "node", device, (id_,), share))
        values = {"gpu": GpuUuid(f"GPU-{minor}"), "share": share, "request": request}
        holdings.append(holding(claim, device, admin=bool(admin), **values))
        env: tuple[str, ...] = (f"GPU_DEVICE_{minor}_UUID=GPU-{minor}",)
        if leads:
            env = (*env, f"CUDA_MPS_PIPE_DIRECTORY={leads}")
        edits.append(CdiDevice(f"{name}-{number}", container_edits=ContainerEdits(env=env)))
    gpus = tuple(GpuUuid(f"GPU-{minor}") for _, minor, leads, *_ in devices if leads)
    served = MpsNamespace(MpsNamespaceName(f"c_{name}"), claim.uid, gpus)
    steps = (ServeMpsNamespace(served),) if gpus else ()
    spec = to_json(Spec("k8s.gpu.nvidia.com/claim", devices=tuple(edits)))
    outcome = {"prepared": tuple(prepared), "spec": spec, "pods": tuple(pods)} | fields
    return ClaimRecord(claim, tuple(holdings), steps, **outcome)


def mps(name, minor=0, **fields):
    return record(name, ("gpu", minor, "/x"), **fields)


def turns(name, minor=1, **fields):
    return record(name, ("gpu", minor, ""), **fields)


def admin(name, minor=1):
    return record(name, ("gpu", minor, "", "admin"))


def tenants(record):
    """The profile said NonRoot when it was prepared."""
    holdings = (replace(part, tenants=MpsTenants.NON_ROOT) for part in record.holdings)
    return replace(record, holdings=tuple(holdings))


def spec(*containers, pod=LATER):
    return PodSpec("default", pod.name, pod.uid, containers)


def looked_at(*records):
    return [
        (joined_pod.record.claim.name, joined_pod.pod.name) for joined_pod in pods_to_check(records)
    ]


def problems(joined, *containers, others=(), pod=LATER):
    return unusable_devices(
        JoinedPod(joined, pod),
        spec(*containers, pod=pod),
        requested_devices(joined),
        [joined, *others],
    )


# Claims that are prepared for one container


def together(record, others, *uses):
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

    assert together(mps("a"), [turns("b")], *uses) == [
        "pod default/p, container 'c' uses claim b too, which is not under MPS: a program under "
        "MPS sees no other GPU; write both as requests of one claim with the same strategy, or use "
        "them in different containers"
    ]
    assert together(turns("b"), [mps("a")], *uses) == [
        "pod default/p, container 'c' uses claim a too, which is under MPS: a program under MPS "
        "sees no other GPU; write both as requests of one claim with the same strategy, or use "
        "them in different containers"
    ]


def test_a_container_with_all_kinds_of_claims_is_told_of_all():
    two, problem = together(mps("a"), [mps("b"), turns("c")], ("a", ""), ("b", ""), ("c", ""))

    assert "uses claim b too: it is under MPS as well" in two
    assert "uses claim c too, which is not under MPS" in problem


@pytest.mark.parametrize(
    ("claim_record", "other"),
    [
        pytest.param(turns("a"), turns("b"), id="neither is under MPS"),
        pytest.param(mps("a"), admin("b"), id="the other has admin access"),
        pytest.param(admin("a"), mps("b"), id="it has admin access"),
        pytest.param(mps("a"), turns("b", namespace="else"), id="another claim of this name"),
    ],
)
def test_these_go_together(claim_record, other):
    assert together(claim_record, [other], ("a", ""), ("b", "")) == []
    assert together(claim_record, [other], ("a", "")) == []


def test_of_a_claim_only_the_requests_count_that_the_container_uses():
    both = record("a", ("gpu", 0, "/x"), ("rest", 1, ""), ("look", 2, "", "admin"))

    assert together(both, [turns("b")], ("a", "rest"), ("b", "")) == []
    assert together(both, [turns("b")], ("a", "look"), ("b", "")) == []
    assert together(turns("b"), [both], ("a", "rest"), ("b", "")) == []
    assert len(together(both, [mps("b")], ("a", "rest"), ("b", ""))) == 1
    assert len(together(both, [turns("b")], ("a", "gpu"), ("b", ""))) == 1


def test_admin_access_is_no_gpu_to_compute_on():
    assert turns("a").computes
    assert not admin("a").computes


def test_the_strictest_rule_of_what_is_held_is_the_claims():
    rules = (MpsTenants.NON_ROOT, MpsTenants.USER_NAMESPACES, MpsTenants.ANY)
    holdings = tuple(holding(device=f"gpu-{n}", tenants=rule) for n, rule in enumerate(rules))

    assert mps_tenants_of(ClaimRecord(ref(), holdings)) is MpsTenants.USER_NAMESPACES
    assert mps_tenants_of(ClaimRecord(ref(), ())) is MpsTenants.ANY


# Whose spec matters


def test_a_pod_that_can_only_use_a_claim_as_a_whole_and_nothing_else_is_not_read():
    assert looked_at(record("a", ("gpu", 0, "/x"), ("gpu", 1, "/x"))) == []


def test_the_pods_of_a_claim_with_several_requests_are():
    assert looked_at(record("a", ("one", 0, "/x"), ("two", 0, "/y"))) == [
        ("a", "first"),
        ("a", "later"),
    ]


@pytest.mark.parametrize("leads", ["/y", ""], ids=["under MPS", "without"])
def test_a_pod_with_gpus_of_another_claim_is(leads):
    shared = record("a", ("gpu", 0, "/x"))
    own = record("own", ("gpu", 1, leads), pods=(LATER,), pod_claim_name="gpu")

    assert looked_at(shared, own) == [("a", "later"), *([("own", "later")] if leads else [])]


def test_where_pods_may_have_come_to_another_claim_unnoticed_all_are():
    whole = record("whole", ("gpu", 1, ""), pods=())
    elsewhere = replace(whole, claim=ref("whole", namespace="else"))
    shared = record("a", ("gpu", 0, "/x"))

    assert looked_at(shared, whole) == [("a", "first"), ("a", "later")]
    for other in (elsewhere, replace(whole, pod_claim_name="gpu")):
        assert looked_at(shared, other) == []


def test_the_pods_of_a_claim_that_is_not_for_everybody_are_though_it_is_from_a_template():
    restricted = tenants(record("a", ("gpu", 0, "/x"), pods=(FIRST,), pod_claim_name="gpu"))

    assert looked_at(restricted) == [("a", "first")]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(record("b", ("one", 1, "", "admin")), id="with admin access"),
        pytest.param(
            record("b", ("one", 1, "/y"), ("two", 2, "/y"), prepared=None, spec=None),
            id="not prepared yet: it is looked at by who prepares it",
        ),
    ],
)
def test_other_claims_make_no_difference(other):
    assert looked_at(record("a", ("gpu", 0, "/x")), other) == []


# What it cannot use


def test_a_container_with_two_claims_under_mps_is_told_of_one_of_them_once():
    joined, two = record("a", ("gpu", 0, "/x")), record("b", ("gpu", 1, "/y"))
    both = container("main", ("a", ""), ("b", ""))

    (problem,) = problems(joined, both, others=[two])
    assert problem.startswith("pod default/later, container 'main' uses claim b too: it is under")
    assert problems(two, both, others=[joined]) == ()


def test_a_claim_counts_though_nobody_noticed_that_the_pod_came_to_it():
    joined = record("b", ("gpu", 0, "/x"))
    both = container("main", ("a", ""), ("b", ""))

    (problem,) = problems(joined, both, others=[record("a", ("gpu", 1, "/y"), pods=(FIRST,))])
    assert "uses claim a too: it is under MPS as well" in problem
    assert problems(joined, both, others=[record("a", ("gpu", 1, "/y"), prepared=None)]) == ()


def test_whom_the_profile_keeps_out_is_told_and_loses_its_clients():
    joined = tenants(record("a", ("gpu", 0, "/x"), ("rest", 1, "")))
    root, user = container("main", ("a", "gpu")), container("main", ("a", "gpu"), root=False)

    (problem,) = problems(joined, root)
    assert "container 'main' can run as root or become it" in problem
    assert problem.endswith("; its clients are ended")
    for harmless in (user, container("main", ("a", "rest")), container("main")):
        assert problems(joined, harmless) == ()
        assert tenant_violations(JoinedPod(joined, LATER), spec(harmless)) == []


def test_different_containers_can_have_different_servers():
    joined, two = record("a", ("gpu", 0, "/x")), record("b", ("gpu", 1, "/y"))
    apart = (container("x", ("a", "")), container("y", ("b", "")), container("z"))

    assert problems(joined, *apart, others=[two]) == ()


def test_requests_that_lead_to_different_servers_are_used_apart():
    joined = record("a", ("one", 0, "/x"), ("two", 1, "/y"))

    assert problems(joined, container("x", ("a", "one")), container("y", ("a", "two"))) == ()
    (problem,) = problems(joined, container("main", ("a", "one"), ("a", "two")))
    assert "container 'main' uses requests one, two together, which were prepared" in problem
    assert problems(joined, container("main", ("a", ""))) == (problem,)


def test_one_request_of_a_server_over_more_gpus_sees_gpus_that_it_does_not_have():
    joined = record("a", ("one", 0, "/x"), ("two", 1, "/x"))

    assert problems(joined, container("main", ("a", ""))) == ()
    (problem,) = problems(joined, container("main", ("a", "two")))
    assert "uses gpu-1 under MPS, and its MPS server is over gpu-0, gpu-1: let all pods" in problem


def test_parts_of_one_gpu_on_one_server_go_together_and_alone():
    joined = record("a", ("one", 0, "/x"), ("two", 0, "/x"))

    for uses in (["one"], ["two"], ["one", "two"]):
        assert problems(joined, container("main", *(("a", request) for request in uses))) == ()


def test_a_gpu_without_mps_is_not_seen_beside_one_with_it():
    joined = record("a", ("one", 0, "/x"), ("two", 1, ""))

    (problem,) = problems(joined, container("main", ("a", "")))
    assert "uses gpu-0 under MPS and gpu-1 without: a program under MPS sees no other" in problem
    assert problems(joined, container("main", ("a", "two"))) == ()


def test_what_looks_on_is_no_gpu_without_mps():
    joined = record("a", ("one", 0, "/x"), ("watch", 1, "", "admin"))

    assert problems(joined, container("main", ("a", ""))) == ()


def test_nothing_is_said_of_a_claim_whose_file_cannot_be_read():
    joined = record("a", ("one", 0, "/x"), ("two", 1, ""), spec="{")

    assert problems(joined, container("main", ("a", ""))) == ()


def on_partitions(*devices, created=True):
    """As ``record``, of partitions of gpu-0, one for each: (request, where it begins, …)."""
    joined = record("a", *((request, 0, leads) for request, _, leads in devices))
    holdings, prepared, steps = [], [], []
    for (_, start, leads), whole_gpu, device in zip(
        devices, joined.holdings, joined.prepared or (), strict=True
    ):
        key = PartitionKey(19, start, 1, 1)
        instance = MigInstance(key, 7 + start, 0, GpuUuid(f"MIG-{start}")) if created else None
        name = DeviceName(f"gpu-0-mig-1g5gb-19-{start}")
        held = replace(whole_gpu, device=name, partition=key, instance=instance)
        holdings.append(held)
        prepared.append(replace(device, device=name))
        if leads:
            served = MpsNamespace(MpsNamespaceName(f"c_{start}"), joined.claim.uid, (held.uuid,))
            steps.append(ServeMpsNamespace(served))
    tuples = {"holdings": holdings, "prepared": prepared, "steps": steps}
    return replace(joined, **{name: tuple(values) for name, values in tuples.items()})


def test_partitions_of_one_gpu_are_told_apart_by_their_names():
    joined = on_partitions(("one", 0, "/x"), ("two", 1, ""))

    assert {device.gpu for device in requested_devices(joined)} == {
        "gpu-0-mig-1g5gb-19-0",
        "gpu-0-mig-1g5gb-19-1",
    }
    (problem,) = problems(joined, container("main", ("a", "")))
    assert "uses gpu-0-mig-1g5gb-19-0 under MPS and gpu-0-mig-1g5gb-19-1 without" in problem


@pytest.mark.parametrize("created", [True, False], ids=["created", "not created yet"])
def test_of_the_partitions_of_one_gpu_those_under_mps_are_told_from_the_others(created):
    both = on_partitions(("one", 0, "/x"), ("two", 1, ""), created=created)

    assert served_requests(both) == {"one"}
    assert together(both, [turns("b")], ("a", "two"), ("b", "")) == []
    (problem,) = together(both, [turns("b")], ("a", "one"), ("b", ""))
    assert "uses claim b too, which is not under MPS" in problem
