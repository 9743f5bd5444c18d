"""Connections that die without a word, and servers that take one and never answer: real sockets."""

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dra_driver.base.errors import Unreachable
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient, ApiTimeouts
from tests.fakes.api_server import ApiServer as FakeApiServer
from tests.fakes.silent_proxy import SilentProxy
from tests.waiting import eventually

NODE = "/api/v1/nodes/n"
PODS = "/api/v1/namespaces/ns/pods"
GENEROUS_SECONDS = 30


@pytest.fixture
def server():
    with FakeApiServer() as running:
        running.put({"kind": "Node", "metadata": {"name": "n"}})
        yield running


@pytest.fixture
def proxy(server):
    with SilentProxy("127.0.0.1", int(server.url.rpartition(":")[2])) as running:
        yield running


@pytest.fixture
def connect(server, proxy, tmp_path):
    """A client that reaches *server* through *proxy*."""
    made = []

    def connect(timeouts=None):
        path = server.kubeconfig(tmp_path / "kubeconfig")
        path.write_text(path.read_text().replace(server.url, f"http://127.0.0.1:{proxy.port}"))
        made.append(ApiClient(load_kubeconfig(path), timeouts))
        return made[-1]

    yield connect
    for client in made:
        client.close()


def read_at_once(server, api, number):
    """So many reads at the same time, each on a connection of its own."""
    server.delay(0.3, "GET", times=number)
    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(lambda _: api.get(NODE)["metadata"]["name"], range(number)))


def leave_idle(server, proxy, api, number):
    """At least so many connections, which nobody uses now."""

    def are_open():
        read_at_once(server, api, number)
        return proxy.opened >= number

    eventually(are_open)


def test_the_first_read_after_connections_died_in_silence_succeeds(server, proxy, connect):
    api = connect()
    leave_idle(server, proxy, api, 6)
    proxy.silence()

    assert api.get(NODE)["metadata"]["name"] == "n"


def test_connections_that_idled_beside_one_that_died_are_not_used_again(server, proxy, connect):
    api = connect()
    leave_idle(server, proxy, api, 6)
    proxy.silence()
    api.get(NODE)

    assert read_at_once(server, api, 6) == ["n"] * 6
    assert proxy.swallowed == 1


def test_a_write_that_died_in_silence_is_not_repeated_and_the_next_one_succeeds(
    server, proxy, connect
):
    api = connect(ApiTimeouts(write=3))
    leave_idle(server, proxy, api, 3)
    proxy.silence()
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}

    with pytest.raises(Unreachable, match="did not answer in time"):
        api.create(PODS, document)
    api.create(PODS, document)

    assert server.count("POST") == 1
    assert proxy.swallowed == 1


def test_a_read_of_a_server_that_never_answers_ends_within_its_deadline(proxy, connect):
    api = connect(ApiTimeouts(read=0.1))
    proxy.new_are_silent = True
    began = time.monotonic()

    with pytest.raises(Unreachable, match="did not answer in time"):
        api.get(NODE, deadline_seconds=60)
    assert time.monotonic() - began < GENEROUS_SECONDS
    eventually(lambda: proxy.swallowed == 3)


def test_a_watch_whose_headers_do_not_come_is_given_up_long_before_it_would_end(proxy, connect):
    api = connect(ApiTimeouts(watch=0.5))
    proxy.new_are_silent = True
    began = time.monotonic()

    with pytest.raises(Unreachable, match=r"watch pods ns: .* did not answer in time"):
        api.watch(PODS, {}, 300)
    assert time.monotonic() - began < GENEROUS_SECONDS


def test_an_open_watch_waits_longer_for_events_than_for_its_headers(server, connect):
    api = connect(ApiTimeouts(watch=3))
    watch = api.watch(PODS, {}, 300)
    create = threading.Timer(
        4, server.put, [{"kind": "Pod", "metadata": {"name": "late", "namespace": "ns"}}]
    )
    create.start()

    assert next(watch)["object"]["metadata"]["name"] == "late"
    watch.close()
    create.join()


def test_an_open_watch_that_died_in_silence_says_unreachable(proxy, connect):
    watch = connect(ApiTimeouts(watch=3)).watch(PODS, {}, 1)
    proxy.silence()

    with pytest.raises(Unreachable, match="did not answer in time"):
        list(watch)


def test_the_system_finds_out_about_a_peer_that_vanished(proxy, connect):
    connect().get(NODE)

    (ours,) = sockets_to(proxy.port)
    with ours:
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 5
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15_000
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def sockets_to(port):
    """The connections of this process to *port*."""
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed by now, or no connection
            copy = os.dup(int(name))
            try:
                candidate = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            sockets.append(candidate)
    connected = [candidate for candidate in sockets if _leads_to(candidate, port)]
    for candidate in sockets:
        if candidate not in connected:
            candidate.close()
    return connected


def _leads_to(candidate, port):
    try:
        return candidate.getpeername()[1:2] == (port,)
    except OSError:
        return False
