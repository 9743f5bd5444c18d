"""Which MIG instances of prepared claims are not there any more, and what their pods are told.

Nobody can remove an instance on which something runs, but an idle one, or all of a GPU that is
reset.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from dra_driver.model.devices import Gpu
from dra_driver.model.holdings import Holding, Record
from dra_driver.model.steps import SetMigMode
from dra_driver.plan.mig.claims import cuts, with_cuts


def lost(record: Record, gpus: Iterable[Gpu]) -> tuple[Holding, ...]:
    """What a prepared claim holds of *gpus* and they have not, or another one in its place.

    Of a GPU that is not among them, and of one that does not say how it is cut, nothing is known.
    """
    there = {
        gpu.uuid: {(one.key, one.uuid) for one in gpu.mig.instances}
        for gpu in gpus
        if gpu.mig is not None
    }
    return tuple(
        holding
        for holding in partitions(record)
        if holding.gpu in there and _identity(holding) not in there[holding.gpu]
    )


def partitions(record: Record) -> tuple[Holding, ...]:
    """What a prepared claim computes on of GPUs that are cut."""
    if not record.completed:
        return ()
    return tuple(one for one in record.holdings if one.instance is not None and not one.admin)


def given_up(record: Record, away: Iterable[Holding]) -> Record:
    """*record*, of whose instances these are known to be *away*: it goes on holding their places,
    and what comes to them is not ours, though it may be called the same."""
    places = {(one.gpu, one.partition) for one in away}
    left = [cut for cut in cuts([record]) if (cut.gpu, cut.key) not in places]
    holdings = (
        replace(one, cut=False) if (one.gpu, one.partition) in places else one
        for one in record.holdings
    )
    return replace(with_cuts(record, left), holdings=tuple(holdings))


def known_given_up(record: Record) -> tuple[Holding, ...]:
    """Of what a prepared claim computes on, what was certainly given up, whatever is there now.

    Only a partition that was cut for the claim had it turn MIG mode on. Which of several it was, no
    record says; nor whether there was one on a board that is not switched for claims.
    """
    cut = {one.gpu for one in cuts([record])}
    switched = {one.gpu for one in record.steps if isinstance(one, SetMigMode) and one.on}
    its = partitions(record)
    places = Counter(gpu for gpu, _ in {(one.gpu, one.partition) for one in its})
    certain = {gpu for gpu in switched - cut if places[gpu] == 1}
    return tuple(one for one in its if not one.cut and one.gpu in certain)


def message(record: Record, holding: Holding) -> str:
    """In the words of the person who has to mend it."""
    served = any(holding.uuid in space.gpus for space in record.spaces)
    return (
        f"{holding.unit} ({holding.uuid}) is not there any more: somebody removed the MIG "
        f"instance, or the GPU was reset. Claim {record.claim} has nothing to compute on"
        f"{', and its MPS server is ended' if served else ''}; delete the pod (and a claim that "
        "is not from a template) to have one allocated anew"
    )


def _identity(holding: Holding) -> object:
    return holding.instance and (holding.instance.key, holding.instance.uuid)
