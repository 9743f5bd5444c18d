"""What Prometheus and the kubelet's probes are told, also while others misuse the port."""

import logging
import socket
import struct
import threading
import time
import urllib.error
import urllib.request

import pytest

from dra_driver.base.errors import SettingsError
from dra_driver.base.http import MAX_CONNECTIONS, MAX_REQUEST_BYTES, HttpServer
from dra_driver.plugin.metrics import Metrics
from tests.fakes.open_files import no_more_files
from tests.pages import read_page
from tests.waiting import eventually


@pytest.fixture
def wrong():
    """What the readiness check answers; a test changes it."""
    return {"slices": None}


@pytest.fixture
def ask(wrong):
    metrics = Metrics()
    metrics.observe("prepare", "ok", 0.003)
    server = HttpServer("127.0.0.1:0", metrics.registry)
    server.start({"sockets": lambda: None}, {"slices": lambda: wrong["slices"]})

    yield lambda path: read_page(server.port, path, 5)
    server.stop()


def test_requests_are_counted_in_buckets_that_start_at_a_millisecond(ask):
    status, text = ask("/metrics")

    assert status == 200
    series = (
        'dra_driver_request_duration_seconds_bucket{le="%s",operation="prepare",outcome="ok"} %s'
    )
    assert series % ("0.001", "0.0") in text
    assert series % ("0.004", "1.0") in text


def test_a_live_process_says_so(ask):
    assert ask("/livez") == (200, "[+] sockets: ok\n")


def test_a_process_that_is_not_ready_says_why(ask, wrong):
    wrong["slices"] = "the API server does not answer"

    assert ask("/readyz") == (503, "[-] slices: the API server does not answer\n")

    wrong["slices"] = None

    assert ask("/readyz")[0] == 200


def test_another_path_names_the_ones_there_are(ask):
    assert ask("/")[0] == 404


@pytest.mark.parametrize(
    "address", ["8080", "127.0.0.1:x", "", "192.0.2.1:80", "127.0.0.1:99999", "127.0.0.1:²"]
)
def test_an_address_that_cannot_be_served_is_a_clear_error(address):
    with pytest.raises(SettingsError, match="--http-address"):
        HttpServer(address, Metrics().registry)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_an_ipv6_address_is_served():
    server = HttpServer("[::1]:0", Metrics().registry)
    server.start({}, {})
    with urllib.request.urlopen(f"http://[::1]:{server.port}/livez", timeout=5) as answer:
        assert answer.status == 200
    server.stop()


SECONDS = 0.5  # that a client has for its request


class Port:
    """The server's, and the connections that a test opens to it."""

    def __init__(self):
        self.checked = {"live": 0, "ready": 0}
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.broken = False
        self.metrics = Metrics()
        self.server = HttpServer("127.0.0.1:0", self.metrics.registry, SECONDS)
        self.server.start({"live": self._live}, {"ready": self._ready})
        self.open = []

    def _live(self):
        self.checked["live"] += 1
        if self.broken:
            raise OSError("a check that nobody thought of")

    def _ready(self):
        self.checked["ready"] += 1
        self.may_answer.wait(30)

    def connect(self, sent=b""):
        client = socket.create_connection(("127.0.0.1", self.server.port), timeout=10)
        self.open.append(client)
        client.sendall(sent)
        return client

    def ask(self, path, headers=""):
        """The whole answer to a request."""
        request = f"GET {path} HTTP/1.1\r\n{headers}\r\n"
        return read(self.connect(request.encode()))

    @property
    def threads(self):
        return sum("process_request_thread" in thread.name for thread in threading.enumerate())


@pytest.fixture
def port():
    made = Port()
    yield made
    made.may_answer.set()
    for client in made.open:
        client.close()
    made.server.stop()
    eventually(lambda: made.threads == 0, "the end of all connections")


def read(client):
    """What the server sends until it closes the connection."""
    received = b""
    try:
        while part := client.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    return received.decode()


def reset(client):
    """Close it as a client that has crashed does: with RST."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def test_liveness_is_looked_at_once_a_second_and_readiness_each_time(port):
    began = time.monotonic()
    for _ in range(20):
        assert port.ask("/livez").endswith("[+] live: ok\n")
        port.ask("/readyz")
    seconds = time.monotonic() - began

    assert port.checked["ready"] == 20
    assert 1 <= port.checked["live"] <= 1 + seconds

    before = port.checked["live"]
    time.sleep(1.01)
    port.ask("/livez")

    assert port.checked["live"] == before + 1


def test_probes_and_metrics_are_answered_while_500_connections_send_nothing(port):
    for number in range(500):
        port.connect(b"GET /metrics HTT" if number % 2 else b"")
        assert port.threads <= MAX_CONNECTIONS
        if number % 50 == 0:
            assert " 200 " in port.ask("/livez")
            assert "process_open_fds" in port.ask("/metrics")

    assert " 200 " in port.ask("/livez")


def test_the_oldest_connection_makes_room_for_a_new_one(port):
    oldest, *_ = [port.connect() for _ in range(MAX_CONNECTIONS)]
    eventually(lambda: port.threads == MAX_CONNECTIONS, "all connections")

    assert " 200 " in port.ask("/livez")
    assert read(oldest) == ""


def test_a_client_that_sends_its_request_byte_by_byte_is_cut_off(port):
    client = port.connect(b"GET /livez HTTP/1.1\r\nX: ")
    began = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - began < 20 * SECONDS:
            client.sendall(b"x")  # refused once the server has closed the connection
            time.sleep(SECONDS / 10)

    assert time.monotonic() - began >= 0.8 * SECONDS


def test_a_client_that_takes_no_answer_is_cut_off(port):
    port.metrics.observe(
        "x" * (1 << 20), "ok", 1
    )  # times its buckets: more than what the kernel keeps for a slow client
    port.connect(b"GET /metrics HTTP/1.1\r\n\r\n")
    eventually(lambda: port.threads == 1, "the connection")
    began = time.monotonic()
    eventually(lambda: port.threads == 0, "the end of the connection", seconds=20 * SECONDS)

    assert time.monotonic() - began >= 0.8 * SECONDS


def test_requests_that_wait_for_a_check_that_hangs_leave_room_for_others(port):
    port.may_answer.clear()
    for _ in range(3 * MAX_CONNECTIONS):
        port.connect(b"GET /readyz HTTP/1.1\r\n\r\n")

    assert " 200 " in port.ask("/livez")
    assert " 503 " in port.ask("/readyz")
    assert port.checked["ready"] == 1  # one thread waits for the check; the others for its answer

    port.may_answer.set()

    eventually(lambda: " 200 " in port.ask("/readyz"), "readiness")


def test_a_request_that_is_too_long_is_refused(port):
    size = MAX_REQUEST_BYTES // 4
    headers = "".join(f"X-{number}: {'x' * size}\r\n" for number in range(5))

    assert " 431 " in port.ask("/livez", headers)
    assert port.ask("/" + MAX_REQUEST_BYTES * "x") == ""
    assert " 501 " in read(port.connect(b"POST /livez HTTP/1.1\r\n\r\n"))
    assert port.checked["live"] == 0


def test_clients_that_go_away_leave_nothing_in_the_log(port, caplog, capfd):
    caplog.set_level(logging.INFO)
    for sent in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n", 500 * b"rubbish "):
        for _ in range(5):
            reset(port.connect(sent))
    port.may_answer.clear()
    client = port.connect(b"GET /readyz HTTP/1.1\r\n\r\n")
    eventually(lambda: port.checked["ready"], "the request")
    reset(client)  # while its answer is being made
    port.may_answer.set()
    eventually(lambda: port.threads == 0, "the end of all connections")

    assert caplog.records == []
    assert capfd.readouterr().err == ""


def test_a_process_without_a_free_file_descriptor_waits_for_one_without_computing(port):
    client = socket.socket()
    port.open.append(client)
    with no_more_files():
        began = time.process_time()
        client.connect(("127.0.0.1", port.server.port))
        client.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
        time.sleep(0.5)
        computed = time.process_time() - began

    assert computed < 0.1
    assert " 200 " in read(client)


def test_a_check_that_fails_in_an_unforeseen_way_is_logged(port, caplog):
    port.broken = True

    assert port.ask("/livez") == ""
    [record] = caplog.records
    assert record.getMessage() == "an HTTP request failed"
    assert "a check that nobody thought of" in caplog.text

    port.broken = False

    assert " 200 " in port.ask("/livez")
