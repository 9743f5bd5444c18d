"""The one door to the API server, with the real client library over real HTTP."""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import islice

import pytest

from dra_driver.base.deadlines import request_deadline
from dra_driver.base.errors import (
    Conflict,
    Forbidden,
    Gone,
    NotFound,
    Refused,
    SettingsError,
    Unreachable,
)
from dra_driver.k8s.access import load_in_cluster, load_kubeconfig
from dra_driver.k8s.client import ApiClient, ApiTimeouts
from tests.fakes.api_server import ApiServer as FakeApiServer

QUICK = ApiTimeouts(retry=0.005)
NODE = "/api/v1/nodes/n"
PODS = "/api/v1/namespaces/ns/pods"


@pytest.fixture(autouse=True)
def node(server):
    server.put({"kind": "Node", "metadata": {"name": "n"}})


@pytest.fixture
def connect(server, tmp_path):
    """A client of *server* with other timeouts or another user; closed after the test."""
    made = []

    def connect(timeouts=QUICK, **user):
        access = load_kubeconfig(server.kubeconfig(tmp_path / "kubeconfig", **user))
        made.append(ApiClient(access, timeouts))
        return made[-1]

    yield connect
    for client in made:
        client.close()


@pytest.fixture
def api(connect):
    return connect()


def pod(name, **more):
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **more}


def test_what_is_created_can_be_read_changed_and_deleted(api):
    made = api.create(PODS, pod("p", spec={"unknownField": [1, 2]}))
    made["spec"]["more"] = "x"
    changed = api.update(f"{PODS}/p", made)
    patched = api.patch(f"{PODS}/p", {"spec": {"more": None}})

    assert changed["spec"] == {"unknownField": [1, 2], "more": "x"}
    assert api.get(f"{PODS}/p") == patched
    assert patched["spec"] == {"unknownField": [1, 2]}
    api.delete(f"{PODS}/p")
    with pytest.raises(NotFound, match="get pods ns/p"):
        api.get(f"{PODS}/p")


def test_what_the_api_servers_clock_shows_is_known_from_its_answers(api):
    assert api.now() is None

    api.create(PODS, pod("p"))

    assert (api.now() or 0.0) == pytest.approx(time.time(), abs=60)


@pytest.mark.point(72)
def test_a_stale_version_is_a_conflict(api):
    made = api.create(PODS, pod("p"))
    api.patch(f"{PODS}/p", {"spec": {"a": 1}})

    with pytest.raises(Conflict):
        api.update(f"{PODS}/p", made)
    with pytest.raises(Conflict):
        api.delete(f"{PODS}/p", resource_version=made["metadata"]["resourceVersion"])
    with pytest.raises(Conflict):
        api.delete(f"{PODS}/p", uid="of another")
    api.delete(f"{PODS}/p", uid=made["metadata"]["uid"])


def test_a_long_list_comes_in_pages_and_is_one(server, api):
    for index in range(5):
        server.put(pod(f"p{index}") | {"metadata": {"name": f"p{index}", "namespace": "ns"}})

    answer = api.list(PODS, {"limit": "2"})

    assert [each["metadata"]["name"] for each in answer["items"]] == [f"p{i}" for i in range(5)]
    assert server.count("GET", PODS) == 3


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_read_is_tried_again_while_the_server_cannot_answer(server, api, status):
    server.fail(status, "GET", times=2)

    assert api.get(NODE)["metadata"]["name"] == "n"
    assert server.count("GET") == 3


def test_a_read_is_tried_again_after_a_connection_was_cut(server, api):
    server.hang_up("GET")

    assert api.get(NODE)["metadata"]["name"] == "n"


def test_a_read_gives_up_after_three_tries(server, api):
    server.fail(503, "GET", times=9)

    with pytest.raises(Unreachable, match="503"):
        api.get(NODE)
    assert server.count("GET") == 3


def test_a_read_waits_as_long_as_it_is_asked_to_but_not_beyond_its_deadline(server, api):
    server.fail(429, "GET", times=9, retry_after=300)
    began = time.monotonic()

    with pytest.raises(Unreachable, match="429"):
        api.get(NODE, deadline_seconds=100)
    assert server.count("GET") == 1
    assert time.monotonic() - began < 60


def test_a_read_tries_again_when_it_was_asked_to(server, api):
    server.fail(429, "GET", retry_after=0)

    assert api.get(NODE)
    assert server.count("GET") == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422])
def test_an_answer_that_will_not_change_is_not_asked_for_again(server, api, status):
    server.fail(status, "GET", times=9)

    with pytest.raises((Refused, Forbidden, NotFound, Conflict, Gone)):
        api.get(NODE)
    assert server.count("GET") == 1


@pytest.mark.parametrize("answer", [(429, None), (503, None), (503, "soon"), (504, 0), (409, 0)])
def test_a_write_that_may_have_been_done_is_never_repeated(server, api, answer):
    status, retry_after = answer
    server.fail(status, "POST", times=9, retry_after=retry_after)

    with pytest.raises((Unreachable, Conflict)):
        api.create(PODS, pod("p"))
    assert server.count("POST") == 1


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("method", "send"),
    [
        ("POST", lambda api: api.create(PODS, pod("new"))),
        ("PUT", lambda api: api.update(f"{PODS}/p", pod("p"))),
        ("PATCH", lambda api: api.patch(f"{PODS}/p", {"spec": {"a": 1}})),
        ("DELETE", lambda api: api.delete(f"{PODS}/p")),
        ("WATCH", lambda api: api.watch(PODS, {}, 30).close()),
    ],
)
def test_what_was_turned_away_is_sent_again_when_it_was_asked_to(server, api, status, method, send):
    api.create(PODS, pod("p"))
    server.forget_requests()
    server.fail(status, method, times=2, retry_after=0)

    send(api)

    assert server.count(method) == 3


def test_it_comes_back_no_sooner_than_it_was_asked_to(server, api):
    server.fail(429, "POST", retry_after=1)
    began = time.monotonic()

    api.create(PODS, pod("p"))

    assert time.monotonic() - began >= 1


def test_when_to_come_back_may_be_a_date(server, api):
    server.fail(429, "POST", retry_after="Wed, 21 Oct 2015 07:28:00 GMT")

    assert api.create(PODS, pod("p"))
    assert server.count("POST") == 2


def test_a_write_gives_up_after_three_tries(server, api):
    server.fail(429, "POST", times=9, retry_after=0)

    with pytest.raises(Unreachable, match="429"):
        api.create(PODS, pod("p"))
    assert server.count("POST") == 3


@pytest.mark.parametrize("method", ["POST", "WATCH"])
def test_a_write_is_not_sent_again_beyond_the_time_that_a_try_may_take(server, connect, method):
    api = connect(ApiTimeouts(write=100, watch=100))
    server.fail(429, method, times=9, retry_after=300)
    began = time.monotonic()

    with pytest.raises(Unreachable, match="429"):
        api.create(PODS, pod("p")) if method == "POST" else api.watch(PODS, {}, 30)
    assert server.count(method) == 1
    assert time.monotonic() - began < 60


def test_who_closes_a_client_does_not_wait_for_what_it_was_asked_to_wait_for(server, connect):
    api = connect(ApiTimeouts(write=300))
    server.fail(429, "POST", times=9, retry_after=200)
    failed = threading.Event()

    def write():
        with pytest.raises(Unreachable, match="was closed"):
            api.create(PODS, pod("p"))
        failed.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert server.wait(lambda: server.count("POST") == 1)
    api.close()

    assert failed.wait(60)
    thread.join()


def test_a_server_that_does_not_answer_is_unreachable_in_time(server, connect):
    api = connect(ApiTimeouts(connect=0.2, write=0.2))
    server.delay(5, "POST")

    with pytest.raises(Unreachable, match=r"create pods ns: .* did not answer in time"):
        api.create(PODS, pod("p"))


def test_a_deadline_holds_for_all_tries_together(server, api):
    server.delay(60, "GET", times=9)
    began = time.monotonic()

    with pytest.raises(Unreachable):
        api.get("/version", deadline_seconds=0.3)
    assert time.monotonic() - began < 50, "an answer takes 60 s"


def test_who_has_to_answer_a_request_himself_waits_no_longer_than_that_has(server, connect):
    api = connect(ApiTimeouts(read=60))
    server.delay(60, "GET")
    began = time.monotonic()

    with request_deadline(0.3), pytest.raises(Unreachable):
        api.get("/version", deadline_seconds=60)
    assert time.monotonic() - began < 50, "an answer takes 60 s"


def test_a_server_that_is_not_there_is_unreachable(server, api):
    server.refuse_connections()

    with pytest.raises(Unreachable, match="cannot be reached"):
        api.get("/version", deadline_seconds=0.3)


@pytest.mark.point(104)
def test_a_token_that_is_refused_is_looked_for_in_its_file(server, connect, tmp_path):
    token = tmp_path / "token"
    api = connect(tokenFile="token")
    with pytest.raises(Forbidden, match=str(token)):
        api.get(NODE)

    token.write_text("first\n")
    server.tokens = {"first"}
    assert api.get(NODE)
    server.tokens = {"second"}
    with pytest.raises(Forbidden, match="service account token"):
        api.get(NODE)
    token.write_text("second\n")
    assert api.get(NODE)
    token.unlink()
    server.tokens = {"third"}
    with pytest.raises(Forbidden, match=str(token)):
        api.get(NODE)


def test_a_token_of_the_kubeconfig_is_sent(server, connect):
    server.tokens = {"secret"}

    assert connect(token="secret").get(NODE)


def credentials_program(tmp_path, answer):
    """What a kubeconfig says of a program that prints *answer*."""
    program = tmp_path / "cloud-login"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{answer}'\n")
    program.chmod(0o755)
    version = "client.authentication.k8s.io/v1"
    return {"apiVersion": version, "command": str(program), "interactiveMode": "Never"}


def credentials(**status):
    version = "client.authentication.k8s.io/v1"
    return json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status})


def test_a_person_may_have_the_token_from_a_program(server, tmp_path):
    server.tokens = {"of-the-cloud"}
    program = credentials_program(tmp_path, credentials(token="of-the-cloud"))
    path = server.kubeconfig(tmp_path / "kubeconfig", exec=program)

    with closing(ApiClient(load_kubeconfig(path, may_run_programs=True), QUICK)) as client:
        assert client.get(NODE)


@pytest.mark.parametrize("answer", ["no JSON", credentials(expirationTimestamp="2026-01-01")])
def test_a_program_that_gives_no_credentials_is_named(server, tmp_path, answer):
    program = credentials_program(tmp_path, answer)
    path = server.kubeconfig(tmp_path / "kubeconfig", exec=program)

    with pytest.raises(SettingsError, match="cloud-login' gave neither a token nor a certificate"):
        ApiClient(load_kubeconfig(path, may_run_programs=True))


def test_a_missing_right_is_said_with_its_mend(server, api):
    server.deny("list", "resourceslices")

    with pytest.raises(Forbidden, match='has to allow the verb "list" on "resourceslices"'):
        api.list("/apis/resource.k8s.io/v1/resourceslices", {})


def test_credentials_that_cannot_be_used_are_a_setting_to_mend(tmp_path):
    fake = FakeApiServer()
    path = fake.kubeconfig(tmp_path / "kubeconfig", **{"client-certificate": "absent.crt"})
    path.write_text(path.read_text().replace("http://", "https://"))

    with pytest.raises(SettingsError, match=r"absent\.crt"):
        ApiClient(load_kubeconfig(path))


def test_a_ca_that_is_not_there_is_a_setting_to_mend(tmp_path):
    access = service_account(tmp_path, "127.0.0.1", "1")
    (tmp_path / "ca.crt").unlink()

    with pytest.raises(SettingsError, match=r"no file .*ca\.crt"):
        ApiClient(access)


def test_a_plugin_in_a_pod_does_without_the_official_client(tmp_path):
    code = f"""
import pathlib, sys
import dra_driver.plugin.run
from dra_driver.k8s.access import load_in_cluster
from dra_driver.k8s.client import ApiClient
environ = {{"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}}
ApiClient(load_in_cluster(pathlib.Path({str(tmp_path)!r}), environ))
assert "kubernetes" not in sys.modules
"""
    service_account(tmp_path, "127.0.0.1", "1")

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={})


def test_a_proxy_of_the_environment_is_used(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        client = ApiClient(service_account(tmp_path, "api.example", "6443"), QUICK)
        call = threading.Thread(target=unreachable, args=[client])
        call.start()
        connection, _ = proxy.accept()
        with connection:
            assert connection.recv(100).startswith(b"CONNECT api.example:6443")
        proxy.close()
        call.join()


def service_account(directory, host, port):
    """What a pod has."""
    (directory / "token").write_text("secret")
    (directory / "ca.crt").touch()
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    return load_in_cluster(directory, environ)


def unreachable(client):
    with pytest.raises(Unreachable):
        client.get("/version", deadline_seconds=1)


def test_a_watch_tells_what_happens_from_where_it_starts(server, api):
    server.put(pod("before") | {"metadata": {"name": "before", "namespace": "ns"}})
    since = api.list(PODS)["metadata"]["resourceVersion"]
    made = api.create(PODS, pod("p"))
    api.patch(f"{PODS}/p", {"spec": {"a": 1}})
    api.delete(f"{PODS}/p", uid=made["metadata"]["uid"])

    watch = api.watch(PODS, {"resourceVersion": since}, 30)
    events = [(event["type"], event["object"]["metadata"]["name"]) for event in islice(watch, 3)]
    watch.close()

    assert events == [("ADDED", "p"), ("MODIFIED", "p"), ("DELETED", "p")]


def test_a_watch_ends_by_itself(api):
    assert list(api.watch(PODS, {}, 0)) == []


@pytest.mark.point(72)
def test_a_watch_that_starts_too_early_says_gone(server, api):
    since = api.list(PODS)["metadata"]["resourceVersion"]
    server.forget_history()

    with pytest.raises(Gone, match="watch pods"):
        list(api.watch(PODS, {"resourceVersion": since}, 30))


def test_a_watch_whose_connection_breaks_says_unreachable(server, api):
    watch = api.watch(PODS, {}, 30)
    server.end_watches()

    with pytest.raises(Unreachable):
        list(watch)


@pytest.mark.parametrize("end", ["watch", "client"])
def test_a_blocked_watch_ends_at_once_when_another_thread_closes_it(server, api, end):
    watch = api.watch(PODS, {}, 30)
    ended = threading.Event()

    def read():
        assert list(watch) == []
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert server.wait(lambda: server.count("WATCH") == 1)
    began = time.monotonic()
    (watch if end == "watch" else api).close()

    assert ended.wait(30)
    assert time.monotonic() - began < 25, "the watch lasts 30 s"
    thread.join()
    watch.close()  # again is nothing


def test_a_closed_client_sends_nothing_more(server, api):
    api.close()

    with pytest.raises(Unreachable, match="was closed"):
        api.get("/version")
    assert server.count() == 0


def test_many_threads_share_a_client(server, api):
    nodes = []
    threads = [threading.Thread(target=lambda: nodes.append(api.get(NODE))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(nodes) == 12


def test_a_document_is_sent_as_it_is(server, api):
    api.create(PODS, pod("ü", spec={"int": 2**60, "none": None, "list": []}))

    (request,) = server.requests
    assert request.body == json.loads(
        '{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ü"},'
        ' "spec": {"int": 1152921504606846976, "none": null, "list": []}}'
    )
    assert request.headers["User-Agent"] == "dra-driver"
