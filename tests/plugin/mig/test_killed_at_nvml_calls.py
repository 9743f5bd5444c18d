"""Killed at each call of NVML while a GPU is partitioned for a claim or by a layout, the next
process finishes the change: all of the plugin that changes GPUs, over simulated NVML."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dra_driver.model.mig_layouts import LayoutState
from dra_driver.node.nvml.api import NvmlFunctions
from tests.fakes.mortal import Killed
from tests.fakes.nvml_calls import (
    AT_A_LOOK,
    AT_WORK,
    BEFORE_A_LAYOUT,
    CHANGES,
    CREATES,
    FOR_OTHERS,
    OF_NO_GPU,
    REMOVES,
)
from tests.fakes.partitioned_node import PartitionedNode

SHUTDOWN = "nvmlShutdown"  # comes as the process ends, or for a new session
PARTITION = "gpu-0-mig-1g10gb-19-0"
WHOLE: tuple[bool, tuple[tuple[int, int, int], ...]] = (False, ())
PARTITIONED = (True, ((19, 0, 1),))
HALVES = (True, ((9, 0, 1), (9, 4, 1)))


def layout(name: str) -> Callable[[PartitionedNode], None]:
    def apply(node: PartitionedNode) -> None:
        node.label = name
        assert node.apply_layout().state is LayoutState.SUCCESS

    return apply


@dataclass(frozen=True)
class Change:
    """How a GPU gets from one state to another, and back."""

    act: Callable[[PartitionedNode], object]
    back: Callable[[PartitionedNode], object]
    before: object
    after: object
    changes: tuple[str, ...]  # the functions that do it
    reads: frozenset[str]  # the functions that only read, of which one call is killed


def prepare(node: PartitionedNode) -> None:
    assert [prepared.device for prepared in node.prepare(PARTITION)] == [PARTITION]


def unprepare(node: PartitionedNode) -> None:
    node.unprepare()


halve, make_whole = layout("all-3g.40gb"), layout("all-disabled")
EVERY = OF_NO_GPU | AT_A_LOOK | AT_WORK
BETWEEN = AT_WORK | BEFORE_A_LAYOUT  # a layout begins and ends with looks, which change nothing
BOTH_HALVES = (CREATES[0], *CREATES[1:], *CREATES[1:])
BOTH_GO = (*REMOVES[:2], *REMOVES[:2], REMOVES[2])
CASES = {
    "prepared": Change(prepare, unprepare, WHOLE, PARTITIONED, CREATES, EVERY),
    "given back": Change(unprepare, prepare, PARTITIONED, WHOLE, REMOVES, EVERY),
    "halved": Change(halve, make_whole, WHOLE, HALVES, BOTH_HALVES, BETWEEN),
    "made whole": Change(make_whole, halve, HALVES, WHOLE, BOTH_GO, BETWEEN),
}


@pytest.fixture
def node(tmp_path):
    node = PartitionedNode(tmp_path)
    yield node
    node.stop()


def begun(node, case):
    """A process has looked at the node, which is as it is before the change."""
    node.start()
    node.look()
    if node.partitions != case.before:
        case.back(node)
    assert node.partitions == case.before


def calls_of(node, case):
    """What is called before the change begins, and call while it is made."""
    begun(node, case)
    mortal = node.start()
    node.look()
    start = len(mortal.calls)
    case.act(node)
    return mortal.calls[:start], mortal.calls[start:]


def moments(calls, reads):
    """Where to die: at the first call of each of these functions that only read, and at every
    change, before it and when it is done."""
    called = set()
    for number, name in enumerate(calls):
        if name in CHANGES or name in reads - called:
            yield number, name, False
        if name in CHANGES:
            yield number, name, True
        called.add(name)


@pytest.mark.point(84)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_killed_at_a_call_of_any_function_the_next_process_makes_the_change(node, case):
    start, calls = calls_of(node, case)
    assert node.partitions == case.after
    assert [name for name in calls if name in CHANGES] == list(case.changes)

    for number, name, carried_out in moments(calls, case.reads):
        where = f"{'after' if carried_out else 'before'} {name}, call {number}"
        begun(node, case)
        node.start(len(start) + number + 1, carried_out)
        node.look()
        with pytest.raises(Killed, match=f"^{name}$"):
            case.act(node)

        node.start()
        node.look()
        case.act(node)

        assert node.partitions == case.after, where
        assert len(node.specs) == len(node.ledger.records()) == (case.after == PARTITIONED), where


def given_out(node):
    """Leaves the partition of a claim."""
    return lambda: begun(node, CASES["given back"])


def half_given_out(node):
    """Leaves what was done when the instance of a claim's partition was created, and no more."""
    start, calls = calls_of(node, CASES["prepared"])
    number = len(start) + calls.index(CREATES[1]) + 1

    def leave():
        begun(node, CASES["prepared"])
        node.start(number, carried_out=True)
        node.look()
        with pytest.raises(Killed, match=CREATES[1]):
            prepare(node)

    return leave


@pytest.mark.point(84)
@pytest.mark.parametrize(
    ("what", "partitions", "claims", "changes"),
    [(given_out, PARTITIONED, 1, set()), (half_given_out, WHOLE, 0, set(REMOVES[1:]))],
)
def test_killed_as_it_starts_the_next_process_finds_or_takes_back_what_was_left(
    node, what, partitions, claims, changes
):
    leave = what(node)
    leave()
    mortal = node.start()
    node.look()
    at_start = list(moments(list(mortal.calls), AT_WORK))
    assert {name for _, name, _ in at_start if name in CHANGES} == changes
    assert at_start

    for number, name, carried_out in at_start:
        where = f"{'after' if carried_out else 'before'} {name}, call {number}"
        leave()
        with pytest.raises(Killed, match=f"^{name}$"):
            node.start(number + 1, carried_out)
            node.look()

        node.start()
        node.look()

        assert node.partitions == partitions, where
        assert len(node.specs) == len(node.ledger.records()) == claims, where


def test_the_functions_that_are_called_are_those_at_which_it_is_killed(node):
    """A new one has to be said in ``tests.fakes.nvml_calls``, and so the plugin be killed at it:
    here, and on the cluster where it changes something or comes before a layout."""
    known = [OF_NO_GPU, AT_A_LOOK, AT_WORK, BEFORE_A_LAYOUT, CHANGES, FOR_OTHERS.keys()]
    every = {name for name in vars(NvmlFunctions) if name.startswith("nvml")}
    assert sorted(name for names in known for name in names) == sorted(every)

    mortal = node.start()
    node.look()
    assert set(mortal.calls) == (OF_NO_GPU | AT_A_LOOK) - {SHUTDOWN}
    by_case = {name: set(calls_of(node, case)[1]) for name, case in CASES.items()}
    for_claims = by_case["prepared"] | by_case["given back"]
    by_layouts = by_case["halved"] | by_case["made whole"]
    assert for_claims - OF_NO_GPU - AT_A_LOOK == AT_WORK | CHANGES
    assert by_layouts - OF_NO_GPU - AT_A_LOOK == AT_WORK | CHANGES | BEFORE_A_LAYOUT
