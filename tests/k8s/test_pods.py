"""What a pod says of its containers, and when it ends, is read as the API server has it."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.errors import Forbidden, NotFound, Unreachable
from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.k8s.pods import ContainerSpec, PodDeletion, PodReader, PodSpec, parse_pod


@pytest.fixture
def reader(client):
    return PodReader(client)


def container(name="main", claims=(), **fields):
    """A container that asks for *claims*: the name that the pod has for one, or with a request."""
    requests = [{"name": claim} if isinstance(claim, str) else dict(claim) for claim in claims]
    return {"name": name, "image": "x", "resources": {"claims": requests}, **fields}


def pod(*containers, status=None, metadata=None, **spec):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "ns", "name": "p", "uid": "uid-p", **(metadata or {})},
        "spec": {"containers": list(containers), **spec},
        "status": status or {},
    }


def request(name, request):
    return {"name": name, "request": request}


def uses(document):
    return {container.name: set(container.uses) for container in parse_pod(document).containers}


def test_a_pod_is_read_as_it_is_at_this_moment(server, reader):
    server.put(
        pod(
            container(claims=["gpu"]),
            resourceClaims=[{"name": "gpu", "resourceClaimName": "shared"}],
        )
    )

    assert reader.read("ns", "p") == PodSpec(
        "ns", "p", PodUid("uid-p"), (ContainerSpec("main", frozenset({("shared", "")}), root=True),)
    )
    server.put(pod(container("other")))
    assert [parsed.name for parsed in reader.read("ns", "p").containers] == ["other"]


def test_a_glance_is_answered_from_what_the_api_server_has_in_memory(server, reader):
    server.put(pod(container()))

    assert reader.read_cached("ns", "p") == reader.read("ns", "p")
    versions = [request.query.get("resourceVersion") for request in server.requests]
    assert versions == ["0", None]


def test_a_pod_that_is_not_there_is_not_found(reader):
    with pytest.raises(NotFound):
        reader.read("ns", "p")


def test_an_api_server_that_does_not_answer_is_no_pod_that_is_gone(server, reader):
    server.put(pod(container()))
    server.fail(503, "GET", "pods", times=9)

    with pytest.raises(Unreachable):
        reader.read("ns", "p")


def test_who_may_not_read_pods_is_told_which_rule_is_missing(server, reader):
    server.put(pod(container()))
    server.fail(403, "GET", "pods", times=9)

    with pytest.raises(Forbidden, match=r'get pods ns/p.*needs the rule "get pods"'):
        reader.read("ns", "p")


def test_the_pods_of_a_node_are_known_by_the_uid_that_the_kubelet_has_for_them(server, reader):
    static = {"name": "static", "annotations": {"kubernetes.io/config.hash": "of-the-file"}}
    running = {"phase": "Running", "startTime": "2026-01-02T03:04:05Z"}
    server.put(pod(container(), nodeName="here", status=running))
    server.put(pod(container(), nodeName="here", metadata=static))
    server.put(pod(container(), nodeName="there", metadata={"name": "elsewhere"}))
    for phase in ("Succeeded", "Failed"):
        ended = {"name": phase.lower(), "uid": f"uid-{phase}"}
        server.put(pod(container(), nodeName="here", metadata=ended, status={"phase": phase}))

    pods = {each.pod: each for each in reader.on_node("here")}

    assert {each: known.ended for each, known in pods.items()} == {
        Pod("p", PodUid("uid-p")): False,
        Pod("static", PodUid("of-the-file")): False,
        Pod("succeeded", PodUid("uid-Succeeded")): True,
        Pod("failed", PodUid("uid-Failed")): True,
    }
    assert [each.name for each, known in pods.items() if known.acknowledged] == ["p"]
    assert {known.namespace for known in pods.values()} == {"ns"}
    assert pods[Pod("static", PodUid("of-the-file"))].spec.uid == "uid-p"
    assert server.requests[-1].query["resourceVersion"] == "0"


def test_who_may_not_list_pods_is_told_which_rule_is_missing(server, reader):
    server.fail(403, "GET", "pods", times=9)

    with pytest.raises(Forbidden, match=r'needs the rule "list pods"'):
        reader.on_node("here")


def test_a_claim_of_a_template_is_called_as_it_was_made():
    document = pod(
        container(claims=["gpu", "other"]),
        resourceClaims=[
            {"name": "gpu", "resourceClaimTemplateName": "template"},
            {"name": "other", "resourceClaimTemplateName": "template"},
        ],
        status={
            "resourceClaimStatuses": [
                {"name": "gpu", "resourceClaimName": "p-gpu-x7k2"},
                {"name": "other"},  # there is nothing to claim
            ]
        },
    )

    assert uses(document) == {"main": {("p-gpu-x7k2", "")}}


def test_each_container_has_the_requests_that_it_names():
    document = pod(
        container("one", [request("gpus", "first")]),
        container("two", [request("gpus", "second"), "gpus"]),
        container("none"),
        {"name": "bare", "image": "x"},
        resourceClaims=[{"name": "gpus", "resourceClaimName": "c"}],
    )

    assert uses(document) == {
        "one": {("c", "first")},
        "two": {("c", "second"), ("c", "")},
        "none": set(),
        "bare": set(),
    }


def test_init_and_ephemeral_containers_are_containers():
    document = pod(
        container("main"),
        initContainers=[container("setup", ["gpu"])],
        ephemeralContainers=[{"name": "debug", "image": "x"}],
        resourceClaims=[{"name": "gpu", "resourceClaimName": "c"}],
    )

    assert uses(document) == {"setup": {("c", "")}, "main": set(), "debug": set()}


def test_extended_resources_are_uses_of_the_claim_that_the_scheduler_made():
    document = pod(
        container("one"),
        container("two", ["gpu"]),
        resourceClaims=[{"name": "gpu", "resourceClaimName": "own"}],
        status={
            "extendedResourceClaimStatus": {
                "resourceClaimName": "p-extended-resources-9x",
                "requestMappings": [
                    {
                        "containerName": "one",
                        "resourceName": "nvidia.com/gpu",
                        "requestName": "container-0-request-0",
                    },
                    {
                        "containerName": "two",
                        "resourceName": "nvidia.com/gpu",
                        "requestName": "container-1-request-0",
                    },
                ],
            }
        },
    )

    assert uses(document) == {
        "one": {("p-extended-resources-9x", "container-0-request-0")},
        "two": {("p-extended-resources-9x", "container-1-request-0"), ("own", "")},
    }


SAFE = {"allowPrivilegeEscalation": False}


ROOT = {
    "nobody says anything: the image may": ({}, None, True),
    "the pod names a user": ({}, {"runAsUser": 1000}, False),
    "the pod names root": ({}, {"runAsUser": 0}, True),
    "the pod wants no root": ({}, {"runAsNonRoot": True}, False),
    "the container's user counts": ({"runAsUser": 0}, {"runAsUser": 1000}, True),
    "also where the pod's is root": ({"runAsUser": 7}, {"runAsUser": 0}, False),
    "the container may be root": ({"runAsNonRoot": False}, {"runAsNonRoot": True}, True),
    "the kubelet does not start it": ({"runAsUser": 0}, {"runAsNonRoot": True}, False),
    "a user is not undone by that": ({"runAsNonRoot": False}, {"runAsUser": 5}, False),
    "other fields say nothing": ({}, {"fsGroup": 5}, True),
}


@pytest.mark.parametrize(("of_container", "of_pod", "root"), ROOT.values(), ids=ROOT)
def test_who_may_run_as_root(of_container, of_pod, root):
    document = pod(container(securityContext=SAFE | of_container), securityContext=of_pod)

    assert [parsed.root for parsed in parse_pod(document).containers] == [root]


def adding(*capabilities):
    return SAFE | {"capabilities": {"add": list(capabilities)}}


BECOMES_ROOT = {
    "a program may be setuid": ({}, True),
    "said": ({"allowPrivilegeEscalation": True}, True),
    "nothing gives it more": (SAFE, False),
    "said to be not": (SAFE | {"privileged": False, "capabilities": None}, False),
    "privileged": (SAFE | {"privileged": True}, True),
    "one that is enough": (adding("SYS_ADMIN"), True),
    "all of them": (adding("ALL"), True),
    "one of two": (adding("NET_BIND_SERVICE", "SETUID"), True),
    "one that only opens ports": (adding("NET_BIND_SERVICE", "CAP_NET_BIND_SERVICE"), False),
    "what is taken away is no harm": (SAFE | {"capabilities": {"drop": ["ALL"]}}, False),
}


@pytest.mark.parametrize(("more", "root"), BECOMES_ROOT.values(), ids=BECOMES_ROOT)
def test_a_user_who_can_become_root_may_be_root(more, root):
    document = pod(container(securityContext={"runAsUser": 1000, "runAsNonRoot": True, **more}))

    assert [parsed.root for parsed in parse_pod(document).containers] == [root]


@pytest.mark.parametrize(
    ("spec", "host_users"),
    [
        ({}, True),
        ({"hostUsers": None}, True),
        ({"hostUsers": True}, True),
        ({"hostUsers": False}, False),
    ],
)
def test_a_pod_has_the_users_of_the_host_unless_it_says_otherwise(spec, host_users):
    assert parse_pod(pod(container(), **spec)).host_users is host_users


def test_a_pod_that_is_not_deleted_does_not_end():
    assert parse_pod(pod(container())).deletion is None


@pytest.mark.parametrize(("seconds", "grace"), [(None, 30.0), (0, 0.0), (600, 600.0)])
def test_a_pod_has_the_time_to_end_that_it_says(seconds, grace):
    assert parse_pod(pod(container(), terminationGracePeriodSeconds=seconds)).grace_seconds == grace


@pytest.mark.parametrize(
    "written",
    ["2026-01-02T03:04:05Z", "2026-01-02T05:04:05+02:00", "2026-01-02T03:04:05"],
)
def test_a_deleted_pod_ends_when_the_api_server_says(written):
    metadata = {"deletionTimestamp": written, "deletionGracePeriodSeconds": 20}
    ends_at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()

    assert parse_pod(pod(container(), metadata=metadata)).deletion == PodDeletion(ends_at, 20.0)


@pytest.mark.parametrize(
    ("ahead", "remaining"), [(30.0, 29.0), (1.5, 0.5), (0.5, 0.0), (-90.0, 0.0)]
)
def test_what_a_deleted_pod_has_left_is_told_by_the_api_servers_clock_rather_too_little(
    ahead, remaining
):
    metadata = {"deletionTimestamp": "2026-01-02T03:04:05Z"}
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp() - ahead

    deletion = parse_pod(pod(container(), metadata=metadata), now).deletion
    assert deletion == PodDeletion(now + ahead, 0.0, remaining)


def test_a_pod_that_is_read_from_the_api_server_says_what_it_has_left(server, reader):
    far = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    metadata = {"deletionTimestamp": far.isoformat(), "deletionGracePeriodSeconds": 3600}
    server.put(pod(container(), metadata=metadata))

    deletion = reader.read_cached("ns", "p").deletion
    assert deletion and deletion.left_seconds == pytest.approx(3600, abs=300)


NAMES = st.sampled_from(["a", "b", "c"])


@given(
    named=st.dictionaries(NAMES, st.sampled_from(["claim-1", "claim-2", None]), max_size=3),
    made=st.dictionaries(NAMES, st.sampled_from(["made-1", None]), max_size=3),
    containers=st.lists(st.lists(st.tuples(NAMES, st.sampled_from(["", "r"])), max_size=3)),
)
def test_no_container_uses_a_claim_that_it_does_not_name(named, made, containers):
    document = pod(
        *(
            container(f"c{index}", [request(*names) for names in claims])
            for index, claims in enumerate(containers)
        ),
        resourceClaims=[
            {"name": name, "resourceClaimName": claim}
            if claim
            else {"name": name, "resourceClaimTemplateName": "t"}
            for name, claim in named.items()
        ],
        status={
            "resourceClaimStatuses": [
                {"name": name, "resourceClaimName": claim} for name, claim in made.items()
            ]
        },
    )
    real = {name: named.get(name) or made.get(name) for name in {*named, *made}}

    assert uses(document) == {
        f"c{index}": {(real[name], of) for name, of in claims if real.get(name)}
        for index, claims in enumerate(containers)
    }
