"""What tenants are told of each other: nothing but that somebody of another namespace is there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.errors import DeviceHeldByClaim, DriverError, NodeError
from dra_driver.k8s.claims import Claim
from dra_driver.model.offer import Exclusive, Replica
from dra_driver.model.records import ClaimRecord
from dra_driver.plan.prepare.claim import plan_claim
from tests.builders import POOL, allocation, config, fraction, offer, ref
from tests.fakes.mig import mig_offer

NAMESPACES = ("alpha", "beta")
SHORT, LONG = (
    config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}})
    for interval in ("Short", "Long")
)
OFFERS = [
    offer(2, fractions_set_interval=True),
    offer(2, Exclusive()),
    offer(2, Replica(place=0, of=4, memory_bytes=None, cores=0)),
    mig_offer(),
]
DEVICES = [
    "gpu-0",
    "gpu-1",
    "gpu-0-mig-1g10gb-19-0",
    "gpu-0-mig-1g10gb-19-1",
    "gpu-0-mig-3g40gb-9-0",
]
ALLOCATIONS = st.sampled_from(
    [
        *(allocation(device) for device in DEVICES),
        *(fraction(memory, device) for memory in ("20Gi", "60Gi") for device in DEVICES[:2]),
    ]
)
CONFIGS = st.sampled_from([(), (SHORT,), (LONG,)])


@st.composite
def claims(draw):
    """Claims of two namespaces for the same few devices."""
    return [
        Claim(
            ref(f"{namespace}-{number}", namespace=namespace),
            (draw(ALLOCATIONS),),
            draw(CONFIGS),
        )
        for number, namespace in enumerate(draw(st.lists(st.sampled_from(NAMESPACES), max_size=8)))
    ]


@given(claims(), st.sampled_from(OFFERS))
def test_no_refusal_tells_a_tenant_of_another_namespaces_claim(asked, at):
    held: list[ClaimRecord] = []
    for claim in asked:
        (other,) = set(NAMESPACES) - {claim.ref.namespace}
        try:
            held.append(plan_claim(claim, at, held, POOL).record)
        except DriverError as refused:
            assert other not in refused.public
            if isinstance(refused, DeviceHeldByClaim):
                assert "held by" in refused.public or "has set" in refused.public


def holding(namespace, device="gpu-0", **fields):
    """The record of a claim that has all of a GPU."""
    asked = Claim(ref("holder", namespace=namespace), (allocation(device),), **fields)
    return plan_claim(asked, offer(), (), POOL).record


def refused(others, *allocations, **fields):
    """Why a claim of the namespace alpha cannot be prepared."""
    asked = Claim(ref("claim", namespace="alpha"), allocations or (allocation(),), **fields)
    with pytest.raises(DeviceHeldByClaim) as error:
        plan_claim(asked, offer(fractions_set_interval=True), others, POOL)
    return error.value


def test_a_claim_of_another_namespace_is_not_named():
    error = refused([holding("beta")])

    assert "gpu-0 is held by a claim of another namespace, and it needs" in error.public
    assert "gpu-0 is held by claim beta/holder (UID uid-holder), and it needs" in str(error)


def test_a_claim_of_the_same_namespace_is_named():
    error = refused([holding("alpha")])

    assert "gpu-0 is held by claim alpha/holder (UID uid-holder), and it needs" in error.public


def test_an_interval_of_another_namespace_is_told_without_its_claim():
    whole = offer(fractions_set_interval=True)
    beta = Claim(ref("holder", namespace="beta"), (fraction(),), (SHORT,))
    error = refused([plan_claim(beta, whole, (), POOL).record], fraction(), configs=(LONG,))

    assert "but a claim of another namespace has set Short; write Short" in error.public
    assert "but claim beta/holder (UID uid-holder) has set Short; write Short" in str(error)


def test_an_error_says_the_same_to_everybody_unless_it_is_said_otherwise():
    assert NodeError("why").public == str(NodeError("why")) == "why"
    assert NodeError("why, in full", "why").public == "why"
    assert str(NodeError("why, in full", "why")) == "why, in full"
