"""What is read from a ResourceClaim, and when it is refused."""

from typing import Any

import pytest

from dra_driver.base.errors import ClaimError
from dra_driver.k8s.claims import parse_claim
from tests.builders import claim, claim_document, ref

DRIVER = "gpu.nvidia.com"


def document(**status: Any) -> dict[str, Any]:
    answer = claim_document(claim("gpu-0"))
    answer["status"] |= status
    return answer


def test_our_results_are_read() -> None:
    assert parse_claim(document(), ref(), DRIVER) == claim("gpu-0")


@pytest.mark.point(93)
def test_who_a_claim_is_reserved_for_makes_no_difference() -> None:
    group = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g", "uid": "1"}

    assert parse_claim(document(reservedFor=[group]), ref(), DRIVER) == claim("gpu-0")


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        pytest.param(None, False, id="written by a user"),
        pytest.param([{"kind": "Pod", "name": "p", "controller": True}], True, id="of a pod"),
        pytest.param([{"kind": "Pod", "name": "p"}], False, id="gone with a pod that others share"),
        pytest.param([{"kind": "Job", "name": "j", "controller": True}], False, id="of a job"),
    ],
)
def test_a_claim_that_was_made_for_a_pod_is_told_from_others(owners, expected) -> None:
    answer = document()
    answer["metadata"]["ownerReferences"] = owners

    assert parse_claim(answer, ref(), DRIVER).made_for_pod is expected


@pytest.mark.point(20)
def test_a_claim_without_an_allocation_is_refused() -> None:
    with pytest.raises(ClaimError, match="default/claim is not allocated"):
        parse_claim(document(allocation=None), ref(), DRIVER)


@pytest.mark.point(21)
def test_a_claim_with_another_uid_is_refused() -> None:
    with pytest.raises(ClaimError, match="got replaced: UID another was asked for"):
        parse_claim(document(), ref(uid="another"), DRIVER)


def test_a_claim_of_another_driver_is_refused() -> None:
    with pytest.raises(ClaimError, match=r"no device of driver other\.example\.com"):
        parse_claim(document(), ref(), "other.example.com")
