"""A frozen class is what a frozen dataclass with slots is, but that nothing watches over its fields
at run time."""

import copy
import operator
import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.codec import Codec
from dra_driver.base.frozen import frozen, ordered
from tests.conftest import pytest_assertrepr_compare


@frozen
class Share:
    """Of the memory of a GPU."""

    gpu: str
    mib: float
    source: str = field(default="", compare=False)
    processes: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class DataclassShare:
    gpu: str
    mib: float
    source: str = field(default="", compare=False)
    processes: tuple[int, ...] = field(default=(), repr=False)


@frozen
class Name:
    text: str


@frozen
class Nothing:
    pass


@frozen
class Used(Share):
    """Of another class than what it inherits from, with a field that is computed."""

    by: str = field(kw_only=True)
    names: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", (self.gpu, self.by))


@ordered
class Placement:
    start: int
    size: int
    note: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, order=True)
class DataclassPlacement:
    start: int
    size: int
    note: str = field(default="", compare=False)


@frozen
class Shouted:
    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shouted) and other.text.lower() == self.text.lower()

    def __hash__(self) -> int:
        return hash(self.text.lower())

    def __repr__(self) -> str:
        return self.text.upper()


FIELDS = st.tuples(
    st.sampled_from(["gpu-0", "gpu-1"]),
    st.sampled_from([1.0, 2.0]),
    st.sampled_from(["", "claim"]),
    st.lists(st.integers(0, 1), max_size=1).map(tuple),
)


@given(FIELDS, FIELDS)
def test_values_are_equal_hashed_and_shown_as_those_of_a_dataclass(a, b):
    ours, theirs = (Share(*a), Share(*b)), (DataclassShare(*a), DataclassShare(*b))
    assert (ours[0] == ours[1]) == (theirs[0] == theirs[1])
    assert (ours[0] != ours[1]) == (theirs[0] != theirs[1])
    assert len(set(ours)) == len(set(theirs))
    assert f"Dataclass{ours[0]!r}" == repr(theirs[0])


PLACEMENTS = st.tuples(*[st.integers(0, 1)] * 2, st.sampled_from(["", "note"]))


@given(PLACEMENTS, PLACEMENTS)
def test_ordered_values_are_ordered_as_those_of_a_dataclass(a, b):
    ours, theirs = (Placement(*a), Placement(*b)), (DataclassPlacement(*a), DataclassPlacement(*b))
    for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq):
        assert compare(*ours) == compare(*theirs)
    assert hash(ours[0]) == hash(Placement(*a[:2]))


def test_what_is_not_of_the_same_class_has_no_order():
    with pytest.raises(TypeError, match="'<' not supported"):
        assert Placement(0, 1) < (1, 1)  # type: ignore[operator]
    with pytest.raises(TypeError, match="'<' not supported"):
        assert Name("a") < Name("b")  # type: ignore[operator]


@pytest.mark.parametrize("values", [(Name("a"), Name("a"), Name("b")), (Nothing(), Nothing(), 1)])
def test_one_field_and_none_are_compared_too(values):
    value, same, other = values
    assert value == same and hash(value) == hash(same) and value != other


def test_values_of_different_classes_are_never_equal():
    @frozen
    class Louder(Name):
        pass

    assert Name("a") != Louder("a")
    assert Name("a") != "a"
    assert repr(Louder("a")).endswith("Louder(text='a')")


def test_what_a_class_has_itself_stays():
    assert Shouted("a") == Shouted("A")
    assert len({Shouted("a"), Shouted("A")}) == 1
    assert repr(Shouted("a")) == "A"
    assert (Share.__doc__, Name.__doc__) == ("Of the memory of a GPU.", "Name")


def test_a_value_can_be_matched_replaced_copied_and_pickled():
    share = Share("gpu-0", 1.0)
    match share:
        case Share("gpu-0", mib=mib):
            assert mib == 1.0
    assert replace(share, mib=2.0) == Share("gpu-0", 2.0)
    assert copy.deepcopy(share) == pickle.loads(pickle.dumps(share)) == share


def test_a_class_may_inherit_from_one_and_compute_fields():
    used = Used("gpu-0", 1.0, by="pod")
    assert used.names == ("gpu-0", "pod")
    assert replace(used, gpu="gpu-1").names == ("gpu-1", "pod")
    assert used != Used("gpu-0", 1.0, by="other") and used != Share("gpu-0", 1.0)


def test_a_value_that_holds_what_has_no_hash_has_none():
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        hash(Share("gpu-0", [1.0]))  # type: ignore[arg-type]


def test_a_test_that_fails_says_in_which_fields_values_differ():
    a, b = (Share(Name(gpu), 1.0, source=gpu) for gpu in "ab")  # type: ignore[arg-type]
    explanation = pytest_assertrepr_compare("==", a, b)
    assert explanation == ["Share == Share; different:", "gpu.text: 'a' != 'b'"]
    others = [(Name("a"), a), (Name, Name), (DataclassPlacement(0, 1), DataclassPlacement(0, 2))]
    assert [pytest_assertrepr_compare("==", *each) for each in others] == [None] * 3


def test_a_document_of_values_is_read_as_it_was_written():
    codec = Codec(Share)
    share = Share("gpu-0", 1.0, "claim", (1, 2))
    assert codec.decode(codec.encode(share)) == share


def test_it_has_no_fields_but_its_own_and_none_is_set_where_types_are_checked() -> None:
    share: Any = Share("gpu-0", 1.0)
    with pytest.raises(AttributeError):
        share.other = 1
    typed = Share("gpu-0", 1.0)
    typed.mib = 2.0  # type: ignore[misc]  # mypy says if it would not refuse this
