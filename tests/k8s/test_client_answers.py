"""What the API server may answer: whatever it is, it is a document or an ApiServerError."""

import contextlib
import http.server
import json
import threading
import urllib.parse
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.errors import ApiServerError, Unreachable
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient, ApiTimeouts
from dra_driver.k8s.responses import MAX_RESPONSE_BYTES, ResponseTooLarge, request_info
from dra_driver.k8s.watch import WatchStream
from tests.fakes.configs import claim_text, shapes

CLAIMS = "/apis/resource.k8s.io/v1/resourceclaims"
KUBECONFIG = """
current-context: c
contexts: [{name: c, context: {cluster: k}}]
clusters: [{name: k, cluster: {server: "%s"}}]
"""


class Answering(http.server.ThreadingHTTPServer):
    """Answers each request with what *answer* makes of its query: a status and a body."""

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.connections = 0
        self.chunk = 0  # bytes; none: in one piece, of which the length is said before
        self.cut_off = 0  # bytes of the answer that are not sent


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Answering

    def setup(self):
        super().setup()
        self.server.connections += 1

    def do_GET(self):
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        status, body = self.server.answer(query)
        self.send_response(status)
        if self.server.chunk:
            self.send_header("Transfer-Encoding", "chunked")
            chunks = [
                body[i : i + self.server.chunk] for i in range(0, len(body), self.server.chunk)
            ]
            body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has read enough
            self.wfile.write(body[: len(body) - self.server.cut_off])
        self.close_connection |= bool(self.server.cut_off)

    def log_message(self, *arguments):
        """Standard error is for people."""


@pytest.fixture
def answering(tmp_path):
    """A client of a server that answers as told."""
    with contextlib.ExitStack() as stack:

        def answering(answer):
            server = stack.enter_context(Answering(answer))
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            path = tmp_path / "kubeconfig"
            path.write_text(KUBECONFIG % f"http://127.0.0.1:{server.server_address[1]}")
            # Whether it answers in time is of no matter here.
            client = ApiClient(load_kubeconfig(path), ApiTimeouts(read=30, watch=30, retry=0.005))
            stack.callback(client.close)
            return client, server

        yield answering


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"[" * 5000),
        (200, b'{"a":' + b"1" * 5000 + b"}"),
        (200, b"\xff\xfe"),
        (200, b"[]"),
        (200, b""),
        (403, b"[" * 5000 + b"]" * 5000),
        (500, b'{"message":' + b"1" * 5000 + b"}"),
        (404, b'{"message":{"a":[]},"reason":7}'),
    ],
    ids=["nested", "digits", "no text", "no object", "nothing", "refusal", "error", "no status"],
)
def test_what_cannot_be_read_is_a_cluster_error(answering, status, body):
    client, _ = answering(lambda query: (status, body))

    with pytest.raises(ApiServerError, match="list resourceclaims") as failed:
        client.get(CLAIMS)
    assert ("did not answer with" in str(failed.value)) == (status == 200)


def test_an_answer_without_end_is_not_read_to_its_end_and_not_asked_for_again(answering):
    queries = []

    def answer(query):
        queries.append(query)
        return 200, b" " * (MAX_RESPONSE_BYTES + 1)

    client, _ = answering(answer)

    with pytest.raises(ResponseTooLarge, match="more than 16 MiB"):
        client.get(CLAIMS)
    assert len(queries) == 1


@pytest.mark.parametrize("chunk", [0, 1000])
def test_an_answer_that_is_cut_off_is_no_answer(answering, chunk):
    client, server = answering(lambda query: (200, b'{"a":1}' + b" " * 10_000))
    server.chunk, server.cut_off = chunk, 2000

    with pytest.raises(Unreachable, match="list resourceclaims"):
        client.get(CLAIMS)


@pytest.mark.parametrize("chunk", [0, 1000])
def test_a_connection_is_used_again_once_its_answer_is_read(answering, chunk):
    client, server = answering(lambda query: (200, b'{"a":1}' + b" " * 100_000))
    server.chunk = chunk

    assert [client.get(CLAIMS) for _ in range(5)] == [{"a": 1}] * 5
    assert server.connections == 1


def test_one_users_nesting_keeps_nobody_from_the_list_of_all_claims(answering):
    deep, plain = claim_text(shapes()["lists in lists"]), claim_text('{"kind":"GpuConfig"}', 1, "b")
    client, _ = answering(lambda query: (200, f'{{"items":[{deep},{plain}]}}'.encode()))

    names = [item["metadata"]["name"] for item in client.list(CLAIMS)["items"]]

    assert names == ["worst", "b"]


def test_a_list_of_objects_that_are_filled_to_the_brim_comes_in_smaller_pages(answering):
    objects = [json.dumps({"text": "x" * 200_000})] * 120

    def answer(query):
        limit, first = int(query["limit"]), int(query.get("continue", 0))
        items, end = objects[first : first + limit], first + limit
        following = {"continue": str(end)} if end < len(objects) else {}
        return 200, f'{{"items":[{",".join(items)}],"metadata":{json.dumps(following)}}}'.encode()

    client, _ = answering(answer)

    pages = [len(page["items"]) for page in client.pages(CLAIMS, deadline_seconds=60)]

    assert pages == [50, 50, 20]


def test_a_single_object_that_is_too_long_ends_the_list(answering):
    queries = []

    def answer(query):
        queries.append(query["limit"])
        return 200, b" " * (MAX_RESPONSE_BYTES + 1)

    client, _ = answering(answer)

    with pytest.raises(ResponseTooLarge):
        client.list(CLAIMS)
    assert queries == ["500", "50", "5"]


def events(*chunks):
    return WatchStream(
        request_info("GET", CLAIMS, watch=True), iter(chunks), lambda: None, lambda: None
    )


@pytest.mark.parametrize(
    "line",
    [b"[" * 5000, b"[]", b'{"type":' + b"1" * 5000 + b"}", b"{", b"\xff"],
    ids=["nested", "no object", "digits", "cut off", "no text"],
)
def test_an_event_that_cannot_be_read_says_so(line):
    with pytest.raises(Unreachable, match="watch resourceclaims"):
        next(events(line + b"\n"))


def test_an_event_without_end_is_not_kept():
    endless = (b"x" * (1 << 20) for _ in range(1000))
    watch = events(*islice(endless, 20))

    with pytest.raises(Unreachable, match="an event has more than 16 MiB"):
        next(watch)


def test_an_event_of_a_claim_that_is_nested_without_end_is_told():
    object = claim_text(shapes()["maps in maps"], 1)

    (event,) = events(f'{{"type":"ADDED","object":{object}}}\n'.encode())

    assert event["object"]["metadata"]["name"] == "worst"


@given(st.binary(max_size=40))
def test_whatever_a_watch_says_is_an_event_or_an_error(line):
    try:
        for event in events(line, b"\n"):
            assert isinstance(event, dict)
    except ApiServerError:
        pass
