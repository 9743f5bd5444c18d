"""A record is completed when it has an answer, even an empty one."""

from dra_driver.model.holdings import Record
from tests.fakes.values import ref


def test_a_record_without_an_answer_was_only_begun() -> None:
    assert not Record(ref(), ()).completed


def test_a_record_with_an_answer_is_completed() -> None:
    assert Record(ref(), (), prepared=(), spec="").completed
