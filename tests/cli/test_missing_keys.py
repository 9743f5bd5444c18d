"""Claims that make the scheduler give up, since they ask a device for what it has not."""

import pytest

from dra_driver.cli.doctor.scheduling.pending_claims import judge, of_verdict
from dra_driver.cli.findings import Level
from tests.cli.scheduling import DRIVER, MIG_CLASS, A, claim, published, request, slices
from tests.plan.mig.boards import dynamic, instance, mig, mig_gpu

STATIC = instance(mig(), "3g.20gb", 4)


def node(*instances, name="n1", profiles=("3g.20gb",)):
    gpu = mig_gpu(on=True, instances=instances)
    return slices(gpu, rules=dynamic(*profiles), node=name)


def verdict(*expressions, on=None, **fields):
    requested = request(f"mig.{DRIVER}", *expressions, **fields)
    return judge([claim(requested)], published(on or node(STATIC), classes=[MIG_CLASS]))


def test_a_claim_that_asks_a_partition_without_a_uuid_for_it_is_told_how_to_write_it():
    outcome = verdict(f"{A}.uuid == '{STATIC.uuid}'")

    assert outcome.problems == ()
    ((name, why),) = outcome.risks
    assert name == "team-a/a"
    assert why == (
        "spec.devices.requests[0].exactly.selectors: gpu-0-mig-3g20gb-9-0 on n1 has "
        "no uuid, which ends the scheduler's search with an error (no such key: uuid); ask first "
        f"whether it is there: 'uuid' in {A} && …"
    )
    (finding,) = of_verdict(outcome)
    assert finding.level is Level.WARN
    assert finding.message == f"team-a/a may not be served although it could be: {why}"


def test_where_no_device_has_it_the_claim_can_never_be_served_and_says_why():
    outcome = verdict(f"{A}.uuid == 'MIG-1'", on=node(profiles=("1g.5gb",)))

    ((_, why),) = outcome.problems
    assert "none of the 7 devices of its class match them; their MIG profiles are 1g.5gb" in why
    assert "(and 6 more of its class) has no uuid" in why


def test_what_is_missing_of_the_capacity_is_asked_for_there():
    outcome = verdict(f"device.capacity['{DRIVER}'].memorySlice4.compareTo(quantity('1')) >= 0")

    ((_, why),) = outcome.risks
    assert f"'memorySlice4' in device.capacity['{DRIVER}']" in why


@pytest.mark.parametrize(
    "expressions",
    [
        pytest.param([f"'uuid' in {A} && {A}.uuid == '{STATIC.uuid}'"], id="asked first"),
        pytest.param([f"'uuid' in {A}", f"{A}.uuid == '{STATIC.uuid}'"], id="in a selector before"),
        pytest.param([f"{A}.profile == '3g.20gb'"], id="what every partition has"),
        pytest.param([f"{A}.profile.matches('3g')", f"{A}.uuid == ''"], id="maybe false before"),
        pytest.param([f"has({A}.uuid) && {A}.uuid == ''"], id="of what is not understood, nothing"),
    ],
)
def test_selectors_of_which_no_error_is_known_are_no_risk(expressions):
    assert verdict(*expressions).risks == ()


def test_where_every_device_has_it_there_is_no_risk():
    both = [instance(mig(), "3g.20gb", start, gi=start + 1) for start in (0, 4)]

    assert verdict(f"{A}.uuid == '{STATIC.uuid}'", on=node(*both)).risks == ()
