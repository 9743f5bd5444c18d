"""What giving a claim back takes: its steps undone, newest first, for what others still need."""

from collections.abc import Sequence

from dra_driver.model.holdings import Record
from dra_driver.model.steps import EndMps, Step
from dra_driver.plan.gpu_settings import undo_settings
from dra_driver.plan.limits import undo_limit_steps
from dra_driver.plan.mig.claims import remove_steps


def undoing(record: Record, others: Sequence[Record]) -> tuple[Step, ...]:
    """The steps that leave the node as it would be without *record*'s claim.

    *others*: the records of the claims that share a GPU with it. Device files stay: they do no
    harm, and others may use them.
    """
    return (
        *(EndMps(space.name) for space in record.spaces),
        *remove_steps(record, others),
        *undo_limit_steps(record, others),
        *undo_settings(record, others),
    )
