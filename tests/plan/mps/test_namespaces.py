"""Which GPUs of a claim one MPS server is over, with which limits, and whom it cannot serve."""

import re
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dra_driver.base.errors import ClaimError
from dra_driver.k8s.claims import Claim, ShareId
from dra_driver.model.mps import MpsLimits, MpsNamespace, MpsPriority
from dra_driver.model.offer import Device, Fractional, Offer, Replica
from dra_driver.model.profiles import MpsServerScope, MpsTenants, Rules
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.plan.mps.namespaces import PodsNeeded
from dra_driver.plan.prepare.claim import plan_claim
from tests.builders import MIB, POOL, SLICEABLE, allocation, config, fraction, gpu, offer, ref
from tests.fakes.pods import NOBODY, container, pod_spec

GIB = 1024 * MIB
MPS = config(sharing={"strategy": "MPS"})


def limits(**fields):
    return config(sharing={"strategy": "MPS", "mpsConfig": fields})


def planned(*allocations, pods=NOBODY, configs=(MPS,), at=None, name="claim", made_for_pod=True):
    claim = Claim(ref(name), allocations, configs, made_for_pod=made_for_pod)
    return plan_claim(claim, at or offer(4), (), POOL, pods)


def namespaces(*allocations, **fields) -> tuple[MpsNamespace, ...]:
    steps = planned(*allocations, **fields).steps
    return tuple(step.namespace for step in steps if isinstance(step, ServeMpsNamespace))


def refusal(*allocations, **fields) -> str:
    with pytest.raises(ClaimError) as refused:
        planned(*allocations, **fields)
    return str(refused.value)


def user(name, *requests, **fields):
    """A container that uses these requests of the claim; none: all of it."""
    return container(name, *(("claim", request) for request in requests or ("",)), **fields)


def test_a_request_for_two_gpus_is_served_by_one_server_over_both():
    (namespace,) = namespaces(allocation("gpu-2"), allocation("gpu-0"), configs=(limits(),))

    assert namespace.gpus == (gpu(0).uuid, gpu(2).uuid), "as containers see them: by minor number"
    assert (namespace.claim, namespace.percent, namespace.memory_bytes) == (
        "uid-claim",
        100,
        (None, None),
    )


TWO = (allocation("gpu-0", "a"), allocation("gpu-1", "b"))
GPUS = (gpu(0).uuid, gpu(1).uuid)


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        pytest.param(
            [user("one", "a"), user("other", "b"), container("neither")],
            [GPUS[:1], GPUS[1:]],
            id="apart",
        ),
        pytest.param([user("both", "a", "b")], [GPUS], id="together, by request"),
        pytest.param([user("both")], [GPUS], id="together, as all of the claim"),
        pytest.param(
            [container("c", ("other", "a"), ("other", "b"), ("claim", "a"))],
            [GPUS[:1], GPUS[1:]],
            id="of a claim of another name",
        ),
    ],
)
def test_requests_that_a_container_uses_together_are_one_namespace(containers, expected):
    served_namespaces = namespaces(*TWO, pods=(pod_spec("p", *containers),))

    assert sorted(namespace.gpus for namespace in served_namespaces) == expected
    assert len({namespace.name for namespace in served_namespaces}) == len(expected)


def test_requests_are_together_also_by_way_of_another_pod():
    requests = [fraction("1Gi", request=name) for name in "abcd"]
    first = pod_spec("p", user("x", "a", "b"), user("z", "d"))
    second = pod_spec("q", user("y", "b", "c"))

    served_namespaces = namespaces(*requests, pods=(first, second))

    assert sorted(namespace.memory_bytes for namespace in served_namespaces) == [(GIB,), (3 * GIB,)]


def test_the_chosen_alternative_of_a_request_is_used_by_its_main_name():
    requests = (allocation("gpu-0", "a/large"), allocation("gpu-1", "b"))

    assert len(namespaces(*requests, pods=(pod_spec("p", user("both", "a", "b")),))) == 1


@pytest.mark.parametrize(
    ("allocations", "rules", "needed"),
    [
        ([fraction()], {}, False),
        ([allocation("gpu-0"), allocation("gpu-1")], {}, False),  # one request
        ([fraction(), allocation("gpu-1", "look", admin=True)], {}, False),
        ([fraction(), fraction("1Gi", request="more")], {}, True),
        ([fraction()], {"tenants": MpsTenants.NON_ROOT}, True),
        ([fraction()], {"tenants": MpsTenants.USER_NAMESPACES}, True),
    ],
)
def test_pods_are_needed_only_where_it_depends_on_them(allocations, rules, needed):
    def plan(configs):
        return planned(*allocations, pods=None, configs=configs, at=offer(**rules))

    assert plan(()).grants, "nothing is shared by MPS"
    if needed:
        with pytest.raises(PodsNeeded):
            plan((MPS,))
    else:
        assert plan((MPS,)).grants


A_BY_MPS = config("GpuConfig", "a", sharing={"strategy": "MPS"})


def test_a_request_that_is_not_shared_by_mps_makes_the_pods_needed_too():
    with pytest.raises(PodsNeeded):
        planned(*TWO, pods=None, configs=(A_BY_MPS,))


def test_a_gpu_by_mps_and_one_without_go_to_different_containers():
    apart = pod_spec("p", user("c", "a"), user("d", "b"))
    served_namespaces = namespaces(*TWO, configs=(A_BY_MPS,), pods=(apart,))

    assert [namespace.gpus for namespace in served_namespaces] == [GPUS[:1]]


@pytest.mark.parametrize(
    ("containers", "fields", "message"),
    [
        pytest.param(
            [user("c")],
            {"configs": (A_BY_MPS,)},
            "pod default/p, container 'c' uses request a under MPS and b without: a program under "
            "MPS sees no other GPU; use the same strategy for both, or different containers",
            id="one GPU by MPS and one without",
        ),
        pytest.param(
            [user("both"), user("one", "a")],
            {},
            "pod default/p, container 'one' uses gpu-0 under MPS, and another container gpu-0, "
            "gpu-1: a GPU of a claim is on one MPS server; let both use the same requests, or "
            "write a claim for each",
            id="different parts of one server",
        ),
        pytest.param(
            [user("c")],
            {"at": offer(tenants=MpsTenants.NON_ROOT)},
            "pod default/p, container 'c' can run as root or become it, and this node's profile "
            "lets no pod with such a container share a GPU by MPS (mpsTenants: NonRoot); set "
            "securityContext.runAsNonRoot: true (or a runAsUser) and allowPrivilegeEscalation: "
            "false, without privileged and without added capabilities, or spec.hostUsers: false",
            id="all that keeps a program from becoming root is said",
        ),
    ],
)
def test_containers_that_cannot_be_served_are_refused(containers, fields, message):
    text = refusal(*TWO, pods=(pod_spec("p", *containers),), **fields)

    assert text == f"claim default/claim: {message}"


def test_containers_with_different_requests_on_one_gpu_are_served():
    requests = (fraction("1Gi", request="a"), fraction("2Gi", request="b"))
    pod = pod_spec("p", user("both"), user("one", "a"))

    (namespace,) = namespaces(*requests, pods=(pod,))

    assert namespace.memory_bytes == (3 * GIB,)


ROOT, USER = user("c"), user("c", root=False)


@pytest.mark.parametrize(
    ("tenants", "pod", "message"),
    [
        (MpsTenants.ANY, pod_spec("p", ROOT), ""),
        (MpsTenants.NON_ROOT, pod_spec("p", USER), ""),
        (MpsTenants.NON_ROOT, pod_spec("p", ROOT), "can run as root or become it, .* set securit"),
        (MpsTenants.NON_ROOT, pod_spec("p", ROOT, host_users=False), ""),
        (MpsTenants.USER_NAMESPACES, pod_spec("p", USER), "set spec.hostUsers: false"),
        (MpsTenants.USER_NAMESPACES, pod_spec("p", USER, host_users=False), ""),
        (MpsTenants.USER_NAMESPACES, pod_spec("p", container("logs")), ""),
    ],
)
def test_only_the_tenants_that_the_profile_lets_in_share_by_mps(tenants, pod, message):
    node = offer(tenants=tenants)

    if message:
        assert re.search(
            f"pod default/p, container 'c'.*{message}", refusal(fraction(), pods=(pod,), at=node)
        )
    else:
        assert namespaces(fraction(), pods=(pod,), at=node)


@pytest.mark.parametrize("claim_first", [True, False])
def test_a_container_that_is_root_counts_though_only_another_of_its_pod_names_the_claim(
    claim_first,
):
    sidecar = container("sidecar")
    both = (USER, sidecar) if claim_first else (sidecar, USER)
    node = offer(tenants=MpsTenants.NON_ROOT)

    message = refusal(fraction(), pods=(pod_spec("p", *both),), at=node)

    assert "pod default/p, container 'sidecar' can run as root or become it" in message
    assert "'c'" not in message
    assert namespaces(fraction(), pods=(pod_spec("p", USER, container("x", root=False)),), at=node)


def test_a_pod_without_a_container_that_uses_the_claim_hands_it_to_nobody():
    node = offer(tenants=MpsTenants.NON_ROOT)

    assert namespaces(fraction(), pods=(pod_spec("p", container("sidecar")),), at=node)


def test_where_tenants_matter_a_claim_that_any_pod_can_join_is_refused():
    pods, node = (pod_spec("p", USER),), offer(tenants=MpsTenants.NON_ROOT)

    message = refusal(fraction(), pods=pods, at=node, made_for_pod=False)

    assert "any pod can join this claim" in message
    assert "use a ResourceClaimTemplate" in message
    assert namespaces(fraction(), pods=pods, at=offer(), made_for_pod=False)


def test_several_requests_of_no_pod_that_is_known_are_not_guessed_to_be_apart():
    assert refusal(*TWO, pods=()) == (
        "claim default/claim: requests a, b are under MPS, and which of them a container uses is "
        "not known: it is reserved for no pod that is there (a PodGroup does not tell its pods); "
        "ask for all of it in one request, or write a claim for each"
    )
    assert namespaces(allocation("gpu-0"), allocation("gpu-1"), pods=()), (
        "one request is one namespace"
    )


def test_where_tenants_matter_a_claim_of_no_pod_that_is_known_is_refused():
    text = refusal(fraction(), pods=(), at=offer(tenants=MpsTenants.USER_NAMESPACES))

    assert "who uses the claim is not known: it is reserved for no pod" in text


@pytest.mark.parametrize("configs", [(MPS,), ()], ids=["by MPS", "by turns"])
def test_who_may_use_what_is_under_mps_is_recorded(configs):
    node = offer(tenants=MpsTenants.NON_ROOT)
    plan = planned(
        fraction(request="a/large"), pods=(pod_spec("p", USER),), configs=configs, at=node
    )

    (holding,) = plan.record.holdings
    assert holding.request == "a"
    assert holding.tenants is (MpsTenants.NON_ROOT if configs else MpsTenants.ANY)


def test_the_strictest_rule_of_the_gpus_holds():
    rules = (MpsTenants.NON_ROOT, MpsTenants.ANY)
    devices = [Device(gpu(n), SLICEABLE, Rules(tenants=tenants)) for n, tenants in enumerate(rules)]

    assert "can run as root" in refusal(
        allocation("gpu-1"),
        allocation("gpu-0"),
        pods=(pod_spec("p", ROOT),),
        at=Offer(tuple(devices)),
    )


def test_tenants_are_nobodys_business_where_nothing_is_shared_by_mps():
    node = offer(tenants=MpsTenants.USER_NAMESPACES)

    assert planned(fraction(), configs=(), pods=(pod_spec("p", ROOT),), at=node).grants


ONE_LIMIT = limits(defaultPerDevicePinnedMemoryLimit={gpu(0).uuid: "1Gi"})


@pytest.mark.parametrize(
    ("parts", "fields", "percent", "memory_bytes"),
    [
        pytest.param(
            (fraction("20Gi", request="a", cores="30"), fraction("8Gi", request="b", cores="20")),
            {"configs": ()},
            50,
            (28 * GIB,),
            id="parts of one GPU add up",
        ),
        pytest.param(
            (fraction("1Gi", request="a"), fraction("1Gi", request="b", cores="20")),
            {},
            100,
            (2 * GIB,),
            id="without reserved cores no more than all of them together",
        ),
        pytest.param(
            (fraction("20Gi", "gpu-0", cores="30"), fraction("8Gi", "gpu-1", cores="50")),
            {"configs": ()},
            30,
            (20 * GIB, 8 * GIB),
            id="of several GPUs the smallest percentage, and the memory of each",
        ),
        pytest.param(
            (allocation("gpu-0"), allocation("gpu-1")),
            {"configs": (ONE_LIMIT,)},
            100,
            (GIB, None),
            id="a part without a limit leaves its GPU without one",
        ),
        pytest.param(
            (fraction("1Gi", request="a"), fraction("1Gi", request="b")),
            {"at": offer(limited=False)},
            100,
            (None,),
            id="two parts that are only booked have no limit together",
        ),
    ],
)
def test_what_is_used_together_has_limits_together(parts, fields, percent, memory_bytes):
    (namespace,) = namespaces(*parts, pods=(pod_spec("p", user("c")),), **fields)

    assert (namespace.percent, namespace.memory_bytes) == (percent, memory_bytes)
    least = min((size for size in memory_bytes if size is not None), default=None)
    assert namespace.limits == MpsLimits(percent, least)


def test_the_lower_priority_counts_for_what_is_used_together():
    low = replace(limits(clientPriority="BelowNormal"), requests=("a",), path="b")
    parts = (fraction("1Gi", request="a"), fraction("1Gi", request="b"))

    (namespace,) = namespaces(*parts, configs=(MPS, low), pods=(pod_spec("p", user("c")),))

    assert namespace.priority is MpsPriority.BELOW_NORMAL


QUARTER = Fractional(20 * GIB, GIB, MIB, shares=4, replicas=4, cores_default=25)


@pytest.mark.parametrize(
    ("shape", "rules", "most"),
    [
        (QUARTER, {"one_share": True}, MpsLimits(25, 20 * GIB)),
        (QUARTER, {"one_share": True, "limited": False}, MpsLimits(25)),
        (replace(QUARTER, cores_default=0), {"one_share": True}, MpsLimits(100, 20 * GIB)),
        (QUARTER, {}, MpsLimits()),
        (SLICEABLE, {"one_share": True}, MpsLimits()),
        (Replica(0, 4, 20 * GIB, cores=25), {"one_share": True}, MpsLimits(25, 20 * GIB)),
        (Replica(0, 4, None), {"one_share": True}, MpsLimits()),
        (Replica(0, 4, 20 * GIB, cores=25), {"one_share": True, "limited": False}, MpsLimits(25)),
    ],
)
def test_the_most_that_a_claim_can_have_is_one_replica_where_nobody_gets_two(shape, rules, most):
    (device,) = offer(1, shape, **rules).devices
    allocated = allocation(device.name) if isinstance(shape, Replica) else fraction("1Gi")

    (namespace,) = namespaces(allocated, at=Offer((device,)))

    assert namespace.default_limits == most


def test_a_server_over_two_gpus_is_for_no_single_replica():
    node = offer(2, QUARTER, one_share=True)
    requests = (fraction("1Gi", "gpu-0", "a"), fraction("1Gi", "gpu-1", "b"))

    (namespace,) = namespaces(*requests, pods=(pod_spec("p", user("c")),), at=node)

    assert namespace.default_limits == MpsLimits()


def test_a_claims_namespace_has_a_server_of_its_own_unless_the_profile_joins_them():
    shared = offer(mps_servers=MpsServerScope.SHARED)

    assert [namespace.tenant for namespace in namespaces(fraction())] == ["default"]
    assert [namespace.tenant for namespace in namespaces(fraction(), at=shared)] == [""]


def test_the_name_of_a_namespace_is_the_same_whenever_it_is_planned_and_another_for_another_claim():
    (first,) = namespaces(fraction())
    (again,) = namespaces(fraction(), pods=(pod_spec("p", user("c")),))
    (other,) = namespaces(fraction(), name="other")

    assert first == again
    assert first.name != other.name


def test_a_claim_that_is_allocated_anew_on_another_gpu_has_another_namespace():
    """What an agent still has of the first one is not in its way."""
    (before,), (after,) = namespaces(fraction(device="gpu-0")), namespaces(fraction(device="gpu-1"))

    assert before.name != after.name


REQUESTS = ("a", "b", "c", "d")


@st.composite
def claims(draw):
    """Parts of GPUs with cores, and containers that use some requests of them."""
    available = {
        (n, resource): 100 if resource == "cores" else 79
        for n in range(3)
        for resource in ("cores", "gib")
    }
    parts = []
    for number in range(draw(st.integers(1, 5))):
        minor = draw(st.integers(0, 2))
        if not available[minor, "cores"] or available[minor, "gib"] < 1:
            continue
        cores = draw(st.integers(1, available[minor, "cores"]))
        gib = draw(st.integers(1, available[minor, "gib"]))
        available[minor, "cores"] -= cores
        available[minor, "gib"] -= gib
        part = fraction(
            f"{gib}Gi", f"gpu-{minor}", draw(st.sampled_from(REQUESTS)), cores=str(cores)
        )
        parts.append(replace(part, share=ShareId(f"share-{number}")))
    uses = st.sets(st.sampled_from(("", *REQUESTS, "unknown")), max_size=3)
    containers = [
        container(f"c{n}", *(("claim", request) for request in requests))
        for n, requests in enumerate(draw(st.lists(uses, max_size=4)))
    ]
    at = draw(st.integers(0, len(containers)))
    return parts, (pod_spec("p", *containers[:at]), pod_spec("q", *containers[at:]))


@given(asked=claims())
def test_every_part_is_in_one_namespace_and_no_container_has_two(asked):
    parts, pods = asked
    try:
        plan = planned(*parts, pods=pods, configs=())
    except ClaimError as e:
        assert "is on one MPS server" in str(e)
        assume(False)
    served_namespaces = [
        step.namespace for step in plan.steps if isinstance(step, ServeMpsNamespace)
    ]

    assert all(grant.namespace in served_namespaces for grant in plan.grants)
    assert len({served.name for served in served_namespaces}) == len(served_namespaces)
    assert all(re.fullmatch("[a-z0-9_]{1,64}", served.name) for served in served_namespaces)
    assert set(served_namespaces) == {grant.namespace for grant in plan.grants}
    for grant in plan.grants:
        assert grant.device.gpu.uuid in grant.namespace.gpus
    for spec in (spec for pod in pods for spec in pod.containers):
        uses = {request for _, request in spec.uses}
        grants = [g for g in plan.grants if "" in uses or g.allocation.base_request in uses]
        assert len({grant.namespace for grant in grants}) <= 1
        for namespace in {grant.namespace for grant in grants}:
            assert {g.device.gpu.uuid for g in grants} == set(namespace.gpus), (
                "it has all that it sees"
            )
    granted_percent, granted_bytes = defaultdict(int), defaultdict(int)
    for grant in plan.grants:
        granted_percent[grant.device.gpu.uuid] += grant.amount.cores
        granted_bytes[grant.device.gpu.uuid] += grant.amount.memory_bytes
    for uuid, percent in granted_percent.items():
        on_gpu = [served for served in served_namespaces if uuid in served.gpus]
        assert 0 < sum(served.percent for served in on_gpu) <= percent <= 100
        limits = [served.memory_bytes[served.gpus.index(uuid)] for served in on_gpu]
        assert sum(limit or 0 for limit in limits) == granted_bytes[uuid]


@given(asked=claims(), data=st.data())
def test_neither_the_order_of_allocations_nor_that_of_containers_makes_a_difference(asked, data):
    parts, pods = asked

    def served_namespaces(parts, pods):
        try:
            return set(namespaces(*parts, pods=pods, configs=()))
        except ClaimError:
            return "refused"

    turned = [replace(pod, containers=data.draw(st.permutations(pod.containers))) for pod in pods]

    assert served_namespaces(data.draw(st.permutations(parts)), turned[::-1]) == served_namespaces(
        parts, pods
    )
