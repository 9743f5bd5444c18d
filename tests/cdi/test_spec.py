"""Edits add."""

from functools import reduce
from operator import add

from hypothesis import given, settings
from hypothesis import strategies as st

from cdi.spec import ContainerEdits, Hook, IntelRdt, Spec
from hack.cdi_apply import apply_edits
from tests.cdi.strategies import edits, envs


@settings(max_examples=50)
@given(edits, edits, edits)
def test_addition_is_associative(a, b, c):
    assert (a + b) + c == a + (b + c)


@given(edits)
def test_adding_nothing_or_the_same_again_changes_nothing(a):
    once = a + ContainerEdits()

    assert once == ContainerEdits() + a == a + a == once + once


@given(st.lists(envs, max_size=4))
def test_a_sum_sets_the_variables_its_parts_set_one_after_the_other(parts):
    total = reduce(add, (ContainerEdits(env=env) for env in parts), ContainerEdits())
    config: dict = {}
    for env in parts:
        config = apply_edits(config, ContainerEdits(env=env))

    def variables(config):
        return sorted(config.get("process", {}).get("env", []))

    assert variables(apply_edits({}, total)) == variables(config)


def test_what_both_sides_refresh_is_refreshed_once_and_last():
    refresh, link, prepare = (Hook("createContainer", f"/bin/{name}") for name in ("r", "l", "p"))

    total = ContainerEdits(hooks=(link, refresh)) + ContainerEdits(hooks=(prepare, refresh))

    assert total.hooks == (link, prepare, refresh)


def test_the_cache_class_of_the_right_side_wins():
    gold, silver = (ContainerEdits(intel_rdt=IntelRdt(name)) for name in ("gold", "silver"))

    assert gold + silver == silver
    assert gold + ContainerEdits(env=("A=1",)) == ContainerEdits(env=("A=1",)) + gold


def test_a_spec_is_a_value():
    spec = Spec("v.example/gpu", container_edits=ContainerEdits(env=("A=1",)))

    assert len({spec, Spec("v.example/gpu", container_edits=ContainerEdits(env=("A=1",)))}) == 1
    assert (spec.vendor, spec.device_class) == ("v.example", "gpu")
