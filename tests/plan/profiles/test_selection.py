"""What holds on a node: labels before NodeProfiles before files."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.node_profiles import NodeProfileObject, NodeReport, NodeView, ProfileStatus
from dra_driver.plan.profiles.selection import (
    ChoiceKind,
    NodeChoice,
    assign_nodes,
    choose_on_node,
    revision_on_node,
    select_profile,
)

LABELS = {"gpu.nvidia.com/profile": "a", "nvidia.com/device-plugin.config": "b", "pool": "x"}
GIVEN = "inference-5d8fbz7k2x"


def profile(name, **fields):
    return NodeProfileObject(name, f"uid-{name}", "1", created="2026-01-01T00:00:00Z", **fields)


def node(name="node-1", labels=None, **fields):
    return NodeView(name, f"uid-{name}", "1", labels or {}, **fields)


def names(assignment):
    """The names of the nodes of each profile that has any."""
    return {
        name: [node.name for node in nodes] for name, nodes in assignment.nodes.items() if nodes
    }


@pytest.mark.parametrize(
    ("labels", "given", "kept", "choice"),
    [
        pytest.param(LABELS, GIVEN, GIVEN, NodeChoice(ChoiceKind.LABEL, "a"), id="our label"),
        pytest.param(
            {**LABELS, "gpu.nvidia.com/profile": ""},
            GIVEN,
            GIVEN,
            NodeChoice(ChoiceKind.LABEL, "b"),
            id="the label of NVIDIA's device plugin",
        ),
        pytest.param({}, GIVEN, "b-1", NodeChoice(ChoiceKind.REVISION, GIVEN), id="given"),
        pytest.param({}, "", GIVEN, NodeChoice(ChoiceKind.FILES), id="told of no NodeProfile"),
        pytest.param({}, None, GIVEN, NodeChoice(ChoiceKind.KEPT, GIVEN), id="keeps a revision"),
        pytest.param({}, None, "", NodeChoice(ChoiceKind.FILES), id="keeps what files said"),
        pytest.param({}, None, None, NodeChoice(ChoiceKind.SELECTED), id="the first start"),
    ],
)
def test_where_a_plugin_finds_what_holds_on_its_node(labels, given, kept, choice):
    assert choose_on_node(labels, given, kept) == choice


@pytest.mark.parametrize(
    ("given", "current", "taken"),
    [
        pytest.param(GIVEN, "inference-bbbbbbbbbb", GIVEN, id="what it was given"),
        pytest.param("b-5d8fbz7k2x", "inference-b", "inference-b", id="not of another profile"),
        pytest.param(None, "inference-b", "inference-b", id="what was rolled out everywhere"),
        pytest.param(None, "", "inference-new", id="the spec, where nothing was yet"),
    ],
)
def test_which_revision_a_node_takes_by_itself(given, current, taken):
    status = ProfileStatus(current_revision=current)
    inference = profile("inference", revision="inference-new", status=status)

    assert revision_on_node(inference, given) == taken


def test_the_highest_priority_holds_and_then_the_oldest_and_then_the_first_name():
    young = replace(profile("a", priority=1), created="2026-02-01T00:00:00Z")
    old, old_too, low = profile("c", priority=1), profile("b", priority=1), profile("d")

    assert select_profile({}, [low, young, old, old_too]) == old_too
    assert select_profile({}, [low, young, old]) == old
    assert select_profile({}, [low, young]) == young
    assert select_profile({}, []) is None


def test_a_profile_selects_nodes_that_have_all_labels_of_its_selector():
    selective = profile("a", node_selector={"pool": "x", "zone": "1"})

    assert select_profile({"pool": "x", "zone": "1", "other": ""}, [selective]) == selective
    assert select_profile({"pool": "x"}, [selective]) is None


@pytest.mark.parametrize("fields", [{"deleting": True}, {"problem": "spec.x: unknown field"}])
def test_a_profile_that_is_deleted_or_cannot_be_read_selects_nothing(fields):
    assert select_profile({}, [profile("a", **fields)]) is None
    assert names(assign_nodes([profile("a", **fields)], [node()])) == {}


def test_nodes_are_assigned_by_label_and_by_selector():
    everywhere, somewhere = profile("everywhere"), profile("somewhere", priority=1)
    somewhere = replace(somewhere, node_selector={"pool": "x"})
    nodes = [
        node("1"),
        node("2", {"pool": "x"}),
        node("3", {"pool": "x", "gpu.nvidia.com/profile": "everywhere"}),
        node("4", {"gpu.nvidia.com/profile": "a-file"}),
        node("5", {"pool": "x"}),
    ]

    assignment = assign_nodes([everywhere, somewhere], nodes)

    assert names(assignment) == {"everywhere": ["1", "3"], "somewhere": ["2", "5"]}
    assert assignment.without_profile == []
    assert assignment.ties == {}


def test_nodes_that_nothing_selects_are_without_a_profile():
    nodes = [node("1"), node("2", {"gpu.nvidia.com/profile": "a-file"})]

    assert assign_nodes([], nodes).without_profile == nodes[:1]


def test_profiles_of_one_priority_that_select_a_node_tie_and_the_older_one_holds():
    old, young = profile("b"), replace(profile("a"), created="2026-02-01T00:00:00Z")
    elsewhere = profile("c", node_selector={"pool": "x"})

    assignment = assign_nodes([young, elsewhere, old], [node()])

    assert names(assignment) == {"b": ["node-1"]}
    assert assignment.ties == {"a": {"b"}, "b": {"a"}}


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(node(given="a-5d8fbz7k2x"), id="given"),
        pytest.param(node(report=NodeReport("a", "a-5d8fbz7k2x")), id="taken by itself"),
    ],
)
def test_a_node_with_a_revision_of_a_profile_that_cannot_be_read_keeps_it(left):
    profiles = [profile("a", problem="spec.x: unknown field"), profile("b")]

    assert names(assign_nodes(profiles, [left])) == {}
    assert assign_nodes(profiles[:1], [left]).without_profile == []


@pytest.mark.parametrize("report", [None, NodeReport("a", of_files=True)])
def test_other_nodes_do_not_wait_for_a_profile_that_cannot_be_read(report):
    profiles = [profile("a", problem="spec.x: unknown field"), profile("b")]

    assert names(assign_nodes(profiles, [node(report=report)])) == {"b": ["node-1"]}


SELECTORS = st.dictionaries(st.sampled_from("pq"), st.sampled_from("12"))


@given(
    st.lists(st.tuples(SELECTORS, st.integers(0, 1)), max_size=4),
    st.lists(SELECTORS, max_size=8),
)
def test_controller_and_plugins_agree(selectors, nodes_labels):
    profiles = [
        profile(f"p{number}", node_selector=selector, priority=priority)
        for number, (selector, priority) in enumerate(selectors)
    ]
    nodes = [node(f"n{number}", labels) for number, labels in enumerate(nodes_labels)]

    assignment = assign_nodes(profiles, nodes)

    for each in nodes:
        chosen = select_profile(each.labels, profiles)
        assert each in (assignment.nodes[chosen.name] if chosen else assignment.without_profile)
