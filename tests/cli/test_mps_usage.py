"""What is told of claims under MPS: from the ledger always, from the agent while it answers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.__main__ import node_opener
from dra_driver.base.errors import MpsAgentUnreachable
from dra_driver.cli.claims.run import claims, report_document
from dra_driver.cli.mps_usage import ClaimsMpsUsage, MpsReport, server_message
from dra_driver.cli.terminal import Terminal
from dra_driver.k8s.claims import PodUid
from dra_driver.model.gpus import DeviceName, GpuUuid, MigInstance, PartitionKey
from dra_driver.model.mps import MpsStatus
from dra_driver.model.offer import AdminAccess
from dra_driver.model.records import Holding
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.ledger import Ledger
from dra_driver.plan.mps.usage import clients_without_namespace
from dra_driver.settings import ClaimsSettings
from tests.builders import holding, ref
from tests.cli.mps import (
    GIB,
    GPU,
    OTHER,
    SERVER,
    SLICEABLE,
    claim,
    namespace,
    report,
    report_lines,
    server,
)

DOWN = "the MPS agent of this node does not answer at /run/agent.sock (No such file or directory)"


def mps_report(*servers, **fields):
    return MpsReport(MpsStatus(servers), **fields)


NO_SERVER = mps_report()


def mps_of(record, *others, **fields):
    """What JSON has of the first device of *record*."""
    every = report_document(report(record, *others, **fields))["claims"]
    (own,) = (document for document in every if document["uid"] == record.claim.uid)
    return own["devices"][0]["mps"]


def test_a_share_under_mps_is_told_from_one_that_takes_turns_by_a_word():
    turns = replace(claim("turns", cores=0), steps=())

    _, mps, other = report_lines(claim("a"), turns)

    assert mps == "  # default/a      10.0 GiB  MPS 30 %, limit 10.0 GiB"
    assert "MPS" not in other and other.endswith("no limit")


def test_clients_and_what_they_use_are_told_beside_the_limits():
    a, b = claim("a"), claim("b", percent=70, cores=70)
    known = mps_report(
        server(a, b, clients=[(7, "a"), (9, "a"), (11, "b")]),
        used={GPU.uuid: {7: GIB, 9: 2 * GIB, 11: GIB, 12: GIB}},
    )

    _, first, second, last = report_lines(a, b, answer=known)

    assert first.endswith("MPS 30 %, limit 10.0 GiB, 2 clients use 3.0 GiB")
    assert second.endswith("MPS 70 %, limit 10.0 GiB, 1 client uses 1.0 GiB")
    assert last == f"    MPS server {SERVER}: protocol 3, ready, 3 clients"


@pytest.mark.parametrize(
    ("record", "answer", "end"),
    [
        pytest.param(
            claim("a", cores=50),
            None,
            "MPS 30 %, limit 10.0 GiB, 50 % of the cores",
            id="more cores are reserved than a client can use",
        ),
        pytest.param(claim("a", memory=None), None, "MPS 30 %, no limit", id="no limit"),
        pytest.param(
            claim("a"), NO_SERVER, "limit 10.0 GiB, not served by the agent", id="not served"
        ),
        pytest.param(
            claim("a", completed=False), NO_SERVER, "limit 10.0 GiB, not yet prepared", id="begun"
        ),
    ],
)
def test_what_is_special_of_a_claim_is_told_behind_its_limits(record, answer, end):
    assert report_lines(record, answer=answer)[1].endswith(end)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, "protocol 3, ready, no clients", id="idle"),
        pytest.param({"protocol": 2, "clients": [7]}, "protocol 2, ready, 1 client", id="older"),
        pytest.param(
            {"protocol": 2, "tenant": "a"},
            "protocol 2, ready, of namespace a, no clients",
            id="of a namespace",
        ),
        pytest.param({"tenant": "a"}, "protocol 3, ready, no clients", id="of everybody"),
        pytest.param(
            {"ready": False, "reason": "Fault", "restarts": 1},
            "protocol 3, not ready: Fault, no clients, restarted once",
            id="ill",
        ),
        pytest.param(
            {"ready": False, "restarts": 3},
            "protocol 3, not ready: it does not say why, no clients, restarted 3 times",
            id="ill without a reason",
        ),
    ],
)
def test_a_server_is_told_in_one_line(fields, expected):
    assert server_message(server(claim("a"), **fields)) == f"MPS server {SERVER}: {expected}"


def test_a_server_over_several_gpus_is_told_below_each_of_them():
    both = claim("a", gpus=(GPU, OTHER))

    shown = report_lines(both, answer=mps_report(server(both)), gpus=(GPU, OTHER))

    assert [line for line in shown if "over 2 GPUs" in line] == [shown[2], shown[5]]


def test_without_an_agent_the_limits_are_told_and_one_line_says_that_clients_are_not_known():
    _, line, last = report_lines(claim("a"), answer=MpsReport(problem=DOWN))

    assert line.endswith("MPS 30 %, limit 10.0 GiB")
    assert last == f"the clients of MPS are not known: {DOWN}"


def test_an_agent_that_nobody_needs_is_not_missed():
    turns = replace(claim("turns"), steps=())

    assert len(report_lines(turns, answer=MpsReport(problem=DOWN))) == 2


def test_the_table_gets_a_column_where_a_claim_is_under_mps():
    a = claim("a", gpus=(GPU, OTHER))
    turns = replace(claim("b"), steps=())
    known = mps_report(server(a, clients=[(7, "a")], restarts=2))

    head, first, second, last = report_lines(a, turns, answer=known, output="table")

    assert head.split()[-2:] == ["UID", "MPS"]
    assert first.endswith("uid-a   30 %, limit 10.0 GiB, 1 client")
    assert second.endswith("uid-b")
    assert last.endswith("over 2 GPUs, 1 client, restarted 2 times")
    assert "MPS" not in report_lines(turns, output="table")[0]


def test_json_has_limits_clients_and_directory_of_each_gpu_of_a_claim():
    a, b = claim("a"), claim("b")
    known = mps_report(
        server(a, b, clients=[(9, "a"), (7, "a"), (8, "b")]), used={GPU.uuid: {7: GIB, 9: None}}
    )

    assert mps_of(a, b, answer=known) == {
        "percent": 30,
        "memoryLimitBytes": 10 * GIB,
        "memoryUsedBytes": None,
        "clients": [7, 9],
        "protocol": 3,
        "pipeDirectory": "/run/mps/c_a",
        "server": SERVER,
    }
    assert mps_of(replace(a, steps=()), answer=known) is None


def test_json_has_the_servers_and_whose_they_are():
    a, gone = claim("a"), claim("gone")
    known = mps_report(server(a, gone, clients=[(9, "a"), (7, "a")], restarts=1))

    document = report_document(report(a, answer=known))

    assert document["mpsServers"] == [
        {
            "name": SERVER,
            "gpus": [GPU.uuid],
            "protocol": 3,
            "namespace": None,
            "ready": True,
            "reason": "",
            "restarts": 1,
            "clients": [7, 9],
            "claims": ["default/a"],
        }
    ]
    assert document["mpsAgent"] == {"answers": True, "problem": ""}


def test_json_says_what_it_does_not_know():
    down = report_document(report(claim("a"), answer=MpsReport(problem=DOWN)))
    not_asked = report_document(report(claim("a")))

    assert down["mpsAgent"] == {"answers": False, "problem": DOWN}
    assert not_asked["mpsAgent"] == {"answers": None, "problem": ""}
    for document in (down, not_asked):
        mps = document["claims"][0]["devices"][0]["mps"]
        assert mps["percent"] == 30
        assert {mps[key] for key in ("clients", "protocol", "pipeDirectory", "server")} == {None}


def test_each_gpu_has_the_limit_that_is_its_own():
    two = namespace("a", gpus=(GPU, OTHER))
    uneven = replace(two, memory_bytes=(GIB, 2 * GIB))
    record = claim("a", gpus=(GPU, OTHER))
    record = replace(record, steps=(replace(record.steps[0], namespace=uneven),))

    limits = {use.gpu: use.memory_bytes for use in ClaimsMpsUsage((record,)).of_claim(record)}

    assert limits == {GPU.uuid: GIB, OTHER.uuid: 2 * GIB}


@pytest.mark.parametrize(
    "beside",
    [
        pytest.param(holding("a", "gpu-0-mon", admin=True, shape=AdminAccess()), id="a monitor"),
        pytest.param(holding("a", "gpu-1", shape=SLICEABLE), id="a GPU without a namespace"),
    ],
)
def test_what_a_claim_has_beside_its_namespace_is_not_under_mps(beside):
    record = claim("a")

    assert ClaimsMpsUsage((record,)).of(record, beside) == ()


class TestProtocolTwo:
    """It does not tell whose client a process is."""

    def test_of_a_server_with_one_claim_every_client_is_the_claims(self):
        a = claim("a")
        known = mps_report(server(a, clients=[9, 7], protocol=2))

        assert mps_of(a, answer=known)["clients"] == [7, 9]
        assert clients_without_namespace(known.status) == set(), "no pod has to be looked for"

    def test_of_several_claims_the_pod_tells(self):
        a, b = claim("a", pods=["pod-a"]), claim("b", pods=["pod-b", "pod-b2"])
        pods = {7: PodUid("pod-a"), 8: PodUid("pod-b2")}
        known = mps_report(server(a, b, clients=[7, 8], protocol=2), pods=pods)

        assert clients_without_namespace(known.status) == {7, 8}
        assert [mps_of(a, b, answer=known)["clients"], mps_of(b, a, answer=known)["clients"]] == [
            [7],
            [8],
        ]

    @pytest.mark.parametrize(
        "pods",
        [
            pytest.param({7: PodUid("pod-a")}, id="a process that ended"),
            pytest.param({7: PodUid("pod-a"), 8: PodUid("later")}, id="a pod nobody told us of"),
            pytest.param({7: PodUid("pod-a"), 8: PodUid("both")}, id="a pod with both claims"),
        ],
    )
    def test_while_one_client_can_be_anybodys_nobodys_number_is_known(self, pods):
        a, b = claim("a", pods=["pod-a", "both"]), claim("b", pods=["pod-b", "both"])
        known = mps_report(server(a, b, clients=[7, 8], protocol=2), pods=pods)

        assert mps_of(a, b, answer=known)["clients"] is None
        assert report_lines(a, b, answer=known)[1].endswith("limit 10.0 GiB, pods pod-a, both")
        assert report_lines(a, b, answer=known)[3].endswith("2 clients")


@pytest.mark.parametrize(
    ("used", "clients", "expected"),
    [
        pytest.param({7: GIB, 9: GIB}, [7], GIB, id="its own only"),
        pytest.param({7: GIB}, [7, 9], GIB, id="one that has nothing on this GPU"),
        pytest.param({7: GIB, 9: None}, [7, 9], None, id="one that is not told"),
        pytest.param({70: GIB}, [7, 9], None, id="numbers of another PID namespace"),
        pytest.param({7: GIB}, [], 0, id="nobody"),
    ],
)
def test_what_clients_use_is_the_sum_where_all_of_it_is_known(used, clients, expected):
    a = claim("a")
    status = server(a, clients=[(pid, "a") for pid in clients])

    assert (
        mps_of(a, answer=mps_report(status, used={GPU.uuid: used}))["memoryUsedBytes"] == expected
    )


CLIENTS = st.lists(
    st.tuples(st.integers(2, 30), st.sampled_from(["a", "b", None])),
    unique_by=lambda client: client[0],
    max_size=6,
)


@given(CLIENTS, st.dictionaries(st.integers(2, 30), st.sampled_from(["pa", "pb", "px"])))
def test_no_process_is_counted_for_two_claims_and_none_that_is_counted_is_left_out(clients, pods):
    a, b = claim("a", pods=["pa"]), claim("b", pods=["pb"])
    listed = [(pid, name) if name else pid for pid, name in clients]
    known = mps_report(server(a, b, clients=listed), pods={k: PodUid(v) for k, v in pods.items()})

    of_a, of_b = (mps_of(*both, answer=known)["clients"] for both in ((a, b), (b, a)))

    assert (of_a is None) == (of_b is None)
    if of_a is not None:
        assert sorted([*of_a, *of_b]) == sorted(pid for pid, _ in clients)


@pytest.fixture
def settings(tmp_path):
    a = claim("a")
    settings = ClaimsSettings.model_validate(
        {"state_dir": tmp_path, "sim": "h100x8", "mps_socket": "/run/agent.sock"}
    )
    ledger = Ledger(settings.ledger_dir, boot_id(Path("/")))
    ledger.reload()
    ledger.write(a)
    return settings


def test_the_agent_is_asked_at_its_socket(settings):
    sockets = []

    def ask(socket):
        sockets.append(socket)
        return MpsStatus((server(claim("a"), clients=[(7, "a")]),))

    document = json.loads(
        claims(settings, node_opener(settings, copy=True), "json", Terminal(), ask=ask)
    )

    assert sockets == [Path("/run/agent.sock")]
    assert document["claims"][0]["devices"][0]["mps"]["clients"] == [7]


def test_from_the_ledger_alone_no_agent_is_asked(settings):
    def ask(socket):
        raise AssertionError(socket)

    shown = claims(settings, None, "bars", Terminal(), ask=ask)

    assert "MPS 30 %, limit 10.0 GiB" in shown
    assert "not known" not in shown


def test_an_agent_that_is_down_is_no_reason_to_say_nothing(settings):
    def ask(socket):
        raise MpsAgentUnreachable(DOWN)

    for form in ("bars", "table"):
        shown = claims(
            settings, node_opener(settings, copy=True), form, Terminal(), ask=ask
        ).splitlines()
        assert any("default/a" in line or "uid-a" in line for line in shown)
        assert shown[-1] == f"the clients of MPS are not known: {DOWN}"


def test_where_mps_was_switched_off_since_it_is_said_so(settings):
    off = settings.model_copy(update={"mps_socket": ""})

    assert claims(off, node_opener(off, copy=True), "bars", Terminal()).endswith(
        "not known: --mps-socket is empty: there is no MPS agent to ask"
    )


def test_of_the_partitions_of_one_gpu_each_has_its_own_server_or_none():
    uuid = GpuUuid("MIG-0")
    first, second = (
        Holding(
            ref("a"),
            DeviceName(f"gpu-0-mig-1g10gb-19-{start}"),
            gpu=GPU.uuid,
            partition=PartitionKey(19, start, 1, 1),
            instance=MigInstance(
                PartitionKey(19, start, 1, 1), 7 + start, 0, GpuUuid(f"MIG-{start}")
            ),
        )
        for start in (0, 1)
    )
    steps = tuple(
        replace(step, namespace=replace(step.namespace, gpus=(uuid,))) for step in claim("a").steps
    )
    record = replace(claim("a"), holdings=(first, second), steps=steps)
    uses = ClaimsMpsUsage(
        [record], mps_report(server(record, clients=(7,), protocol=2), used={uuid: {7: GIB}})
    )

    (use,) = uses.of(record, first)
    assert (use.gpu, use.clients, use.used_bytes, use.lost) == (uuid, (7,), GIB, False)
    assert uses.of(record, second) == ()
    assert uses.gpus == {uuid}
