"""Which GPUs reach each other over NVLink."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.node.nvml.values import NvLinks, nvlink_clique, nvlink_neighbours

SWITCH, ALONE = NvLinks(switch=True), NvLinks()


def to(*peers: str) -> NvLinks:
    return NvLinks(peers=frozenset(peers))


def test_all_gpus_on_switches_form_one_clique():
    reached = nvlink_neighbours({name: SWITCH for name in "abcdefgh"})
    assert reached["a"] == frozenset("bcdefgh")
    assert nvlink_clique("a", reached) == nvlink_clique("h", reached) == frozenset("abcdefgh")


def test_a_bridge_makes_pairs():
    reached = nvlink_neighbours(
        {"a": to("b"), "b": to("a"), "c": to("d"), "d": to("c"), "e": ALONE}
    )
    assert nvlink_clique("a", reached) == {"a", "b"}
    assert nvlink_clique("d", reached) == {"c", "d"}
    assert nvlink_clique("e", reached) is None


@pytest.mark.parametrize("links", [{"a": to("b"), "b": ALONE}, {"a": ALONE, "b": to("a")}])
def test_a_link_that_one_end_tells_of_counts_for_both(links):
    assert nvlink_neighbours(links) == {"a": {"b"}, "b": {"a"}}


def test_a_ring_has_neighbours_without_being_a_clique():
    reached = nvlink_neighbours({"a": to("b"), "b": to("c"), "c": to("d"), "d": to("a")})
    assert reached["a"] == {"b", "d"}
    assert nvlink_clique("a", reached) is None


def test_a_link_to_a_gpu_that_is_not_there_leads_nowhere():
    assert nvlink_neighbours({"a": to("gone")}) == {"a": frozenset()}


names = st.sampled_from("abcdef")
layouts = st.dictionaries(
    names, st.builds(NvLinks, switch=st.booleans(), peers=st.frozensets(names, max_size=3))
)


@given(layouts)
def test_reaching_is_mutual_and_never_to_oneself(links):
    reached = nvlink_neighbours(links)
    for gpu, neighbours in reached.items():
        assert gpu not in neighbours
        assert all(gpu in reached[neighbour] for neighbour in neighbours)


@given(layouts)
def test_members_of_a_clique_agree_on_it(links):
    reached = nvlink_neighbours(links)
    for gpu in links:
        members = nvlink_clique(gpu, reached) or ()
        assert all(nvlink_clique(member, reached) == members for member in members)
