"""The controller as a process of its own, at a fake API server: replicas, signals, HTTP port."""

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.controller.fleet import NAMESPACE, PROFILE, Fleet, at_once, profile_document, revision
from tests.driver_process import DriverProcess
from tests.fakes.api_server import ApiServer
from tests.pages import read_page
from tests.waiting import eventually

NODES = [f"node-{number:02}" for number in range(12)]
LEASE_SECONDS = 3  # the shortest
Replica = DriverProcess
StartReplica = Callable[..., Replica]


@pytest.fixture
def replica(server: ApiServer, tmp_path: Path) -> Iterator[StartReplica]:
    config = server.kubeconfig(tmp_path / "replicas")
    with ExitStack() as stack:

        def start(identity: str, *flags: str) -> Replica:
            process = DriverProcess(
                *("controller", f"--kubeconfig={config}", f"--revision-namespace={NAMESPACE}"),
                *(f"--identity={identity}", f"--lease-seconds={LEASE_SECONDS}", *flags),
            )
            stack.callback(process.kill)
            return process

        yield start


def leader(server: ApiServer) -> str:
    leases = server.objects("leases")
    return leases[0]["spec"].get("holderIdentity") or "" if leases else ""


def test_when_the_leader_is_killed_another_replica_finishes_the_rollout(
    server: ApiServer, fleet: Fleet, replica: StartReplica
) -> None:
    fleet.join(*NODES)
    fleet.silent = set(NODES[4:])
    replicas = {"a": replica("a"), "b": replica("b")}
    eventually(lambda: leader(server))
    fleet.apply(profile_document(4, rollout=at_once(2)))
    assert server.wait(lambda: sum(map(bool, fleet.given().values())) >= 5)

    first = leader(server)
    replicas[first].kill()
    fleet.silent = set()
    fleet.wait("Complete")

    assert leader(server) != first
    assert fleet.given() == dict.fromkeys(NODES, revision(4))
    assert fleet.most_in_progress() == 2


def test_a_leader_that_was_stopped_for_a_while_finds_that_it_does_not_lead_any_more(
    server: ApiServer, fleet: Fleet, replica: StartReplica
) -> None:
    fleet.join(*NODES)
    fleet.silent = set(NODES[2:])
    replicas = {"a": replica("a"), "b": replica("b")}
    eventually(lambda: leader(server))
    fleet.apply(profile_document(4, rollout=at_once(2)))
    assert server.wait(lambda: sum(map(bool, fleet.given().values())) >= 3)

    first = leader(server)
    replicas[first].send_signal(signal.SIGSTOP)
    assert server.wait(lambda: leader(server) != first)
    fleet.silent = set(NODES[6:])
    assert server.wait(lambda: sum(map(bool, fleet.given().values())) >= 7)
    second = leader(server)
    replicas[first].send_signal(signal.SIGCONT)
    fleet.silent = set()
    fleet.wait("Complete")

    assert leader(server) == second
    assert fleet.given() == dict.fromkeys(NODES, revision(4))
    assert fleet.most_in_progress() == 2


def test_a_replica_that_is_told_to_end_does_so_at_once_and_lets_the_next_one_lead(
    server: ApiServer, fleet: Fleet, replica: StartReplica
) -> None:
    first = replica("a")
    eventually(lambda: leader(server) == "a")

    begun = time.monotonic()
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=10) == 0

    assert time.monotonic() - begun < 5
    assert leader(server) == ""


def test_a_replica_ends_in_time_while_the_api_server_hangs(
    server: ApiServer, fleet: Fleet, replica: StartReplica
) -> None:
    fleet.join(*NODES)
    process = replica("a")
    eventually(lambda: leader(server) == "a")
    server.delay(30, "PATCH", "nodeprofiles", times=100)
    server.delay(30, "PUT", "leases", times=100)
    fleet.apply(profile_document(4))
    assert server.wait(lambda: server.count("PATCH", "nodeprofiles") > 0)

    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=10) == 0
    assert time.monotonic() - begun < 5.5


def test_a_replica_without_the_api_server_is_alive_and_not_ready(
    server: ApiServer, replica: StartReplica
) -> None:
    port = free_port()
    server.refuse_connections()
    replica("a", f"--http-address=127.0.0.1:{port}")
    eventually(lambda: "[+] rollouts: ok" in page(port, "/livez"))
    assert "not listed yet: nodes, nodeprofiles, controllerrevisions" in page(port, "/readyz")

    server.accept_connections()

    eventually(lambda: "[+] cluster: ok" in page(port, "/readyz"))


def test_two_replicas_on_one_network_share_a_port(
    server: ApiServer, fleet: Fleet, replica: StartReplica
) -> None:
    port = free_port()
    first = replica("a", f"--http-address=127.0.0.1:{port}")
    eventually(lambda: "dra_driver_controller_leader 1.0" in page(port, "/metrics"))
    second = replica("b", f"--http-address=127.0.0.1:{port}")
    time.sleep(1.0)
    assert second.poll() is None

    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=10) == 0

    eventually(lambda: "dra_driver_controller_leader 1.0" in page(port, "/metrics"))
    assert "[+] cluster: ok" in page(port, "/readyz")


def test_the_leader_tells_how_far_a_profile_is(
    server: ApiServer, fleet: Fleet, replica: StartReplica
) -> None:
    port = free_port()
    fleet.join(*NODES[:3])
    replica("a", f"--http-address=127.0.0.1:{port}")
    fleet.apply(profile_document(4))
    fleet.wait("Complete")

    expected = f'dra_driver_profile_nodes{{profile="{PROFILE}",state="updated"}} 3.0'
    eventually(lambda: expected in page(port, "/metrics"))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def page(port: int, path: str) -> str:
    return read_page(port, path)[1]
