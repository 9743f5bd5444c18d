"""Claims are read live, and a record's claim is only gone when that is sure."""

from dataclasses import replace

import pytest

from dra_driver.base.errors import ClaimError, Forbidden, Unreachable
from dra_driver.k8s.claims import AllocationResult, ClaimReader, ClaimRef, ClaimUid, parse_claim
from dra_driver.k8s.resource_api import ResourceApi
from tests import builders

DRIVER, POOL = "gpu.example.com", "n1"


@pytest.fixture
def reader(client):
    return ClaimReader(ResourceApi(client), DRIVER, POOL)


def claim(name="c", device="gpu-0", driver=DRIVER, pool=POOL):
    """A claim with one device; without one it is not allocated."""
    result = {"request": "gpu", "driver": driver, "pool": pool, "device": device}
    requests = [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-of-{name}"},
        "spec": {"devices": {"requests": requests}},
        "status": {"allocation": {"devices": {"results": [result]}}} if device else {},
    }


REF = ClaimRef("ns", "c", ClaimUid("uid-of-c"))


@pytest.mark.parametrize("served", ["v1", "v1beta2", "v1beta1"])
def test_a_claim_is_read_in_every_version(server, reader, served):
    server.served = [served]
    server.put(claim())

    assert reader.read(REF).allocations == (AllocationResult("gpu", POOL, "gpu-0"),)


@pytest.mark.point(19, 20, 21)
@pytest.mark.parametrize(
    ("document", "message"),
    [
        pytest.param(None, "does not exist any more", id="gone"),
        pytest.param(claim(device=None), "not allocated", id="not allocated"),
        pytest.param(
            claim() | {"metadata": {"name": "c", "namespace": "ns", "uid": "new"}},
            "got replaced",
            id="another of that name",
        ),
        pytest.param(claim(driver="other.com"), "no device of driver", id="nothing of ours"),
    ],
)
def test_a_claim_that_cannot_be_prepared_is_refused_and_counts_as_gone(
    server, reader, document, message
):
    if document:
        server.put(document)

    with pytest.raises(ClaimError, match=message):
        reader.read(REF)
    assert not reader.exists(REF)


def test_a_claim_that_was_allocated_elsewhere_holds_nothing_here(server, reader):
    server.put(claim(pool="n2"))

    assert not reader.exists(REF)


def reads(server):
    """How claims were asked for since the last time: from memory or live."""
    requests = [each for each in server.requests if each.path.endswith("/resourceclaims/c")]
    server.forget_requests()
    return ["memory" if each.query.get("resourceVersion") == "0" else "live" for each in requests]


def test_a_claim_that_is_there_is_looked_at_without_asking_etcd(server, reader):
    server.put(claim())

    assert reader.exists(REF)
    assert reader.read_cached(REF).allocations == (AllocationResult("gpu", POOL, "gpu-0"),)

    assert reads(server) == ["memory", "memory"]


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(None, id="not there"),
        pytest.param(claim(device=None), id="not allocated"),
        pytest.param(
            claim() | {"metadata": {"name": "c", "namespace": "ns", "uid": "old"}},
            id="another of that name",
        ),
        pytest.param(claim(pool="n2"), id="allocated elsewhere"),
    ],
)
def test_a_claim_that_only_seems_gone_exists(server, reader, before):
    if before:
        server.put(before)
    server.hold_memory()
    if before:
        server.remove("resourceclaims", "c", "ns")
    server.put(claim())

    assert reader.exists(REF)
    assert reads(server) == ["memory", "live"]


@pytest.mark.point(18)
def test_a_claim_is_read_for_its_pod_as_it_is_now(server, reader):
    server.put(claim())
    server.hold_memory()
    server.put(claim(device="gpu-1"))

    assert reader.read_cached(REF).allocations[0].device == "gpu-0"
    assert reader.read(REF).allocations[0].device == "gpu-1"
    assert reads(server) == ["memory", "live"]


def test_a_claim_that_is_gone_is_gone_once_memory_knows_it(server, reader):
    server.put(claim())
    server.hold_memory()
    server.remove("resourceclaims", "c", "ns")

    assert reader.exists(REF), "a moment too long, and nothing is taken back too early"
    server.hold_memory()
    assert not reader.exists(REF)


def test_a_claim_whose_api_version_went_away_is_not_gone(server, reader):
    server.served = ["v1beta1"]
    server.put(claim())
    assert reader.exists(REF)
    server.served = ["v1"]

    assert reader.exists(REF)


@pytest.fixture
def without_requests(server):
    """A claim that asks for nothing: the API server takes it, and writes null for its requests."""
    document = claim("asks-for-nothing", None)
    document["spec"]["devices"]["requests"] = None
    server.put(document)


@pytest.mark.usefixtures("without_requests")
def test_a_claim_is_found_by_its_uid_among_many(server, reader):
    for index in range(3):
        server.put(claim(f"c{index}"))

    found_claim = reader.find_by_uid(ClaimUid("uid-of-c1"))

    assert found_claim is not None
    assert found_claim.ref == ClaimRef("ns", "c1", ClaimUid("uid-of-c1"))
    assert reader.find_by_uid(ClaimUid("none")) is None


def test_a_claim_found_by_its_uid_without_anything_of_ours_is_refused(server, reader):
    server.put(claim(device=None))

    with pytest.raises(ClaimError, match="not allocated"):
        reader.find_by_uid(ClaimUid("uid-of-c"))


@pytest.mark.usefixtures("without_requests")
@pytest.mark.parametrize("served", ["v1", "v1beta2", "v1beta1"])
def test_what_was_allocated_of_this_node_is_known_whether_it_was_prepared_or_not(
    server, reader, served
):
    server.served = [served]
    server.put(claim("a", "gpu-0-mig-1g5gb-19-0"))
    server.put(claim("b", "gpu-1"))
    server.put(claim("elsewhere", "gpu-2", pool="n2"))
    server.put(claim("theirs", "gpu-3", driver="net.example.com"))
    server.put(claim("waits", None))
    monitor = claim("monitor", "gpu-4")
    monitor["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = True
    server.put(monitor)

    assert reader.allocated() == {"gpu-0-mig-1g5gb-19-0", "gpu-1"}
    assert reader.on_this_node() == ("ns/a", "ns/b", "ns/monitor")


def test_a_claim_is_deleted_when_it_or_its_uid_is_gone_and_not_when_it_is_deallocated(
    server, reader
):
    assert reader.is_deleted(REF)
    server.put(claim())
    assert not reader.is_deleted(REF)
    assert reader.is_deleted(ClaimRef("ns", "c", ClaimUid("an-earlier-one")))
    server.put(claim(device=None))
    assert not reader.is_deleted(REF)


@pytest.mark.parametrize(("status", "error"), [(503, Unreachable), (403, Forbidden)])
@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda reader: reader.exists(REF), id="exists"),
        pytest.param(lambda reader: reader.is_deleted(REF), id="is deleted"),
        pytest.param(lambda reader: reader.allocated(), id="what is allocated"),
        pytest.param(lambda reader: reader.on_this_node(), id="which claims"),
    ],
)
def test_what_cannot_be_known_is_an_error_and_no_answer(server, reader, ask, status, error):
    server.put(claim())
    server.fail(status, "GET", "resourceclaims", times=9)

    with pytest.raises(error):
        ask(reader)


@pytest.mark.point(93)
@pytest.mark.parametrize(
    ("owners", "made_for_pod"),
    [
        pytest.param(None, False, id="written by a user"),
        pytest.param([{"kind": "Pod", "name": "p", "controller": True}], True, id="of a pod"),
        pytest.param([{"kind": "Pod", "name": "p"}], False, id="gone with a pod that others share"),
        pytest.param([{"kind": "Job", "name": "j", "controller": True}], False, id="of a job"),
    ],
)
def test_who_made_a_claim_is_known_and_who_else_it_is_reserved_for_makes_no_difference(
    owners, made_for_pod
):
    group = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g", "uid": "1"}
    document = builders.claim_document(builders.claim("gpu-0"), DRIVER)
    document["status"]["reservedFor"] = [group]
    document["metadata"]["ownerReferences"] = owners

    expected = replace(builders.claim("gpu-0"), made_for_pod=made_for_pod)
    assert parse_claim(document, builders.ref(), DRIVER) == expected
