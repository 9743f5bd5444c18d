"""What Prometheus and the kubelet's probes are told."""

import socket
import urllib.error
import urllib.request

import pytest

from dra_driver.base.errors import SettingsError
from dra_driver.base.http import HttpServer
from dra_driver.plugin.metrics import Metrics


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

    def get(path):
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{server.port}{path}", timeout=5
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, e.read().decode()

    yield get
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
