"""Who uses a claim, by its record and by what containers were given."""

from dra_driver.k8s.claims import ClaimUid, Pod, PodUid
from dra_driver.k8s.pods import Container
from dra_driver.plan.prepare.claim_users import records_with_pods
from tests.builders import pod, record, ref


def given(name, *claims, namespace="default", container="main"):
    uids = frozenset(ref(claim).uid for claim in claims)
    return Container(f"{container} of {name}", container, namespace, pod(name), uids)


def test_a_pod_with_a_container_that_was_given_a_claim_uses_it():
    records = (record("a", pods=("p",)), record("b"), record("c", pods=("r",)))

    updated = records_with_pods(records, [given("q", "a", "b"), given("a-first", "a")])

    assert updated == (
        record("a", pods=("a-first", "p", "q")),
        record("b", pods=("q",)),
        record("c", pods=("r",)),
    )
    assert updated[2] is records[2]


def test_a_pod_is_named_once_whatever_a_container_says_that_it_is_called():
    called = Container("c", "main", "default", Pod("", PodUid("uid-p")), frozenset({ref("a").uid}))
    containers = [given("p", "a"), given("q", "a"), given("q", "a", container="init"), called]

    assert records_with_pods((record("a", pods=("p",)),), containers) == (
        record("a", pods=("p", "q")),
    )


def test_containers_of_other_namespaces_and_of_unknown_claims_change_nothing():
    records = (record("a", pods=("p",)),)
    unknown = given("q", "of-another-driver")

    updated = records_with_pods(records, [given("q", "a", namespace="other"), unknown])

    assert updated == records


def test_where_no_container_was_given_anything_the_records_are_the_same_object():
    records = (record("a", pods=("p",)),)

    assert records_with_pods(records, ()) is records
    assert records_with_pods(records, [given("sidecar")]) is records


def test_a_claim_is_told_by_its_uid_and_not_by_its_name():
    """A template's claim can be made again under the name of one that is being given back."""
    other = Container("c", "main", "default", pod("q"), frozenset({ClaimUid("another")}))

    assert records_with_pods((record("a"),), [other]) == (record("a"),)
