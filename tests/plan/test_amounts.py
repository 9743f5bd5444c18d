"""How much of a GPU claims take, and whether there is that much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.offer import AdminAccess, Exclusive, Replica
from dra_driver.plan.prepare.amounts import (
    NO_AMOUNT,
    WHOLE_AMOUNT,
    Amount,
    requested_amount,
    shortage,
    total_amount,
)
from tests.builders import MIB, SLICEABLE, gpu, holding

GIB = 1024 * MIB


def consumed(memory="20Gi", cores="0", shares="1"):
    return (("cores", cores), ("memory", memory), ("shares", shares))


def part(gib, cores=0, shares=1):
    return Amount(gib * GIB, cores, shares)


@pytest.mark.parametrize(
    ("asked", "shape", "expected"),
    [
        pytest.param(consumed(), Exclusive(), WHOLE_AMOUNT, id="exclusive"),
        pytest.param(consumed(), AdminAccess(), NO_AMOUNT, id="a-monitor-takes-nothing"),
        pytest.param((), SLICEABLE, WHOLE_AMOUNT, id="allocated-while-it-was-exclusive"),
        pytest.param(consumed("81559Mi"), SLICEABLE, WHOLE_AMOUNT, id="all-the-memory"),
        pytest.param(
            consumed("81559Mi", "50"), SLICEABLE, Amount(cores=50, whole=True), id="all-and-cores"
        ),
        pytest.param(consumed("20Gi", "30", "2"), SLICEABLE, part(20, 30, 2), id="a-part"),
        pytest.param((("gpu.nvidia.com/memory", "1Gi"),), SLICEABLE, part(1), id="qualified"),
        pytest.param((), Replica(0, 2, 40 * GIB), part(40), id="a-replica"),
        pytest.param((), Replica(0, 2, 40 * GIB, cores=50), part(40, 50), id="a-replica-by-mps"),
        pytest.param((), Replica(0, 2, None), Amount(), id="a-replica-of-unknown-memory"),
    ],
)
def test_an_allocation_is_an_amount(asked, shape, expected):
    assert requested_amount(asked, shape) == expected


def test_who_looks_on_takes_nothing():
    holdings = [
        holding("a", consumed=consumed("20Gi"), shape=SLICEABLE),
        holding("b", consumed=consumed("10Gi", "5"), shape=SLICEABLE),
        holding("c", admin=True),
    ]

    assert total_amount(holdings) == part(30, 5, 2)


@pytest.mark.parametrize(
    ("requested", "held", "expected"),
    [
        pytest.param(WHOLE_AMOUNT, NO_AMOUNT, "", id="nobody-is-there"),
        pytest.param(part(20), part(59), "", id="it-fits"),
        pytest.param(WHOLE_AMOUNT, part(1), "all of it", id="all"),
        pytest.param(part(1), WHOLE_AMOUNT, "it, all of which is taken", id="taken"),
        pytest.param(
            part(20), part(60), "20480Mi of memory, of which 20119Mi are free", id="memory"
        ),
        pytest.param(
            part(1, 60), part(1, 50), "60 % of the cores, of which 50 are free", id="cores"
        ),
        pytest.param(part(1), part(1, 0, 48), "1 of 48 shares, of which 0 are free", id="shares"),
        pytest.param(
            part(80, 60),
            part(1, 50),
            "81920Mi of memory, of which 80535Mi are free and 60 % of the cores, of which 50 are "
            "free",
            id="both",
        ),
    ],
)
def test_what_is_lacking_is_said_with_what_is_free(requested, held, expected):
    assert shortage(requested, held, gpu(0).memory_bytes, SLICEABLE) == expected


def test_replicas_of_a_gpu_are_counted():
    shape = Replica(0, 2, None)

    assert shortage(Amount(), Amount(), None, shape) == ""
    assert "shares" in shortage(Amount(), Amount(shares=2), None, shape)


def test_an_exclusive_gpu_has_no_second_share():
    assert "shares" in shortage(Amount(), Amount(), gpu(0).memory_bytes, Exclusive())


@given(st.lists(st.builds(part, st.integers(1, 80), st.integers(0, 100)), max_size=10))
def test_what_is_let_in_one_by_one_is_never_more_than_the_gpu_has(amounts):
    held = NO_AMOUNT
    for amount in amounts:
        if not shortage(amount, held, gpu(0).memory_bytes, SLICEABLE):
            held += amount

    assert held.memory_bytes <= 81559 * MIB or held.shares == 1
    assert held.cores <= 100
