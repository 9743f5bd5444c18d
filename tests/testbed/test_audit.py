"""Reading the API server's audit log."""

import json
from pathlib import Path
from typing import Any

import pytest

from hack.testbed.audit import ApiRequest, read_requests


def line(number: int, verb: str = "get", **fields: Any) -> str:
    """One that the API server writes, so many seconds after the epoch."""
    event = {
        "kind": "Event",
        "auditID": f"id-{number}",
        "stage": "ResponseComplete",
        "requestURI": "/apis/resource.k8s.io?timeout=8s",
        "verb": verb,
        "user": {"username": "system:serviceaccount:gpus:plugin"},
        "userAgent": "dra-driver",
        "responseStatus": {"metadata": {}, "code": 200},
        "requestReceivedTimestamp": f"1970-01-01T00:00:{number:02d}.500000Z",
    }
    return json.dumps(event | fields) + "\n"


def request(number: int, verb: str, resource: str, refusal: str = "") -> ApiRequest:
    return ApiRequest("plugin", verb, resource, "dra-driver", refusal, number + 0.5)


def test_requests_are_named_as_rights_are_and_refusals_by_their_reason(tmp_path: Path) -> None:
    slices = {"resource": "resourceslices", "apiGroup": "resource.k8s.io", "name": "a"}
    policy = "a is forbidden: ValidatingAdmissionPolicy 'p' denied request: spec.nodeName is 'b'"
    log = tmp_path / "audit.log"
    log.write_text(
        line(1)
        + line(2, "patch", objectRef={"resource": "nodes", "subresource": "status"})
        + line(3, "list", responseStatus={"code": 403, "message": "no role allows it"})
        + line(4, "create", objectRef=slices, responseStatus={"code": 422, "message": policy})
        + line(5, "update", objectRef=slices, responseStatus={"code": 409, "message": "older"})
    )

    assert read_requests(log, 0) == [
        request(1, "get", "/apis/resource.k8s.io"),
        request(2, "patch", "nodes/status"),
        request(3, "list", "/apis/resource.k8s.io", "no role allows it"),
        request(4, "create", "resourceslices.resource.k8s.io", policy),
        request(5, "update", "resourceslices.resource.k8s.io"),
    ]


def test_a_watch_counts_once_and_while_it_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    log.write_text(
        line(1, "watch", stage="ResponseStarted")
        + line(2, "watch", stage="ResponseStarted")
        + line(1, "watch")
    )

    assert [str(each) for each in read_requests(log, 0)] == ["watch /apis/resource.k8s.io"] * 2


def test_what_is_older_or_just_being_written_is_left_out_and_a_replaced_file_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "audit-2026-01-02T03-04-05.000.log").write_text(line(1, "get") + line(2, "list"))
    log = tmp_path / "audit.log"
    log.write_text(line(3, "create") + line(4, "patch")[:90])

    assert [each.verb for each in read_requests(log, 2)] == ["list", "create"]


def test_without_an_audit_log_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_requests(tmp_path / "audit.log", 0)
