"""Whose client a process is: told, or found out by its pod, or not known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.k8s.claims import ClaimUid, PodUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import (
    MpsClient,
    MpsNamespace,
    MpsNamespaceName,
    MpsServer,
    MpsServerName,
    MpsStatus,
    ServedNamespace,
)
from dra_driver.plan.mps.usage import client_owners, clients_without_namespace, counted_clients

GPU = GpuUuid("GPU-0")
WEB, DB, BOTH, LATER = map(PodUid, ("web", "db", "both", "later"))
A, B, C = map(MpsNamespaceName, ("c_a", "c_b", "c_c"))
USERS = {A: {WEB, BOTH}, B: {DB, BOTH}, C: {PodUid("other")}}


def server(namespaces=(A, B, C), clients=(7,), protocol=2):
    served = tuple(
        ServedNamespace(MpsNamespace(name, ClaimUid(name), (GPU,)), protocol, "/pipe")
        for name in namespaces
    )
    clients_seen = tuple(
        MpsClient(client) if isinstance(client, int) else MpsClient(client[0], client[1])
        for client in clients
    )
    return MpsServer(
        MpsServerName("s"), (GPU,), protocol, True, namespaces=served, clients=clients_seen
    )


def test_a_client_is_of_the_namespace_that_is_told_wherever_it_runs():
    assert client_owners(server(clients=[(7, B)]), USERS, {7: WEB}) == {7: {B}}


@pytest.mark.parametrize("pods", [{}, {7: WEB}, {7: DB}, {7: LATER}])
def test_the_only_namespace_of_a_server_has_all_its_clients(pods):
    assert client_owners(server([A]), USERS, pods) == {7: {A}}


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param({7: WEB}, {A}, id="a pod with one of them"),
        pytest.param({7: BOTH}, {A, B}, id="a pod with two of them"),
        pytest.param({7: LATER}, {A, B, C}, id="a pod nobody told us of"),
        pytest.param({}, {A, B, C}, id="a process that nobody finds"),
    ],
)
def test_of_several_namespaces_it_is_one_that_its_pod_uses(pods, expected):
    assert client_owners(server(), USERS, pods) == {7: expected}


def test_a_namespace_that_no_record_has_may_have_whoever_is_nobody_elses():
    gone = MpsNamespaceName("c_gone")

    assert client_owners(server([A, gone]), USERS, {7: WEB}) == {7: {A}}
    assert client_owners(server([A, gone]), USERS, {7: DB}) == {7: {A, gone}}


def test_a_client_that_may_be_anothers_counts_for_none_and_nobodys_number_is_known():
    whose = client_owners(server(clients=[7, 8, 9]), USERS, {7: WEB, 8: BOTH, 9: PodUid("other")})

    assert counted_clients({A}, whose) is None
    assert counted_clients({B}, whose) is None
    assert counted_clients({A, B}, whose) == {7, 8}, "together they have it for certain"
    assert counted_clients({C}, whose) == {9}, "whose it cannot be is not concerned"


def test_only_clients_of_which_nothing_else_tells_have_to_be_looked_for():
    alone = server([A], clients=[1])
    telling = server([A, B], clients=[(2, A)], protocol=3)
    several = server([B, C], clients=[3, 4])

    assert clients_without_namespace(MpsStatus((alone, telling, several))) == {3, 4}


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([A, B, C, None])),
        unique_by=lambda client: client[0],
    ),
    st.dictionaries(st.integers(1, 9), st.sampled_from([WEB, DB, BOTH, LATER])),
)
def test_no_client_is_counted_twice_and_none_is_lost_where_every_number_is_known(listed, pods):
    now = server(clients=[pid if name is None else (pid, name) for pid, name in listed])

    whose = client_owners(now, USERS, pods)
    counted = [counted_clients({name}, whose) for name in (A, B, C)]

    known = [pid for pids in counted if pids is not None for pid in pids]
    assert len(known) == len(set(known))
    if None not in counted:
        assert set(known) == {pid for pid, _ in listed}
    assert counted_clients({A, B, C}, whose) == {pid for pid, _ in listed}
