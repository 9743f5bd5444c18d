"""When NodeProfiles slow the scheduler down, and what is said then."""

import pytest

from dra_driver.model.node_profiles import NodeProfileObject
from dra_driver.plan.profiles.revisions import canonical_rules
from dra_driver.plan.profiles.scheduler_cost import (
    MANY_NODES,
    creates_partitions,
    slow_scheduler_warnings,
)

DYNAMIC = canonical_rules({"gpus": [{"mig": {"mode": "Dynamic"}}]})
PLAIN = canonical_rules({"gpus": [{"replicas": 2}]})


def profile(name: str, rules: str) -> NodeProfileObject:
    return NodeProfileObject(name, name, "1", rules=rules)


def warned(minor: int | None, **nodes: int) -> set[str]:
    """Of which profiles it is said; those whose names begin with "d" create partitions."""
    profiles = [profile(name, DYNAMIC if name[0] == "d" else PLAIN) for name in nodes]
    by_profile = {name: range(number) for name, number in nodes.items()}
    return set(slow_scheduler_warnings(profiles, by_profile, minor))


@pytest.mark.parametrize(
    ("minor", "nodes", "expected"),
    [
        pytest.param(36, {"d": MANY_NODES}, {"d"}, id="partitions on many nodes"),
        pytest.param(36, {"d": MANY_NODES - 1}, set(), id="on few"),
        pytest.param(36, {"d1": 10, "d2": 10, "d3": 0}, {"d1", "d2"}, id="of two profiles"),
        pytest.param(36, {"p": 5000}, set(), id="other profiles cost nothing"),
        pytest.param(37, {"d": 5000}, set(), id="a release whose scheduler is better"),
        pytest.param(None, {"d": 5000}, set(), id="nobody knows the release"),
    ],
)
def test_partitions_on_many_nodes_slow_the_scheduler_down(minor, nodes, expected) -> None:
    assert warned(minor, **nodes) == expected


def test_the_warning_has_the_measured_figure_and_what_costs_nothing() -> None:
    [text] = slow_scheduler_warnings([profile("d", DYNAMIC)], {"d": range(25)}, 36).values()
    assert text.startswith("25 nodes create MIG partitions for claims.")
    assert "3.7 pods a second instead of 93" in text
    assert text.endswith("Partitions of a layout have none of this cost")


def test_gpus_that_cannot_be_read_create_nothing() -> None:
    assert not creates_partitions("p", canonical_rules({"gpus": [{"nonsense": 1}]}))
