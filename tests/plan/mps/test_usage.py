"""What follows from what the MPS agent serves, decided by values alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.model.gpus import DeviceName, GpuUuid, MigInstance, PartitionKey, placeholder_uuid
from dra_driver.model.mps import (
    MpsClient,
    MpsNamespace,
    MpsNamespaceName,
    MpsServer,
    MpsServerName,
    MpsServerRestart,
    MpsStatus,
    ServedNamespace,
)
from dra_driver.model.processes import ContainerProcess
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.plan.memory.usage import GpuMemorySample, MemoryShare, ProcessUsage
from dra_driver.plan.mps.usage import (
    CONNECTING_SECONDS,
    BypassingProcess,
    ClaimMpsUsage,
    MpsSnapshot,
    NamespaceClients,
    agent_down_message,
    bypass_message,
    bypass_subject,
    bypassing_processes,
    claim_namespaces,
    client_owners,
    clients_without_namespace,
    confirmed_bypasses,
    counted_clients,
    last_restart,
    mps_memory_shares,
    mps_usages,
    new_restarts,
    orphaned_namespaces,
    pod_not_served_message,
    server_failures,
    server_restarted_message,
    unserved_claims,
)
from tests.builders import holding, ref

GPU, OTHER = GpuUuid("GPU-0"), GpuUuid("GPU-1")
A, B, C = ref("a"), ref("b"), ref("c")
WEB, DB = Pod("web", PodUid("uid-web")), Pod("db", PodUid("uid-db"))


def namespace(name="s-a", claim=A, gpus=(GPU,), percent=30):
    return MpsNamespace(MpsNamespaceName(name), claim.uid, tuple(gpus), percent)


def record(claim=A, *namespaces, pods=(WEB,), completed=True, holdings=None):
    if holdings is None:
        gpus = sorted({gpu for namespace in namespaces for gpu in namespace.gpus})
        holdings = tuple(holding(claim, f"gpu-{gpu[-1]}", gpu=gpu) for gpu in gpus)
    steps = tuple(map(ServeMpsNamespace, namespaces))
    return ClaimRecord(claim, holdings, steps, prepared=() if completed else None, pods=tuple(pods))


def server(*namespaces, clients=(), protocol=3, ready=True, name="s1"):
    served = tuple(ServedNamespace(namespace, protocol, "/pipe") for namespace in namespaces)
    return MpsServer(
        MpsServerName(name),
        namespaces[0].gpus,
        protocol,
        ready,
        namespaces=served,
        clients=tuple(clients),
    )


def snapshot_of(servers, *records, pods=None):
    """These servers, and these records."""
    return MpsSnapshot(MpsStatus(tuple(servers)), records, pods or {})


def client(pid, of=None):
    return MpsClient(pid, MpsNamespaceName(of) if of else None)


def process(pid, pod=WEB):
    return ContainerProcess(pid, 7, pod.uid, "container")


def look(*uses, gpu=GPU):
    """What is on a GPU: the pid and the claims for which it may be there."""
    usages = (
        ProcessUsage(process(pid), 1, frozenset(claim.uid for claim in claims))
        for pid, *claims in uses
    )
    return GpuMemorySample(gpu, (), tuple(usages))


# Who is served


def test_a_prepared_claim_that_is_not_served_is_and_one_that_is_being_prepared_is_not():
    first, second = namespace(), namespace("s-b", B)
    records = record(A, first), record(B, second)

    assert unserved_claims(snapshot_of([server(first)], *records)) == (B.uid,)
    assert unserved_claims(snapshot_of([server(first)], *records), {second.name}) == ()
    assert unserved_claims(snapshot_of([server(first, second)], *records)) == ()
    assert unserved_claims(snapshot_of([], record(A, first, completed=False))) == ()


def test_a_claim_that_cannot_use_mps_is_told_why():
    first, second, third = namespace(), namespace("s-b", B), namespace("s-c", C)
    records = record(A, first), record(B, second), record(C, third, completed=False)
    broken = snapshot_of([replace(server(first, ready=False), reason="it died")], *records)

    assert server_failures(broken, (), ()) == {
        A.uid: "the MPS server of gpu-0 (GPU-0) does not work: it died"
    }
    assert server_failures(broken, {first.name}, {B.uid}) == {
        A.uid: "the MIG instance of its MPS server is gone",
        B.uid: "no MPS server of gpu-0 (GPU-0) serves it",
    }
    assert server_failures(snapshot_of([server(first, second)], *records), (), ()) == {}


def test_a_namespace_that_no_record_has_is_orphaned_unless_its_record_cannot_be_read():
    first, second = namespace(), namespace("s-b", B)
    snapshot = snapshot_of([server(first, second)], record(A, first, completed=False))

    assert orphaned_namespaces(snapshot, ()) == (second,)
    assert orphaned_namespaces(snapshot, {B.uid}) == ()


@given(
    recorded=st.lists(st.tuples(st.integers(0, 5), st.booleans()), unique_by=lambda pair: pair[0]),
    served=st.sets(st.integers(0, 5)),
    unreadable=st.sets(st.integers(0, 5)),
)
def test_after_what_is_lacking_is_served_and_what_is_unknown_is_ended_all_is_right(
    recorded, served, unreadable
):
    claims = [ref(f"c{number}") for number in range(6)]
    made = [namespace(f"s{number}", claim) for number, claim in enumerate(claims)]
    records = (record(claims[number], made[number], completed=done) for number, done in recorded)
    snapshot = snapshot_of([server(made[number]) for number in served], *records)

    again = {n for n, claim in enumerate(claims) if claim.uid in unserved_claims(snapshot)}
    orphans = orphaned_namespaces(snapshot, {claims[n].uid for n in unreadable})
    ended = {made.index(orphan) for orphan in orphans}

    after = (served | again) - ended
    assert {number for number, done in recorded if done} <= after
    assert after <= {number for number, _ in recorded} | unreadable
    assert not ended & {number for number, _ in recorded}


# What is news


def incident(number, at=0.0, namespaces=("s-a",)):
    return MpsServerRestart(
        number, MpsServerName("s1"), at, "it died", tuple(map(MpsNamespaceName, namespaces)), 2
    )


@pytest.mark.parametrize(
    ("last", "now", "expected"),
    [
        pytest.param(None, 119.0, [1, 2], id="at the start those of the last minutes"),
        pytest.param(None, 121.0, [2], id="and no older ones"),
        pytest.param(None, 9999.0, [], id="so perhaps none"),
        pytest.param(0, 9999.0, [1, 2], id="later all that were not told"),
        pytest.param(1, 5.0, [2], id="each once"),
        pytest.param(2, 5.0, [], id="and not again"),
        pytest.param(7, 121.0, [2], id="an agent that begins anew is as at the start"),
    ],
)
def test_what_is_told_of_restarts(last, now, expected):
    incidents = new_restarts([incident(1), incident(2, at=100.0)], last, now)

    assert [restart.number for restart in incidents] == expected


def test_where_nothing_happened_the_last_number_is_none():
    assert last_restart([]) == 0
    assert last_restart([incident(3), incident(4)]) == 4


# Who is a client of whom


def candidates(owners, by_pod=None):
    """Clients by number with the namespaces of which they may be, and those of pods."""
    return NamespaceClients(
        {pid: frozenset(map(MpsNamespaceName, names)) for pid, names in owners.items()},
        {pod: frozenset(pids) for pod, pids in (by_pod or {}).items()},
    )


OF_WEB, OF_DB, OF_BOTH, LATER, ELSE = map(PodUid, ("web", "db", "both", "later", "else"))
S_A, S_B, S_C = map(MpsNamespaceName, ("s-a", "s-b", "s-c"))
USERS = {S_A: {OF_WEB, OF_BOTH}, S_B: {OF_DB, OF_BOTH}, S_C: {ELSE}}


def serving(namespaces=(S_A, S_B, S_C), clients=(7,), protocol=2):
    """A server with these namespaces; a client is a number, or that with its namespace."""
    pairs = (pid if isinstance(pid, tuple) else (pid,) for pid in clients)
    clients = [MpsClient(*pair) for pair in pairs]
    return server(*(namespace(name) for name in namespaces), clients=clients, protocol=protocol)


def test_a_client_is_of_the_namespace_that_is_told_wherever_it_runs():
    assert client_owners(serving(clients=[(7, S_B)]), USERS, {7: OF_WEB}) == {7: {S_B}}


@pytest.mark.parametrize("pods", [{}, {7: OF_WEB}, {7: OF_DB}, {7: LATER}])
def test_the_only_namespace_of_a_server_has_all_its_clients(pods):
    assert client_owners(serving([S_A]), USERS, pods) == {7: {S_A}}


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param({7: OF_WEB}, {S_A}, id="a pod with one of them"),
        pytest.param({7: OF_BOTH}, {S_A, S_B}, id="a pod with two of them"),
        pytest.param({7: LATER}, {S_A, S_B, S_C}, id="a pod nobody told us of"),
        pytest.param({}, {S_A, S_B, S_C}, id="a process that nobody finds"),
    ],
)
def test_of_several_namespaces_it_is_one_that_its_pod_uses(pods, expected):
    assert client_owners(serving(), USERS, pods) == {7: expected}


def test_a_namespace_that_no_record_has_may_have_whoever_is_nobody_elses():
    gone = MpsNamespaceName("c_gone")

    assert client_owners(serving([S_A, gone]), USERS, {7: OF_WEB}) == {7: {S_A}}
    assert client_owners(serving([S_A, gone]), USERS, {7: OF_DB}) == {7: {S_A, gone}}


def test_a_client_that_may_be_anothers_counts_for_none_and_nobodys_number_is_known():
    owners = client_owners(serving(clients=[7, 8, 9]), USERS, {7: OF_WEB, 8: OF_BOTH, 9: ELSE})

    assert counted_clients({S_A}, owners) is None
    assert counted_clients({S_B}, owners) is None
    assert counted_clients({S_A, S_B}, owners) == {7, 8}, "together they have it for certain"
    assert counted_clients({S_C}, owners) == {9}, "owners it cannot be is not concerned"


def test_only_clients_of_which_nothing_else_tells_have_to_be_looked_for():
    alone = serving([S_A], clients=[1])
    telling = serving([S_A, S_B], clients=[(2, S_A)], protocol=3)
    several = serving([S_B, S_C], clients=[3, 4])

    assert clients_without_namespace(MpsStatus((alone, telling, several))) == {3, 4}


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([S_A, S_B, S_C, None])),
        unique_by=lambda client: client[0],
    ),
    st.dictionaries(st.integers(1, 9), st.sampled_from([OF_WEB, OF_DB, OF_BOTH, LATER])),
)
def test_no_client_is_counted_twice_and_none_is_lost_where_every_number_is_known(listed, pods):
    now = serving(clients=[pid if name is None else (pid, name) for pid, name in listed])

    owners = client_owners(now, USERS, pods)
    counted = [counted_clients({name}, owners) for name in (S_A, S_B, S_C)]

    known = [pid for pids in counted if pids is not None for pid in pids]
    assert len(known) == len(set(known))
    if None not in counted:
        assert set(known) == {pid for pid, _ in listed}
    assert counted_clients({S_A, S_B, S_C}, owners) == {pid for pid, _ in listed}


FIRST, SECOND = namespace(), namespace("s-b", B)


def two_claims(*clients, protocol=2, second_pods=(DB,), pods):
    """The namespaces of two claims in one server, with these clients; *pods* is of these."""
    both = server(FIRST, SECOND, protocol=protocol, clients=clients)
    records = record(A, FIRST), record(B, SECOND, pods=second_pods)
    return snapshot_of([both], *records, pods=pods).clients


def test_protocol_3_tells_of_which_namespace_a_client_is():
    pods = {1: WEB.uid, 2: WEB.uid}
    clients = two_claims(client(1, "s-a"), client(2, "s-b"), protocol=3, pods=pods)

    assert clients[S_A] == candidates({1: {"s-a"}}, {WEB.uid: {1}})


def test_with_protocol_2_the_pods_tell_which_of_several_claims_has_a_client():
    clients = two_claims(client(1), client(2), client(3), pods={1: WEB.uid, 2: DB.uid})

    either = {"s-a", "s-b"}
    assert clients[S_A] == candidates({1: {"s-a"}, 3: either}, {WEB.uid: {1}})


def test_with_protocol_2_a_client_of_a_pod_with_two_claims_may_be_of_either_and_ends_with_the_pod():
    clients = two_claims(client(1), second_pods=(WEB,), pods={1: WEB.uid})

    either = candidates({1: {"s-a", "s-b"}}, {WEB.uid: {1}})
    assert clients == {"s-a": either, "s-b": either}


@pytest.mark.parametrize("protocol", [3, 2])
def test_a_client_owners_process_cannot_be_seen_is_of_the_only_pod(protocol):
    only_server = server(
        FIRST, protocol=protocol, clients=[client(1, "s-a" if protocol == 3 else None)]
    )

    assert snapshot_of([only_server], record(A, FIRST)).clients[S_A].by_pod == {WEB.uid: {1}}
    shared = record(A, FIRST, pods=(WEB, DB))
    assert snapshot_of([only_server], shared).clients[S_A] == candidates({1: {"s-a"}})


def test_a_client_of_a_pod_that_does_not_have_the_claim_is_counted_and_is_no_pods():
    snapshot = snapshot_of(
        [server(FIRST, clients=[client(1, "s-a")])], record(A, FIRST), pods={1: DB.uid}
    )

    assert snapshot.clients[S_A] == candidates({1: {"s-a"}})


def test_what_is_not_served_has_no_clients_and_what_nobody_has_is_not_told():
    assert snapshot_of([], record(A, FIRST), pods={1: WEB.uid}).clients == {}
    assert snapshot_of([server(FIRST, clients=[client(1, "s-a")])]).clients == {}


# Who bypasses MPS


def bypassing(sample, servers, *records):
    """The processes on *sample* that bypass MPS."""
    bypasses = bypassing_processes([sample], snapshot_of(servers, *records))
    return {bypass.process.pid for bypass in bypasses}


@pytest.mark.parametrize(
    ("usages", "serving", "expected"),
    [
        pytest.param(
            [(1, A), (2, A)], server(FIRST, clients=[client(1, "s-a")]), {2}, id="no client of it"
        ),
        pytest.param(
            [(1, A), (2, B)],
            server(FIRST, SECOND, clients=[client(1, "s-b"), client(2, "s-b")]),
            {1},
            id="protocol 3: a client of another claim's namespace",
        ),
        pytest.param(
            [(1, A), (2, A)],
            server(FIRST, protocol=2, clients=[client(1)]),
            {2},
            id="protocol 2: any client of the server is one",
        ),
        pytest.param([(9,)], server(FIRST), set(), id="of nobody"),
        pytest.param([(9, C)], server(FIRST), set(), id="of a claim without MPS"),
        pytest.param([(9, A, C)], server(FIRST), set(), id="perhaps of a claim without MPS"),
        pytest.param([(1, A)], server(SECOND), set(), id="it is not served"),
        pytest.param([(1, A)], server(FIRST, ready=False), set(), id="it is not ready"),
    ],
)
def test_who_bypasses_mps(usages, serving, expected):
    records = record(A, FIRST), record(B, SECOND, pods=(DB,))

    assert bypassing(look(*usages), [serving], *records) == expected


def test_who_may_be_of_several_claims_bypasses_all_of_them_or_none():
    both = server(FIRST, SECOND, clients=[client(1, "s-b")])
    snapshot = snapshot_of([both], record(A, FIRST), record(B, SECOND))

    bypasses = bypassing_processes([look((1, A, B), (2, A, B))], snapshot)

    assert bypasses == {BypassingProcess(process(2), GPU, (A, B))}


def test_a_claim_with_two_servers_on_a_gpu_may_use_either_and_both_have_to_be_well():
    first, second = namespace("s-1"), namespace("s-2")
    sample = look((1, A), (2, A), (3, A))
    both = server(first, second, clients=[client(1, "s-1"), client(2, "s-2")])

    for servers, expected in (([both], {3}), ([server(first)], set()), ([server(second)], set())):
        assert bypassing(sample, servers, record(A, first, second)) == expected


def test_a_process_on_a_gpu_that_the_claim_has_without_mps_does_not_bypass_it():
    assert bypassing(look((1, A), gpu=OTHER), [server(FIRST)], record(A, FIRST)) == set()


def test_who_is_seen_long_enough_is_not_about_to_connect():
    old, new = BypassingProcess(process(1), GPU, (A,)), BypassingProcess(process(2), GPU, (A,))

    assert confirmed_bypasses({old: 0.0, new: 0.1}, CONNECTING_SECONDS) == {old}


def test_everybody_on_a_gpu_under_mps_is_known():
    made = namespace()
    looks_on = Holding(C, DeviceName("gpu-0"), gpu=GPU, admin=True)
    part = Holding(B, DeviceName("gpu-0"), gpu=GPU)
    elsewhere = Holding(B, DeviceName("gpu-1"), gpu=OTHER)
    records = [
        record(A, made),
        record(B, holdings=(part, elsewhere), pods=(DB,)),
        record(C, holdings=(looks_on,), pods=()),
    ]

    assert mps_memory_shares(snapshot_of([], *records)) == {
        GPU: (
            MemoryShare(A, frozenset({WEB.uid}), None),
            MemoryShare(B, frozenset({DB.uid}), None),
            MemoryShare(C, frozenset(), None, admin=True),
        )
    }


def test_where_no_prepared_claim_is_under_mps_no_gpu_needs_a_look():
    records = [record(A, namespace(), completed=False), record(B, holdings=())]

    assert mps_memory_shares(snapshot_of([], *records)) == {}


# MIG instances

KEY = PartitionKey(19, 2, 1, 1)
INSTANCE = MigInstance(KEY, 7, 0, GpuUuid("MIG-0"))


def partition(claim=A, instance=INSTANCE, start=2):
    key = PartitionKey(19, start, 1, 1)
    name = DeviceName(f"gpu-0-mig-1g5gb-19-{start}")
    return Holding(claim, name, gpu=GPU, partition=key, instance=instance)


def test_who_shares_an_instance_is_known_and_who_has_another_or_the_gpu_is_not_of_it():
    other = MigInstance(PartitionKey(19, 3, 1, 1), 8, 0, GpuUuid("MIG-1"))
    looks_on = Holding(C, DeviceName("gpu-0-mon"), gpu=GPU, admin=True)
    records = [
        record(A, namespace(gpus=(INSTANCE.uuid,)), holdings=(partition(A),)),
        record(B, holdings=(partition(B), partition(B, other, 3)), pods=(DB,)),
        record(C, holdings=(looks_on, partition(C, None, 4))),
    ]

    assert mps_memory_shares(snapshot_of([], *records)) == {
        INSTANCE.uuid: (
            MemoryShare(A, frozenset({WEB.uid}), None),
            MemoryShare(B, frozenset({DB.uid}), None),
        )
    }


def test_a_namespace_knows_which_instance_it_is_over_once_that_is_created():
    before = record(
        A,
        namespace(gpus=(placeholder_uuid(GPU, KEY),)),
        holdings=(partition(instance=None),),
        completed=False,
    )
    after = record(A, namespace(gpus=(INSTANCE.uuid,)), holdings=(partition(),))
    (first, second) = claim_namespaces([before, after])

    placeholder = placeholder_uuid(GPU, KEY)
    name = "gpu-0-mig-1g5gb-19-2"
    assert (first.display_names, first.instance) == (
        {placeholder: f"{name} ({placeholder})"},
        None,
    )
    assert (second.display_names, second.instance) == (
        {"MIG-0": f"{name} (MIG-0)"},
        (GPU, INSTANCE),
    )
    assert [of_gpu.instance for of_gpu in claim_namespaces([record(A, FIRST)])] == [None]


# What is counted


def test_what_a_claim_has_on_a_gpu_is_all_that_it_has_there():
    namespaces = claim_namespaces(
        [
            record(
                A, namespace("s-1", percent=60), namespace("s-2", gpus=(GPU, OTHER), percent=50)
            ),
            record(B, SECOND, completed=False),
        ]
    )
    clients = {
        MpsNamespaceName("s-1"): candidates({1: {"s-1"}, 2: {"s-1", "s-2"}}),
        MpsNamespaceName("s-2"): candidates({2: {"s-1", "s-2"}, 3: {"s-2"}}),
    }
    bypasses = [BypassingProcess(process(9), OTHER, (A, C))]

    assert mps_usages(namespaces, clients, bypasses) == (
        ClaimMpsUsage(A, GPU, 100, 3, 0),
        ClaimMpsUsage(A, OTHER, 50, None, 1),  # 2 may be of the namespace that is not there
    )


def test_where_the_agent_does_not_answer_clients_are_unknown_and_else_there_may_be_none():
    namespaces = claim_namespaces([record(A, FIRST)])

    assert mps_usages(namespaces) == (ClaimMpsUsage(A, GPU, 30, None, None),)
    assert mps_usages(namespaces, {}, ()) == (ClaimMpsUsage(A, GPU, 30, 0, 0),)


# What is said


def test_a_pod_reads_what_happened_and_what_to_do():
    (claim_namespace,) = claim_namespaces([record(A, namespace(gpus=(GPU, OTHER)))])

    message = server_restarted_message(incident(1), claim_namespace)
    assert "MPS server of gpu-0 (GPU-0), gpu-1 (GPU-1) was restarted (it died)" in message
    assert "claim default/a" in message
    assert "restart the container" in message

    message = agent_down_message(claim_namespace, 60.0, "nobody answers")
    assert "not answered for 60 s: claim default/a goes on" in message
    assert "on gpu-0 (GPU-0), gpu-1 (GPU-1)" in message
    assert "look at the pod of the DaemonSet" in message
    assert message.endswith("(nobody answers)")


def test_a_process_that_bypasses_mps_is_named_with_what_to_look_for():
    single = BypassingProcess(process(4711), GPU, (A,))
    several = BypassingProcess(process(1), GPU, (A, B))

    message = bypass_message(single, "gpu-0 (GPU-0)")
    assert message.startswith("process 4711 of the host uses gpu-0 (GPU-0) for claim default/a")
    assert "CUDA_MPS_PIPE_DIRECTORY" in message
    assert bypass_subject(several) == "GPU-0 claims default/a or default/b"


def test_a_pod_that_joined_is_told_which_claim_does_not_serve_it_and_why():
    message = pod_not_served_message(claim_namespaces([record(A, FIRST)]), ["one thing", "another"])

    assert str(A) in message
    assert GPU in message
    assert message.endswith("does not serve all of it: one thing; another")
