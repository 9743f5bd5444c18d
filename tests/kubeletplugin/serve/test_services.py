"""One answer per claim, whatever happens to its neighbours."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc
import pytest

from api.kubelet import dra_v1_pb2
from dra_driver.base.errors import ClaimError, NodeError
from dra_driver.k8s.claims import ClaimRef, PreparedDevice, ShareId
from dra_driver.kubeletplugin.serve.services import MAX_CONCURRENT_CLAIMS, DraService
from tests.fakes.claimdriver import DRIVER, Counted, Desk, Gate, Running, device, ref, running
from tests.fakes.kubelet import FakeKubelet
from tests.fakes.plugins import KubeletError
from tests.waiting import eventually


@pytest.fixture
def kubelet(short: Path) -> Iterator[FakeKubelet]:
    with FakeKubelet(short) as kubelet:
        yield kubelet


@pytest.mark.point(16)
def test_every_claim_of_a_call_gets_its_own_answer(short: Path, kubelet: FakeKubelet) -> None:
    refs = [ref(f"claim-{n}") for n in range(5)]
    with running(short):
        kubelet.wait_for_plugin(DRIVER)
        assert kubelet.prepare(refs) == {r.uid: (device(r),) for r in refs}
        kubelet.unprepare(refs)


@pytest.mark.point(34, 35)
def test_a_bad_claim_does_not_fail_its_neighbours(short: Path, kubelet: FakeKubelet) -> None:
    def tell(operation: str, ref: ClaimRef) -> None:
        if ref.name == "refused":
            raise ClaimError("claim default/refused wants two GPUs of one: ask for one")
        if ref.name == "node":
            raise NodeError("NVML does not answer: ask claim other/secret", "NVML does not answer")
        if ref.name == "crash":
            raise ZeroDivisionError("oops")

    observer = Counted()
    with Running(short, DraService(Desk(tell), observer)):
        kubelet.wait_for_plugin(DRIVER)
        refs = [ref("good"), ref("refused"), ref("node"), ref("crash"), ref("fine")]
        answers = kubelet.ask("prepare", refs)
        eventually(lambda: len(observer.outcomes) == len(refs))
    errors = {name: answers[ref(name).uid].error for name in ("refused", "node", "crash")}
    assert errors == {
        "refused": "claim default/refused wants two GPUs of one: ask for one",
        "node": "NVML does not answer",
        "crash": "internal error: ZeroDivisionError: oops",
    }
    assert answers[ref("good").uid].devices == (device(ref("good")),)
    assert answers[ref("fine").uid].devices == (device(ref("fine")),)
    assert sorted(observer.outcomes) == [
        ("prepare", outcome) for outcome in ("crashed", "failed", "ok", "ok", "refused")
    ]


@pytest.mark.point(17)
def test_no_claims_no_answers(short: Path, kubelet: FakeKubelet) -> None:
    with running(short):
        kubelet.wait_for_plugin(DRIVER)
        assert kubelet.ask("prepare", []) == {}
        assert kubelet.ask("unprepare", []) == {}


@pytest.mark.point(16)
def test_a_uid_asked_for_twice_in_one_call_is_served_once(
    short: Path, kubelet: FakeKubelet
) -> None:
    desk = Desk()
    with running(short, desk):
        kubelet.wait_for_plugin(DRIVER)
        answers = kubelet.ask("prepare", [ref("a"), ref("a"), ref("b")])
    assert sorted(answers) == ["uid-a", "uid-b"]
    assert sorted(desk.calls) == [("prepare", "a"), ("prepare", "b")]


@pytest.mark.point(30)
@pytest.mark.parametrize(
    ("minor", "share"),
    [
        pytest.param(36, ShareId("s1"), id="v1 carries the share"),
        pytest.param(34, None, id="a kubelet of 1.34 does not know the share"),
        pytest.param(32, None, id="v1beta1 cannot carry it"),
    ],
)
def test_share_ids_are_told_where_the_version_can(
    short: Path, minor: int, share: ShareId | None
) -> None:
    class Shares(Desk):
        def prepare(self, ref: ClaimRef) -> list[PreparedDevice]:
            return [PreparedDevice(("gpu",), "node-a", "gpu-0", (), ShareId("s1"))]

    with FakeKubelet(short, minor) as kubelet, running(short, Shares()):
        kubelet.wait_for_plugin(DRIVER)
        assert kubelet.prepare([ref("a")])[ref("a").uid][0].share == share


@pytest.mark.point(30)
def test_a_share_that_is_not_there_is_absent_on_the_wire(short: Path) -> None:
    with running(short) as run, grpc.insecure_channel(f"unix:{run.paths.service}") as channel:
        request = dra_v1_pb2.NodePrepareResourcesRequest(claims=[dra_v1_pb2.Claim(uid="u")])
        raw = channel.unary_unary(
            "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
            request_serializer=dra_v1_pb2.NodePrepareResourcesRequest.SerializeToString,
            response_deserializer=dra_v1_pb2.NodePrepareResourcesResponse.FromString,
        )(request, timeout=5)
    assert not raw.claims["u"].devices[0].HasField("share_id")


@pytest.mark.point(26)
def test_claims_of_one_call_are_served_side_by_side(short: Path, kubelet: FakeKubelet) -> None:
    together = threading.Barrier(8, timeout=5)

    def meet(operation: str, ref: ClaimRef) -> None:
        together.wait()

    with running(short, Desk(meet)):
        kubelet.wait_for_plugin(DRIVER)
        refs = [ref(f"claim-{n}") for n in range(8)]
        assert kubelet.prepare(refs).keys() == {r.uid for r in refs}


@pytest.mark.point(25)
def test_two_calls_for_one_claim_come_one_after_the_other(
    short: Path, kubelet: FakeKubelet
) -> None:
    gate = Gate()
    desk = Desk(gate)
    with running(short, desk), ThreadPoolExecutor(2) as pool:
        kubelet.wait_for_plugin(DRIVER)
        first = pool.submit(kubelet.ask, "prepare", [ref("a")])
        assert gate.begun.wait(60)
        second = pool.submit(kubelet.ask, "prepare", [ref("a")])
        no_answers = kubelet.ask("prepare", [])  # the second is on its way when this is answered
        gate.go.set()
        assert first.result(5) == second.result(5) != no_answers
    assert desk.at_once == {"uid-a": 1}
    assert desk.calls == [("prepare", "a"), ("prepare", "a")]


def test_a_claim_that_stays_busy_is_answered_with_an_error(
    short: Path, kubelet: FakeKubelet
) -> None:
    gate = Gate()
    service = DraService(Desk(gate), Counted(), patience_seconds=0.05)
    with Running(short, service), ThreadPoolExecutor(1) as pool:
        kubelet.wait_for_plugin(DRIVER)
        first = pool.submit(kubelet.ask, "prepare", [ref("a")])
        assert gate.begun.wait(60)
        second = kubelet.ask("prepare", [ref("a")])[ref("a").uid]
        gate.go.set()
        assert not first.result(5)[ref("a").uid].error
    assert second.error.startswith("claim default/a (UID uid-a) is still being served")


@pytest.mark.point(27)
def test_work_goes_on_when_the_kubelet_gives_up_and_the_next_call_is_right(
    short: Path, kubelet: FakeKubelet
) -> None:
    gate = Gate()
    desk = Desk(gate)
    with running(short, desk):
        kubelet.wait_for_plugin(DRIVER)
        with pytest.raises(grpc.RpcError) as given_up:
            kubelet.ask("prepare", [ref("a")], timeout=0.1)
        assert given_up.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        gate.go.set()
        assert kubelet.prepare([ref("a")]) == {ref("a").uid: (device(ref("a")),)}
    assert desk.at_once == {"uid-a": 1}


@pytest.mark.point(110)
def test_110_pods_at_once_are_served(short: Path, kubelet: FakeKubelet) -> None:
    slow = Desk(lambda operation, ref: time.sleep(0.01))
    with running(short, slow), ThreadPoolExecutor(110) as pool:
        kubelet.wait_for_plugin(DRIVER)
        refs = [ref(f"claim-{n}") for n in range(110)]
        answers = list(pool.map(lambda r: kubelet.ask("prepare", [r]), refs))
        assert answers == [{r.uid: answers[i][r.uid]} for i, r in enumerate(refs)]
        assert all(not a[r.uid].error for a, r in zip(answers, refs, strict=True))


def test_110_claims_in_one_call_are_served(short: Path, kubelet: FakeKubelet) -> None:
    with running(short):
        kubelet.wait_for_plugin(DRIVER)
        refs = [ref(f"claim-{n}") for n in range(110)]
        assert kubelet.prepare(refs) == {r.uid: (device(r),) for r in refs}


def test_a_claim_alone_is_served_by_the_thread_of_its_call(
    short: Path, kubelet: FakeKubelet
) -> None:
    threads = []

    with running(short, Desk(lambda *_: threads.append(threading.current_thread().name))):
        kubelet.wait_for_plugin(DRIVER)
        kubelet.prepare([ref("a")])
        kubelet.unprepare([ref("a")])
    assert threads == ["call", "call"]


@pytest.mark.point(110)
@pytest.mark.parametrize("claims", [1, 2])
def test_unprepares_and_empty_calls_are_answered_while_the_prepares_of_110_pods_hang(
    short: Path, kubelet: FakeKubelet, claims: int
) -> None:
    gate = Gate()
    desk = Desk(lambda operation, ref: gate(operation, ref) if operation == "prepare" else None)
    with running(short, desk) as run, ThreadPoolExecutor(110) as pool:
        kubelet.wait_for_plugin(DRIVER)
        pods = [[ref(f"claim-{pod}-{n}") for n in range(claims)] for pod in range(110)]
        waiting = [pool.submit(kubelet.ask, "prepare", refs) for refs in pods]
        eventually(lambda: len(desk.calls) == MAX_CONCURRENT_CLAIMS)
        kubelet.unprepare([ref(f"other-{n}") for n in range(claims)])
        assert kubelet.ask("prepare", []) == {}
        run.plugin.check()
        gate.go.set()
        answers = [answer for call in waiting for answer in call.result(60).values()]
    assert [answer.error for answer in answers] == [""] * 110 * claims


def test_a_prepare_too_many_is_refused_and_an_unprepare_gets_in(
    short: Path, kubelet: FakeKubelet
) -> None:
    gate = Gate()
    desk = Desk(lambda operation, ref: gate(operation, ref) if operation == "prepare" else None)
    with (
        Running(short, DraService(desk, Counted(), max_concurrent=1, max_waiting=1)),
        ThreadPoolExecutor(1) as pool,
    ):
        kubelet.wait_for_plugin(DRIVER)
        first = pool.submit(kubelet.ask, "prepare", [ref("a")])
        assert gate.begun.wait(60)
        refused = kubelet.ask("prepare", [ref("b")])[ref("b").uid]
        kubelet.unprepare([ref("c")])
        gate.go.set()
        assert not first.result(5)[ref("a").uid].error
    assert refused.error == (
        "claim default/b (UID uid-b): too many others wait; the kubelet will ask again"
    )


def test_a_prepare_that_queues_for_too_long_is_answered_with_an_error(
    short: Path, kubelet: FakeKubelet
) -> None:
    gate = Gate()
    service = DraService(Desk(gate), Counted(), patience_seconds=0.05, max_concurrent=1)
    with Running(short, service), ThreadPoolExecutor(1) as pool:
        kubelet.wait_for_plugin(DRIVER)
        first = pool.submit(kubelet.ask, "prepare", [ref("a")])
        assert gate.begun.wait(60)
        late = kubelet.ask("prepare", [ref("b")])[ref("b").uid]
        gate.go.set()
        assert not first.result(5)[ref("a").uid].error
    assert late.error.startswith(
        "claim default/b (UID uid-b): others were being prepared for 0.05 s"
    )


def test_registration_and_liveness_are_answered_while_all_places_are_taken(
    short: Path, kubelet: FakeKubelet
) -> None:
    gate = Gate()
    service = DraService(Desk(gate), Counted(), max_concurrent=2)
    with Running(short, service) as run, ThreadPoolExecutor(6) as pool:
        kubelet.wait_for_plugin(DRIVER)
        waiting = [pool.submit(kubelet.ask, "prepare", [ref(f"claim-{n}")]) for n in range(6)]
        run.plugin.check(2.0)
        gate.go.set()
        assert all(len(w.result(5)) == 1 for w in waiting)


def test_an_unprepare_gets_in_while_prepares_that_wait_for_it_take_all_places(
    short: Path, kubelet: FakeKubelet
) -> None:
    gone = threading.Event()

    def hand_over(operation: str, claim: ClaimRef) -> None:
        if operation == "unprepare":
            gone.set()
        else:
            assert gone.wait(5)

    service = DraService(Desk(hand_over), Counted(), max_concurrent=1)
    with Running(short, service), ThreadPoolExecutor(2) as pool:
        kubelet.wait_for_plugin(DRIVER)
        waiting = [pool.submit(kubelet.ask, "prepare", [ref(f"claim-{n}")]) for n in range(2)]
        kubelet.ask("unprepare", [ref("holder")])
        assert all(not a.error for w in waiting for a in w.result(6).values())


@pytest.mark.point(35)
def test_an_error_in_our_own_wiring_is_internal_and_the_process_lives(
    short: Path, kubelet: FakeKubelet
) -> None:
    class Broken(Desk):
        def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
            return [replace(device(ref), pool=cast(str, 7))]

    with Running(short, DraService(Broken(), Counted())) as run:
        kubelet.wait_for_plugin(DRIVER)
        with pytest.raises(KubeletError, match="INTERNAL"):
            kubelet.prepare([ref("a")])
        run.plugin.check()


def test_a_claim_that_cannot_be_counted_is_answered_and_the_log_says_why(
    short: Path, kubelet: FakeKubelet, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Counted):
        def observe(self, operation: str, outcome: str, seconds: float) -> None:
            raise RuntimeError("no such metric")

    with Running(short, DraService(Desk(), Broken())):
        kubelet.wait_for_plugin(DRIVER)
        assert kubelet.prepare([ref("a")]) == {ref("a").uid: (device(ref("a")),)}
        eventually(lambda: "no such metric" in caplog.text)


@pytest.mark.point(90)
def test_another_service_is_unimplemented(short: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(short) as run, grpc.insecure_channel(f"unix:{run.paths.service}") as channel:
        health = channel.unary_unary("/v1.DRAResourceHealth/NodeWatchResources")
        with caplog.at_level(logging.INFO), pytest.raises(grpc.RpcError) as refused:
            health(b"", timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not caplog.records


def test_a_uid_that_is_no_file_name_is_refused(short: Path, kubelet: FakeKubelet) -> None:
    desk = Desk()
    with running(short, desk):
        kubelet.wait_for_plugin(DRIVER)
        for uid in ("../../etc", "a/b", ".hidden", "x" * 200):
            answer = kubelet.ask("prepare", [ref("a", uid)])
            assert "which no Kubernetes object can have" in answer[ref("a", uid).uid].error
    assert desk.calls == []


@pytest.mark.point(109)
def test_each_claim_is_logged_once_with_its_identity(
    short: Path, kubelet: FakeKubelet, caplog: pytest.LogCaptureFixture
) -> None:
    def tell(operation: str, ref: ClaimRef) -> None:
        if ref.name == "b":
            raise ClaimError("no")

    with running(short, Desk(tell)), caplog.at_level(logging.INFO):
        kubelet.wait_for_plugin(DRIVER)
        kubelet.ask("prepare", [ref("a"), ref("b")])
        eventually(lambda: sum(hasattr(r, "claim") for r in caplog.records) == 2)
    records = [r.__dict__ for r in caplog.records if hasattr(r, "claim")]
    assert sorted((r["claim"], r["uid"], r["operation"], r["outcome"]) for r in records) == [
        ("default/a", "uid-a", "prepare", "ok"),
        ("default/b", "uid-b", "prepare", "refused"),
    ]
    assert all(r["seconds"] >= 0 for r in records)
