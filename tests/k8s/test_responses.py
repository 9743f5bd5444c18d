"""What an answer of the API server means, in the words of the person who has to mend it."""

import json

import pytest

from dra_driver.base.errors import Conflict, Forbidden, Gone, NotFound, Refused, Unreachable
from dra_driver.k8s.responses import request_info, response_error, watch_error

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims"


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("GET", SLICES, "list resourceslices.resource.k8s.io"),
        ("GET", f"{SLICES}/s", "get resourceslices.resource.k8s.io s"),
        ("POST", SLICES, "create resourceslices.resource.k8s.io"),
        ("PUT", f"{CLAIMS}/c/status", "update resourceclaims/status.resource.k8s.io ns/c"),
        ("DELETE", f"{SLICES}/s", "delete resourceslices.resource.k8s.io s"),
        ("GET", "/api/v1/nodes/n", "get nodes n"),
        ("GET", "/api/v1/namespaces/ns", "get namespaces ns"),
        ("PATCH", "/api/v1/namespaces/ns/events/e", "patch events ns/e"),
        ("GET", "/apis/resource.k8s.io", "get /apis/resource.k8s.io"),
        ("GET", "/version", "get /version"),
    ],
)
def test_a_request_is_described_in_the_words_of_rbac(method, path, words):
    assert str(request_info(method, path)) == words


def test_a_watch_is_a_verb_of_its_own():
    assert request_info("GET", SLICES, watch=True).verb == "watch"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Refused),
        (401, Forbidden),
        (403, Forbidden),
        (404, NotFound),
        (405, Refused),
        (409, Conflict),
        (410, Gone),
        (413, Refused),
        (422, Refused),
        (429, Unreachable),
        (500, Unreachable),
        (503, Unreachable),
        (504, Unreachable),
    ],
)
def test_each_status_has_its_error(status, kind):
    assert type(response_error(request_info("GET", SLICES), status, b"")) is kind


def test_the_message_names_the_request_the_status_and_what_the_server_said():
    body = json.dumps({"reason": "Invalid", "message": "spec.driver: Required value"}).encode()

    assert str(response_error(request_info("POST", SLICES), 422, body)) == (
        "create resourceslices.resource.k8s.io: the API server answered 422 Invalid: "
        "spec.driver: Required value"
    )


def test_a_missing_right_is_named_as_a_role_has_to_have_it():
    body = json.dumps({"reason": "Forbidden", "message": 'User "u" cannot list resource'}).encode()

    assert str(response_error(request_info("GET", SLICES), 403, body)).endswith(
        'a role bound to this user has to allow the verb "list" on "resourceslices" '
        'in API group "resource.k8s.io"'
    )


def test_an_admission_policy_that_forbids_is_not_taken_for_a_missing_right():
    body = json.dumps({"reason": "Forbidden", "message": "policy: not your node"}).encode()
    error = response_error(request_info("POST", SLICES), 403, body)

    assert str(error).endswith("policy: not your node")


@pytest.mark.parametrize("body", [b"404 page not found\n", b"", b"\xff\xfe", b"[1]", b"null"])
def test_an_answer_that_is_no_status_is_quoted_as_far_as_it_goes(body):
    assert "the API server answered 404" in str(
        response_error(request_info("GET", SLICES), 404, body)
    )


def test_an_error_event_of_a_watch_is_the_same_error():
    status = {"code": 410, "reason": "Expired", "message": "too old resource version"}

    assert type(watch_error(request_info("GET", SLICES, watch=True), status)) is Gone
    assert type(watch_error(request_info("GET", SLICES, watch=True), {})) is Unreachable
