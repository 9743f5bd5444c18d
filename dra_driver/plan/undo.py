"""What giving a claim back takes: its steps undone, newest first, for what others still need."""

from collections.abc import Sequence

from dra_driver.model.holdings import Record
from dra_driver.model.steps import Step
from dra_driver.plan.limits import undo_limit_steps
from dra_driver.plan.time_slices import undo_time_slice_steps


def undoing(record: Record, others: Sequence[Record]) -> tuple[Step, ...]:
    """The steps that leave the node as it would be without *record*'s claim.

    *others*: the records of the claims that share a GPU with it. Device files stay: they do no
    harm, and others may use them.
    """
    return (*undo_limit_steps(record, others), *undo_time_slice_steps(record, others))
