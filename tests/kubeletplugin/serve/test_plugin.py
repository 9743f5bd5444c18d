"""How a plugin comes, stays and goes in front of a kubelet."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from api.kubelet import registration_v1_pb2 as registration
from dra_driver.base.errors import NodeError, SettingsError
from dra_driver.k8s.claims import ClaimRef
from dra_driver.kubeletplugin.serve.plugin import PluginTimeouts
from dra_driver.kubeletplugin.serve.sockets import remove_dead_sockets
from tests.fakes.claimdriver import DRIVER, Desk, Gate, device, ref, running
from tests.fakes.kubelet import FakeKubelet
from tests.fakes.plugins import Instance
from tests.waiting import eventually

OLD, NEW = "11111111-old", "22222222-new"

SERVE = """
import sys, threading
from pathlib import Path
from tests.fakes.claimdriver import running
with running(Path(sys.argv[1])) as run:
    print("ready", flush=True)
    threading.Event().wait()
"""


@pytest.mark.point(2, 3, 14)
def test_the_kubelet_is_told_who_we_are(short: Path) -> None:
    with (
        running(short, pod_uid=NEW) as run,
        grpc.insecure_channel(f"unix:{run.paths.registration}") as channel,
        ThreadPoolExecutor(8) as pool,
    ):
        ask = channel.unary_unary(
            "/pluginregistration.Registration/GetInfo",
            request_serializer=registration.InfoRequest.SerializeToString,
            response_deserializer=registration.PluginInfo.FromString,
        )
        answers = list(pool.map(lambda _: ask(registration.InfoRequest(), timeout=30), range(40)))
    expected = registration.PluginInfo(
        type="DRAPlugin",
        name=DRIVER,
        endpoint=str(short / "plugins" / DRIVER / f"dra-{NEW}.sock"),
        supported_versions=["v1.DRAPlugin", "v1beta1.DRAPlugin"],
    )
    assert answers == [expected] * 40


@pytest.mark.point(4, 108)
@pytest.mark.parametrize(
    ("minor", "version"),
    [
        (32, "v1beta1.DRAPlugin"),
        (33, "v1beta1.DRAPlugin"),
        (34, "v1.DRAPlugin"),
        (37, "v1.DRAPlugin"),
    ],
)
def test_kubelets_of_all_versions_register_us(short: Path, minor: int, version: str) -> None:
    with FakeKubelet(short, minor) as kubelet, running(short) as run:
        assert kubelet.wait_for_plugin(DRIVER).version == version
        assert kubelet.prepare([ref("a")]) == {ref("a").uid: (device(ref("a")),)}
        assert run.plugin.registered


@pytest.mark.point(1)
def test_the_service_answers_before_the_registration_socket_appears(short: Path) -> None:
    answers = []

    def watch(kubelet_sees: Path, service: Path, stop: threading.Event) -> None:
        while not stop.is_set():
            if kubelet_sees.exists():
                with grpc.insecure_channel(f"unix:{service}") as channel:
                    method = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
                    answers.append(channel.unary_unary(method)(b"", timeout=30))  # type: ignore[arg-type]
                return

    run, stop = running(short), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch, run.paths.registration, run.paths.service, stop)
        with run:
            watching.result(30)
    assert answers == [b""]


@pytest.mark.point(5, 8)
def test_a_refused_registration_is_logged_and_survived(
    short: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(short) as run:
        with grpc.insecure_channel(f"unix:{run.paths.registration}") as channel:
            notify = channel.unary_unary(
                "/pluginregistration.Registration/NotifyRegistrationStatus",
                request_serializer=registration.RegistrationStatus.SerializeToString,
                response_deserializer=registration.RegistrationStatusResponse.FromString,
            )
            answer = notify(registration.RegistrationStatus(error="wrong moon"), timeout=5)
            assert answer == registration.RegistrationStatusResponse()
            assert not run.plugin.registered
            assert "the kubelet refused to register us: wrong moon" in caplog.text
        with FakeKubelet(short) as kubelet:
            kubelet.wait_for_plugin(DRIVER)
            assert run.plugin.registered


@pytest.mark.point(6)
def test_a_restarted_kubelet_finds_us_again(short: Path) -> None:
    with running(short):
        for _ in range(2):
            with FakeKubelet(short) as kubelet:
                kubelet.wait_for_plugin(DRIVER)
                assert kubelet.prepare([ref("a")])


@pytest.mark.point(10)
def test_stopping_takes_the_registration_first_and_lets_calls_end(short: Path) -> None:
    gate = Gate()
    with FakeKubelet(short) as kubelet, ThreadPoolExecutor(2) as pool:
        run = running(short, Desk(gate))
        # A connection of our own: the kubelet closes its own as soon as the registration is gone.
        with run, grpc.insecure_channel(f"unix:{run.paths.service}") as channel:
            kubelet.wait_for_plugin(DRIVER)
            instance = Instance(DRIVER, "", "v1.DRAPlugin", (), channel)
            call = pool.submit(instance.call, "Prepare", [ref("a")], 10)
            assert gate.begun.wait(60)
            stopping = pool.submit(run.plugin.stop)
            kubelet.wait_until_gone(DRIVER)
            assert not run.paths.registration.exists() and run.paths.service.exists()
            gate.go.set()
            assert not call.result(5).claims["uid-a"].error
            stopping.result(5)
        assert not run.paths.service.exists()
        assert not list(short.rglob(".*"))


@pytest.mark.point(105)
def test_a_call_that_does_not_end_does_not_keep_us(
    short: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended, gate = threading.Event(), Gate()

    def wait(operation: str, ref: ClaimRef) -> None:
        gate(operation, ref)
        ended.set()

    with FakeKubelet(short) as kubelet, ThreadPoolExecutor(1) as pool:
        run = running(short, Desk(wait), grace_seconds=0.1)
        with run:
            kubelet.wait_for_plugin(DRIVER)
            call = pool.submit(kubelet.ask, "prepare", [ref("a")])
            assert gate.begun.wait(60)
        assert isinstance(call.exception(5), grpc.RpcError)
        gate.go.set()
        assert ended.wait(5)


HUNG = """
import os, sys, threading
from pathlib import Path
from tests.fakes.claimdriver import Desk, running
def hang(operation, ref):
    os.write(1, b"begun\\n")  # at once: two claims say so at the same time
    threading.Event().wait()
with running(Path(sys.argv[1]), Desk(hang), grace_seconds=0.1):
    sys.stdin.readline()
"""


@pytest.mark.point(105)
def test_claims_that_do_not_end_do_not_keep_the_process(short: Path) -> None:
    with (
        FakeKubelet(short) as kubelet,
        ThreadPoolExecutor(1) as pool,
        subprocess.Popen(
            [sys.executable, "-c", HUNG, str(short)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        kubelet.wait_for_plugin(DRIVER)
        call = pool.submit(kubelet.ask, "prepare", [ref("a"), ref("b")])
        assert [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        process.communicate("stop\n", timeout=60)
        assert process.returncode == 0
        assert isinstance(call.exception(5), grpc.RpcError)


@pytest.mark.point(11, 12, 13)
def test_two_instances_serve_and_the_one_that_registered_last_is_asked(short: Path) -> None:
    before, after = Desk(), Desk()
    with FakeKubelet(short) as kubelet, running(short, before, OLD):
        kubelet.wait_for_plugin(DRIVER)
        kubelet.prepare([ref("a")])
        with running(short, after, NEW):
            kubelet.wait_for_plugin(DRIVER, count=2)
            kubelet.prepare([ref("b")])
        kubelet.wait_for_plugin(DRIVER)  # a failed update: the old one is asked again
        kubelet.prepare([ref("c")])
    assert before.calls == [("prepare", "a"), ("prepare", "c")]
    assert after.calls == [("prepare", "b")]


@pytest.mark.point(13)
def test_a_second_process_with_our_paths_gives_up_and_harms_nobody(short: Path) -> None:
    with FakeKubelet(short) as kubelet, running(short) as first:
        kubelet.wait_for_plugin(DRIVER)
        with pytest.raises(SettingsError, match=r"another live process serves .*dra.sock"):
            running(short, patience_seconds=0.1).__enter__()
        first.plugin.check()
        assert kubelet.prepare([ref("a")])
        assert not list(short.rglob(".*"))


def test_we_wait_for_a_process_that_is_leaving(short: Path) -> None:
    first, second = running(short), running(short)
    with first, ThreadPoolExecutor(1) as pool:
        starting = pool.submit(second.plugin.start)
        first.plugin.stop()
        starting.result(10)
        second.plugin.check()
        second.plugin.stop()


@pytest.mark.point(7)
def test_the_sockets_of_a_killed_process_are_replaced(short: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, str(short)], stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "ready\n"
        killed.send_signal(signal.SIGKILL)
    with FakeKubelet(short) as kubelet, running(short):
        kubelet.wait_for_plugin(DRIVER)
        assert kubelet.prepare([ref("a")])


STUCK = """
import sys
from pathlib import Path
from tests.fakes.claimdriver import running
running(Path(sys.argv[1]), pod_uid=sys.argv[2], patience_seconds=60).__enter__()
"""


@pytest.mark.point(7, 13)
@pytest.mark.parametrize("which", ["service", "registration"])
def test_a_process_killed_before_its_socket_appeared_leaves_nothing_for_long(
    short: Path, which: str
) -> None:
    pod = "11111111-1111-4111-8111-111111111111"
    paths = running(short, pod_uid=pod).paths
    path = paths.service if which == "service" else paths.registration
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as holder:  # whose name it waits for, its socket bound
        holder.bind(os.fspath(path))
        holder.listen()
        with subprocess.Popen([sys.executable, "-c", STUCK, str(short), pod]) as killed:
            eventually(lambda: any(path.parent.glob(".*")))
            killed.send_signal(signal.SIGKILL)
    hidden = list(short.rglob(".*"))
    rounds = threading.Semaphore(0)

    def look() -> bool:
        others = remove_dead_sockets(following.paths)
        rounds.release()
        return others

    following = running(short, pod_uid=NEW, on_round=look, watch_seconds=0.02)
    with following:
        assert rounds.acquire(timeout=5)
        assert all(file.is_socket() for file in hidden)  # for all we know it is starting just now
        then = time.time() - 61
        for file in hidden:
            os.utime(file, (then, then))
        eventually(lambda: not any(file.exists() for file in hidden))
        sockets = {path for path in short.rglob("*") if path.is_socket()}
        assert sockets == {following.paths.service, following.paths.registration}
        following.plugin.check()


@pytest.mark.point(14)
def test_a_deleted_registration_socket_comes_back_and_the_kubelet_registers_again(
    short: Path,
) -> None:
    with FakeKubelet(short) as kubelet, running(short, watch_seconds=0.05) as run:
        first = kubelet.wait_for_plugin(DRIVER)
        run.paths.registration.unlink()
        kubelet.wait_until(
            lambda: kubelet.instances(DRIVER) not in ((), (first,)), "a new registration"
        )
        kubelet.wait_for_plugin(DRIVER)
        assert kubelet.prepare([ref("a")])


def test_it_is_not_registered_while_the_kubelet_has_not_found_the_new_registration_socket(
    short: Path,
) -> None:
    with running(short, watch_seconds=0.05) as run:
        with FakeKubelet(short) as kubelet:
            kubelet.wait_for_plugin(DRIVER)
            eventually(lambda: run.plugin.registered, "the registration")

        run.paths.registration.unlink()

        eventually(lambda: not run.plugin.registered, "the loss")
        eventually(run.paths.registration.exists, "another socket")


def test_a_wiped_directory_comes_back_and_calls_in_flight_end(short: Path) -> None:
    gate = Gate()
    with (
        FakeKubelet(short) as kubelet,
        ThreadPoolExecutor(1) as pool,
        running(short, Desk(gate), watch_seconds=0.05) as run,
    ):
        kubelet.wait_for_plugin(DRIVER)
        call = pool.submit(kubelet.ask, "prepare", [ref("a")])
        assert gate.begun.wait(60)
        run.paths.service.unlink()
        run.paths.service.parent.rmdir()
        kubelet.wait_until(run.paths.service.exists, "the DRA socket")
        gate.go.set()
        assert not call.result(5)[ref("a").uid].error
        run.plugin.check()
        assert not kubelet.ask("prepare", [ref("b")])[ref("b").uid].error


@pytest.mark.point(107)
@pytest.mark.parametrize("which", ["service", "registration"])
def test_liveness_fails_while_a_socket_is_deleted(short: Path, which: str) -> None:
    with running(short) as run:
        run.plugin.check()
        getattr(run.paths, which).unlink()
        with pytest.raises(NodeError, match="failed"):
            run.plugin.check()


def test_an_answer_over_our_sockets_counts_for_a_while(short: Path) -> None:
    with running(short, check_seconds=3600) as run:
        with pytest.raises(NodeError, match="asking our own sockets"):  # which does not count
            run.plugin.check(timeout_seconds=0)
        run.plugin.check()
        run.plugin.check(timeout_seconds=0)


def test_after_that_our_sockets_are_asked_again(short: Path) -> None:
    with running(short, check_seconds=0) as run:
        run.plugin.check()
        with pytest.raises(NodeError, match="asking our own sockets"):
            run.plugin.check(timeout_seconds=0)


def test_liveness_fails_when_we_do_not_serve(short: Path) -> None:
    run = running(short)
    with pytest.raises(NodeError, match="not served"):
        run.plugin.check()
    with run:
        pass
    with pytest.raises(NodeError, match="not served"):
        run.plugin.check()


@pytest.mark.point(106)
def test_somebody_who_takes_our_path_is_fatal(short: Path) -> None:
    taken = short / "taken"
    with (
        running(short, patience_seconds=0.1, watch_seconds=0.05) as run,
        socket.socket(socket.AF_UNIX) as taker,
    ):
        taker.bind(os.fspath(taken))
        taker.listen()
        taken.replace(run.paths.service)
        assert run.died.wait(10)
        assert isinstance(run.fatal[0], SettingsError)
        assert run.paths.service.exists() and not run.paths.registration.exists()


def test_the_regular_look_is_taken_and_may_fail(
    short: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looked = threading.Event()
    rounds: list[int] = []

    def look() -> bool:
        rounds.append(1)
        if len(rounds) > 2:
            looked.set()
        raise RuntimeError("not now")

    run = running(short, watch_seconds=0.02, on_round=look)
    with run:
        assert looked.wait(5)
        run.plugin.check()
    assert "a regular check failed" in caplog.text


def test_looks_come_when_something_changed_beside_the_sockets_or_somebody_asks_for_them(
    short: Path,
) -> None:
    rounds: list[bool] = []
    again = False

    def look() -> bool:
        rounds.append(again)
        return again

    with running(short, watch_seconds=0.01, on_round=look) as run:
        eventually(lambda: rounds)
        time.sleep(0.3)
        assert len(rounds) <= 3  # the sockets themselves have just come
        for path in (run.paths.service, run.paths.registration):
            looks = len(rounds)
            (path.parent / "another.sock").touch()
            eventually(lambda looks=looks: len(rounds) > looks)  # type: ignore[misc]
        again = True
        (run.paths.registration.parent / "another.sock").unlink()
        eventually(lambda: rounds.count(True) > 5)


def test_a_registry_that_cannot_be_made_is_said_at_start(short: Path) -> None:
    (short / "plugins_registry").touch()
    with pytest.raises(NodeError, match="plugins_registry"):
        running(short).__enter__()
    assert os.listdir(short / "plugins" / DRIVER) == []


def test_stop_before_start_and_twice_does_nothing(short: Path) -> None:
    run = running(short)
    run.plugin.stop()
    with run:
        run.plugin.stop()
        run.plugin.stop()


def test_the_grace_leaves_room_for_a_process_to_end_within_five_seconds() -> None:
    assert PluginTimeouts().grace_seconds < 5
